"""Which tokens a prefill computes: each node's tokens once, in chunks of one fixed size.

Host only, NumPy. A chunk is itself a small forest whose requests are the chunk's tokens: a node is
shared by the tokens that stand in it or below it. So the planner and the attention of decoding
serve prefill too, with a causal mask by position.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestArrays, export_arrays, node_order


class PrefillChunk(NamedTuple):
    """Token rows of one call, padded to the chunk size, and the forest they attend over.

    Attributes:
      token_ids, position: of each row; 0 in padding.
      page, row: where its key and value go; page -1 (written nowhere) in padding and where they are
        in the pool already.
      last_row: row of each request's last prompt token; -1 when it is not in this chunk.
      forest: the nodes that the rows attend to, unpadded; its requests are the chunk's rows.
      num_tokens: rows before the padding.
    """

    token_ids: Int32[Any, " chunk"]
    position: Int32[Any, " chunk"]
    page: Int32[Any, " chunk"]
    row: Int32[Any, " chunk"]
    last_row: Int32[Any, " batch"]
    forest: ForestArrays
    num_tokens: int


class PrefillChunks:
    """The chunks of a prefill, each made when it is asked for: long prompts need little memory.

    They come in an order in which every token follows those that it attends to.

    Attributes:
      num_tokens: tokens to compute, over all chunks.
    """

    def __init__(self, prompts: "_Prompts", chunk_size: int, batch_size: int):
        self._prompts = prompts
        self._rows = _rows_to_compute(prompts)
        self._chunk_size, self._batch_size = chunk_size, batch_size
        self.num_tokens = self._rows.node.size

    def __len__(self) -> int:
        return -(-self.num_tokens // self._chunk_size)

    def __iter__(self) -> Iterator[PrefillChunk]:
        sizes = {"chunk_size": self._chunk_size, "batch_size": self._batch_size}
        for start in range(0, self.num_tokens, self._chunk_size):
            yield _make_chunk(self._prompts, self._rows, start, **sizes)


class _Prompts(NamedTuple):
    """A forest's nodes in preorder, as the chunks need them."""

    arrays: ForestArrays
    token_ids: np.ndarray  # of all nodes, one after the other
    token_lo: np.ndarray  # first entry of each node in token_ids
    token_hi: np.ndarray
    subtree_end: np.ndarray  # one past the last node below each node
    num_computed: np.ndarray  # tokens at each node's start that are in the pool already
    end_node: np.ndarray  # node in which each request's prompt ends
    page_size: int


class _Rows(NamedTuple):
    """Tokens to compute, in preorder: node, offset in the node, and whether it is in the pool."""

    node: np.ndarray
    offset: np.ndarray
    is_stored: np.ndarray


def prefill_chunks(
    forest: Forest,
    *,
    chunk_size: int,
    batch_size: int,
    num_computed: dict[int, int] | None = None,
) -> PrefillChunks:
    """The token rows that fill a forest's pages, cut into chunks of one size.

    Args:
      forest: the prompts, with requests 0, 1, ...; private leaves are left to the decode loop.
      chunk_size: token rows of a chunk.
      batch_size: length of `last_row`, at least the number of requests.
      num_computed: tokens at the start of each node (by node id) whose keys and values are in the
        pool already. A request whose whole prompt is there recomputes its last token, for its
        logits.

    Raises:
      ValueError: a size is too small, or `num_computed` does not fit its node.
    """
    if chunk_size < 1:
        raise ValueError(f"`chunk_size` must be positive; got {chunk_size}.")
    if batch_size < forest.num_requests:
        raise ValueError(
            f"`batch_size` must be at least the {forest.num_requests} requests; got {batch_size}."
        )
    for node_id, count in (num_computed or {}).items():
        if not 0 <= count <= forest.node(node_id).kv_len:
            raise ValueError(
                f"`num_computed` must be 0 to {forest.node(node_id).kv_len} for node {node_id}; got"
                f" {count}."
            )
    return PrefillChunks(_read_prompts(forest, num_computed or {}), chunk_size, batch_size)


def _read_prompts(forest: Forest, num_computed: dict[int, int]) -> _Prompts:
    arrays, order = export_arrays(forest), node_order(forest).tolist()
    runs = [forest.node(node_id).tokens for node_id in order]
    preorder_of = {node_id: place for place, node_id in enumerate(order)}
    sizes = np.array([run.size for run in runs], np.int64)
    end_node = []
    for request in sorted(arrays.request_row.tolist()):
        node = forest.node(forest.end_node(request))
        end = node.parent if node.is_private_leaf else forest.end_node(request)
        end_node.append(preorder_of[end])
    return _Prompts(
        arrays=arrays,
        token_ids=np.concatenate([np.zeros(0, np.int32), *runs]),
        token_lo=np.cumsum(sizes) - sizes,
        token_hi=np.cumsum(sizes),
        subtree_end=_subtree_ends(arrays.parent),
        num_computed=np.array([num_computed.get(node_id, 0) for node_id in order], np.int64),
        end_node=np.array(end_node, np.int64),
        page_size=forest.page_size,
    )


