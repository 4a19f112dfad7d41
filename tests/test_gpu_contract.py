"""The kernels' contract, on a real GPU: every case against the float64 oracle.

Run on an NVIDIA H200 after the last change of a kernel: `python -m experiments.gpu_tests`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import make_batch, random_token_lists
from plan_cases import Case
from plan_editing import pieces_of, with_pieces

from codec_jax.attention import attend, stored_head_dim
from codec_jax.kv_cache import KVCache, KVPool
from codec_jax.planning.build import build_plan
from codec_jax.planning.spec import PlanSpec

pytestmark = pytest.mark.gpu

TOLERANCE = {"bfloat16": 1e-2, "float16": 1.5e-3}
"""Largest |out - oracle| for values of unit variance: one rounding of P, 8 and 11 bits."""
LSE_TOLERANCE = 1e-4
HEADS = {"32/8": (8, 4), "32/32": (32, 1), "8/1": (1, 8), "64/8": (8, 8)}
HEADS |= {"28/4": (4, 7), "9/3": (3, 3), "71/1": (1, 71)}


def case(dtype, head_dim, heads, page_size, **rest):
    num_kv_heads, group_size = HEADS[heads]
    few = {"max_requests": 8} if group_size * num_kv_heads > 30 else {"max_requests": 24}
    return Case(
        dtype=dtype,
        q_dtype=dtype,
        head_dim=head_dim,
        num_kv_heads=num_kv_heads,
        group_size=group_size,
        page_size=page_size,
        num_workers=132,
        **(few | rest),
    )


CASES = (
    case("bfloat16", 128, "32/8", 64, max_tail=150, max_kept=200),
    case("float16", 128, "32/32", 16),
    case("bfloat16", 64, "8/1", 128, max_tail=300, max_kept=300),
    case("float16", 256, "64/8", 32, policy="codec"),
    case("bfloat16", 80, "28/4", 64),
    case("bfloat16", 96, "9/3", 16, policy="flash_decoding"),
    case("float16", 192, "71/1", 64),
    case("bfloat16", 128, "9/3", 128, policy="hydragen", max_tail=200),
    case("float16", 64, "28/4", 32, policy="one_task_per_node"),
    case("bfloat16", 256, "8/1", 16, policy="auto"),
)


def kernel_attend(batch, plan):
    """The batch through the kernels, heads padded as they want, what is dead left as it is."""
    cache = batch.cache()
    head_dim = batch.q.shape[2]
    width = stored_head_dim(head_dim, implementation="mosaic_gpu")
    padding = ((0, 0), (0, 0), (0, 0), (0, width - head_dim))
    pool = KVPool(jnp.pad(cache.pool.k_pages, padding), jnp.pad(cache.pool.v_pages, padding))
    cache = KVCache(pool, cache.page_list, cache.kv_len)
    plan = jax.tree.map(jnp.asarray, plan)
    return attend(jnp.asarray(batch.q), cache, plan, implementation="mosaic_gpu")


def assert_right(result, expected, dtype):
    out, lse = expected
    np.testing.assert_allclose(
        np.asarray(result.out, np.float64), out, rtol=0, atol=TOLERANCE[dtype]
    )
    np.testing.assert_allclose(result.lse, lse, rtol=0, atol=LSE_TOLERANCE)


def lists_for(case, seed):
    """Random token lists that fit the case's capacities."""
    rng = np.random.default_rng(seed)
    num_requests = int(rng.integers(1, case.max_requests + 1))
    max_len = min(case.max_tail, 40 if seed % 2 else case.max_tail)
    lists = random_token_lists(rng, num_requests=num_requests, max_len=max_len)
    return [tokens[: case.max_kept + case.max_tail] for tokens in lists]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_forests_with_nan_in_every_dead_slot(case):
    for seed in range(20):
        batch = case.batch(lists_for(case, seed), seed=seed)
        result = kernel_attend(batch, case.plan(batch.arrays))
        assert_right(result, batch.expected(), case.dtype)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
