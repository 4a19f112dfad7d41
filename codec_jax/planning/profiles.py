"""Measured cost profiles: what steps, segments and partial results take on a device.

`python -m experiments.profile_cost` measures them and writes `profiles/<device>.json`; without a
profile of the device, plans are made with `CostModel.closed_form`.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any, Self

from codec_jax.planning.cost import CostModel
from codec_jax.planning.spec import PlanSpec

FOLDER = Path(__file__).parent / "profiles"

TICKS_PER_US = 64
"""Ticks are integers; a step of 64 tokens takes about one microsecond."""
WORKER_COSTS = ("segment_us", "step_us", "wide_step_us", "masked_us", "partial_us", "short_us")
"""What adds up on each worker; the rest is the work of all workers together."""
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CostProfile:
    """What the kernels take, in microseconds, with all workers busy and the pages in cache.

    Attributes:
      dtype, head_dim, page_size: of keys and values; head_dim as stored.
      num_workers: workers that were busy.
      step_us: a page for one tile, on one worker.
      wide_step_us: a page for two tiles, on one worker.
      segment_us: what a segment costs besides its steps, on one worker.
      slot_us: what a partial result of 64 rows costs to merge, all workers together.
      launch_us: what a call costs whatever it does.
      bytes_per_us: pages read that are not in cache.
      flops_per_us: operations of both products.
      cache_bytes: of pages that the last-level cache holds.
      masked_us: what a page costs more, for each tile, whose rows do not fill the tile.
      partial_us: the same of a page whose tokens are not all live.
      short_us: a page for one tile with few live tokens, see `Steps.is_short`, all included; where
        none was measured, 0: it is priced as any other then.
      tile_us: what a tile of a KV head costs that the merge writes, all workers together.
    """

    dtype: str
    head_dim: int
    page_size: int
    num_workers: int
    step_us: float
    wide_step_us: float
    segment_us: float
    slot_us: float
    launch_us: float
    bytes_per_us: float
    flops_per_us: float
    cache_bytes: float
    masked_us: float = 0.0
    partial_us: float = 0.0
    short_us: float = 0.0
    tile_us: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_field(field.name, field.type, getattr(self, field.name))

    @property
    def page_bytes(self) -> int:
        """Keys and values of a page, of one KV head."""
        return 2 * self.page_size * self.head_dim * ITEMSIZE[self.dtype]

    def _short_step_ticks(self) -> int:
        """0 where none was measured; no more than any other step costs."""
        most = max(1, round((self.step_us + self.masked_us) * TICKS_PER_US))
        return min(max(1, round(self.short_us * TICKS_PER_US)), most) if self.short_us else 0

    @property
    def worker_costs(self) -> tuple[float, ...]:
        """Microseconds of each of `WORKER_COSTS`."""
        *costs, short_us = (getattr(self, name) for name in WORKER_COSTS)
        return *costs, short_us or self.step_us + self.masked_us

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Self:
        """The profile that a row of a profile file holds; what else it holds is left out.

        Raises:
          ValueError: a field is missing, or no such value.
        """
        fields = dataclasses.fields(cls)
        names = [field.name for field in fields if field.default is dataclasses.MISSING]
        missing = [name for name in names if name not in row]
        if missing:
            raise ValueError(f"`row` must hold {', '.join(names)}; it lacks {missing[0]!r}.")
        return cls(**{field.name: row[field.name] for field in fields if field.name in row})

    def cost_model(self) -> CostModel:
        """The costs in ticks that plans are made with."""

        def ticks(us: float, *, least: int) -> int:
            return max(least, round(us * TICKS_PER_US))

        return CostModel(
            # A tile's stream is mostly pages of single requests, whose rows do not fill it.
            step_ticks=ticks(self.step_us + self.masked_us, least=1),
            wide_step_ticks=ticks(self.wide_step_us, least=1),
            segment_ticks=ticks(self.segment_us, least=1),
            # Merging is the work of all workers together.
            slot_ticks=ticks(self.slot_us * self.num_workers, least=0),
            short_step_ticks=self._short_step_ticks(),
        )


def load_profiles(path: Path) -> list[CostProfile]:
    """The profiles of a device's file.

    Raises:
      ValueError: it is not what `experiments.profile_cost` writes; names the file.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["profiles"]
        return [CostProfile.from_row(row) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`path` must be a file that experiments.profile_cost wrote; {path}: {error}."
        ) from error


def find_profile(device: str, *, dtype: str, head_dim: int, page_size: int) -> CostProfile | None:
    """The measured profile for such pages on a device, if there is one.

    Args:
      device: its slug, as `nvidia-h200`.
      dtype, head_dim, page_size: of keys and values; head_dim as stored.
    """
    wanted = (dtype, head_dim, page_size)
    for profile in _profiles_of(device):
        if (profile.dtype, profile.head_dim, profile.page_size) == wanted:
            return profile
    return None


def cost_for(spec: PlanSpec, profile: CostProfile | None) -> CostModel:
    """The costs to plan with: measured ones where there is a profile."""
    return CostModel.closed_form(spec) if profile is None else profile.cost_model()


@functools.cache
def _profiles_of(device: str) -> tuple[CostProfile, ...]:
    path = FOLDER / f"{device}.json"
    return tuple(load_profiles(path)) if path.is_file() else ()


def _check_field(name: str, kind: Any, value: Any) -> None:
    """Refuses what no measurement can be: a text for a number, zero bandwidth, infinite costs."""
    if kind is str:
        if value not in ITEMSIZE:
            raise ValueError(f"`{name}` must be one of {', '.join(ITEMSIZE)}; got {value!r}.")
        return
    is_number = isinstance(value, int if kind is int else int | float)
    is_number = is_number and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0:
        raise ValueError(f"`{name}` must be a number of at least 0; got {value!r}.")
    if value == 0 and (kind is int or name in ("bytes_per_us", "flops_per_us")):
        raise ValueError(f"`{name}` must be positive; got {value!r}.")
