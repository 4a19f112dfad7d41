"""Segments: pieces of (item, KV head) pairs, and which worker runs each.

A worker's segments follow each other; slots are numbered in line order whoever runs them, so that a
pair's are consecutive and the merge needs no sort.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from codec_jax.planning.codec_division import cut_into_slices, longest_first
from codec_jax.planning.cost import CostModel, StepTicks
from codec_jax.planning.pieces import Pieces
from codec_jax.planning.plan import Items, Segments
from codec_jax.planning.policies import Policy
from codec_jax.planning.ranges import cut_into_ranges
from codec_jax.planning.scans import indptr, iota
from codec_jax.planning.spec import PlanSpec


class Division(NamedTuple):
    """The segments with the offsets that workers and the merge need."""

    segments: Segments
    worker_indptr: Int32[Array, " workers+1"]
    slot_indptr: Int32[Array, " pairs+1"]
    num_segments: Int32[Array, ""]
    num_slots: Int32[Array, ""]


def divide(
    items: Items,
    step_ticks: StepTicks,
    *,
    spec: PlanSpec,
    policy: Policy,
    cost: CostModel,
    capacity: int,
) -> Division:
    """Segments worker by worker, and each worker's range of them."""
    if policy.division != "longest_first":
        pieces, worker_indptr = cut_into_ranges(
            items,
            step_ticks,
            spec=spec,
            cost=cost,
            may_divide=policy.division == "ranges",
            capacity=capacity,
        )
        return _assemble(items, pieces, worker_indptr, num_kv_heads=spec.num_kv_heads)
    pieces = cut_into_slices(items, step_ticks, spec=spec, cost=cost, capacity=capacity)
    item = pieces.pair // spec.num_kv_heads
    ticks = cost.segment_ticks + step_ticks.sum(
        items.num_tiles[item], items.step_lo[item] + pieces.begin, pieces.end - pieces.begin
    )
    ticks = jnp.where(iota(capacity) < pieces.total, ticks, 0)
    worker = longest_first(ticks, num_workers=spec.num_workers)
    counts = jnp.zeros(spec.num_workers, jnp.int32).at[worker].add(1, mode="drop")
    division = _assemble(items, pieces, indptr(counts), num_kv_heads=spec.num_kv_heads)
    order = jnp.argsort(worker, stable=True)
    segments = jax.tree.map(lambda column: column[order], division.segments)
    return division._replace(segments=segments)


def _assemble(
    items: Items, pieces: Pieces, worker_indptr: Int32[Array, " workers+1"], *, num_kv_heads: int
) -> Division:
    """The pieces as segments in line order; zeros in padding."""
    item, used = pieces.pair // num_kv_heads, iota(pieces.pair.shape[0]) < pieces.total
    num_tiles = jnp.where(used, items.num_tiles[item], 0)
    slot_of = indptr(num_tiles)[:-1]
    columns = (
        pieces.pair % num_kv_heads,
        items.tile[item],
        num_tiles,
        items.step_lo[item] + pieces.begin,
        pieces.end - pieces.begin,
        slot_of,
    )
    segments = Segments(*(jnp.where(used, column, 0) for column in columns))
    slot_indptr = indptr(pieces.per_pair * jnp.repeat(items.num_tiles, num_kv_heads))
    return Division(segments, worker_indptr, slot_indptr, pieces.total, slot_indptr[-1])
