"""What a piece of work is thought to cost, in integer ticks.

Ticks are integers because a running sum of floats is not monotone, and cuts are searched in it.
"""

import dataclasses
from typing import NamedTuple, Self

import jax.numpy as jnp
from jaxtyping import Array, Int32

from codec_jax.planning.plan import Items, Steps
from codec_jax.planning.scans import indptr, owner_of
from codec_jax.planning.spec import SHORT_TOKENS, PlanSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Ticks of one step and of one segment, on one worker while all workers are busy.

    Attributes:
      step_ticks: a page for one tile.
      wide_step_ticks: a page for two tiles.
      segment_ticks: what a segment costs besides its steps: first loads, epilogue, results.
      slot_ticks: what a partial result costs to merge; 0 counts it with its segment.
      short_step_ticks: a page for one tile with few live tokens, see `Steps.is_short`; 0 counts it
        as any other.
    """

    step_ticks: int
    wide_step_ticks: int
    segment_ticks: int
    slot_ticks: int = 0
    short_step_ticks: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least, value = int(field.default is dataclasses.MISSING), getattr(self, field.name)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"`{field.name}` must be an integer of at least {least}; got {value!r}."
                )
        if self.short_step_ticks > self.step_ticks:
            raise ValueError(
                f"`short_step_ticks` must be at most `step_ticks`, {self.step_ticks}; got"
                f" {self.short_step_ticks}."
            )

    @classmethod
    def closed_form(cls, spec: PlanSpec) -> Self:
        """Costs without a profile: a step costs its tokens, a segment 128 tokens more.

        A page for two tiles is read once, and its products overlap: half as much again as for one.
        Of a short page, the tokens count that two of them share a step by.
        """
        page = spec.page_size
        return cls(
            step_ticks=page,
            wide_step_ticks=page + page // 2,
            segment_ticks=128,
            short_step_ticks=min(page, SHORT_TOKENS),
        )


class StepTicks(NamedTuple):
    """What each of a plan's steps costs.

    Attributes:
      before: ticks of all steps before each one, for one tile each; one entry more than steps.
      full: ticks of a step that is not short; those past the end, of a plan that overflowed, too.
      wide: ticks of any step for two tiles.
    """

    before: Int32[Array, " steps+1"]
    full: int
    wide: int

    @classmethod
    def of(cls, steps: Steps, cost: CostModel) -> Self:
        """Of these steps."""
        short = cost.short_step_ticks or cost.step_ticks
        each = jnp.where(steps.is_short != 0, short, cost.step_ticks)
        # Padding costs nothing: the sum of a large capacity must not pass 2**31.
        each = jnp.where(steps.row_hi > steps.row_lo, each, 0).astype(jnp.int32)
        return cls(indptr(each), cost.step_ticks, cost.wide_step_ticks)

    def sum(
        self,
        num_tiles: Int32[Array, " runs"],
        step_lo: Int32[Array, " runs"],
        num_steps: Int32[Array, " runs"],
    ) -> Int32[Array, " runs"]:
        """Ticks of runs of steps, each for one or two tiles."""
        narrow = self.until(step_lo + num_steps) - self.until(step_lo)
        return jnp.where(num_tiles > 1, num_steps * self.wide, narrow)

    def until(self, step: Int32[Array, " runs"]) -> Int32[Array, " runs"]:
        """Ticks of all steps before these, for one tile each."""
        last = self.before.shape[0] - 1
        return self.before[jnp.minimum(step, last)] + jnp.maximum(step - last, 0) * self.full

    def nearest(self, ticks: Int32[Array, " cuts"]) -> Int32[Array, " cuts"]:
        """The step whose start is nearest, of two at the same distance the later one."""
        before, last = self.before, self.before.shape[0] - 1
        after = jnp.clip(owner_of(ticks, before), 1, last)
        is_later = before[after] - ticks <= ticks - before[after - 1]
        past = last + (ticks - before[last] + self.full // 2) // self.full
        inside = after - 1 + is_later.astype(jnp.int32)
        return jnp.where(ticks > before[last], past, inside)

    def of_items(self, items: Items) -> Int32[Array, " items"]:
        """Ticks of all steps of each item."""
        return self.sum(items.num_tiles, items.step_lo, items.num_steps)
