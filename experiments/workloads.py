"""The named workloads of the papers and of this project, as forests with a place in a pool."""

import dataclasses
import json
from pathlib import Path

import numpy as np

from codec_jax import Forest, ForestArrays, export_arrays

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
        arrays = export_arrays(forest)
        order = np.random.default_rng(seed).permutation(arrays.page_list.size)
        return arrays._replace(page_list=order.astype(np.int32)[arrays.page_list])


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
