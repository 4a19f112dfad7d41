"""Random prefix forests with filled pools, for the tests of planning and attention."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import oracle

from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestArrays, ForestCapacity, export_arrays, node_order
from codec_jax.kv_cache import KVCache, KVPool


@dataclasses.dataclass
class Batch:
    """Requests, their forest, and one layer of pages that holds their keys and values.

    Rows of `q` past the last request hold NaN: nobody may look at them.
    """

    token_lists: list[list[int]]
    forest: Forest
    arrays: ForestArrays
    q: np.ndarray
    pages: tuple[np.ndarray, np.ndarray]

    def keys_and_values(self, request):
        """K and V of one request as the pool holds them: rounded to its dtype."""
        _, num_kv_heads, _, head_dim = self.pages[0].shape
        kv = oracle.keys_and_values(self.token_lists[request], num_kv_heads, head_dim)
        return kv.astype(self.pages[0].dtype).astype(np.float64)

    def expected(self, times_read=None):
        """The oracle's answer, request by request; (0, -inf) in rows without a request.

        `times_read[request]`, `[num_kv_heads, tokens]`, says how often each token counts; by
        default once.
        """
        out = np.zeros(self.q.shape)
        lse = np.full(self.q.shape[:2], -np.inf)
        group = self.q.shape[1] // self.pages[0].shape[1]
        for request in range(len(self.token_lists)):
            kv = self.keys_and_values(request)
            q = self.q[request].astype(np.float64)
            for head in range(kv.shape[2]):
                heads = slice(head * group, (head + 1) * group)
                k, v = kv[:, :, head : head + 1]
                if times_read is not None:
                    k, v = (np.repeat(x, times_read[request][head], axis=0) for x in (k, v))
                out[request, heads], lse[request, heads] = oracle.attention(q[heads], k, v)
        return out, lse

    def cache(self, dead_value=None):
        """The pool on the device, with every slot that is not live set to `dead_value` if given."""
        pages = [
            jnp.asarray(x if dead_value is None else self._refill(x, dead_value))
            for x in self.pages
        ]
        return KVCache(
            KVPool(*pages), jnp.asarray(self.arrays.page_list), jnp.asarray(self.arrays.kv_len)
        )

    def _refill(self, pages, value):
        return np.where(self.live_slots()[:, None, :, None], pages, np.asarray(value, pages.dtype))

    def live_slots(self):
        """Whether each row of each page holds a live token, `[num_pages, page_size]`."""
        live = np.zeros((self.pages[0].shape[0], self.pages[0].shape[2]), bool)
        for node_id in self.forest.preorder():
            node = self.forest.node(node_id)
            page, row = np.divmod(node.first_row + np.arange(node.kv_len), self.forest.page_size)
            live[node.page_ids[page], row] = True
        return live


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
    token_lists,
    *,
    page_size=16,
    num_kv_heads=2,
    group_size=2,
    head_dim=8,
    dtype="float32",
    q_dtype="float32",
    capacity=None,
    seed=0,
):
    """A batch whose pool holds NaN in every slot that is not live.

    With a `capacity` (the fields of `ForestCapacity`), arrays, queries and pool have its sizes.
    """
    forest = Forest(page_size=page_size)
    forest.add_requests(token_lists)
    num_rows, num_pages = len(token_lists), max(forest.pages.num_pages_touched, 1)
    if capacity is not None:
        capacity = ForestCapacity(**capacity)
        num_rows, num_pages = capacity.requests, capacity.page_entries
    arrays = export_arrays(forest, capacity)
    shape = (2, num_pages, num_kv_heads, page_size, head_dim)
    pages = np.full(shape, np.nan, jnp.dtype(dtype))
    for request, tokens in enumerate(token_lists):
        _write_path(pages, forest, request, oracle.keys_and_values(tokens, num_kv_heads, head_dim))
    q = np.full((num_rows, num_kv_heads * group_size, head_dim), np.nan, jnp.dtype(q_dtype))
    q[: len(token_lists)] = np.random.default_rng(seed).standard_normal(
        (len(token_lists), *q.shape[1:])
    )
    return Batch(token_lists, forest, arrays, q, (pages[0], pages[1]))


def _write_path(pages, forest, request, kv):
    position = 0
    for node_id in forest.path(forest.end_node(request)):
        node = forest.node(node_id)
        page, row = np.divmod(node.first_row + np.arange(node.kv_len), forest.page_size)
        values = kv[:, position : position + node.kv_len].astype(pages.dtype)
        # Advanced indices with a slice between them put the tokens first.
        pages[:, node.page_ids[page], :, row] = np.swapaxes(values, 0, 1)
        position += node.kv_len


def preorder_positions(forest):
    """Preorder place of each node id."""
    return {node_id: place for place, node_id in enumerate(node_order(forest).tolist())}
