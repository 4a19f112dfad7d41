"""The kernels at sizes where an index could overflow: huge pools, many requests, long nodes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import make_batch

from codec_jax.attention import attend
from codec_jax.forest import Forest
from codec_jax.forest_arrays import export_arrays
from codec_jax.kv_cache import KVCache, KVPool
from codec_jax.planning.build import build_plan
from codec_jax.planning.spec import PlanSpec
from experiments.dense_check import max_relative_error

# In one process: the tests share what they compile.
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("sizes")]


@pytest.mark.parametrize("num_pages", [131_080, 262_160], ids=["2**31", "2**32"])
def test_live_tokens_in_the_last_pages_of_a_huge_pool(num_pages):
    """O05 (vllm#50427, flashinfer#3136): elements of K pass 2**31 and 2**32; all else is NaN."""
    lists = [[1] * 40 + [2 + i] * 25 for i in range(6)]
    batch = make_batch(
        lists,
        page_size=16,
        num_kv_heads=8,
        group_size=4,
        head_dim=128,
        dtype="bfloat16",
        q_dtype="bfloat16",
    )
    used = batch.pages[0].shape[0]

    @jax.jit
    def at_the_end(pages):
        pool = jnp.full((num_pages, *pages.shape[1:]), jnp.nan, pages.dtype)
        return pool.at[num_pages - used :].set(pages)

    pool = KVPool(*(at_the_end(pages) for pages in batch.pages))
    page_list = jnp.asarray(batch.arrays.page_list) + (num_pages - used)
    cache = KVCache(pool, page_list, jnp.asarray(batch.arrays.kv_len))
    plan = build_plan(batch.arrays, PlanSpec(num_kv_heads=8, group_size=4, page_size=16))
    result = attend(jnp.asarray(batch.q), cache, plan, implementation="mosaic_gpu")
    out, lse = batch.expected()
    np.testing.assert_allclose(np.asarray(result.out, np.float64), out, rtol=0, atol=1e-2)
    np.testing.assert_allclose(result.lse, lse, rtol=0, atol=1e-4)


def check_against_float32(forest, page_size, *, num_q_heads, num_kv_heads, head_dim):
    arrays = export_arrays(forest)
    shape = (arrays.page_list.size, num_kv_heads, page_size, head_dim)
    k, v = (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in (0, 1))
    cache = KVCache(KVPool(k, v), jnp.asarray(arrays.page_list), jnp.asarray(arrays.kv_len))
    q_shape = (forest.num_requests, num_q_heads, head_dim)
    q = jax.random.normal(jax.random.key(2), q_shape, jnp.bfloat16)
    spec = PlanSpec(
        num_kv_heads=num_kv_heads, group_size=num_q_heads // num_kv_heads, page_size=page_size
    )
    plan = build_plan(arrays, spec)
    result = attend(q, cache, plan, implementation="mosaic_gpu")
    error, lse_error = max_relative_error(result, q, cache, arrays, logits_scale=head_dim**-0.5)
    assert error < 6e-3
    assert lse_error < 1e-3


def test_seventy_thousand_requests_of_one_page():
    forest = Forest(page_size=16)
    for i in range(70_000):
        forest.add_request(np.full(1 + i % 16, i))
    check_against_float32(forest, 16, num_q_heads=8, num_kv_heads=1, head_dim=64)


def test_one_node_of_a_million_tokens():
    forest = Forest(page_size=64)
    node = forest.insert(np.ones(1_000_003, np.int32))
    forest.add_request([], parent=node)
    forest.add_request([2, 3], parent=node)
    check_against_float32(forest, 64, num_q_heads=8, num_kv_heads=1, head_dim=128)