def test_lengths_around_a_page(page_size):
    lengths = [1, page_size - 1, page_size, page_size + 1, 2 * page_size, 2 * page_size + 1]
    lists = [[i] * length for i, length in enumerate(lengths)]
    spec = PlanSpec(num_kv_heads=2, group_size=4, page_size=page_size)
    batch = make_batch(
        lists,
        page_size=page_size,
        num_kv_heads=2,
        group_size=4,
        head_dim=128,
        dtype="bfloat16",
        q_dtype="bfloat16",
    )
    assert_right(kernel_attend(batch, build_plan(batch.arrays, spec)), batch.expected(), "bfloat16")


def test_hand_made_plan_is_executed_as_its_arrays_say():
    case = CASES[0]
    batch = case.batch(lists_for(case, 3))
    plan = case.plan(batch.arrays)
    pieces = pieces_of(plan)
    rng = np.random.default_rng(0)
    edited = []
    for piece in pieces:
        if piece.num_steps > 1:
            cut = int(rng.integers(1, piece.num_steps))
            second = dataclasses.replace(
                piece, step_lo=piece.step_lo + cut, num_steps=piece.num_steps - cut, worker=5
            )
            edited += [dataclasses.replace(piece, num_steps=cut), second]
        else:
            edited.append(dataclasses.replace(piece, worker=int(rng.integers(132))))
    assert_right(kernel_attend(batch, with_pieces(plan, edited)), batch.expected(), case.dtype)


@pytest.mark.parametrize("num_workers", [1, 8, 64])
def test_splits_change_nothing_beyond_rounding(num_workers):
    lists = [[1] * 700 + [2 + i] * 70 for i in range(12)]
    batch = make_batch(
        lists,
        page_size=64,
        num_kv_heads=2,
        group_size=4,
        head_dim=128,
        dtype="bfloat16",
        q_dtype="bfloat16",
    )
    spec = PlanSpec(num_kv_heads=2, group_size=4, page_size=64, num_workers=num_workers)
    result = kernel_attend(batch, build_plan(batch.arrays, spec))
    assert_right(result, batch.expected(), "bfloat16")


def test_repeated_calls_are_bitwise_equal():
    case = CASES[0]
    batch = case.batch(lists_for(case, 5))
    plan = case.plan(batch.arrays)
    first = jax.device_get(kernel_attend(batch, plan))
    for _ in range(5):
        again = jax.device_get(kernel_attend(batch, plan))
        assert np.asarray(first.out).tobytes() == np.asarray(again.out).tobytes()
        assert first.lse.tobytes() == again.lse.tobytes()


def test_integer_values_come_out_exactly():
    """With equal scores the mean of small integers over 2**n keys is exact in every order."""
    lists = [[1] * 192 + [2 + i] * 64 for i in range(6)]
    batch = make_batch(
        lists,
        page_size=64,
        num_kv_heads=2,
        group_size=4,
        head_dim=128,
        dtype="bfloat16",
        q_dtype="bfloat16",
    )
    rng = np.random.default_rng(0)
    values = rng.integers(-8, 9, batch.pages[1].shape).astype(batch.pages[1].dtype)
    batch.pages = (np.zeros_like(batch.pages[0]), values)
    spec = PlanSpec(num_kv_heads=2, group_size=4, page_size=64)
    result = kernel_attend(batch, build_plan(batch.arrays, spec))
    for request in range(len(lists)):
        nodes = batch.forest.path(batch.forest.end_node(request))
        pages = np.concatenate([batch.forest.node(node).page_ids for node in nodes])
        mean = values[pages].astype(np.float64).mean(axis=(0, 2))
        expected = np.repeat(mean, 4, axis=0)
        got = np.asarray(result.out[request], np.float64)
        np.testing.assert_allclose(got, expected, rtol=2**-8, atol=1e-6)
        np.testing.assert_allclose(result.lse[request], np.log(256), rtol=1e-6)
