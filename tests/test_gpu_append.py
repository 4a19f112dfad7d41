"""The kernel that writes new keys and values, on a GPU: every layout, programs, huge pools."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from test_kernels_append import (
    CASES,
    NUM_LAYERS,
    Case,
    assert_same_bits,
    filled_pool,
    new_values,
    setting,
)
from test_kernels_lower import HEAD_DIMS

from codec_jax.attention import attend_resolved, prepare_plan, resolve_plan
from codec_jax.attention_layer import append_in_one_launch, layer_attention
from codec_jax.kv_cache import KVPool, TokenSlots, append

pytestmark = pytest.mark.gpu

NUM_PAGES = 40
LAYOUTS = tuple(
    Case(("bfloat16", "float16")[(i + j) % 2], num_kv_heads, 16, head_dim, head_dim)
    for (i, num_kv_heads), (j, head_dim) in itertools.product(
        enumerate((1, 2, 4, 8, 32)), enumerate(HEAD_DIMS)
    )
)
"""Every width with both dtypes, which take turns over the heads."""
append_jitted = jax.jit(append)
append_by_kernel = jax.jit(append_in_one_launch)


def random_slots(case, num_tokens):
    """Different slots in random order, about an eighth of them outside the layer."""
    rng = np.random.default_rng(3)
    num_slots = NUM_PAGES * case.page_size
    page, row = np.divmod(rng.permutation(num_slots)[:num_tokens], case.page_size)
    page[rng.random(num_tokens) < 1 / 8] = -1
    page[rng.random(num_tokens) < 1 / 8] = NUM_PAGES
    return TokenSlots(jnp.asarray(page, jnp.int32), jnp.asarray(row, jnp.int32))


def check(case, num_tokens):
    """In the middle layer; a pool that was not donated is left as it was."""
    pool, slots = filled_pool(case, NUM_PAGES), random_slots(case, num_tokens)
    before = jax.tree.map(lambda pages: np.array(pages), pool)
    arguments = pool, jnp.int32(1), slots, *new_values(case, num_tokens)
    written = append_by_kernel(*arguments)
    assert_same_bits(pool, before)
    assert_same_bits(written, append_jitted(*arguments))


@pytest.mark.parametrize("case", LAYOUTS + CASES, ids=str)
def test_the_same_bits_as_the_scatters(case):
    check(case, min(512, NUM_PAGES * case.page_size))


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 640])
def test_any_number_of_tokens(num_tokens):
    check(Case("bfloat16", 8, 16, 128, 128), num_tokens)


def step_program(case, write_and_attend):
    """Two steps of all layers; each overwrites keys that its attention then reads."""
    batch, plan, slots = setting(case)

    def program(pool, q, k, v):
        resolved = resolve_plan(
            prepare_plan(plan, implementation="mosaic_gpu"),
            jnp.asarray(batch.arrays.page_list),
            jnp.asarray(batch.arrays.kv_len),
            page_size=case.page_size,
        )

        def step(i, carry):
            pool, _ = carry
            gain = (i + 1).astype(k.dtype)

            def layer(pool, number):
                attend = write_and_attend(resolved, slots)
                out, pool = attend(number, q, gain * k, gain * v, pool)
                return pool, out

            return lax.scan(layer, pool, jnp.arange(NUM_LAYERS, dtype=jnp.int32))

        outs = jnp.zeros((NUM_LAYERS, *q.shape), q.dtype)
        return lax.fori_loop(0, 2, step, (pool, outs))

    return program


def by_kernel(resolved, slots):
    return layer_attention(resolved, slots, implementation="mosaic_gpu")


def by_scatters(resolved, slots):
    def attend(layer, q, k, v, pool):
        pool = append(pool, layer, slots, k, v)
        scale = q.shape[-1] ** -0.5
        partial = attend_resolved(
            q, pool, resolved, layer, logits_scale=scale, implementation="mosaic_gpu"
        )
        return partial.out, pool

    return attend


@pytest.mark.parametrize(
    "case", [Case("bfloat16", 8, 64, 128, 128), Case("float16", 2, 16, 128, 80)], ids=str
)
def test_steps_of_all_layers_in_one_program_copy_no_pool(case):
    batch = setting(case)[0]
    pool = jax.tree.map(jnp.nan_to_num, filled_pool(case, batch.pages[0].shape[0]))
    k, v = new_values(case, batch.q.shape[0])
    q = jnp.concatenate([k, v], axis=1)
    expected_pool, expected_outs = jax.jit(step_program(case, by_scatters))(pool, q, k, v)
    jitted = jax.jit(step_program(case, by_kernel), donate_argnums=0)
    compiled = jitted.lower(pool, q, k, v).compile()
    text, pool_bytes = compiled.as_text(), 2 * pool.k_pages.nbytes
    shape = ",".join(map(str, pool.k_pages.shape))
    new_pool, outs = compiled(pool, q, k, v)
    assert_same_bits(new_pool, expected_pool)
    assert_same_bits(outs, expected_outs)
    assert text.count('custom_call_target="mosaic_gpu') == 3
    pools = [line for line in text.splitlines() if f"[{shape}]" in line]
    assert pools
    assert [line for line in pools if re.search(r" (copy|copy-start|scatter)\(", line)] == []
    assert compiled.memory_analysis().alias_size_in_bytes >= pool_bytes


@pytest.mark.xdist_group("sizes")
@pytest.mark.parametrize("num_pages", [65_540, 131_080], ids=["2**31", "2**32"])
def test_the_last_pages_of_a_huge_pool(num_pages):
    """O05 (vllm#50427, flashinfer#3136): elements of K pass 2**31 and 2**32; no other page."""
    case = Case("bfloat16", 8, 16, 128, 128)
    sizes = (case.num_kv_heads, case.page_size, case.stored)
    pool = KVPool.zeros(num_pages, sizes, num_layers=2, dtype=case.dtype)
    page, row = jnp.int32([num_pages - 1, 0, num_pages - 2]), jnp.int32([15, 0, 7])
    k, v = new_values(case, 3)
    written = jax.jit(append_in_one_launch, donate_argnums=0)(
        pool, jnp.int32(1), TokenSlots(page, row), k, v
    )
    where = np.asarray(page) + num_pages
    for pages, values in ((written.k_pages, k), (written.v_pages, v)):
        touched = jax.jit(lambda pages: jnp.any(pages != 0, axis=(1, 2, 3)))(pages)
        np.testing.assert_array_equal(np.flatnonzero(touched), np.sort(where))
        for token in range(3):
            assert_same_bits(pages[int(where[token]), :, int(row[token])], values[token])
