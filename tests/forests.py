"""Random prefix forests with filled pools, for the tests of planning and attention."""

import dataclasses

import numpy as np
import oracle

from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestArrays, ForestCapacity, export_arrays, node_order


@dataclasses.dataclass
class Batch:
    """Requests, their forest, and one layer of pages that holds their keys and values."""

    token_lists: list[list[int]]
    forest: Forest
    arrays: ForestArrays
    q: np.ndarray
    pages: tuple[np.ndarray, np.ndarray]

    def expected(self):
        """The oracle's answer, request by request."""
        num_kv_heads, head_dim = self.pages[0].shape[1], self.pages[0].shape[3]
        answers = [
            oracle.attention(q, *oracle.keys_and_values(tokens, num_kv_heads, head_dim))
            for q, tokens in zip(self.q, self.token_lists, strict=True)
        ]
        return np.stack([out for out, _ in answers]), np.stack([lse for _, lse in answers])


def random_token_lists(rng, *, num_requests, alphabet=3, max_len=40):
    """Token lists that share prefixes in many ways: duplicates, strict prefixes, several roots."""
    lists = []
    for _ in range(num_requests):
        start = []
        if lists and rng.random() < 0.8:
            parent = lists[rng.integers(len(lists))]
            start = parent[: rng.integers(0, len(parent) + 1)]
        tail = rng.integers(0, alphabet, rng.integers(0, max_len)).tolist()
        lists.append((start + tail) or [int(rng.integers(alphabet))])
    return lists


def make_batch(
    token_lists, *, page_size=16, num_kv_heads=2, group_size=2, head_dim=8, capacity=None, seed=0
):
    """A batch whose pool holds NaN in every slot that is not live."""
    forest = Forest(page_size=page_size)
    forest.add_requests(token_lists)
    if capacity is not None:
        capacity = ForestCapacity(**capacity)
    arrays = export_arrays(forest, capacity)
    num_pages = max(forest.pages.num_pages_touched, 1)
    pages = np.full((2, num_pages, num_kv_heads, page_size, head_dim), np.nan, np.float32)
    for request, tokens in enumerate(token_lists):
        kv = oracle.keys_and_values(tokens, num_kv_heads, head_dim)
        _write_path(pages, forest, request, kv)
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((len(token_lists), num_kv_heads * group_size, head_dim))
    return Batch(token_lists, forest, arrays, q.astype(np.float32), (pages[0], pages[1]))


def _write_path(pages, forest, request, kv):
    position = 0
    for node_id in forest.path(forest.end_node(request)):
        node = forest.node(node_id)
        for i in range(node.kv_len):
            page, row = divmod(node.first_row + i, forest.page_size)
            pages[:, node.page_ids[page], :, row] = kv[:, position]
            position += 1


def preorder_positions(forest):
    """Preorder place of each node id."""
    return {node_id: place for place, node_id in enumerate(node_order(forest).tolist())}
