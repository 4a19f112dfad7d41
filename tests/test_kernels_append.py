"""Writing new keys and values by the kernel: bit for bit what the scatters write, in place.

The kernel's own body runs in Pallas's Mosaic interpreter, on a CPU, with race detection; each
configuration lowers for CUDA. The register layouts and large pools are in tests/test_gpu_append.py.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from forests import make_batch
from jax import lax
from jax.sharding import AbstractMesh, use_abstract_mesh
from test_kernels_lower import H200, HEAD_DIMS, shape

from codec_jax.attention import prepare_plan, resolve_plan
from codec_jax.attention_layer import append_in_one_launch, layer_attention
from codec_jax.kv_cache import KVPool, TokenSlots, append
from codec_jax.planning.build import build_plan
from codec_jax.planning.spec import PlanSpec
from pallas_kernels.support import DTYPES

NUM_LAYERS, NUM_PAGES = 3, 5


class Case(NamedTuple):
    dtype: str
    num_kv_heads: int
    page_size: int
    stored: int
    head_dim: int

    def __str__(self):
        return "-".join(map(str, self))


CASES = (
    Case("bfloat16", 8, 64, 128, 128),
    Case("float16", 1, 16, 64, 64),  # fewer numbers than threads
    Case("bfloat16", 3, 32, 192, 160),
    Case("float16", 32, 16, 128, 80),  # several blocks for a token
    Case("bfloat16", 6, 128, 256, 256),
)


def filled_pool(case, num_pages=NUM_PAGES):
    """Random keys and values; NaN and -0.0 too, to be left as they are."""
    rng = np.random.default_rng(1)
    sizes = (NUM_LAYERS * num_pages, case.num_kv_heads, case.page_size, case.stored)
    k, v = rng.standard_normal((2, *sizes), np.float32)
    k[..., 0], v[..., 1] = np.nan, -0.0
    return KVPool(jnp.asarray(k, case.dtype), jnp.asarray(v, case.dtype), NUM_LAYERS)


def new_values(case, num_tokens):
    rng = np.random.default_rng(2)
    sizes = (2, num_tokens, case.num_kv_heads, case.head_dim)
    values = rng.standard_normal(sizes, np.float32)
    values[:, :, :, 3] = -0.0
    return tuple(jnp.asarray(x, case.dtype) for x in values)


def slots_of(case, *pairs):
    page, row = np.array(pairs, np.int32).T
    return TokenSlots(jnp.asarray(page), jnp.asarray(row % case.page_size))


def interpreted(*arguments):
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        return jax.block_until_ready(append_in_one_launch(*arguments))


def assert_same_bits(pool, expected):
    for array, other in zip(jax.tree.leaves(pool), jax.tree.leaves(expected), strict=True):
        assert array.dtype == other.dtype
        np.testing.assert_array_equal(*(np.asarray(x).view(np.uint16) for x in (array, other)))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("layer", [0, NUM_LAYERS - 1])
def test_the_same_bits_as_the_scatters_and_no_races(case, layer, capfd):
    """First and last page and row, tokens out of order, dropped ones before and after."""
    pairs = [(-1, 0), (NUM_PAGES - 1, -1), (0, 0), (NUM_PAGES, 1), (2**31 - 1, 1), (2, 3), (0, -1)]
    pool, slots = filled_pool(case), slots_of(case, *pairs)
    k, v = new_values(case, len(pairs))
    arguments = pool, jnp.int32(layer), slots, k, v
    written = interpreted(*arguments)
    assert_same_bits(written, append(*arguments))
    token, page = 1, (layer + 1) * NUM_PAGES - 1
    for pages, values in ((written.k_pages, k), (written.v_pages, v)):
        row = np.asarray(pages[page, :, case.page_size - 1], np.float32)
        np.testing.assert_array_equal(row[:, : case.head_dim], values[token].astype(jnp.float32))
        assert not row[:, case.head_dim :].any()
    assert "RACE" not in "".join(capfd.readouterr()).upper()


@pytest.mark.parametrize("row", [-1, 64, 2**31 - 1])
def test_a_row_outside_its_page_is_dropped(row):
    case = CASES[0]
    pool, slots = filled_pool(case), TokenSlots(jnp.zeros(1, jnp.int32), jnp.int32([row]))
    assert_same_bits(interpreted(pool, jnp.int32(1), slots, *new_values(case, 1)), pool)


def test_no_tokens_change_nothing():
    case = CASES[0]
    none = jnp.zeros(0, jnp.int32)
    arguments = filled_pool(case), jnp.int32(0), TokenSlots(none, none), *new_values(case, 0)
    assert_same_bits(append_in_one_launch(*arguments), append(*arguments))


def test_values_are_rounded_to_the_pool():
    case = CASES[0]
    pool, slots = filled_pool(case), slots_of(case, (1, 1))
    k, v = (x.astype(jnp.float32) + np.float32(1e-3) for x in new_values(case, 1))
    arguments = pool, jnp.int32(0), slots, k, v
    assert_same_bits(interpreted(*arguments), append(*arguments))


def lower(function, *arguments):
    """The program's text; the first argument is donated."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        traced = jax.jit(function, donate_argnums=0).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def lines_with(text, *parts):
    return [line for line in text.splitlines() if all(part in line for part in parts)]


