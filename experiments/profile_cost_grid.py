"""The points at which `experiments.profile_cost` measures the kernels: axis by axis.

Every point keeps all workers busy with the same work. No whole plan and no shape of workloads.json
is among them.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from codec_jax.planning.spec import SHORT_TOKENS, TILE_ROWS
from experiments.uniform_plans import UniformSizes, UniformWork

Regime = Literal["cache", "memory", "reuse"]
"""Where pages come from: a few that stay in cache; all different; a footprint, read again and
again, that the cache may or may not hold."""

HELD_OUT_EVERY = 4
"""One point of so many is kept from the fit, and tells how good it is."""
CACHE_BYTES = 4 * 2**20
"""Footprint of the regime "cache": far below any last-level cache, far above a worker's loads."""
REUSE_BYTES = tuple(
    mib * 2**20 for mib in (8, 16, 24, 32, 36, 40, 44, 48, 56, 64, 80, 96, 128, 192)
)
TILES_PER_WORKER = 4
"""Tiles that there is room for."""
PAGES_PER_WORKER = 512
"""Of the pool: far more than the cache holds; longer segments go around it once more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GridPoint:
    """One point.

    Attributes:
      axis: what is varied: "steps", "segments", "slots", "rows", "partial", "short" or
        "reuse".
      regime: see `Regime`.
      work: of every worker.
      held_out: not part of the fit.
    """

    axis: str
    regime: Regime
    work: UniformWork
    held_out: bool

    def row(self) -> dict[str, Any]:
        """The point as fields of a row."""
        work = dataclasses.asdict(self.work)
        return {"axis": self.axis, "regime": self.regime, **work, "held_out": self.held_out}

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "GridPoint":
        """The point of `row()`."""
        names = [field.name for field in dataclasses.fields(UniformWork)]
        work = UniformWork(**{name: row[name] for name in names})
        return cls(axis=row["axis"], regime=row["regime"], work=work, held_out=row["held_out"])


def grid_sizes(
    *, num_workers: int, page_size: int, group_size: int, smoke: bool = False
) -> UniformSizes:
    """The sizes that all points of a grid fit, so that one program serves them."""
    return UniformSizes(
        num_workers=num_workers,
        num_tiles=TILES_PER_WORKER * num_workers,
        num_steps=num_workers * (16 if smoke else 2048),
        num_segments=8 * num_workers,
        num_pages=num_workers * (16 if smoke else PAGES_PER_WORKER),
        page_size=page_size,
        group_size=group_size,
    )


def make_grid(sizes: UniformSizes, *, page_bytes: int) -> list[GridPoint]:
    """The points that fit the sizes, each once, every fourth held out.

    Args:
      sizes: see `grid_sizes`; `rows` are cut to whole groups of its `group_size`.
      page_bytes: keys and values of a page, of one KV head.
    """
    points: dict[UniformWork, tuple[str, Regime]] = {}
    for axis, regime, settings in _axes(sizes.page_size):
        rows = settings.pop("rows", TILE_ROWS)
        rows = max(rows // sizes.group_size, 1) * sizes.group_size
        num_pages = _num_pages(regime, settings, sizes, page_bytes)
        work = UniformWork(rows=rows, num_pages=num_pages, **settings)
        if _fits(work, sizes):
            points.setdefault(work, (axis, regime))
    return [
        GridPoint(axis=axis, regime=regime, work=work, held_out=i % HELD_OUT_EVERY == 2)
        for i, (work, (axis, regime)) in enumerate(points.items())
    ]


def _axes(page_size: int) -> Iterator[tuple[str, Regime, dict[str, int]]]:
    """Axis, regime and settings of every point; `reuse` is a footprint in bytes."""
    narrow, wide = TILE_ROWS, 2 * TILE_ROWS
    for regime in ("cache", "memory"):
        for rows in (narrow, wide):
            for power in range(12):
                yield "steps", regime, {"rows": rows, "num_steps": 2**power}
    for rows in (narrow, wide):
        for segments in (2, 4, 8):
            # As few partial results as the tiles allow.
            slots = -(-segments * (rows // TILE_ROWS) // TILES_PER_WORKER)
            shape = {"rows": rows, "num_segments": segments, "slots_per_tile": slots}
            for num_steps in (1, 4, 16, 64, 256):
                yield "segments", "cache", shape | {"num_steps": num_steps}
        for segments in (1, 2, 8):
            for slots in (2, 4, 8, 16, 32):
                shape = {"rows": rows, "num_segments": segments, "slots_per_tile": slots}
                yield "slots", "cache", shape | {"num_steps": 4}
    for rows in (1, 4, 8, 16, 32, 48, 96, 256, 512):
        for regime in ("cache", "memory"):
            for num_steps in (8, 64, 256):
                yield "rows", regime, {"rows": rows, "num_steps": num_steps}
    for rows in (4, narrow, wide):
        for num_steps in (2, 16, 64):
            # More than half of a page is live: it has a step of the kernel for itself.
            shape = {"rows": rows, "num_steps": num_steps, "dead_tokens": page_size // 4}
            yield "partial", "cache", shape
    if page_size >= 2 * SHORT_TOKENS:
        for rows in (4, narrow):
            for live in (SHORT_TOKENS // 2, SHORT_TOKENS - 4, SHORT_TOKENS):
                for num_steps in (2, 16, 64, 256):
                    shape = {"rows": rows, "num_steps": num_steps, "dead_tokens": page_size - live}
                    yield "short", "cache", shape
    for num_bytes in REUSE_BYTES:
        yield "reuse", "reuse", {"num_steps": 128, "reuse": num_bytes}


def _num_pages(
    regime: Regime, settings: dict[str, int], sizes: UniformSizes, page_bytes: int
) -> int:
    footprint = settings.pop("reuse", CACHE_BYTES if regime == "cache" else 2**62)
    return min(max(footprint // page_bytes, 1), sizes.num_pages)


def _fits(work: UniformWork, sizes: UniformSizes) -> bool:
    segments = sizes.num_workers * work.num_segments
    tiles = -(-segments // (work.slots_per_tile * work.items_per_node)) * work.tiles_per_node
    steps = -(-segments // (work.slots_per_tile * work.items_per_node)) * work.steps_per_node
    return tiles <= sizes.num_tiles and steps <= sizes.num_steps and segments <= sizes.num_segments
