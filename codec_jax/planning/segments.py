"""Segments: all (item, KV head) pairs laid on one line of cost and cut into equal ranges.

Design: running sums, bounded counts and scatters; no sort, no sequential loop. A cut closer than
two steps to a border between pairs is moved onto it, and no segment is empty.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from codec_jax.planning.cost import CostModel
from codec_jax.planning.plan import Items, Segments
from codec_jax.planning.scans import exclusive_sum, inclusive_sum, indptr, iota, owner_of

MIN_CUT_STEPS = 2
"""Steps that a cut must leave on both sides; nearer to a border it moves onto the border."""


class Pairs(NamedTuple):
    """(item, KV head) pairs in line order: item-major, so a node's heads follow each other."""

    num_steps: Int32[Array, " pairs"]
    step_ticks: Int32[Array, " pairs"]
    line_end: Int32[Array, " pairs"]
    line_start: Int32[Array, " pairs"]


class Cuts(NamedTuple):
    """Where the line is cut between workers.

    Attributes:
      pair: the pair that each cut falls in.
      step: steps of that pair before the cut (0 and all of them: on its border).
      inside: whether the cut divides the pair.
      first: whether it is the first cut at its place.
    """

    pair: Int32[Array, " cuts"]
    step: Int32[Array, " cuts"]
    inside: Bool[Array, " cuts"]
    first: Bool[Array, " cuts"]


class Division(NamedTuple):
    """The segments with the offsets that workers and the merge need."""

    segments: Segments
    worker_indptr: Int32[Array, " workers+1"]
    slot_indptr: Int32[Array, " pairs+1"]
    num_segments: Int32[Array, ""]
    num_slots: Int32[Array, ""]


def divide(
    items: Items, *, num_kv_heads: int, num_workers: int, cost: CostModel, cuts: bool, capacity: int
) -> Division:
    """Segments in line order, which is also worker-major, and each worker's range of them."""
    pairs = _lay_on_line(items, num_kv_heads=num_kv_heads, cost=cost)
    places = _place_cuts(pairs, num_workers=num_workers, cost=cost, may_divide=cuts)
    return _cut(items, pairs, places, num_kv_heads=num_kv_heads, capacity=capacity)


def _lay_on_line(items: Items, *, num_kv_heads: int, cost: CostModel) -> Pairs:
    steps = jnp.repeat(items.num_steps, num_kv_heads)
    wide = jnp.repeat(items.num_tiles, num_kv_heads) > 1
    step_ticks = jnp.where(wide, cost.wide_step_ticks, cost.step_ticks).astype(jnp.int32)
    ticks = jnp.where(steps > 0, cost.segment_ticks + steps * step_ticks, 0)
    return Pairs(steps, step_ticks, inclusive_sum(ticks), exclusive_sum(ticks))


def _place_cuts(pairs: Pairs, *, num_workers: int, cost: CostModel, may_divide: bool) -> Cuts:
    total = pairs.line_end[-1]
    ordinal = iota(num_workers - 1) + 1
    # Whole and remainder apart: ordinal * total would overflow int32.
    target = ordinal * (total // num_workers) + ordinal * (total % num_workers) // num_workers
    pair = jnp.minimum(owner_of(target, pairs.line_end), pairs.line_end.shape[0] - 1)
    steps, ticks = pairs.num_steps[pair], jnp.maximum(pairs.step_ticks[pair], 1)
    offset = target - pairs.line_start[pair] - cost.segment_ticks
    step = jnp.clip((offset + ticks // 2) // ticks, 0, steps)
    nearest = jnp.where(2 * step >= steps, steps, 0)
    near = (step < MIN_CUT_STEPS) | (steps - step < MIN_CUT_STEPS)
    step = jnp.where(near, nearest, step) if may_divide else nearest
    inside = (step > 0) & (step < steps)
    same = (pair[1:] == pair[:-1]) & (step[1:] == step[:-1])
    first = jnp.concatenate([jnp.ones(min(num_workers - 1, 1), bool), ~same])
    return Cuts(pair, step, inside, inside & first)


def _cut(items: Items, pairs: Pairs, cuts: Cuts, *, num_kv_heads: int, capacity: int) -> Division:
    num_pairs = pairs.num_steps.shape[0]
    live = pairs.num_steps > 0
    new = cuts.first.astype(jnp.int32)
    cuts_in_pair = jnp.zeros(num_pairs, jnp.int32).at[cuts.pair].add(new)
    segments_of_pair = live.astype(jnp.int32) + cuts_in_pair
    first_segment = exclusive_sum(segments_of_pair)
    rank = inclusive_sum(new) - exclusive_sum(cuts_in_pair)[cuts.pair]
    segment_of_cut = first_segment[cuts.pair] + rank

    def scatter(target, where, index, values):
        return target.at[jnp.where(where, index, capacity)].set(values, mode="drop")

    zeros = jnp.zeros(capacity, jnp.int32)
    pair = scatter(zeros, live, first_segment, iota(num_pairs))
    pair = scatter(pair, cuts.first, segment_of_cut, cuts.pair)
    begin = scatter(zeros, cuts.first, segment_of_cut, cuts.step)
    end = scatter(zeros, live, first_segment + segments_of_pair - 1, pairs.num_steps)
    end = scatter(end, cuts.first, segment_of_cut - 1, cuts.step)

    num_segments = jnp.sum(segments_of_pair, dtype=jnp.int32)
    used = iota(capacity) < num_segments
    item = pair // num_kv_heads
    num_tiles = jnp.where(used, items.num_tiles[item], 0)
    slot_ends = indptr(num_tiles)
    segments = Segments(
        kv_head=jnp.where(used, pair % num_kv_heads, 0),
        tile=jnp.where(used, items.tile[item], 0),
        num_tiles=num_tiles,
        step_lo=jnp.where(used, items.step_lo[item] + begin, 0),
        num_steps=end - begin,
        slot=jnp.where(used, slot_ends[:-1], 0),
    )
    on_border = first_segment[cuts.pair] + jnp.where(cuts.step > 0, segments_of_pair[cuts.pair], 0)
    at_cut = jnp.where(cuts.inside, segment_of_cut, on_border)
    worker_indptr = jnp.concatenate(
        [jnp.zeros(1, jnp.int32), at_cut, jnp.reshape(num_segments, (1,))]
    )
    slots_of_pair = segments_of_pair * jnp.repeat(items.num_tiles, num_kv_heads)
    slot_indptr = indptr(slots_of_pair)
    return Division(segments, worker_indptr, slot_indptr, num_segments, slot_indptr[-1])
