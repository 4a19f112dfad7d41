"""From times of uniform work to a cost profile: non-negative least squares on relative errors.

A time is `launch + merge + max(work, memory)`, linear in the costs once it is known which of the
two binds. So it is decided by turns: who binds, under the costs; the costs, under who binds.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import nnls

from codec_jax.planning.estimate import PlanWork, missed_bytes, num_flops, parts_us
from codec_jax.planning.profiles import WORKER_COSTS, CostProfile

FIXED_COSTS = ("launch_us", "slot_us", "tile_us")
CACHE_CANDIDATES = tuple(np.geomspace(8, 256, 31) * 2**20)
"""Sizes of the last-level cache that are tried; the one that explains the times best is taken."""
_MAX_TURNS = 50
_START_SHARES = (0.5, 0.8, 0.95, 2.0)
"""Where memory may bind to begin with: at such a share of the highest rate; 2: nowhere."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A measured point.

    Attributes:
      work: of its plan.
      time_us: measured.
      row: what it is, as `profile_cost_grid.GridPoint.row` says.
    """

    work: PlanWork
    time_us: float
    row: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Fit:
    """A profile and what it was fitted to.

    Attributes:
      profile: the costs.
      is_memory: of each sample that was not held out, whether memory binds.
      loss: sum of squared relative errors.
    """

    profile: CostProfile
    is_memory: np.ndarray
    loss: float


def fit_profile(
    samples: Sequence[Sample], *, dtype: str, head_dim: int, page_size: int, num_workers: int
) -> Fit:
    """The costs that explain the samples best, those held out not among them.

    `flops_per_us` is not fitted: it is the highest rate that any sample reached, so that it never
    binds where a sample was faster. (A tile is computed whole, however few of its rows are live, so
    that a step's products are part of what the step costs.) `cache_bytes` is the best of
    `CACHE_CANDIDATES`.

    Raises:
      ValueError: there are fewer samples than costs, or a time is not positive.
    """
    used = [sample for sample in samples if not sample.row["held_out"]]
    _check_samples(used)
    pages: dict[str, Any] = {"dtype": dtype, "head_dim": head_dim, "page_size": page_size}
    pages["num_workers"] = num_workers
    fits = [_fit_costs(used, pages | {"cache_bytes": float(size)}) for size in CACHE_CANDIDATES]
    return min(fits, key=lambda fit: fit.loss)


def relative_errors(samples: Sequence[Sample], profile: CostProfile) -> np.ndarray:
    """How much more than measured is predicted for each sample, relatively."""
    return np.array([predicted_us(s.work, profile) / s.time_us - 1 for s in samples])


def predicted_us(work: PlanWork, profile: CostProfile) -> float:
    """The model's time: max(work, memory, compute), and what is fixed."""
    *bounds_us, fixed_us = parts_us(work, profile)
    return max(bounds_us) + fixed_us


def held_out_error(samples: Sequence[Sample], profile: CostProfile) -> dict[str, float]:
    """Number, median and largest relative error of the samples that the fit has not seen."""
    held_out = [sample for sample in samples if sample.row["held_out"]]
    errors = np.abs(relative_errors(held_out, profile))
    return {
        "points": len(held_out),
        "median_rel_err": float(np.median(errors)),
        "max_rel_err": float(errors.max()),
    }


def _fit_costs(samples: Sequence[Sample], pages: dict[str, Any]) -> Fit:
    """The costs with a cache of a given size."""
    time_us = np.array([sample.time_us for sample in samples])
    shape = _profile(pages, np.zeros(len(WORKER_COSTS) + len(FIXED_COSTS)), 1.0, 1.0)
    num_bytes = np.array([missed_bytes(sample.work, shape) for sample in samples])
    flops = np.array([num_flops(sample.work, shape) for sample in samples])
    # All workers do the same; where blocks differ in masks, the longest counts.
    worker = np.array([sample.work.worker.max(axis=0) for sample in samples], float)
    fixed = np.array([[1, s.work.merged_slots, s.work.merged_tiles] for s in samples], float)

    rate = num_bytes / time_us
    is_memory, (costs, us_per_byte) = min(
        (
            _alternate(worker, fixed, num_bytes, time_us, rate >= share * rate.max())
            for share in _START_SHARES
        ),
        key=lambda found: _loss(worker, fixed, num_bytes, time_us, found[1]),
    )
    busy_us = np.maximum(time_us - fixed @ costs[len(WORKER_COSTS) :], 1e-3 * time_us)
    # Where memory never binds, the fastest sample says what it can do at least.
    bytes_per_us = 1 / us_per_byte if us_per_byte > 0 else (num_bytes / busy_us).max()
    profile = _profile(pages, costs, float(bytes_per_us), float((flops / busy_us).max()))
    loss = float((relative_errors(samples, profile) ** 2).sum())
    return Fit(profile, is_memory, loss)


def _alternate(worker, fixed, num_bytes, time_us, is_memory):
    """Where memory binds and the costs, by turns until nothing changes."""
    costs, us_per_byte = _solve(worker, fixed, num_bytes, time_us, is_memory)
    for _ in range(_MAX_TURNS):
        now = us_per_byte * num_bytes > worker @ costs[: len(WORKER_COSTS)]
        if (now == is_memory).all():
            break
        is_memory = now
        costs, us_per_byte = _solve(worker, fixed, num_bytes, time_us, is_memory)
    return is_memory, (costs, us_per_byte)


def _loss(worker, fixed, num_bytes, time_us, solution) -> float:
    """Sum of squared relative errors."""
    costs, us_per_byte = solution
    work_us = worker @ costs[: len(WORKER_COSTS)]
    total_us = np.maximum(work_us, us_per_byte * num_bytes) + fixed @ costs[len(WORKER_COSTS) :]
    return float(((total_us / time_us - 1) ** 2).sum())


def _solve(worker, fixed, num_bytes, time_us, is_memory) -> tuple[np.ndarray, float]:
    """Costs and microseconds of a byte, given where memory binds."""
    columns = [
        np.where(is_memory[:, None], 0, worker),
        fixed,
        np.where(is_memory, num_bytes, 0)[:, None],
    ]
    matrix = np.concatenate(columns, axis=1) / time_us[:, None]
    # Bytes and steps differ by orders of magnitude: the solver's tolerance is absolute.
    scale = np.maximum(np.abs(matrix).max(axis=0), 1e-300)
    solution = nnls(matrix / scale, np.ones(len(time_us)))[0] / scale
    return solution[:-1], float(solution[-1])


def _profile(
    pages: dict[str, Any], costs: np.ndarray, bytes_per_us: float, flops_per_us: float
) -> CostProfile:
    named = dict(zip((*WORKER_COSTS, *FIXED_COSTS), map(float, costs), strict=True))
    return CostProfile(**pages, **named, bytes_per_us=bytes_per_us, flops_per_us=flops_per_us)


def _check_samples(samples: Sequence[Sample]) -> None:
    least = len(WORKER_COSTS) + len(FIXED_COSTS) + 1
    if len(samples) < least:
        raise ValueError(
            f"`samples` must be at least {least} for as many costs; got {len(samples)}."
        )
    for sample in samples:
        if not sample.time_us > 0:
            raise ValueError(f"`samples` must have positive times; got {sample.time_us}.")