def _subtree_ends(parent: np.ndarray) -> np.ndarray:
    ends = np.arange(1, parent.size + 1)
    for node in range(parent.size - 1, -1, -1):
        if parent[node] >= 0:
            ends[parent[node]] = max(ends[parent[node]], ends[node])
    return ends


def _rows_to_compute(prompts: _Prompts) -> _Rows:
    node = np.repeat(np.arange(prompts.token_lo.size), prompts.token_hi - prompts.token_lo)
    offset = np.arange(node.size) - prompts.token_lo[node]
    is_stored = offset < prompts.num_computed[node]
    is_wanted = ~is_stored
    is_wanted[prompts.token_hi[prompts.end_node] - 1] = True
    return _Rows(node[is_wanted], offset[is_wanted], is_stored[is_wanted])


def _make_chunk(
    prompts: _Prompts, rows: _Rows, start: int, *, chunk_size: int, batch_size: int
) -> PrefillChunk:
    stop = start + chunk_size
    node, offset, is_stored = (field[start:stop] for field in rows)
    # A node's new tokens are one run of rows; a recomputed one is not new.
    num_new = np.maximum(prompts.token_hi - prompts.token_lo - prompts.num_computed, 0)
    first_row = np.searchsorted(rows.node, np.arange(num_new.size))
    kv_len = prompts.num_computed + np.clip(stop - first_row, 0, num_new)
    place = prompts.arrays.first_row[node] + offset
    page = prompts.arrays.page_list[prompts.arrays.page_lo[node] + place // prompts.page_size]
    return PrefillChunk(
        token_ids=_padded(prompts.token_ids[prompts.token_lo[node] + offset], chunk_size),
        position=_padded(prompts.arrays.position[node] + offset, chunk_size),
        page=_padded(np.where(is_stored, -1, page), chunk_size, fill=-1),
        row=_padded(place % prompts.page_size, chunk_size),
        last_row=_last_rows(prompts, node, offset, batch_size),
        forest=_forest_of_rows(prompts, node, kv_len, chunk_size),
        num_tokens=node.size,
    )


def _last_rows(prompts: _Prompts, node, offset, batch_size: int) -> np.ndarray:
    last_row_of_node = np.full(prompts.token_lo.size, -1, np.int32)
    is_last = prompts.token_lo[node] + offset == prompts.token_hi[node] - 1
    last_row_of_node[node[is_last]] = np.flatnonzero(is_last)
    return _padded(last_row_of_node[prompts.end_node], batch_size, fill=-1)


def _forest_of_rows(prompts: _Prompts, row_node, kv_len, chunk_size: int) -> ForestArrays:
    """The nodes that the chunk's rows stand in or below, each shared by those rows."""
    arrays = prompts.arrays
    lo = np.searchsorted(row_node, np.arange(kv_len.size))
    hi = np.searchsorted(row_node, prompts.subtree_end)
    kept = np.flatnonzero(hi > lo)
    new_place = np.cumsum(hi > lo) - 1
    num_pages = -(-(arrays.first_row[kept] + kv_len[kept]) // prompts.page_size)
    page_lo = np.cumsum(num_pages) - num_pages
    entry = np.arange(num_pages.sum()) + np.repeat(arrays.page_lo[kept] - page_lo, num_pages)
    parent = arrays.parent[kept]
    fields = {
        "parent": np.where(parent >= 0, new_place[parent], -1),
        "position": arrays.position[kept],
        "kv_len": kv_len[kept],
        "max_kv_len": kv_len[kept],
        "first_row": arrays.first_row[kept],
        "page_lo": page_lo,
        "num_pages": num_pages,
        "request_lo": lo[kept],
        "request_hi": hi[kept],
        "num_nodes": kept.size,
        "page_list": arrays.page_list[entry],
        "num_page_entries": entry.size,
        "request_row": _padded(np.arange(row_node.size), chunk_size, fill=-1),
        "request_node": _padded(new_place[row_node], chunk_size, fill=-1),
        "num_requests": row_node.size,
    }
    return ForestArrays(**{name: np.asarray(value, np.int32) for name, value in fields.items()})


def _padded(values: np.ndarray, size: int, fill: int = 0) -> np.ndarray:
    return np.concatenate([values, np.full(size - values.size, fill)]).astype(np.int32)
