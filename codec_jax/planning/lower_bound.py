"""The makespan that no division of the work can beat."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from codec_jax.planning.cost import CostModel, StepTicks
from codec_jax.planning.plan import Items
from codec_jax.planning.scans import ceil_div
from codec_jax.planning.spec import PlanSpec


def lower_bound_ticks(
    items: Items, step_ticks: StepTicks, *, spec: PlanSpec, cost: CostModel
) -> Int32[Array, ""]:
    """The smallest c that passes a test which every makespan passes, by binary search.

    Under a makespan c no piece is longer than c, so item i falls into at least b_i(c) pieces, each
    with a segment's cost of its own, and together they fit into W workers:

        sum_i H (ticks of i's steps + b_i(c) * segment_ticks) <= W c,

    with H KV heads. The left side falls and the right side rises with c (CoDec, arXiv 2505.17694,
    section on workload balancing). 0 when there is nothing to do.
    """
    ticks, live = step_ticks.of_items(items), items.num_steps > 0
    work = jnp.sum(ticks, dtype=jnp.int32) * spec.num_kv_heads
    segments = jnp.sum(live, dtype=jnp.int32) * (spec.num_kv_heads * cost.segment_ticks)
    # Any item's mean step must fit, and what all workers do together without a cut.
    mean = ceil_div(ticks, jnp.maximum(items.num_steps, 1))
    least = cost.segment_ticks + jnp.max(jnp.where(live, mean, 0))
    least = jnp.maximum(least, ceil_div(work + segments, spec.num_workers))

    def fits(makespan: Int32[Array, ""]) -> Bool[Array, ""]:
        pieces = jnp.sum(num_pieces(items, step_ticks, makespan, cost=cost), dtype=jnp.int32)
        total = work + pieces * (spec.num_kv_heads * cost.segment_ticks)
        return ceil_div(total, spec.num_workers) <= makespan

    def halve(bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        is_enough = fits(middle)
        return jnp.where(is_enough, low, middle + 1), jnp.where(is_enough, middle, high)

    # With the longest pair in one piece, a piece for each pair is enough: that is the upper end.
    longest = jnp.max(jnp.where(live, cost.segment_ticks + ticks, 0))
    start = (least, jnp.maximum(least, longest))
    bound, _ = lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, start)
    return jnp.where(jnp.any(live), bound, 0)


def num_pieces(
    items: Items, step_ticks: StepTicks, makespan: Int32[Array, ""], *, cost: CostModel
) -> Int32[Array, " items"]:
    """Fewest pieces of each item, for each KV head, that all fit in a makespan.

    Where an item's steps differ, they are taken as divisible.
    """
    ticks, steps = step_ticks.of_items(items), jnp.maximum(items.num_steps, 1)
    most_ticks, mean = jnp.maximum(makespan - cost.segment_ticks, 1), jnp.maximum(ticks // steps, 1)
    are_alike = (items.num_tiles > 1) | _is_any_of(ticks, steps, cost)
    by_step = ceil_div(items.num_steps, jnp.maximum(most_ticks // mean, 1))
    return jnp.where(are_alike, by_step, ceil_div(ticks, most_ticks))


def _is_any_of(
    ticks: Int32[Array, " items"], steps: Int32[Array, " items"], cost: CostModel
) -> Bool[Array, " items"]:
    """Whether all steps of an item are full ones, or all short ones."""
    short = cost.short_step_ticks or cost.step_ticks
    return (ticks == steps * cost.step_ticks) | (ticks == steps * short)
