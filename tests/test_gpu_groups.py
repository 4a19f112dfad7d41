"""Any group size, and what a request's neighbours in the batch do to its answer.

Public bugs O06 (flashinfer#996: groups that are no power of two refused, or wrong) and O20
(FlashMLA#212: a row's answer depends on its batch, because the batch decides where it is cut).
"""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import gpu_batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_batches import COMMON, PAGE_SIZE, Run, Runs, assert_right, make_batch

from codec_jax.attention import attend_packed, prepare_plan, resolve_plan
from codec_jax.attention_rows import pack_rows, unpack_rows
from codec_jax.forest_arrays import ForestCapacity
from codec_jax.planning.spec import PlanCapacity

# In one process: the tests share what they compile.
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("groups")]

GROUP_SIZES = (1, 2, 3, 5, 6, 7, 8, 12, 14, 16, 28, 71)
HEAD_DIMS = (64, 128)
BATCH_SIZES = (1, 3, 33)
CAPACITY = PlanCapacity(virtual_nodes=48, tiles=80, steps=128, items=192, segments=640, slots=1280)
MAX_ULP = 3
"""Rounded weights (bfloat16) put two cuts up to 2 ulp apart in 500,000 simulated values."""


pack = jax.jit(pack_rows)
unpack = jax.jit(functools.partial(unpack_rows, dtype=jnp.float32))


def signature(group_size, head_dim):
    sizes = ForestCapacity(nodes=48, requests=max(BATCH_SIZES), page_entries=128)
    return dataclasses.replace(
        COMMON, group_size=group_size, head_dim=head_dim, forest=sizes, plan=CAPACITY
    )


def tree(num_requests):
    """A root, a second level for every fifth request, and ragged ends; the last one is a root."""
    runs, ends, above = [Run(-1, 150)], [], 0
    for i in range(num_requests):
        if i % 5 == 0:
            runs.append(Run(0, 40))
            above = len(runs) - 1
        runs.append(Run(above, 1 + 37 * i % 90))
        ends.append(len(runs) - 1)
    if num_requests > 1:
        runs[-1] = Run(-1, 70)
    return Runs(tuple(runs), tuple(ends))


@functools.cache
def batch_of(group_size, head_dim, num_requests):
    return make_batch(signature(group_size, head_dim), tree(num_requests), seed=group_size)


@functools.cache
def plans():
    """Every group's plans. A planner is compiled for each group, several at a time."""

    def plans_of(group_size):
        sizes = {size: batch_of(group_size, HEAD_DIMS[0], size) for size in BATCH_SIZES}
        return {(group_size, size): batch.plan() for size, batch in sizes.items()}

    with ThreadPoolExecutor() as pool:
        made = pool.map(plans_of, GROUP_SIZES)
    return {key: plan for some in made for key, plan in some.items()}


@functools.partial(jax.jit, static_argnames=("logits_scale", "implementation"))
def attend_rows(rows, kv, plan, *, logits_scale, implementation):
    """What `attend` does between packing and unpacking: one program for all groups."""
    prepared = prepare_plan(plan, implementation=implementation)
    resolved = resolve_plan(prepared, kv.page_list, kv.kv_len, page_size=PAGE_SIZE)
    return attend_packed(
        rows,
        kv.pool,
        resolved,
        jnp.int32(0),
        logits_scale=logits_scale,
        implementation=implementation,
    )


def attend_group(batch, plan):
    """The batch through the kernels that its head_dim's other groups use too."""
    plan = jax.tree.map(jnp.asarray, plan)
    result = attend_rows(
        pack(jnp.asarray(batch.padded_q(), jnp.bfloat16), plan),
        batch.cache(),
        dataclasses.replace(plan, packed_row=jnp.zeros((1, 1), jnp.int32)),
        logits_scale=batch.signature.head_dim**-0.5,
        implementation=gpu_batches.IMPLEMENTATION,
    )
    result = unpack(result, plan)
    count = len(batch.q)
    return np.asarray(result.out)[:count], np.asarray(result.lse)[:count]


@pytest.mark.parametrize("num_requests", BATCH_SIZES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_o06_every_group_size(group_size, head_dim, num_requests):
    batch = batch_of(group_size, head_dim, num_requests)
    assert_right(attend_group(batch, plans()[group_size, num_requests]), batch.expected())


def mixed_batch(num_requests):
    """One request of 8192 tokens, the same in every batch, and short ones that share a prefix."""
    short = [Run(1, 1 + 11 * i % 60) for i in range(num_requests - 1)]
    runs = (Run(-1, 8192), *((Run(-1, 100), *short) if short else ()))
    return make_batch(COMMON, Runs(runs, (0, *range(2, len(runs)))))


def with_row_0_of(batch, first):
    """The batch with request 0's query, keys and values taken from another one."""
    q, k, v = batch.q.copy(), batch.k.copy(), batch.v.copy()
    q[0] = first.q[0]
    tokens = first.tokens(0)
    k[tokens], v[tokens] = first.k[tokens], first.v[tokens]
    return dataclasses.replace(batch, q=q, k=k, v=v)


def in_bfloat16(values):
    return np.asarray(values).astype(jnp.bfloat16).astype(np.float64)


def ulps_apart(a, b):
    """Largest difference in ulp of bfloat16, at an element's size or its row's RMS if larger."""
    rms = np.sqrt(np.mean(a**2, axis=-1, keepdims=True))
    size = np.maximum(np.maximum(np.abs(a), np.abs(b)), rms)
    ulp = 2.0 ** (np.floor(np.log2(size)) - 7)
    return float(np.max(np.abs(a - b) / ulp))


def test_o20_a_row_differs_between_batches_by_a_few_ulp_at_most(record_property):
    """Not batch invariant: the batch decides where a row's keys are cut. Bounded by MAX_ULP."""
    alone = mixed_batch(1)
    outs = []
    for num_requests in (1, 8, 64):
        batch = with_row_0_of(mixed_batch(num_requests), alone)
        result = batch.attend(batch.plan())
        assert_right(result, batch.expected())
        outs.append(in_bfloat16(result[0][0]))
    apart = max(ulps_apart(outs[0], out) for out in outs[1:])
    record_property("max_ulp", apart)
    assert apart <= MAX_ULP


@pytest.mark.parametrize("num_requests", [1, 64])
def test_o20_the_same_call_gives_the_same_bits(num_requests):
    batch = mixed_batch(num_requests)
    plan = batch.plan()
    first = batch.attend(plan)
    for _ in range(5):
        again = batch.attend(plan)
        assert all(a.tobytes() == b.tobytes() for a, b in zip(first, again, strict=True))
