"""How long a plan will take on a device, from its measured profile."""

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int64

from codec_jax.planning.plan import Plan
from codec_jax.planning.prediction import predict
from codec_jax.planning.profiles import TICKS_PER_US, CostProfile
from codec_jax.planning.spec import SHORT_TOKENS, TILE_ROWS, PlanSpec

_BLOCK, _BOXES = 64, (16, 32, 64)
"""Tokens of a block of the GPU kernels, and of a copy that loads the live start of one."""


class PlanWork(NamedTuple):
    """What a plan makes a device do, counted.

    Attributes:
      worker: what each worker does, in the order of `WORKER_COSTS`: segments, steps for one tile,
        steps for two tiles, tiles of steps whose rows do not fill them, tiles of steps whose page
        is partly live, short steps (which none of the three before counts).
      unique_pages: different pages, each KV head's by itself; of a page whose end is dead, the part
        that is read.
      loaded_pages: pages that all segments load, counted likewise.
      live_rows: query rows over all pages that they are multiplied with; a short page's count for
        the part of it that takes part.
      merged_slots: partial results of tiles that have several.
      merged_tiles: (tile, KV head) pairs that the merge writes, those without a result included.
    """

    worker: Int64[np.ndarray, "workers costs"]
    unique_pages: float
    loaded_pages: float
    live_rows: float
    merged_slots: int
    merged_tiles: int


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


def estimate(
    plan: Plan, *, spec: PlanSpec, profile: CostProfile, kv_len: np.ndarray | None = None
) -> Estimate:
    """How long a call with this plan takes (host).

    Args:
      plan: a plan for `spec`.
      spec: KV heads and workers.
      profile: of the device, for these pages.
      kv_len: live tokens of each node; by default all pages are live from end to end.

    Pages that several segments read come from memory again to the extent that all pages together
    exceed the cache.
    """
    work_us, memory_us, compute_us, fixed_us = parts_us(count_work(plan, kv_len=kv_len), profile)
    prediction = jax.device_get(predict(plan, spec=spec, cost=profile.cost_model()))
    bound_us = int(prediction.lower_bound_ticks) / TICKS_PER_US
    lower_bound_us = max(bound_us, memory_us, compute_us) + fixed_us
    return Estimate(work_us, memory_us, compute_us, fixed_us, lower_bound_us)


def parts_us(work: PlanWork, profile: CostProfile) -> tuple[float, float, float, float]:
    """Microseconds of the busiest worker, of memory, of both products, and what is fixed."""
    costs = np.array(profile.worker_costs)
    fixed_us = profile.launch_us + work.merged_slots * profile.slot_us
    return (
        float((work.worker @ costs).max()),
        missed_bytes(work, profile) / profile.bytes_per_us,
        num_flops(work, profile) / profile.flops_per_us,
        fixed_us + work.merged_tiles * profile.tile_us,
    )


def missed_bytes(work: PlanWork, profile: CostProfile) -> float:
    """Bytes that come from memory: every page once, and again what does not fit into the cache."""
    unique, loaded = (n * profile.page_bytes for n in (work.unique_pages, work.loaded_pages))
    missed = max(0.0, 1 - profile.cache_bytes / unique) if unique else 0.0
    return unique + missed * max(0, loaded - unique)


def num_flops(work: PlanWork, profile: CostProfile) -> float:
    """Operations of both products."""
    return 4 * work.live_rows * profile.page_size * profile.head_dim


def count_work(plan: Plan, *, kv_len: np.ndarray | None = None) -> PlanWork:
    """What the plan's arrays make a device do (host).

    Args:
      plan: the plan.
      kv_len: live tokens of each node; by default all pages are live from end to end.
    """
    plan = jax.tree.map(np.asarray, plan)
    steps, heads = plan.steps, plan.num_kv_heads
    used = steps.row_hi > steps.row_lo
    part, entry = _loaded_parts(plan, kv_len), steps.page_entry
    unique = np.zeros(plan.num_page_entries)
    np.maximum.at(unique, entry[used], part[used])
    walked = _walked_steps(plan)[1]
    slots = _slots_of_tiles(plan)
    computed = np.where(_is_short(plan, kv_len), SHORT_TOKENS / plan.page_size, 1.0)
    rows = float(((steps.row_hi - steps.row_lo) * computed).sum())
    return PlanWork(
        worker=_count_workers(plan, kv_len),
        unique_pages=float(unique.sum()) * heads,
        loaded_pages=float(part[walked].sum()),
        live_rows=rows * heads,
        merged_slots=int(slots[slots > 1].sum()),
        merged_tiles=int((slots != 1).sum()),
    )


