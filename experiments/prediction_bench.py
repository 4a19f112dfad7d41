"""Plans of padded cases: predicted on the host, and ready to be run on the device."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from codec_jax import Plan, build_plan
from codec_jax.planning.estimate import Estimate, estimate
from codec_jax.planning.profiles import CostProfile
from codec_jax.planning.spec import TILE_ROWS
from experiments.bare_attention import BareAttention, random_arrays
from experiments.prediction_cases import Batch, Case


class PlannedCase(NamedTuple):
    """A plan with its prediction."""

    case: Case
    policy: str
    plan: Plan
    estimate: Estimate


@dataclasses.dataclass(frozen=True, eq=False)
class PlanBench:
    """Where the plans of a batch of cases are made and run.

    Attributes:
      batch: cases of one shape.
      profile: for their pages; plans are made with its costs.
      implementation: "mosaic_gpu", or "xla" in a smoke test.
      policy: any of those that the batch has room for; shapes are the same under all.
    """

    batch: Batch
    profile: CostProfile
    implementation: str
    policy: str

    @property
    def attention(self) -> BareAttention:
        """What is run."""
        profile = self.profile
        return BareAttention(
            dtype=profile.dtype,
            head_dim=profile.head_dim,
            page_size=profile.page_size,
            implementation=self.implementation,
        )

    def compile(self) -> Any:
        """The program for all plans of the batch; needs no arrays yet."""
        return self.attention.compile(*self.shapes)

    @functools.cached_property
    def shapes(self) -> tuple[Any, Any, Any]:
        """Shapes of its arguments."""
        case, batch = self.batch.cases[0], self.batch
        plan, forest = self._plan(case, self.policy), case.forest
        resolved = jax.eval_shape(
            lambda: self.attention.resolve(plan, forest.page_list, forest.kv_len)
        )
        return self.attention.shapes(
            resolved,
            num_kv_heads=batch.spec.num_kv_heads,
            num_rows=batch.capacity.tiles * TILE_ROWS,
            num_pages=batch.num_pages,
        )

    def predict(self, case: Case, policy: str) -> PlannedCase:
        """The plan of a case under a policy, and how long it should take."""
        plan = self._plan(case, policy)
        with jax.default_device(jax.devices("cpu")[0]):
            found = estimate(
                plan, spec=self.batch.spec, profile=self.profile, kv_len=case.forest.kv_len
            )
        return PlannedCase(case, policy, plan, found)

    def calls(self, planned: Sequence[PlannedCase], program: Any) -> list[Callable[[], object]]:
        """What runs the plans, their tables and random keys and values on the device."""
        arrays = self._arrays
        resolved = [
            self.attention.resolve(job.plan, job.case.forest.page_list, job.case.forest.kv_len)
            for job in planned
        ]
        return [lambda plan=plan: program(*arrays, plan) for plan in resolved]

    @functools.cached_property
    def _arrays(self) -> Any:
        return random_arrays(self.shapes[:2])

    def _plan(self, case: Case, policy: str) -> Plan:
        # On the host: a planner need not be compiled for the device.
        with jax.default_device(jax.devices("cpu")[0]):
            plan = build_plan(
                case.forest,
                self.batch.spec,
                policy=policy,
                capacity=self.batch.capacity,
                cost=self.profile.cost_model(),
            )
            return jax.device_get(plan)
