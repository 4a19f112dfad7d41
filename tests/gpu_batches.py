"""Batches for the kernels' contract tests, padded to a few signatures, with float64 answers.

A batch is runs of tokens that continue each other; keys and values belong to a run's tokens. The
answers are computed from the runs alone: no forest, page or plan has a part in them.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from forests import preorder_positions

from codec_jax.attention import attend
from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestCapacity, export_arrays
from codec_jax.kv_cache import KVCache, KVPool
from codec_jax.planning.build import build_plan
from codec_jax.planning.spec import PlanCapacity, PlanSpec

IMPLEMENTATION = "mosaic_gpu"
PAGE_SIZE = 64
TOLERANCE = 6e-3
"""Largest relative error of a row: rounded weights (bfloat16) left 2.2e-3 in a simulation."""
LSE_TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signature:
    """What is compiled once: heads, and the fixed size of every array."""

    group_size: int
    head_dim: int
    forest: ForestCapacity
    plan: PlanCapacity
    num_kv_heads: int = 2

    @property
    def spec(self):
        return PlanSpec(
            num_kv_heads=self.num_kv_heads, group_size=self.group_size, page_size=PAGE_SIZE
        )

    @property
    def num_q_heads(self):
        return self.num_kv_heads * self.group_size


COMMON = Signature(
    group_size=4,
    head_dim=128,
    forest=ForestCapacity(nodes=544, requests=512, page_entries=640),
    plan=PlanCapacity(virtual_nodes=544, tiles=65, steps=640, items=192, segments=1536, slots=3072),
)
"""512 requests, or nodes of 4096 tokens in 64 pieces each: one kernel for all that fits."""


class Run(NamedTuple):
    """Tokens that continue those of run `parent`; -1 starts at a root."""

    parent: int
    num_tokens: int


@dataclasses.dataclass(frozen=True)
class Runs:
    """Runs, parents first, and for each request the run at which it ends."""

    runs: tuple[Run, ...]
    ends: tuple[int, ...]

    @property
    def num_tokens(self):
        return sum(run.num_tokens for run in self.runs)

    def tokens_of_run(self, run):
        """Places of a run's tokens among all tokens, run after run."""
        start = sum(run.num_tokens for run in self.runs[:run])
        return np.arange(start, start + self.runs[run].num_tokens)

    def path(self, request):
        """Runs from the root to where the request ends."""
        path, run = [], self.ends[request]
        while run >= 0:
            path.append(run)
            run = self.runs[run].parent
        return path[::-1]

    def forest(self):
        """The forest, and the id of each run's node."""
        forest, nodes = Forest(page_size=PAGE_SIZE), []
        for place, run in enumerate(self.runs):
            parent = None if run.parent < 0 else nodes[run.parent]
            nodes.append(forest.insert(np.full(run.num_tokens, place), parent=parent))
        for end in self.ends:
            forest.add_request([], parent=nodes[end])
        return forest, nodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """Queries `[requests, num_q_heads, head_dim]`, keys and values `[tokens, num_kv_heads,
    head_dim]`: float32 arrays of bfloat16 values. The tokens of `dead` runs are not live."""

    signature: Signature
    runs: Runs
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dead: tuple[int, ...] = ()

    def tokens(self, request):
        """Places of the tokens that a request sees."""
        live = [run for run in self.runs.path(request) if run not in self.dead]
        places = [np.zeros(0, int), *map(self.runs.tokens_of_run, live)]
        return np.concatenate(places)

    def expected(self):
        """Float64 out and lse of every request."""
        rows = []
        for request, q in enumerate(self.q):
            tokens = self.tokens(request)
            rows.append(oracle.attention(q, self.k[tokens], self.v[tokens]))
        outs, lses = zip(*rows, strict=True)
        return np.stack(outs), np.stack(lses)

    def arrays(self):
        """The forest's arrays, padded."""
        return export_arrays(self.runs.forest()[0], self.signature.forest)

    def plan(self, policy="balanced"):
        """The planner's plan, on the host."""
        capacity = self.signature.plan
        plan = build_plan(self.arrays(), self.signature.spec, policy=policy, capacity=capacity)
        return jax.device_get(plan)

    def cache(self):
        """The padded pool, pages shuffled, NaN wherever no token is live."""
        sizes, spec = self.signature.forest, self.signature.spec
        forest, nodes = self.runs.forest()
        shape = (spec.num_kv_heads, PAGE_SIZE, self.signature.head_dim)
        pages = np.full((2, sizes.page_entries, *shape), np.nan, jnp.bfloat16)
        where = np.random.default_rng(0).permutation(sizes.page_entries).astype(np.int32)
        arrays = self.arrays()
        kv_len = np.copy(arrays.kv_len)
        for run, node in enumerate(nodes):
            if run in self.dead:
                kv_len[preorder_positions(forest)[node]] = 0
                continue
            tokens = self.runs.tokens_of_run(run)
            page, row = np.divmod(np.arange(tokens.size), PAGE_SIZE)
            place = where[forest.node(node).page_ids[page]]
            for stored, values in zip(pages, (self.k, self.v), strict=True):
                stored[place, :, row] = values[tokens]
        page_list = np.where(arrays.page_list < 0, -1, where[arrays.page_list])
        pool = KVPool(jnp.asarray(pages[0]), jnp.asarray(pages[1]))
        return KVCache(pool, jnp.asarray(page_list), jnp.asarray(kv_len))

    def padded_q(self):
        """Queries of the signature's size, NaN past the last request."""
        padding = ((0, self.signature.forest.requests - len(self.q)), (0, 0), (0, 0))
        return np.pad(self.q, padding, constant_values=np.nan)

    def attend(self, plan, logits_scale=None):
        """What the kernels say, rounded to no less than float32."""
        device_plan = jax.tree.map(jnp.asarray, plan)
        q = jnp.asarray(self.padded_q())
        settings = {"logits_scale": logits_scale, "implementation": IMPLEMENTATION}
        result = attend(q, self.cache(), device_plan, **settings)
        count = len(self.q)
        return np.asarray(result.out)[:count], np.asarray(result.lse)[:count]


def make_batch(signature, runs, *, seed=0, dead=()):
    """Random queries, keys and values; token i has the same ones whatever the runs."""
    rng = np.random.default_rng(seed)

    def normal(count, heads):
        values = rng.standard_normal((count, heads, signature.head_dim), np.float32)
        return values.astype(jnp.bfloat16).astype(np.float32)

    q = normal(len(runs.ends), signature.num_q_heads)
    k, v = (normal(runs.num_tokens, signature.num_kv_heads) for _ in range(2))
    return Batch(signature=signature, runs=runs, q=q, k=k, v=v, dead=dead)


def row_errors(out, expected):
    """|out - expected|2 / |expected|2 of every row."""
    gap = np.linalg.norm(np.asarray(out, np.float64) - expected, axis=-1)
    return gap / np.linalg.norm(expected, axis=-1)


def assert_right(result, expected):
    """Every row within the tolerances; NaN is never within."""
    (out, lse), (expected_out, expected_lse) = result, expected
    assert row_errors(out, expected_out).max() < TOLERANCE
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=LSE_TOLERANCE)
