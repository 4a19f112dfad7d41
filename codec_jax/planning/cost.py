"""What a piece of work is thought to cost, in integer ticks.

Ticks are integers because a running sum of floats is not monotone, and cuts are searched in it.
"""

import dataclasses
from typing import Self

from codec_jax.planning.spec import PlanSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Ticks of one step and of one segment, on one worker while all workers are busy.

    Attributes:
      step_ticks: a page for one tile.
      wide_step_ticks: a page for two tiles.
      segment_ticks: what a segment costs besides its steps: first loads, epilogue, results.
    """

    step_ticks: int
    wide_step_ticks: int
    segment_ticks: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(
                    f"`{field.name}` must be a positive integer; got {getattr(self, field.name)}."
                )

    @classmethod
    def closed_form(cls, spec: PlanSpec) -> Self:
        """Costs without a profile: a step costs its tokens, a segment 128 tokens more."""
        return cls(step_ticks=spec.page_size, wide_step_ticks=2 * spec.page_size, segment_ticks=128)