def _walked_steps(plan: Plan) -> tuple[Int64[np.ndarray, " walked"], Int64[np.ndarray, " walked"]]:
    """Every step of every segment, one after the other: whose it is, and which."""
    num = np.asarray(plan.segments.num_steps[: plan.worker_indptr[-1]], np.int64)
    owner = np.repeat(np.arange(num.size), num)
    place = np.arange(owner.size) - (np.cumsum(num) - num)[owner]
    return owner, np.asarray(plan.segments.step_lo)[: num.size][owner] + place


def _live_rows(plan: Plan, kv_len: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """First live row of each step's page, and the one past the last, which may be past the page."""
    start = np.asarray(plan.steps.kv_start, np.int64)
    if kv_len is None:
        return np.zeros_like(start), np.full_like(start, plan.page_size)
    return -start, np.asarray(kv_len)[plan.steps.node] - start


def _is_short(plan: Plan, kv_len: np.ndarray | None) -> np.ndarray:
    """Which steps are for one tile, and for few live tokens; as the plan says without `kv_len`."""
    steps = plan.steps
    if kv_len is None or plan.page_size < 2 * SHORT_TOKENS:
        return np.asarray(steps.is_short) != 0
    end = _live_rows(plan, kv_len)[1]
    row_lo, row_hi = np.asarray(steps.row_lo), np.asarray(steps.row_hi)
    is_narrow = row_lo // TILE_ROWS == (row_hi - 1) // TILE_ROWS
    return is_narrow & (end > 0) & (end <= SHORT_TOKENS)


def _loaded_parts(plan: Plan, kv_len: np.ndarray | None) -> np.ndarray:
    """How much of each step's page is loaded: whole blocks, and of the last one a box.

    Of a short one half a block, which another one shares.
    """
    end = np.clip(_live_rows(plan, kv_len)[1], 0, plan.page_size)
    blocks, rest = np.divmod(end, _BLOCK)
    box = np.array((0, *_BOXES))[np.searchsorted(_BOXES, rest) + (rest > 0)]
    tokens = np.where(_is_short(plan, kv_len), SHORT_TOKENS, blocks * _BLOCK + box)
    return np.minimum(tokens, plan.page_size) / plan.page_size


def _count_workers(plan: Plan, kv_len: np.ndarray | None) -> Int64[np.ndarray, "workers costs"]:
    """See `PlanWork.worker`."""
    segments, indptr, page_size = plan.segments, plan.worker_indptr, plan.page_size
    num = np.asarray(segments.num_steps[: indptr[-1]], np.int64)
    tiles, first_row = segments.num_tiles[: num.size], TILE_ROWS * segments.tile[: num.size]
    owner, step = _walked_steps(plan)
    end_row = first_row + TILE_ROWS * tiles
    row_lo, row_hi = np.asarray(plan.steps.row_lo)[step], np.asarray(plan.steps.row_hi)[step]
    is_masked = (row_lo > first_row[owner]) | (row_hi < end_row[owner])
    start, end = (rows[step] for rows in _live_rows(plan, kv_len))
    is_partial = (start > 0) | (end < page_size)
    is_short = _is_short(plan, kv_len)[step]

    def per_segment(values: np.ndarray) -> np.ndarray:
        return np.bincount(owner, values & ~is_short, num.size)

    every = np.ones_like(is_short)
    counts = np.stack(
        [
            np.ones(num.size),
            np.where(tiles == 1, per_segment(every), 0),
            np.where(tiles == 2, num, 0),
            tiles * per_segment(is_masked),
            tiles * per_segment(is_partial),
            np.bincount(owner, is_short, num.size),
        ],
        axis=1,
    ).astype(np.int64)
    sums = np.concatenate([np.zeros((1, counts.shape[1]), np.int64), np.cumsum(counts, axis=0)])
    return sums[indptr[1:]] - sums[indptr[:-1]]


def _slots_of_tiles(plan: Plan) -> Int64[np.ndarray, "tiles num_kv_heads"]:
    """How many partial results each tile has of each KV head."""
    entries = plan.tile_indptr[-1]
    tile = np.repeat(np.arange(plan.num_tiles), np.diff(plan.tile_indptr))
    item = plan.tile_items[:entries]
    per_pair = np.diff(plan.slot_indptr).reshape(-1, plan.num_kv_heads)[item]
    slots = np.zeros((plan.num_tiles, plan.num_kv_heads), np.int64)
    np.add.at(slots, tile, per_pair // np.maximum(plan.items.num_tiles[item], 1)[:, None])
    return slots
