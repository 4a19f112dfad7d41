"""What a piece of work is thought to cost, in integer ticks.

Ticks are integers because a running sum of floats is not monotone, and cuts are searched in it.
"""

import dataclasses
from typing import Self

import jax.numpy as jnp
from jaxtyping import Array, Int32

from codec_jax.planning.plan import Items, Segments
from codec_jax.planning.spec import PlanSpec


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostModel:
    """Ticks of one step and of one segment, on one worker while all workers are busy.

    Attributes:
      step_ticks: a page for one tile.
      wide_step_ticks: a page for two tiles.
      segment_ticks: what a segment costs besides its steps: first loads, epilogue, results.
      slot_ticks: what a partial result costs to merge; 0 counts it with its segment.
    """

    step_ticks: int
    wide_step_ticks: int
    segment_ticks: int
    slot_ticks: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least, value = (0 if field.name == "slot_ticks" else 1), getattr(self, field.name)
            if not isinstance(value, int) or value < least:
                raise ValueError(
                    f"`{field.name}` must be an integer of at least {least}; got {value!r}."
                )

    @classmethod
    def closed_form(cls, spec: PlanSpec) -> Self:
        """Costs without a profile: a step costs its tokens, a segment 128 tokens more.

        A page for two tiles is read once, and its products overlap: half as much again as for one.
        """
        page = spec.page_size
        return cls(step_ticks=page, wide_step_ticks=page + page // 2, segment_ticks=128)


def item_step_ticks(items: Items | Segments, cost: CostModel) -> Int32[Array, " items"]:
    """Ticks of one step of each item (or segment)."""
    return jnp.where(items.num_tiles > 1, cost.wide_step_ticks, cost.step_ticks).astype(jnp.int32)
