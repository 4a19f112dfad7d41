"""A prefix forest as flat arrays of fixed capacity, for the planner and the device.

NumPy only: a NamedTuple is a pytree to JAX without JAX being imported here.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from jaxtyping import Int32

from codec_jax.forest import Forest
from codec_jax.forest_node import NO_NODE, NOT_POPPED


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForestCapacity:
    """How much a `ForestArrays` has room for.

    Attributes:
      nodes: nodes, private leaves included.
      requests: requests.
      page_entries: entries of all nodes' page lists, those reserved for private leaves included.
    """

    nodes: int
    requests: int
    page_entries: int

    @classmethod
    def for_forest(cls, forest: Forest) -> "ForestCapacity":
        """The exact sizes of a forest."""
        return cls(
            nodes=forest.num_nodes,
            requests=forest.num_requests,
            page_entries=sum(forest.node(i).page_ids.size for i in forest.preorder()),
        )


class ForestArrays(NamedTuple):
    """A forest's nodes in preorder and its requests in depth-first order, padded at the end.

    A request that ends at a node comes before those that end below it, so the sharers of each node
    are one run of depth-first places. All arrays are int32. N, R and E are the capacity's nodes,
    requests and page entries.

    Attributes:
      parent: place of the parent in preorder, always lower; -1 for a root and in padding.
      position: absolute position of the first token.
      kv_len: tokens in the node now.
      max_kv_len: `kv_len`, except for a private leaf: its capacity.
      first_row: row of the first token in the first page.
      page_lo: first entry in `page_list`.
      num_pages: entries, `ceil((first_row + max_kv_len) / page_size)`; 0 in padding.
      request_lo: first sharer, a depth-first place.
      request_hi: one past the last sharer; the run is empty (0, 0) in padding.
      num_nodes: nodes before the padding.
      page_list: physical page ids; -1 where none is popped yet, and in padding.
      num_page_entries: entries before the padding.
      request_row: request id (batch row) at each depth-first place; -1 in padding.
      request_node: place in preorder of that request's last node; -1 in padding.
      num_requests: requests before the padding.
    """

    parent: Int32[Any, " N"]
    position: Int32[Any, " N"]
    kv_len: Int32[Any, " N"]
    max_kv_len: Int32[Any, " N"]
    first_row: Int32[Any, " N"]
    page_lo: Int32[Any, " N"]
    num_pages: Int32[Any, " N"]
    request_lo: Int32[Any, " N"]
    request_hi: Int32[Any, " N"]
    num_nodes: Int32[Any, ""]
    page_list: Int32[Any, " E"]
    num_page_entries: Int32[Any, ""]
    request_row: Int32[Any, " R"]
    request_node: Int32[Any, " R"]
    num_requests: Int32[Any, ""]


def node_order(forest: Forest) -> Int32[np.ndarray, " num_nodes"]:
    """Node ids in preorder: entry i is the node that row i of `export_arrays` describes."""
    return np.array(forest.preorder(), np.int32)


def export_arrays(forest: Forest, capacity: ForestCapacity | None = None) -> ForestArrays:
    """The forest as arrays of the given capacity, by default exactly as large as needed.

    Raises:
      ValueError: the capacity is smaller than the forest.
    """
    needed = ForestCapacity.for_forest(forest)
    capacity = needed if capacity is None else capacity
    _check_capacity(capacity, needed)
    order = forest.preorder()
    nodes = [forest.node(node_id) for node_id in order]
    preorder_of = {node_id: i for i, node_id in enumerate(order)}
    preorder_of[NO_NODE] = -1
    parent = [preorder_of[node.parent] for node in nodes]
    num_pages = np.array([node.page_ids.size for node in nodes], np.int64)
    request_lo, request_hi = _sharer_runs(parent, [len(node.request_ids) for node in nodes])
    page_list = np.concatenate([np.zeros(0, np.int32), *(node.page_ids for node in nodes)])
    request_row = [request for node in nodes for request in node.request_ids]
    request_node = [preorder_of[forest.end_node(request)] for request in request_row]
    return ForestArrays(
        parent=_padded(parent, capacity.nodes, -1),
        position=_padded([node.position for node in nodes], capacity.nodes),
        kv_len=_padded([node.kv_len for node in nodes], capacity.nodes),
        max_kv_len=_padded([node.max_kv_len for node in nodes], capacity.nodes),
        first_row=_padded([node.first_row for node in nodes], capacity.nodes),
        page_lo=_padded(np.cumsum(num_pages) - num_pages, capacity.nodes),
        num_pages=_padded(num_pages, capacity.nodes),
        request_lo=_padded(request_lo, capacity.nodes),
        request_hi=_padded(request_hi, capacity.nodes),
        num_nodes=np.array(needed.nodes, np.int32),
        page_list=_padded(page_list, capacity.page_entries, NOT_POPPED),
        num_page_entries=np.array(needed.page_entries, np.int32),
        request_row=_padded(request_row, capacity.requests, -1),
        request_node=_padded(request_node, capacity.requests, -1),
        num_requests=np.array(needed.requests, np.int32),
    )


def check_page_size(forest: ForestArrays, page_size: int) -> None:
    """Raises ValueError when the forest's pages are visibly of another size."""
    row = forest.first_row.astype(np.int64) + forest.max_kv_len
    pages = np.where(forest.max_kv_len > 0, -(-row // page_size), forest.num_pages)
    wrong = np.flatnonzero((pages != forest.num_pages) | (forest.first_row >= page_size))
    if wrong.size:
        node = int(wrong[0])
        raise ValueError(
            f"`page_size` must be the forest's; with {page_size} node {node} would have"
            f" {pages[node]} pages, it has {forest.num_pages[node]}."
        )


def _sharer_runs(
    parent: list[int], num_ending: list[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First and one past the last sharer of each node, given how many requests end at each."""
    num_sharers = list(num_ending)
    for i in range(len(parent) - 1, -1, -1):
        if parent[i] >= 0:
            num_sharers[parent[i]] += num_sharers[i]
    request_lo = np.cumsum(num_ending, dtype=np.int64) - np.array(num_ending, np.int64)
    return request_lo, request_lo + np.array(num_sharers, np.int64)


def _padded(values: npt.ArrayLike, size: int, fill: int = 0) -> Int32[np.ndarray, " size"]:
    array = np.full(size, fill, np.int32)
    used = np.asarray(values, np.int32)
    array[: used.size] = used
    return array


def _check_capacity(capacity: ForestCapacity, needed: ForestCapacity) -> None:
    sizes = dataclasses.asdict(needed).items()
    short = [
        f"{name} >= {size} (got {getattr(capacity, name)})"
        for name, size in sizes
        if getattr(capacity, name) < size
    ]
    if short:
        raise ValueError(
            f"`capacity` must have {', '.join(short)}. "
            "`ForestCapacity.for_forest` returns what a forest needs."
        )
