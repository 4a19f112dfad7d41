"""The cases of the planner's ablation, by group."""

import fnmatch
import itertools
from collections.abc import Sequence

from experiments.workloads import AnyWorkload, RandomForest, Workload, load_workloads

_TINY = {"num_q_heads": 32, "num_kv_heads": 2, "head_dim": 64}
SMOKE = (
    Workload("smoke-star", (1, 8), (200, 9), **_TINY),
    RandomForest("smoke-random", 12, 8, 60, seed=3, **_TINY),
)
"""A root wider than a tile; one bucket."""
RANDOM = (
    RandomForest("random-nodes16-median2000", 16, 16, 2000, seed=0),
    RandomForest("random-nodes32-median1000", 32, 64, 1000, seed=1),
    RandomForest("random-nodes64-median400", 64, 64, 400, seed=2),
    RandomForest("random-nodes128-median200", 128, 128, 200, seed=3),
    RandomForest("random-nodes400-median60", 400, 256, 60, seed=4),
    RandomForest("random-chains", 64, 64, 200, window=1, seed=5),
)
AUTO_BATCHES = (1, 2, 4, 8, 16, 64, 256)
AUTO_PREFIXES = (0, 64, 128, 512, 2048, 16384)
AUTO_SUFFIXES = (16, 256, 2048)
GROUPS = ("codec", "sweep120k", "fasttree", "unshared", "random", "o27")


def cases_of(group: str, patterns: Sequence[str] = ()) -> list[AnyWorkload]:
    """The cases of a group ("smoke", "main" for all but the grid of `auto`, or one of `GROUPS`).

    Args:
      group: a name.
      patterns: keeps what matches any of these names, in which `*` stands for anything.

    Raises:
      ValueError: an unknown group, or a pattern that nothing matches.
    """
    names = [name for name in GROUPS if name == group or (group == "main" and name != "o27")]
    if group != "smoke" and not names:
        raise ValueError(f"`group` must be one of main, {', '.join(GROUPS)}; got {group!r}.")
    cases = list(SMOKE) if group == "smoke" else [case for name in names for case in _group(name)]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in cases):
            raise ValueError(f"`cases` must name cases of group {group}; got {pattern!r}.")
    if not patterns:
        return cases
    return [case for case in cases if any(fnmatch.fnmatchcase(case.name, p) for p in patterns)]


def is_paper_point(name: str) -> bool:
    """Whether a case is one of the 25 points of CoDec's kernel benchmark at its defaults."""
    return name.startswith("codec-vary-") and not name.startswith("codec-vary-batch-120k")


def auto_grid() -> list[Workload]:
    """Batches by prefixes by suffixes: where `auto` must not lose to any fixed policy."""
    return [
        Workload(f"o27-b{batch}-p{prefix}-s{suffix}", (1, batch), (prefix, suffix))
        for batch, prefix, suffix in itertools.product(AUTO_BATCHES, AUTO_PREFIXES, AUTO_SUFFIXES)
    ]


def buckets(cases: Sequence[AnyWorkload]) -> list[list[AnyWorkload]]:
    """The cases with the same heads and batch size together: they share what is compiled."""
    found: dict[tuple[int, ...], list[AnyWorkload]] = {}
    for case in cases:
        key = (case.num_q_heads, case.num_kv_heads, case.head_dim, case.batch_size)
        found.setdefault(key, []).append(case)
    return list(found.values())


def _group(name: str) -> list[AnyWorkload]:
    if name == "random":
        return list(RANDOM)
    if name == "o27":
        return list(auto_grid())
    kept = {
        "codec": is_paper_point,
        "sweep120k": lambda case: case.startswith("codec-vary-batch-120k"),
        "fasttree": lambda case: case.startswith("fasttree-"),
        "unshared": lambda case: case.startswith("unshared-"),
    }[name]
    return [case for case in load_workloads().values() if kept(case.name)]
