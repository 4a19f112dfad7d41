"""CoDec's divider and scheduler (arXiv 2505.17694, section on workload balancing).

What is known of the paper: a lower bound on the makespan by binary search; the number of slices of
a node bounded by its cost over that bound; a pruned search among the divisions that are left; the
longest slices first, to the least loaded worker. The released code has none of it. Here all four
are vectorised; what the search tries, how ties are broken and slices rounded is our own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from codec_jax.planning.cost import CostModel, StepTicks
from codec_jax.planning.lower_bound import lower_bound_ticks, num_pieces
from codec_jax.planning.pieces import Pieces
from codec_jax.planning.plan import Items
from codec_jax.planning.scans import ceil_div, inclusive_sum, iota, owner_of
from codec_jax.planning.spec import PlanSpec

NUM_CANDIDATES = 8
"""Makespans that the search cuts for: from the lower bound to 1.4 times of it."""


class _Slices(NamedTuple):
    """Each item in `num` slices of `length` steps, the last one shorter."""

    num: Int32[Array, " items"]
    length: Int32[Array, " items"]


def cut_into_slices(
    items: Items, step_ticks: StepTicks, *, spec: PlanSpec, cost: CostModel, capacity: int
) -> Pieces:
    """The slices of all pairs, in line order, of the division with the smallest makespan."""
    bound = lower_bound_ticks(items, step_ticks, spec=spec, cost=cost)
    makespans = bound + (bound // 20 + 1) * iota(NUM_CANDIDATES)
    ticks = step_ticks.of_items(items)

    def slices_for(makespan):
        wanted = num_pieces(items, step_ticks, makespan, cost=cost)
        most = ceil_div(cost.segment_ticks + ticks, jnp.maximum(bound, 1))
        return _slices(items, jnp.minimum(wanted, most))

    candidates = jax.vmap(slices_for)(makespans)
    scheduled = jax.vmap(lambda slices: _makespan(items, slices, ticks, spec=spec, cost=cost))(
        candidates
    )
    best = jnp.argmin(scheduled)
    num, length = candidates.num[best], candidates.length[best]

    per_pair = jnp.repeat(num, spec.num_kv_heads)
    ends = inclusive_sum(per_pair)
    place = iota(capacity)
    pair = jnp.minimum(owner_of(place, ends), per_pair.shape[0] - 1)
    item = pair // spec.num_kv_heads
    begin = (place - (ends - per_pair)[pair]) * length[item]
    end = jnp.minimum(begin + length[item], items.num_steps[item])
    used = place < ends[-1]
    pair, begin, end = (jnp.where(used, column, 0) for column in (pair, begin, end))
    return Pieces(pair, begin, end, per_pair, ends[-1])


def longest_first(ticks: Int32[Array, " pieces"], *, num_workers: int) -> Int32[Array, " pieces"]:
    """The worker of each piece: the longest first, each to the least loaded worker.

    Pieces of one length are given out at once, to the workers that would get them one by one;
    within a length each worker's follow each other. Pieces of 0 ticks get worker `num_workers`.
    """
    order = jnp.argsort(-ticks, stable=True)
    ranked = ticks[order]
    place = iota(ticks.shape[0])

    def is_left(carry):
        first = carry[0]
        return ranked.at[first].get(mode="fill", fill_value=0) > 0

    def give_out(carry):
        first, loads, worker = carry
        length = ranked[first]
        past = jnp.sum(ranked >= length, dtype=jnp.int32)
        counts = _share_out(loads, length, past - first)
        theirs = owner_of(place - first, inclusive_sum(counts))
        worker = jnp.where((place >= first) & (place < past), theirs, worker)
        return past, loads + counts * length, worker

    nobody = jnp.full(ticks.shape[0], num_workers, jnp.int32)
    start = (jnp.int32(0), jnp.zeros(num_workers, jnp.int32), nobody)
    _, _, worker = lax.while_loop(is_left, give_out, start)
    return nobody.at[order].set(worker)


def _slices(items: Items, wanted: Int32[Array, " items"]) -> _Slices:
    """About as many slices as wanted, all but the last of one length."""
    length = ceil_div(items.num_steps, jnp.maximum(wanted, 1))
    return _Slices(ceil_div(items.num_steps, jnp.maximum(length, 1)), length)


def _makespan(
    items: Items,
    slices: _Slices,
    ticks: Int32[Array, " items"],
    *,
    spec: PlanSpec,
    cost: CostModel,
) -> Int32[Array, ""]:
    """The makespan of the slices, longest first: an item has slices of two lengths at most.

    Every step of an item is taken for its mean one.
    """
    step = ceil_div(ticks, jnp.maximum(items.num_steps, 1))
    last = items.num_steps - jnp.maximum(slices.num - 1, 0) * slices.length
    lengths = jnp.concatenate([slices.length, last]) * jnp.concatenate([step, step])
    counts = jnp.concatenate([jnp.maximum(slices.num - 1, 0), (slices.num > 0).astype(jnp.int32)])
    per_slice = jnp.where(counts > 0, cost.segment_ticks + lengths, 0)

    def is_left(carry):
        return carry[0] > 0

    def give_out(carry):
        length, loads = carry
        count = jnp.sum(jnp.where(per_slice == length, counts, 0), dtype=jnp.int32)
        loads += _share_out(loads, length, count * spec.num_kv_heads) * length
        return jnp.max(jnp.where(per_slice < length, per_slice, 0)), loads

    start = (jnp.max(per_slice), jnp.zeros(spec.num_workers, jnp.int32))
    return jnp.max(lax.while_loop(is_left, give_out, start)[1])


def _share_out(
    loads: Int32[Array, " workers"], length: Int32[Array, ""], count: Int32[Array, ""]
) -> Int32[Array, " workers"]:
    """Of `count` pieces of one length, given to the least loaded one by one, how many each gets.

    Worker w would start its pieces at loads[w], loads[w] + length, ...: the `count` earliest of all
    these starts are taken, the lower worker first where starts are equal.
    """

    def started_before(time):
        return ceil_div(jnp.maximum(time - loads, 0), length)

    def halve(bounds):
        low, high = bounds
        middle = low + (high - low + 1) // 2
        fits = jnp.sum(started_before(middle), dtype=jnp.int32) <= count
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    low = jnp.min(loads)
    high = jnp.max(loads) + (count // loads.shape[0] + 1) * length
    time, _ = lax.while_loop(lambda bounds: bounds[0] < bounds[1], halve, (low, high))
    counts = started_before(time)
    starts_now = ((loads + counts * length) == time).astype(jnp.int32)
    left = count - jnp.sum(counts, dtype=jnp.int32)
    return counts + starts_now * (inclusive_sum(starts_now) <= left).astype(jnp.int32)
