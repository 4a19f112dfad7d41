"""The named workloads of the papers and of this project, as forests with a place in a pool."""

import dataclasses
import json
from pathlib import Path

import numpy as np

from codec_jax import Forest, ForestArrays, ForestCapacity, export_arrays

_FILE = Path(__file__).parent / "data" / "workloads.json"


@dataclasses.dataclass(frozen=True)
class Workload:
    """A forest of full levels: level i has nodes_per_level[i] nodes of tokens_per_node[i] tokens.

    Children are shared out evenly; there is one request for each node of the last level, with one
    query token.
    """

    name: str
    nodes_per_level: tuple[int, ...]
    tokens_per_node: tuple[int, ...]
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def batch_size(self) -> int:
        """Requests."""
        return self.nodes_per_level[-1]

    @property
    def unique_tokens(self) -> int:
        """KV tokens when each node is read once."""
        return sum(n * t for n, t in zip(self.nodes_per_level, self.tokens_per_node, strict=True))

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Bytes of the unique keys and values of one layer."""
        return 2 * self.unique_tokens * self.num_kv_heads * self.head_dim * itemsize

    def num_flops(self) -> int:
        """Operations of both products: every query over every key on its path."""
        path = sum(self.tokens_per_node)
        return 4 * self.batch_size * path * self.num_q_heads * self.head_dim

    def forest(self, *, page_size: int, seed: int = 0) -> ForestArrays:
        """The forest's arrays, its pages scattered at random over the smallest pool."""
        forest = Forest(page_size=page_size)
        above: list[int | None] = [None]
        for num_nodes, num_tokens in zip(self.nodes_per_level, self.tokens_per_node, strict=True):
            parents = [above[j * len(above) // num_nodes] for j in range(num_nodes)]
            if num_tokens:
                tokens = [np.full(num_tokens, j) for j in range(num_nodes)]
                above = [
                    forest.insert(run, parent=parent)
                    for run, parent in zip(tokens, parents, strict=True)
                ]
            else:
                above = list(parents)
        for leaf in above:
            forest.add_request([], parent=leaf)
        return scattered(export_arrays(forest), seed=seed)


@dataclasses.dataclass(frozen=True)
class RandomForest:
    """Nodes below earlier nodes, lengths from a log-normal distribution, requests anywhere.

    Attributes:
      num_nodes: nodes; one in ten is a root, the others continue one of the last `window`.
      num_requests: requests; the leaves come first, so it is raised to their number.
      median_tokens: of a node.
    """

    name: str
    num_nodes: int
    num_requests: int
    median_tokens: int
    window: int = 8
    seed: int = 0
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    @property
    def batch_size(self) -> int:
        """Requests."""
        return len(self._drawn()[2])

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Bytes of the unique keys and values of one layer."""
        unique = sum(self._drawn()[1])
        return 2 * unique * self.num_kv_heads * self.head_dim * itemsize

    def num_flops(self) -> int:
        """Operations of both products: every query over every key on its path."""
        parents, tokens, ends = self._drawn()
        path = list(tokens)  # a parent comes before its children
        for node, parent in enumerate(parents):
            path[node] += path[parent] if parent >= 0 else 0
        return 4 * sum(path[end] for end in ends) * self.num_q_heads * self.head_dim

    def forest(self, *, page_size: int, seed: int = 0) -> ForestArrays:
        """The forest's arrays, its pages scattered at random over the smallest pool."""
        forest, nodes = Forest(page_size=page_size), []
        parents, tokens, ends = self._drawn()
        for node, (parent, count) in enumerate(zip(parents, tokens, strict=True)):
            above = nodes[parent] if parent >= 0 else None
            nodes.append(forest.insert(np.full(count, node), parent=above))
        for end in ends:
            forest.add_request([], parent=nodes[end])
        return scattered(export_arrays(forest), seed=seed)

    def _drawn(self) -> tuple[list[int], list[int], list[int]]:
        """Parents (-1: a root), tokens, and the node that each request ends at."""
        rng = np.random.default_rng(self.seed)
        parents = [
            -1
            if node == 0 or rng.random() < 0.1
            else int(rng.integers(max(0, node - self.window), node))
            for node in range(self.num_nodes)
        ]
        drawn = rng.lognormal(np.log(self.median_tokens), 1.0, self.num_nodes)
        tokens = np.clip(drawn, 1, 64 * self.median_tokens).astype(int).tolist()
        leaves = sorted(set(range(self.num_nodes)) - set(parents))
        num_others = max(0, self.num_requests - len(leaves))
        return parents, tokens, leaves + rng.integers(0, self.num_nodes, num_others).tolist()


AnyWorkload = Workload | RandomForest


def scattered(arrays: ForestArrays, *, seed: int) -> ForestArrays:
    """The arrays with their pages in a random order."""
    order = np.random.default_rng(seed).permutation(arrays.page_list.size).astype(np.int32)
    return arrays._replace(page_list=order[arrays.page_list])


def padded(arrays: ForestArrays, capacity: ForestCapacity) -> ForestArrays:
    """The arrays with the sizes of a capacity that has room for them."""
    fields = {}
    for name, values in arrays._asdict().items():
        if values.ndim:
            size = capacity.nodes
            size = capacity.page_entries if name == "page_list" else size
            size = capacity.requests if name in ("request_row", "request_node") else size
            fill = -1 if name in ("parent", "page_list", "request_row", "request_node") else 0
            fields[name] = np.pad(values, (0, size - values.size), constant_values=fill)
    return arrays._replace(**fields)


def load_workloads() -> dict[str, Workload]:
    """All named workloads, in the file's order."""
    cases = json.loads(_FILE.read_text(encoding="utf-8"))["cases"]
    names = {field.name for field in dataclasses.fields(Workload)}
    loaded = {}
    for case in cases:
        values = {key: value for key, value in case.items() if key in names}
        for key in ("nodes_per_level", "tokens_per_node"):
            values[key] = tuple(values[key])
        loaded[case["name"]] = Workload(**values)
    return loaded
