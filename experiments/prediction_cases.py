"""Cases of `experiments.check_prediction`, padded so that those of a size share one program."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from codec_jax import ForestArrays, PlanSpec
from codec_jax.planning.policies import policy_named
from codec_jax.planning.spec import PlanCapacity
from experiments.random_forests import ForestSizes, random_forest
from experiments.workloads import Workload

_PER_NODE: tuple[str, ...] = (
    "parent",
    "position",
    "kv_len",
    "max_kv_len",
    "first_row",
    "page_lo",
    "num_pages",
)
_PER_NODE += ("request_lo", "request_hi")
_PER_REQUEST: tuple[str, ...] = ("request_row", "request_node")
_FEWEST_REQUESTS = 16


class Heads(NamedTuple):
    """KV heads, query heads of each, and their width."""

    num_kv_heads: int
    group_size: int
    head_dim: int


RANDOM_HEADS = Heads(num_kv_heads=8, group_size=4, head_dim=128)
"""Of random forests: those of most of workloads.json."""


class Case(NamedTuple):
    """A forest with the heads that attend over it."""

    name: str
    forest: ForestArrays
    num_kv_heads: int
    group_size: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class Batch:
    """Cases whose arrays have one shape, and the room that any of their plans needs."""

    cases: tuple[Case, ...]
    spec: PlanSpec
    capacity: PlanCapacity
    num_pages: int


def workload_case(workload: Workload, *, page_size: int) -> Case:
    """The case of a named workload."""
    group_size = workload.num_q_heads // workload.num_kv_heads
    forest = workload.forest(page_size=page_size)
    return Case(workload.name, forest, workload.num_kv_heads, group_size, workload.head_dim)


def random_case(
    seed: int, *, page_size: int, sizes: ForestSizes, heads: Heads = RANDOM_HEADS
) -> Case:
    """A random forest under these heads."""
    forest = random_forest(seed, page_size=page_size, sizes=sizes)
    return Case(f"random-{seed}", forest, *heads)


def make_batches(
    cases: Sequence[Case], *, policies: Sequence[str], page_size: int, num_workers: int
) -> list[Batch]:
    """The cases by heads and by number of requests, rounded up to a power of two."""
    groups: dict[tuple[int, ...], list[Case]] = {}
    for case in cases:
        room = max(_FEWEST_REQUESTS, 1 << (int(case.forest.num_requests) - 1).bit_length())
        key = (case.num_kv_heads, case.group_size, case.head_dim, room)
        groups.setdefault(key, []).append(case)
    # One pool for all that have the same heads.
    pages = {key[:3]: 0 for key in groups}
    for case in cases:
        heads = (case.num_kv_heads, case.group_size, case.head_dim)
        pages[heads] = max(pages[heads], case.forest.page_list.size)
    batches = []
    for key, group in sorted(groups.items()):
        spec = PlanSpec(
            num_kv_heads=key[0], group_size=key[1], page_size=page_size, num_workers=num_workers
        )
        padded = _pad(group, num_requests=key[3])
        capacity = PlanCapacity.largest(
            PlanCapacity.for_forest(case.forest, spec, policy=policy_named(policy))
            for case in padded
            for policy in policies
        )
        batches.append(Batch(padded, spec, capacity, pages[key[:3]]))
    return batches


def _pad(cases: Sequence[Case], *, num_requests: int) -> tuple[Case, ...]:
    """The cases with forest arrays of one size."""
    num_nodes = max(case.forest.parent.size for case in cases)
    num_entries = max(case.forest.page_list.size for case in cases)
    sizes = [(name, num_nodes) for name in _PER_NODE] + [("page_list", num_entries)]
    sizes += [(name, num_requests) for name in _PER_REQUEST]
    fill = {"parent": -1, "request_row": -1, "request_node": -1}

    def padded(forest: ForestArrays) -> ForestArrays:
        columns = {}
        for name, size in sizes:
            values = np.asarray(getattr(forest, name))
            columns[name] = np.full(size, fill.get(name, 0), np.int32)
            columns[name][: values.size] = values
        return forest._replace(**columns)

    return tuple(case._replace(forest=padded(case.forest)) for case in cases)
