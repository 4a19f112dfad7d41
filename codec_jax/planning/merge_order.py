"""Which slots each tile's rows are merged from, as one flat list in a fixed order."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from codec_jax.planning.plan import Plan
from codec_jax.planning.scans import indptr, iota, owner_of


class MergeOrder(NamedTuple):
    """Slots of (tile, KV head) number p = tile * num_kv_heads + kv_head.

    They are slots[indptr[p] : indptr[p + 1]], by item and within an item in line order.
    """

    indptr: Int32[Array, " tiles*num_kv_heads+1"]
    slots: Int32[Array, " slots"]


def merge_order(plan: Plan) -> MergeOrder:
    """The plan's slots listed by tile and KV head: once for each plan, for all its decode steps."""
    heads, num_tiles = plan.num_kv_heads, plan.num_tiles
    entry = iota(plan.tile_items.shape[0])
    item = plan.tile_items
    tile = jnp.minimum(owner_of(entry, plan.tile_indptr[1:]), num_tiles - 1)
    stride = jnp.maximum(plan.items.num_tiles[item], 1)
    pair = item[:, None] * heads + iota(heads)[None, :]
    first = plan.slot_indptr[pair] + (tile - plan.items.tile[item])[:, None]
    count = (plan.slot_indptr[pair + 1] - plan.slot_indptr[pair]) // stride[:, None]
    count = jnp.where((entry < plan.tile_indptr[-1])[:, None], count, 0)

    before = jnp.concatenate([jnp.zeros((1, heads), jnp.int32), _sum_down(count)])
    in_tile = before[plan.tile_indptr[1:]] - before[plan.tile_indptr[:-1]]
    offsets = indptr(in_tile.reshape(-1))
    start = offsets[tile[:, None] * heads + iota(heads)[None, :]]
    start += before[:-1] - before[plan.tile_indptr[tile]]

    # Every run marks its first place; a place belongs to the last mark at or before it.
    size = plan.num_slots
    place = jnp.where(count > 0, start, size).reshape(-1)
    marks = jnp.zeros(size, jnp.int32).at[place].set(place, mode="drop")
    run_start = lax.cummax(marks)
    run = jnp.zeros(size, jnp.int32).at[place].set(iota(place.shape[0]), mode="drop")[run_start]
    slots = first.reshape(-1)[run] + (iota(size) - run_start) * stride[run // heads]
    return MergeOrder(offsets, jnp.where(iota(size) < offsets[-1], slots, 0))


def _sum_down(values: Int32[Array, "rows columns"]) -> Int32[Array, "rows columns"]:
    return jnp.cumsum(values, axis=0, dtype=jnp.int32)
