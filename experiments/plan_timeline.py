"""What each worker does when, as a plan's costs predict it: the data of `experiments.plot_plan`."""

from typing import NamedTuple

import jax
import numpy as np

from codec_jax import Plan
from codec_jax.planning.cost import CostModel, StepTicks

OVERHEAD = -1
"""In place of a node: what a segment costs besides its steps."""


class Bars(NamedTuple):
    """Runs of time of one worker for one node, in ticks, worker by worker and by time.

    Attributes:
      worker: who.
      start, end: when.
      node: for which node of the forest; `OVERHEAD` for a segment's own cost.
    """

    worker: np.ndarray
    start: np.ndarray
    end: np.ndarray
    node: np.ndarray


def timeline(plan: Plan, *, cost: CostModel) -> Bars:
    """The bars of a plan: each segment's own cost first, then its steps, those of a node in one.

    All workers start at 0 and never wait; the last bar of each ends at its predicted ticks.
    """
    plan = jax.device_get(plan)
    segments, used = plan.segments, int(plan.worker_indptr[-1])
    num_steps = np.asarray(segments.num_steps[:used], np.int64)
    before = np.asarray(StepTicks.of(plan.steps, cost).before, np.int64)
    first_step, is_wide = segments.step_lo[:used], segments.num_tiles[:used] > 1

    def ticks_until(segment, place):
        narrow = before[first_step[segment] + place] - before[first_step[segment]]
        return np.where(is_wide[segment], place * cost.wide_step_ticks, narrow)

    own_and_steps = cost.segment_ticks + ticks_until(np.arange(used), num_steps)
    segment_end = np.cumsum(own_and_steps)
    segment_start = segment_end - own_and_steps
    per_worker = np.diff(plan.worker_indptr)
    worker = np.repeat(np.arange(per_worker.size), per_worker)
    first = np.minimum(plan.worker_indptr[:-1], max(used - 1, 0))
    origin = segment_start[first][worker] if used else segment_start

    # One entry for each step of each segment, in the order in which they are run.
    segment = np.repeat(np.arange(used), num_steps)
    place = np.arange(segment.size) - np.repeat(np.cumsum(num_steps) - num_steps, num_steps)
    node = plan.steps.node[first_step[segment] + place]
    is_first = (place == 0) | np.concatenate([[True], node[1:] != node[:-1]])[: node.size]
    steps_start = (segment_start - origin)[segment] + cost.segment_ticks
    start = steps_start + ticks_until(segment, place)
    end = steps_start + ticks_until(segment, place + 1)
    (run,) = np.nonzero(is_first)
    last = np.append(run[1:], segment.size) - 1
    own = segment_start - origin
    bars = Bars(
        np.concatenate([worker, worker[segment[run]]]),
        np.concatenate([own, start[run]]),
        np.concatenate([own + cost.segment_ticks, end[last]]),
        np.concatenate([np.full(used, OVERHEAD), node[run]]),
    )
    order = np.lexsort((bars.start, bars.worker))
    return Bars(*(column[order] for column in bars))
