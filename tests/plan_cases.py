"""The static signatures that the tests of planning and attention compile, and their random data.

A signature's shapes never change: hypothesis draws token lists that fit its fixed capacities.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from forests import make_batch
from hypothesis import strategies as st

from codec_jax.forest_arrays import ForestArrays
from codec_jax.planning.build import build_plan
from codec_jax.planning.plan import Plan
from codec_jax.planning.policies import POLICIES
from codec_jax.planning.spec import PlanCapacity, PlanSpec

MAX_NODES = 96
MAX_VIRTUAL_NODES = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One signature; `max_tail` and `max_kept` bound a request's own tokens and its prefix."""

    group_size: int = 2
    head_dim: int = 8
    page_size: int = 16
    num_kv_heads: int = 2
    num_workers: int = 7
    policy: str = "balanced"
    dtype: str = "float32"
    q_dtype: str = "float32"
    max_requests: int = 40
    max_tail: int = 24
    max_kept: int = 40

    def __str__(self) -> str:
        return (
            f"group{self.group_size}-dim{self.head_dim}-page{self.page_size}"
            f"-heads{self.num_kv_heads}-workers{self.num_workers}-{self.policy}-{self.dtype}"
        )

    @property
    def spec(self) -> PlanSpec:
        return PlanSpec(
            num_kv_heads=self.num_kv_heads,
            group_size=self.group_size,
            page_size=self.page_size,
            num_workers=self.num_workers,
        )

    @property
    def forest_capacity(self) -> dict[str, int]:
        # A request adds at most its tail's pages, and one more where it splits a node in a page.
        pages_of_tail = -(-self.max_tail // self.page_size) + (self.page_size > 1)
        return {
            "nodes": MAX_NODES,
            "requests": self.max_requests,
            "page_entries": self.max_requests * pages_of_tail,
        }

    @property
    def capacity(self) -> PlanCapacity:
        policy = POLICIES[self.policy]
        units = self.max_requests * self.spec.units_per_request
        tiles = 2 * -(-units // self.spec.units_per_tile) + 1
        path_tokens = self.max_tail + self.max_kept
        # Paths have at most as many nodes as there are requests, half as many on average.
        path_pages = self.max_requests * (self.max_requests + -(-path_tokens // self.page_size))
        items = tiles + 128
        segments = items * self.num_kv_heads + policy.most_cuts(self.num_workers)
        return PlanCapacity(
            virtual_nodes=MAX_VIRTUAL_NODES if policy.repeats else MAX_NODES,
            tiles=tiles,
            steps=path_pages if policy.repeats else self.forest_capacity["page_entries"],
            items=items,
            segments=segments,
            slots=2 * segments,
        )

    def batch(self, token_lists, *, seed=0):
        """The token lists as a batch of this signature."""
        return make_batch(
            token_lists,
            page_size=self.page_size,
            num_kv_heads=self.num_kv_heads,
            group_size=self.group_size,
            head_dim=self.head_dim,
            dtype=self.dtype,
            q_dtype=self.q_dtype,
            capacity=self.forest_capacity,
            seed=seed,
        )

    def plan(self, arrays: ForestArrays, *, num_new_tokens: int = 0) -> Plan:
        """The jitted planner's plan, on the host."""
        plan = build_plan(
            arrays,
            self.spec,
            policy=self.policy,
            num_new_tokens=num_new_tokens,
            capacity=self.capacity,
        )
        return jax.device_get(plan)

    def batches(self) -> st.SearchStrategy:
        """Batches of 1 to `max_requests` requests."""
        return st.builds(self.batch, self.token_lists(), seed=st.integers(0, 99))

    def token_lists(self) -> st.SearchStrategy:
        """Several roots, ragged depths, splits anywhere, duplicates, strict prefixes."""
        request = st.tuples(
            st.integers(0, self.max_requests - 1),
            st.integers(0, self.max_kept),
            st.integers(0, self.max_tail),
            st.integers(0, 5),
        )
        sizes = st.integers(1, self.max_requests)
        return sizes.flatmap(lambda n: st.lists(request, min_size=n, max_size=n)).map(grow_lists)


def grow_lists(requests) -> list[list[int]]:
    """Token lists from (earlier request, tokens kept of it, own tokens, seed) for each request."""
    lists = []
    for earlier, num_kept, num_own, seed in requests:
        kept = lists[earlier % len(lists)][:num_kept] if lists else []
        own = np.random.default_rng(seed).integers(0, 3, num_own).tolist()
        lists.append((kept + own) or [seed])
    return lists


LONG = {"max_requests": 16, "max_tail": 150, "max_kept": 200}
SHAPES = (
    {"group_size": 8, "head_dim": 8, "page_size": 2, "num_kv_heads": 3},
    {"group_size": 2, "head_dim": 64, "page_size": 16, "dtype": "bfloat16"},
    {"group_size": 3, "head_dim": 80, "page_size": 5, "num_kv_heads": 1},
    {"group_size": 4, "head_dim": 128, "dtype": "bfloat16", "q_dtype": "bfloat16"},
    {"group_size": 71, "head_dim": 64, "num_kv_heads": 1, "max_requests": 8},
    {"group_size": 1, "head_dim": 8, "page_size": 1},
    {"group_size": 8, "head_dim": 128, "page_size": 64, "num_kv_heads": 1, **LONG},
    {"group_size": 3, "head_dim": 8, "page_size": 4},
    {"group_size": 7, "head_dim": 64, "page_size": 8, "num_kv_heads": 4},
    {"group_size": 2, "head_dim": 8, "page_size": 32, "dtype": "float16", "q_dtype": "float16"},
    {"group_size": 33, "head_dim": 16, "page_size": 16, "max_requests": 12},
)
"""Groups of 1 to 71 (none, one or many to a tile), head_dim 8 to 128, pages of 1 to 64."""

WORKERS = (1, 7, 132)
CASES = tuple(
    Case(
        policy=policy,
        num_workers=workers,
        **{"max_requests": 40 if POLICIES[policy].shares_all else 24, **shape},
    )
    for (workers, policy), shape in zip(
        itertools.product(WORKERS, POLICIES), itertools.cycle(SHAPES), strict=False
    )
)
"""Every policy with every number of workers, over the shapes in turn."""

SMALL = Case()
"""For properties that need one signature only."""


def attend_arguments(batch, plan):
    """What `attend` takes, on the device."""
    return jnp.asarray(batch.q), batch.cache(), jax.tree.map(jnp.asarray, plan)
