"""What a plan is predicted to cost: each worker's ticks, and the makespan that no plan can beat."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from codec_jax.planning.cost import CostModel, StepTicks
from codec_jax.planning.lower_bound import lower_bound_ticks
from codec_jax.planning.plan import Plan
from codec_jax.planning.scans import iota, owner_of
from codec_jax.planning.spec import PlanSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prediction:
    """A plan under a cost model.

    Attributes:
      segment_ticks: of each segment, its own cost included; 0 in padding.
      worker_ticks: of all segments of each worker.
      makespan_ticks: of the busiest worker.
      lower_bound_ticks: see `lower_bound.lower_bound_ticks`; for the items of this plan.
    """

    segment_ticks: Int32[Array, " segments"]
    worker_ticks: Int32[Array, " workers"]
    makespan_ticks: Int32[Array, ""]
    lower_bound_ticks: Int32[Array, ""]


@functools.partial(jax.jit, static_argnames=("spec", "cost"))
def predict(plan: Plan, *, spec: PlanSpec, cost: CostModel) -> Prediction:
    """The plan's cost: segments and steps, worker by worker (CoDec, arXiv 2505.17694, C_est).

    Args:
      plan: a plan for `spec`.
      spec: KV heads and workers.
      cost: ticks of steps and segments. Memory bandwidth and the matrix units set bounds of their
        own, see `profiles.CostProfile`.
    """
    segments, num_workers = plan.segments, plan.worker_indptr.shape[0] - 1
    step_ticks = StepTicks.of(plan.steps, cost)
    steps = step_ticks.sum(segments.num_tiles, segments.step_lo, segments.num_steps)
    ticks = jnp.where(segments.num_steps > 0, cost.segment_ticks + steps, 0)
    worker = owner_of(iota(ticks.shape[0]), plan.worker_indptr[1:])
    by_worker = jnp.zeros(num_workers, jnp.int32).at[worker].add(ticks, mode="drop")
    bound = lower_bound_ticks(plan.items, step_ticks, spec=spec, cost=cost)
    return Prediction(ticks, by_worker, jnp.max(by_worker), bound)
