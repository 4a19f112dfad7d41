"""Steps and items: pages laid out in runs, walked by tile streams and by blocks of wide nodes."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from codec_jax.forest_arrays import ForestArrays
from codec_jax.planning.plan import Items, Steps
from codec_jax.planning.scans import exclusive_sum, inclusive_sum, indptr, iota, owner_of
from codec_jax.planning.spec import PlanSpec
from codec_jax.planning.tiles import Tiles
from codec_jax.planning.virtual_nodes import VirtualNodes, is_short_page


class Runs(NamedTuple):
    """The virtual nodes' steps: first those of all wide nodes, then those of all narrow ones.

    Attributes:
      wide: whether the node's rows touch more than one tile.
      tile_lo, tile_hi: first and last tile that its rows touch.
      row_lo, row_hi: packed rows from its first to past its last one.
      step_lo: first step of its run.
      num_wide_steps: steps of all wide nodes.
    """

    wide: Bool[Array, " virtual_nodes"]
    tile_lo: Int32[Array, " virtual_nodes"]
    tile_hi: Int32[Array, " virtual_nodes"]
    row_lo: Int32[Array, " virtual_nodes"]
    row_hi: Int32[Array, " virtual_nodes"]
    step_lo: Int32[Array, " virtual_nodes"]
    num_wide_steps: Int32[Array, ""]


def lay_runs(nodes: VirtualNodes, tiles: Tiles, *, spec: PlanSpec) -> Runs:
    """Where each virtual node's rows and steps lie."""
    first_unit = nodes.unit_lo
    last_unit = jnp.maximum(nodes.unit_hi - 1, first_unit)
    tile_lo, tile_hi = tiles.unit_tile[first_unit], tiles.unit_tile[last_unit]
    wide = (tile_lo != tile_hi) & (nodes.num_pages > 0)
    wide_steps = jnp.where(wide, nodes.num_pages, 0)
    num_wide_steps = jnp.sum(wide_steps, dtype=jnp.int32)
    narrow_steps = nodes.num_pages - wide_steps
    step_lo = jnp.where(
        wide, exclusive_sum(wide_steps), num_wide_steps + exclusive_sum(narrow_steps)
    )
    row_lo = tiles.unit_row[first_unit]
    row_hi = tiles.unit_row[last_unit] + spec.rows_per_unit
    return Runs(wide, tile_lo, tile_hi, row_lo, row_hi, step_lo, num_wide_steps)


def make_steps(
    forest: ForestArrays,
    nodes: VirtualNodes,
    runs: Runs,
    reach: Int32[Array, " nodes"],
    *,
    page_size: int,
    capacity: int,
) -> Steps:
    """One step for each page of each virtual node, up to its reach; zeros in padding."""
    wide_ends = inclusive_sum(jnp.where(runs.wide, nodes.num_pages, 0))
    narrow_ends = inclusive_sum(jnp.where(runs.wide, 0, nodes.num_pages))
    step = iota(capacity)
    owner = jnp.where(
        step < runs.num_wide_steps,
        owner_of(step, wide_ends),
        owner_of(step - runs.num_wide_steps, narrow_ends),
    )
    live = owner < nodes.node.shape[0]
    owner = jnp.where(live, owner, 0)
    node = nodes.node[owner]
    page = step - runs.step_lo[owner]
    end_row = forest.first_row[node] + reach[node] - page * page_size
    is_short = ~runs.wide[owner] & is_short_page(end_row, page_size=page_size)

    def unless_padding(values):
        return jnp.where(live, values, 0)

    return Steps(
        page_entry=unless_padding(forest.page_lo[node] + page),
        kv_start=unless_padding(page * page_size - forest.first_row[node]),
        row_lo=unless_padding(runs.row_lo[owner]),
        row_hi=unless_padding(runs.row_hi[owner]),
        node=unless_padding(node),
        is_short=unless_padding(is_short.astype(jnp.int32)),
    )


def make_items(
    nodes: VirtualNodes, runs: Runs, *, num_tiles: int, capacity: int
) -> tuple[Items, Int32[Array, ""]]:
    """Blocks of two tiles of each wide node, then one stream for each tile with narrow nodes.

    Returns:
      The items (zeros in padding) and how many there are.
    """
    blocks = jnp.where(runs.wide, (runs.tile_hi - runs.tile_lo) // 2 + 1, 0)
    num_blocks = jnp.sum(blocks, dtype=jnp.int32)
    item = iota(capacity)
    owner = jnp.minimum(owner_of(item, inclusive_sum(blocks)), blocks.shape[0] - 1)
    is_block = item < num_blocks
    tile = runs.tile_lo[owner] + 2 * (item - exclusive_sum(blocks)[owner])

    narrow = jnp.where(runs.wide, 0, nodes.num_pages)
    stream_steps = jnp.zeros(num_tiles, jnp.int32).at[runs.tile_lo].add(narrow, mode="drop")
    has_stream = (stream_steps > 0).astype(jnp.int32)
    # Empty tiles go past the end and are dropped, so that no segment is ever empty.
    place = jnp.where(stream_steps > 0, num_blocks + exclusive_sum(has_stream), capacity)

    def both(block_values, stream_values):
        return jnp.where(is_block, block_values, 0).at[place].set(stream_values, mode="drop")

    items = Items(
        tile=both(tile, iota(num_tiles)),
        num_tiles=both(jnp.minimum(runs.tile_hi[owner] - tile + 1, 2), has_stream),
        step_lo=both(runs.step_lo[owner], runs.num_wide_steps + exclusive_sum(stream_steps)),
        num_steps=both(nodes.num_pages[owner], stream_steps),
    )
    return items, num_blocks + jnp.sum(has_stream, dtype=jnp.int32)


def items_of_tiles(
    items: Items, *, num_tiles: int
) -> tuple[Int32[Array, " tiles+1"], Int32[Array, " tile_items"]]:
    """Items that touch each tile, in item order, as offsets and a flat list (the merge's order)."""
    capacity = items.tile.shape[0]
    item = jnp.concatenate([iota(capacity), iota(capacity)])
    live = jnp.concatenate([items.num_tiles > 0, items.num_tiles > 1])
    tile = jnp.where(live, jnp.concatenate([items.tile, items.tile + 1]), num_tiles)
    counts = jnp.zeros(num_tiles, jnp.int32).at[tile].add(1, mode="drop")
    order = jnp.lexsort((item, tile))
    return indptr(counts), item[order]