def pool_shape(case, num_pages):
    pages = shape(num_pages, case.num_kv_heads, case.page_size, case.stored, dtype=case.dtype)
    return KVPool(pages, pages, NUM_LAYERS)


ALL = itertools.product(DTYPES, (1, 2, 3, 4, 8, 32), (16, 128), HEAD_DIMS)


@pytest.mark.parametrize("case", [Case(*sizes, sizes[-1]) for sizes in ALL], ids=str)
def test_it_lowers_to_one_call_that_updates_both_pools_in_place(case):
    """A pool of more than 2**32 elements, 512 tokens."""
    values = shape(512, case.num_kv_heads, case.head_dim, dtype=case.dtype)
    text = lower(
        append_in_one_launch,
        pool_shape(case, 3 * 2**24),
        shape(),
        TokenSlots(shape(512), shape(512)),
        values,
        values,
    )
    (call,) = lines_with(text, "mosaic_gpu_v2")
    for output, operand in ((0, 5), (1, 6)):
        assert f"output_tuple_indices = [{output}], operand_index = {operand}," in call
    assert text.count("tf.aliasing_output") == 2
    assert made_pools(text, case, 3 * 2**24) == []


def made_pools(text, case, num_pages):
    """Operations but the kernel that make an array of a pool's shape."""
    name = {"bfloat16": "bf16", "float16": "f16"}[case.dtype]
    sizes = "x".join(map(str, (num_pages, case.num_kv_heads, case.page_size, case.stored)))
    made = lines_with(text, f"-> tensor<{sizes}x{name}>") + lines_with(text, "scatter", sizes)
    return [line for line in made if "mosaic_gpu_v2" not in line]


@functools.cache
def setting(case):
    """A plan of groups of 2 over a case's heads, and the step's slots."""
    batch = make_batch(
        [[1] * 100 + [2 + i] * 70 for i in range(5)],
        num_kv_heads=case.num_kv_heads,
        group_size=2,
        head_dim=case.head_dim,
        page_size=case.page_size,
    )
    spec = PlanSpec(num_kv_heads=case.num_kv_heads, group_size=2, page_size=case.page_size)
    plan = build_plan(batch.arrays, spec)
    return batch, plan, slots_of(case, *((0, i) for i in range(batch.q.shape[0])))


def step_text(case, implementation):
    """The lowered text of one decode step's layers, each with its append and its attention."""
    batch, plan, slots = setting(case)
    num_pages = batch.pages[0].shape[0]

    def step(pool, q, k, v, plan, page_list, kv_len):
        prepared = prepare_plan(plan, implementation=implementation)
        resolved = resolve_plan(prepared, page_list, kv_len, page_size=case.page_size)
        attention = layer_attention(resolved, slots, implementation=implementation)

        def layer(pool, i):
            out, pool = attention(i, q, k, v, pool)
            return pool, out

        return lax.scan(layer, pool, jnp.arange(NUM_LAYERS, dtype=jnp.int32))

    rows = batch.q.shape[0]
    values = shape(rows, case.num_kv_heads, case.head_dim, dtype=case.dtype)
    q = shape(rows, 2 * case.num_kv_heads, case.head_dim, dtype=case.dtype)
    arrays = batch.arrays.page_list, batch.arrays.kv_len
    pool = pool_shape(case, NUM_LAYERS * num_pages)
    return lower(step, pool, q, values, values, plan, *arrays), NUM_LAYERS * num_pages


def test_a_layer_of_a_step_is_three_kernels_that_hand_the_pool_on():
    text, num_pages = step_text(CASES[0], "mosaic_gpu")
    assert len(lines_with(text, "mosaic_gpu_v2")) == 3
    assert len(lines_with(text, "mosaic_gpu_v2", "operand_index = 6")) == 1
    assert made_pools(text, CASES[0], num_pages) == []


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_the_others_write_with_two_scatters(implementation):
    text, num_pages = step_text(CASES[0], implementation)
    assert lines_with(text, "mosaic_gpu_v2") == []
    assert len(made_pools(text, CASES[0], num_pages)) >= 2
