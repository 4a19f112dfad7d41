"""Measures the points of a grid: one compiled program for all of them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from codec_jax.attention import ResolvedPlan
from codec_jax.planning.estimate import count_work
from codec_jax.planning.spec import TILE_ROWS
from experiments.bare_attention import BareAttention, random_arrays
from experiments.profile_cost_config import Signature
from experiments.profile_cost_fit import Sample
from experiments.profile_cost_grid import GridPoint, grid_sizes, make_grid
from experiments.timing import Timing
from experiments.uniform_plans import UniformPlan, UniformSizes, uniform_plan

Timer = Callable[..., list[Timing]]
"""Maps calls, and their number of runs as `num_runs`, to times; see `timing.time_each`."""

_AT_A_TIME = 16
"""Points in one record of the profiler, their tables on the device together."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Where points are measured.

    Attributes:
      signature: dtype and page of the pool.
      num_workers: workers of the plans.
      implementation: "mosaic_gpu", or "xla" in a smoke test.
      smoke: tiny sizes.
    """

    signature: Signature
    num_workers: int
    implementation: str
    smoke: bool = False

    def sizes(self, group_size: int) -> UniformSizes:
        """Sizes of the plans."""
        return grid_sizes(
            num_workers=self.num_workers,
            page_size=self.signature.page_size,
            group_size=group_size,
            smoke=self.smoke,
        )

    def points(self, group_sizes: Sequence[int]) -> list[tuple[UniformSizes, GridPoint]]:
        """The grid with the first group size, and the axis of rows with the others."""
        points = []
        for group_size in group_sizes:
            sizes = self.sizes(group_size)
            for point in make_grid(sizes, page_bytes=self.signature.page_bytes):
                if group_size == group_sizes[0] or point.axis == "rows":
                    points.append((sizes, point))
        return points

    @property
    def attention(self) -> BareAttention:
        """What is measured."""
        signature = dataclasses.asdict(self.signature)
        return BareAttention(**signature, implementation=self.implementation)

    def resolve(self, made: UniformPlan) -> ResolvedPlan:
        """The plan as the implementation takes it, on the device."""
        return self.attention.resolve(made.plan, made.page_list, made.kv_len)

    def shapes(self) -> tuple[Any, Any, Any]:
        """Shapes of the arguments of `attention`, the same for all points."""
        sizes, (_, point) = self.sizes(1), self.points((1,))[0]
        resolved = jax.eval_shape(lambda: self.resolve(uniform_plan(point.work, sizes)))
        return self.attention.shapes(
            resolved,
            num_kv_heads=1,
            num_rows=sizes.num_tiles * TILE_ROWS,
            num_pages=sizes.num_pages,
        )

    def compile(self) -> Any:
        """`attention` compiled."""
        return self.attention.compile(*self.shapes())


def measure(
    bench: Bench, program: Any, *, group_sizes: Sequence[int], num_runs: int, timer: Timer | None
) -> list[dict[str, Any]]:
    """A row for each point; without a timer every point runs once and has no time."""
    points, arrays, rows = bench.points(group_sizes), random_arrays(bench.shapes()[:2]), []
    for first in range(0, len(points), _AT_A_TIME):
        few = points[first : first + _AT_A_TIME]
        resolved = [bench.resolve(uniform_plan(point.work, sizes)) for sizes, point in few]
        calls = [lambda plan=plan: program(*arrays, plan) for plan in resolved]
        if timer is None:
            times = [_without_time(call) for call in calls]
        else:
            times = [_fields(timing) for timing in timer(calls, num_runs=num_runs)]
        for (sizes, point), fields in zip(few, times, strict=True):
            rows.append(_row(bench, sizes, point) | fields)
    return rows


def samples_of(rows: Sequence[dict[str, Any]], signature: Signature) -> list[Sample]:
    """The rows of one signature with what their plans make the device do."""
    samples = []
    for row in signature.of(rows):
        # A plan's work is that of its description, whatever room its arrays have.
        sizes = grid_sizes(
            num_workers=row["num_workers"],
            page_size=row["page_size"],
            group_size=row["group_size"],
            smoke=row["smoke"],
        )
        made = uniform_plan(GridPoint.from_row(row).work, sizes)
        work = count_work(made.plan, kv_len=made.kv_len)
        samples.append(Sample(work, row["time_us"], row))
    return samples


def _row(bench: Bench, sizes: UniformSizes, point: GridPoint) -> dict[str, Any]:
    return {
        **dataclasses.asdict(bench.signature),
        "group_size": sizes.group_size,
        "num_workers": bench.num_workers,
        "implementation": bench.implementation,
        "smoke": bench.smoke,
        **point.row(),
    }


def _fields(timing: Timing) -> dict[str, float]:
    return {"time_us": timing.median_us, "p10_us": timing.p10_us, "p90_us": timing.p90_us}


def _without_time(call: Callable[[], object]) -> dict[str, None]:
    jax.block_until_ready(call())
    return {"time_us": None, "p10_us": None, "p90_us": None}
