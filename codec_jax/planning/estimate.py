"""How long a plan will take on a device, from its measured profile."""

from typing import NamedTuple

import jax
import numpy as np

from codec_jax.planning.plan import Plan
from codec_jax.planning.prediction import predict
from codec_jax.planning.profiles import TICKS_PER_US, CostProfile
from codec_jax.planning.spec import PlanSpec

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


class Estimate(NamedTuple):
    """A plan's time in microseconds, and what bounds it.

    Attributes:
      work_us: the busiest worker's steps and segments.
      memory_us: pages that have to come from memory.
      compute_us: both products.
      fixed_us: the launches, and the partial results that are merged.
      lower_bound_us: the same with work that is shared out as no plan can better.
    """

    work_us: float
    memory_us: float
    compute_us: float
    fixed_us: float
    lower_bound_us: float

    @property
    def predicted_us(self) -> float:
        """max(work, memory, compute), and what is fixed."""
        return max(self.work_us, self.memory_us, self.compute_us) + self.fixed_us


def estimate(plan: Plan, *, spec: PlanSpec, profile: CostProfile) -> Estimate:
    """How long a call with this plan takes, all its pages live (host).

    Args:
      plan: a plan for `spec`.
      spec: KV heads and workers.
      profile: of the device, for these pages.

    Pages that several segments read come from memory again to the extent that all pages together
    exceed the cache.
    """
    prediction = jax.device_get(predict(plan, spec=spec, cost=profile.cost_model()))
    plan = jax.device_get(plan)
    page_bytes = 2 * profile.page_size * profile.head_dim * ITEMSIZE[profile.dtype]
    used = plan.steps.row_hi > plan.steps.row_lo
    unique = np.unique(plan.steps.page_entry[used]).size * spec.num_kv_heads * page_bytes
    loaded = int(plan.segments.num_steps.sum(dtype=np.int64)) * page_bytes
    missed = max(0.0, 1 - profile.cache_bytes / unique) if unique else 0.0
    rows = int((plan.steps.row_hi - plan.steps.row_lo).sum(dtype=np.int64)) * spec.num_kv_heads
    memory_us = (unique + missed * max(0, loaded - unique)) / profile.bytes_per_us
    compute_us = 4 * rows * profile.page_size * profile.head_dim / profile.flops_per_us
    fixed_us = profile.launch_us + int(plan.counts.slots) * profile.slot_us
    bound_us = int(prediction.lower_bound_ticks) / TICKS_PER_US
    return Estimate(
        work_us=int(prediction.makespan_ticks) / TICKS_PER_US,
        memory_us=memory_us,
        compute_us=compute_us,
        fixed_us=fixed_us,
        lower_bound_us=max(bound_us, memory_us, compute_us) + fixed_us,
    )
