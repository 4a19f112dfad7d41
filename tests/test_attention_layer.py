"""One step's attention for loops that others wrote: right, resolved outside layers, refused."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_cases import SMALL

from codec_jax import KVPool, build_plan
from codec_jax.attention_layer import StepView, step_attention
from codec_jax.kv_cache import TokenSlots

LISTS = [[1] * 20, [1] * 20 + [2], [3]]


def make_step(**changes):
    """A batch whose slots drop every key, so that attention sees what the pool holds."""
    batch = SMALL.batch(LISTS)
    plan = build_plan(batch.arrays, dataclasses.replace(SMALL.spec, **changes))
    cache, rows = batch.cache(), batch.q.shape[0]
    slots = TokenSlots(jnp.full(rows, -1, jnp.int32), jnp.zeros(rows, jnp.int32))
    return batch, plan, cache.pool, StepView(cache.page_list, cache.kv_len, slots)


def new_keys(batch):
    shape = (batch.q.shape[0], SMALL.num_kv_heads, SMALL.head_dim)
    return jnp.zeros(shape), jnp.zeros(shape)


def test_it_is_the_attention_of_the_plan():
    batch, plan, pool, view = make_step()
    attention = step_attention(plan, view)
    out, after = jax.jit(attention)(jnp.int32(0), jnp.asarray(batch.q), *new_keys(batch), pool)
    np.testing.assert_allclose(
        out[: len(LISTS)], batch.expected()[0][: len(LISTS)], rtol=0, atol=1e-5
    )
    np.testing.assert_array_equal(after.k_pages, pool.k_pages)


def test_layers_that_are_traced_by_themselves_share_one_plan():
    """What a layer's own trace makes must not be used in another."""
    batch, plan, pool, view = make_step()

    @jax.jit
    def step(q, plan, view, pool):
        attention = step_attention(plan, view)
        outs = []
        for _ in range(2):
            layer = jax.checkpoint(
                lambda q, pool: attention(jnp.int32(0), q, *new_keys(batch), pool)
            )
            out, pool = layer(q, pool)
            outs.append(out)
        return outs

    first, second = step(jnp.asarray(batch.q), plan, view, pool)
    np.testing.assert_array_equal(first, second)


WRONG = {
    "no view": (lambda view: tuple(view), "`view` must be a StepView; got tuple"),
    "lengths": (
        lambda view: view._replace(kv_len=view.kv_len[:2]),
        "`view` must hold the .* page entries",
    ),
    "pages": (
        lambda view: view._replace(page_list=view.page_list[:3]),
        "`view` must hold the .* page entries",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_view_that_is_not_of_the_plan_is_refused_at_once(case):
    change, reason = WRONG[case]
    _, plan, _, view = make_step()
    with pytest.raises(ValueError, match=reason):
        step_attention(plan, change(view))


def test_slots_for_other_tokens_are_refused():
    batch, plan, pool, view = make_step()
    slots = TokenSlots(view.slots.page[:2], view.slots.row[:2])
    attention = step_attention(plan, view._replace(slots=slots))
    with pytest.raises(ValueError, match=r"`view.slots` must hold a slot for each of"):
        attention(jnp.int32(0), jnp.asarray(batch.q), *new_keys(batch), pool)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((2, 8, 8), "float32", "KV heads and page_size 8; it is for 2 and 16"),
        ((4, 16, 8), "float32", "for the pool's 4 KV heads"),
        ((2, 16, 8), "int8", "must hold floating-point numbers; got int8"),
    ],
)
def test_a_pool_that_the_plan_is_not_for_is_refused(shape, dtype, reason):
    batch, plan, _, view = make_step()
    pool = KVPool.zeros(50, shape, dtype=dtype)
    with pytest.raises(ValueError, match=reason):
        step_attention(plan, view)(jnp.int32(0), jnp.asarray(batch.q), *new_keys(batch), pool)


def test_a_plan_of_other_heads_is_refused():
    """2 KV heads of 2 query heads, and 4 of 1: as many query heads, other ones."""
    batch, plan, pool, view = make_step(num_kv_heads=4, group_size=1)
    with pytest.raises(ValueError, match="2 KV heads and page_size 16; it is for 4 and 16"):
        step_attention(plan, view)(jnp.int32(0), jnp.asarray(batch.q), *new_keys(batch), pool)
