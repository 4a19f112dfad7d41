"""The plan: int32 arrays that say who reads which page for whom, and where results go.

A plan is data. The NumPy interpreter, the XLA path and the GPU kernels execute the same arrays, so
a planner's mistake and a kernel's mistake can be told apart.
"""

import dataclasses
import functools

import jax
from jaxtyping import Array, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Steps:
    """One page for one run of rows each; the steps of a node follow each other.

    Attributes:
      page_entry: entry of the page list (not a physical page: pages are popped after planning).
      kv_start: place of the page's first row in its node's run of tokens; negative when the run
        starts inside the page.
      row_lo, row_hi: packed query rows, over all tiles, that this page is for.
      node: node whose live length bounds the page's live columns.
      is_short: 1 for a page for one tile, of at least 64 tokens, that no live token will reach
        past its first `SHORT_TOKENS` while the plan is used; else 0. It is only priced by it.
    """

    page_entry: Int32[Array, " steps"]
    kv_start: Int32[Array, " steps"]
    row_lo: Int32[Array, " steps"]
    row_hi: Int32[Array, " steps"]
    node: Int32[Array, " steps"]
    is_short: Int32[Array, " steps"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Items:
    """A run of steps for one or two tiles: a tile's narrow nodes, or a block of a wide node."""

    tile: Int32[Array, " items"]
    num_tiles: Int32[Array, " items"]
    step_lo: Int32[Array, " items"]
    num_steps: Int32[Array, " items"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segments:
    """A piece of an (item, KV head) pair; one worker runs it with one accumulator per tile.

    Attributes:
      kv_head: KV head whose pages are read.
      tile, num_tiles: first tile, and 1 or 2 tiles.
      step_lo, num_steps: run of steps; never empty.
      slot: partial result of the first tile (the second tile's is slot + 1).
    """

    kv_head: Int32[Array, " segments"]
    tile: Int32[Array, " segments"]
    num_tiles: Int32[Array, " segments"]
    step_lo: Int32[Array, " segments"]
    num_steps: Int32[Array, " segments"]
    slot: Int32[Array, " segments"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlanCounts:
    """How many entries of each array a forest needs; those beyond a capacity were dropped."""

    virtual_nodes: Int32[Array, ""]
    tiles: Int32[Array, ""]
    steps: Int32[Array, ""]
    items: Int32[Array, ""]
    segments: Int32[Array, ""]
    slots: Int32[Array, ""]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        "steps",
        "items",
        "segments",
        "worker_indptr",
        "slot_indptr",
        "tile_indptr",
        "tile_items",
        "packed_row",
        "counts",
    ),
    meta_fields=("page_size", "num_nodes", "num_page_entries"),
)
@dataclasses.dataclass(frozen=True)
class Plan:
    """Who reads which page for which rows, in which order, and where partial results go.

    Attributes:
      steps, items, segments: see their classes.
      worker_indptr: worker w runs segments [worker_indptr[w], worker_indptr[w + 1]); nothing reads
        past its last entry.
      slot_indptr: slots of pair p = item * num_kv_heads + kv_head are
        [slot_indptr[p], slot_indptr[p + 1]); two-tile items alternate first and second tile.
      tile_indptr, tile_items: items that touch tile t, in a fixed order, are
        tile_items[tile_indptr[t] : tile_indptr[t + 1]].
      packed_row: row of each request's query heads in the packed queries
        `[num_kv_heads, tiles * 64, head_dim]`; tiles * 64 for a batch row without a request.
      counts: needed sizes; compare with the capacities before the first use.
      page_size, num_nodes, num_page_entries: of the forest arrays that it was made for.
    """

    steps: Steps
    items: Items
    segments: Segments
    worker_indptr: Int32[Array, " workers+1"]
    slot_indptr: Int32[Array, " pairs+1"]
    tile_indptr: Int32[Array, " tiles+1"]
    tile_items: Int32[Array, " tile_items"]
    packed_row: Int32[Array, "batch group"]
    counts: PlanCounts
    page_size: int
    num_nodes: int
    num_page_entries: int

    @property
    def num_tiles(self) -> int:
        """Capacity in tiles of 64 packed rows."""
        return self.tile_indptr.shape[0] - 1

    @property
    def num_slots(self) -> int:
        """Capacity in partial results: two for each segment."""
        return 2 * self.segments.slot.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """KV heads that the pairs of `slot_indptr` stand for."""
        return (self.slot_indptr.shape[0] - 1) // self.items.tile.shape[0]
