"""CoDec's divider without a sequential loop: one line of cost cut into equal ranges.

Running sums, bounded counts and scatters; no sort. No piece is empty.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from codec_jax.planning.cost import CostModel, StepTicks
from codec_jax.planning.pieces import Pairs, Pieces, lay_on_line
from codec_jax.planning.plan import Items
from codec_jax.planning.scans import exclusive_sum, inclusive_sum, iota, owner_of
from codec_jax.planning.spec import PlanSpec


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


def cut_into_ranges(
    items: Items,
    step_ticks: StepTicks,
    *,
    spec: PlanSpec,
    cost: CostModel,
    may_divide: bool,
    capacity: int,
) -> tuple[Pieces, Int32[Array, " workers+1"]]:
    """Pieces in line order, which is also worker by worker, and each worker's range of them.

    Args:
      items: what there is to do.
      step_ticks: of the steps that they name.
      spec: KV heads and workers.
      cost: ticks of steps and segments.
      may_divide: whether a cut may fall inside a pair; if not, it moves to the nearest border.
      capacity: pieces that there is room for.
    """
    pairs = lay_on_line(items, step_ticks, num_kv_heads=spec.num_kv_heads, cost=cost)
    target = _targets(pairs.line_end[-1], num_workers=spec.num_workers)
    cuts = _place_cuts(pairs, step_ticks, target, cost=cost, may_divide=may_divide)
    return _cut(pairs, cuts, capacity=capacity)


def _targets(total: Int32[Array, ""], *, num_workers: int) -> Int32[Array, " cuts"]:
    """Where the line would be cut if its ticks could be."""
    ordinal = iota(num_workers - 1) + 1
    # Whole and remainder apart: ordinal * total would overflow int32.
    return ordinal * (total // num_workers) + ordinal * (total % num_workers) // num_workers


def _place_cuts(
    pairs: Pairs,
    step_ticks: StepTicks,
    target: Int32[Array, " cuts"],
    *,
    cost: CostModel,
    may_divide: bool,
) -> Cuts:
    pair = jnp.minimum(owner_of(target, pairs.line_end), pairs.line_end.shape[0] - 1)
    steps, first = pairs.num_steps[pair], pairs.step_lo[pair]
    offset = target - pairs.line_start[pair] - cost.segment_ticks
    wide = step_ticks.wide
    nearest_narrow = step_ticks.nearest(step_ticks.until(first) + offset) - first
    nearest_wide = (offset + wide // 2) // wide
    step = jnp.clip(jnp.where(pairs.num_tiles[pair] > 1, nearest_wide, nearest_narrow), 0, steps)
    nearest = jnp.where(2 * step >= steps, steps, 0)
    step = step if may_divide else nearest
    inside = (step > 0) & (step < steps)
    same = (pair[1:] == pair[:-1]) & (step[1:] == step[:-1])
    is_first = jnp.concatenate([jnp.ones(min(target.shape[0], 1), bool), ~same])
    return Cuts(pair, step, inside, inside & is_first)


def _cut(pairs: Pairs, cuts: Cuts, *, capacity: int) -> tuple[Pieces, Int32[Array, " workers+1"]]:
    num_pairs = pairs.num_steps.shape[0]
    live = pairs.num_steps > 0
    new = cuts.first.astype(jnp.int32)
    cuts_in_pair = jnp.zeros(num_pairs, jnp.int32).at[cuts.pair].add(new)
    per_pair = live.astype(jnp.int32) + cuts_in_pair
    first_piece = exclusive_sum(per_pair)
    rank = inclusive_sum(new) - exclusive_sum(cuts_in_pair)[cuts.pair]
    piece_of_cut = first_piece[cuts.pair] + rank

    def scatter(target, where, index, values):
        return target.at[jnp.where(where, index, capacity)].set(values, mode="drop")

    zeros = jnp.zeros(capacity, jnp.int32)
    pair = scatter(zeros, live, first_piece, iota(num_pairs))
    pair = scatter(pair, cuts.first, piece_of_cut, cuts.pair)
    begin = scatter(zeros, cuts.first, piece_of_cut, cuts.step)
    end = scatter(zeros, live, first_piece + per_pair - 1, pairs.num_steps)
    end = scatter(end, cuts.first, piece_of_cut - 1, cuts.step)
    total = jnp.sum(per_pair, dtype=jnp.int32)
    pieces = Pieces(pair, begin, end, per_pair, total)

    on_border = first_piece[cuts.pair] + jnp.where(cuts.step > 0, per_pair[cuts.pair], 0)
    at_cut = jnp.where(cuts.inside, piece_of_cut, on_border)
    return pieces, jnp.concatenate([jnp.zeros(1, jnp.int32), at_cut, jnp.reshape(total, (1,))])
