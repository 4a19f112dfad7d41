"""What the rows of `experiments.planner_ablation` come to."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from experiments.ablation_cases import is_paper_point

BASELINE = "flash_decoding"
AUTO, FIXED = "auto", ("flash_decoding", "hydragen", "balanced")
MAX_LOSS, MAX_LOSS_US = 0.025, 0.5
"""`auto` may be slower than the best fixed policy by either of these."""


class Loss(NamedTuple):
    """`auto` in a case against the best of the fixed policies."""

    case: str
    auto: float
    best: float
    best_policy: str
    is_within: bool


def times_of(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Microseconds by case and policy; those of rows without a time are left out."""
    times: dict[str, dict[str, float]] = {}
    for row in rows:
        if row.get("time_us") is not None:
            times.setdefault(row["case"], {})[row["policy"]] = row["time_us"]
    return times


def speed_ups(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each case, how many times as fast as `flash_decoding` each policy is."""
    return {
        case: {policy: times[BASELINE] / time for policy, time in times.items()}
        for case, times in times_of(rows).items()
        if BASELINE in times
    }


def mean_speed_ups(
    rows: Sequence[dict[str, Any]], *, is_counted: Callable[[str], bool] = is_paper_point
) -> dict[str, tuple[float, int]]:
    """Of each policy, the geometric mean over some cases in the rows, and how many they are.

    Args:
      rows: of `experiments.planner_ablation`.
      is_counted: which cases, by name; by default CoDec's 25 points.
    """
    found: dict[str, list[float]] = {}
    for case, by_policy in speed_ups(rows).items():
        for policy, factor in by_policy.items():
            if is_counted(case):
                found.setdefault(policy, []).append(math.log(factor))
    return {policy: (math.exp(sum(logs) / len(logs)), len(logs)) for policy, logs in found.items()}


def losses_of_auto(rows: Sequence[dict[str, Any]]) -> list[Loss]:
    """Every case with `auto` and a fixed policy in it, the worst first."""
    losses = []
    for case, times in times_of(rows).items():
        fixed = {policy: times[policy] for policy in FIXED if policy in times}
        if AUTO in times and fixed:
            best = min(fixed, key=fixed.__getitem__)
            auto, limit = times[AUTO], max(fixed[best] * (1 + MAX_LOSS), fixed[best] + MAX_LOSS_US)
            losses.append(Loss(case, auto, fixed[best], best, auto <= limit))
    return sorted(losses, key=lambda loss: loss.auto / loss.best, reverse=True)


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines for a terminal."""
    lines = [
        f"{policy}: {factor:.2f} times as fast as {BASELINE}, geometric mean over {count} of the"
        " 25 points"
        for policy, (factor, count) in mean_speed_ups(rows).items()
        if policy != BASELINE
    ]
    losses = losses_of_auto(rows)
    if losses:
        worst, num_within = losses[0], sum(loss.is_within for loss in losses)
        lines.append(
            f"auto / best fixed policy: at worst {worst.auto / worst.best:.3f} ({worst.case},"
            f" {worst.auto:.1f} us to {worst.best:.1f} us of {worst.best_policy}); within"
            f" {MAX_LOSS:.1%} or {MAX_LOSS_US} us in {num_within} of {len(losses)} cases"
        )
        lines += [
            f"  not within: {loss.case} {loss.auto:.2f} us, {loss.best_policy} {loss.best:.2f} us"
            for loss in losses
            if not loss.is_within
        ]
    return lines
