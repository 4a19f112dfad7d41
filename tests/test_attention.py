"""XLA, reference, interpreter and oracle agree on random forests: output and log-sum-exp."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import random_token_lists
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import CASES, SMALL, attend_arguments

from codec_jax.attention import (
    attend,
    attend_resolved,
    choose_implementation,
    default_num_workers,
    prepare_plan,
    resolve_plan,
)
from codec_jax.attention_xla import ChunkConfig
from codec_jax.kv_cache import KVPool
from codec_jax.planning.interpreter import interpret

FLOAT32 = 1e-5
LISTS = random_token_lists(np.random.default_rng(1), num_requests=20)


def rounding(dtype):
    """Largest relative error of one rounding; keys, values, queries are the oracle's already."""
    return 0.0 if dtype == "float32" else float(jnp.finfo(dtype).eps) / 2


def assert_close(partial, expected, *, dtype="float32"):
    """Scores, weights and sums are float32 always; only the output is rounded, to q's dtype."""
    out, lse = expected
    assert partial.out.dtype == jnp.dtype(dtype)
    assert partial.lse.dtype == jnp.float32
    np.testing.assert_array_equal(np.isneginf(partial.lse), np.isneginf(lse))
    np.testing.assert_allclose(partial.lse, lse, atol=FLOAT32)
    error = np.abs(np.asarray(partial.out, np.float64) - out)
    assert (error <= FLOAT32 + rounding(dtype) * np.abs(out)).all(), error.max()


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=30)
@given(data=st.data())
def test_all_implementations_agree_with_the_oracle(case, data):
    """Rows of q without a request hold NaN, and so does every slot that is not live."""
    batch = data.draw(case.batches())
    plan = case.plan(batch.arrays)
    out, lse = interpret(plan, batch.q, batch.pages, batch.arrays.page_list, batch.arrays.kv_len)
    expected = batch.expected()
    np.testing.assert_allclose(out, expected[0], atol=1e-11)
    np.testing.assert_allclose(lse, expected[1], atol=1e-11)
    arguments = attend_arguments(batch, plan)
    for implementation in ("xla", "reference"):
        partial = attend(*arguments, implementation=implementation)
        assert_close(partial, expected, dtype=case.q_dtype)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_logits_scale(implementation):
    batch = SMALL.batch(LISTS)
    scaled = dataclasses.replace(batch, q=batch.q * np.float32(4 * 8**0.5))
    q, kv, plan = attend_arguments(batch, SMALL.plan(batch.arrays))
    partial = attend(q, kv, plan, logits_scale=4.0, implementation=implementation)
    assert_close(partial, scaled.expected())
    out, lse = interpret(
        SMALL.plan(batch.arrays), batch.q, batch.pages, batch.arrays.page_list,
        batch.arrays.kv_len, logits_scale=4.0,
    )  # fmt: skip
    assert_close(partial, (out, lse))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_large_scores_neither_overflow_nor_vanish(implementation):
    """Scores of some thousands, where one key takes all the weight: only lse loses digits."""
    batch = SMALL.batch(LISTS)
    batch.q[: len(LISTS)] *= 3000
    q, kv, plan = attend_arguments(batch, SMALL.plan(batch.arrays))
    partial = attend(q, kv, plan, implementation=implementation)
    out, lse = batch.expected()
    np.testing.assert_allclose(partial.lse, lse, rtol=1e-6)
    assert np.quantile(np.abs(partial.out - out), 0.95) < 1e-3
    assert np.isfinite(partial.out).all()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_layer_is_an_offset_on_the_pages(implementation):
    batches = [SMALL.batch(LISTS), SMALL.batch(LISTS)]
    batches[1].pages = tuple(-2 * pages for pages in batches[1].pages)
    q, kv, plan = attend_arguments(batches[0], SMALL.plan(batches[0].arrays))
    k, v = (jnp.concatenate([jnp.asarray(b.pages[i]) for b in batches]) for i in (0, 1))
    kv = dataclasses.replace(kv, pool=KVPool(k, v, num_layers=2))
    first, second = (
        attend(q, kv, plan, layer=layer, implementation=implementation) for layer in (0, 1)
    )
    assert_close(first, batches[0].expected())
    doubled = dataclasses.replace(batches[0], q=-2 * batches[0].q).expected()
    assert_close(second, (-2 * doubled[0], doubled[1]))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_a_pool_may_be_wider_than_the_heads(implementation):
    """Keys and values are padded with zeros where the kernels want multiples of 64.

    A decoder's step knows that its pool is padded; `attend` takes a narrower q for a mistake.
    """
    batch = SMALL.batch(LISTS)
    q, kv, plan = attend_arguments(batch, SMALL.plan(batch.arrays))
    k, v = (
        jnp.pad(pages, ((0, 0), (0, 0), (0, 0), (0, 56)))
        for pages in (kv.pool.k_pages, kv.pool.v_pages)
    )
    wide = dataclasses.replace(kv, pool=KVPool(k, v))
    with pytest.raises(ValueError, match=r"^`q` must have shape \(40, 4, 64\) .* got \(40, 4, 8\)"):
        attend(q, wide, plan, implementation=implementation)
    prepared = prepare_plan(plan, implementation=implementation)
    resolved = resolve_plan(prepared, kv.page_list, kv.kv_len, page_size=16)
    result = attend_resolved(
        q,
        wide.pool,
        resolved,
        jnp.int32(0),
        logits_scale=SMALL.head_dim**-0.5,
        implementation=implementation,
    )
    assert_close(result, batch.expected())


@settings(max_examples=15)
@given(batch=SMALL.batches(), seed=st.integers(0, 99))
def test_the_order_of_requests_does_not_matter(batch, seed):
    order = np.random.default_rng(seed).permutation(len(batch.token_lists))
    permuted = SMALL.batch([batch.token_lists[i] for i in order])
    permuted.q[: order.size] = batch.q[order]
    before, after = (
        attend(*attend_arguments(b, SMALL.plan(b.arrays)), implementation="xla")
        for b in (batch, permuted)
    )
    np.testing.assert_allclose(after.out[: order.size], before.out[order], atol=FLOAT32)
    np.testing.assert_allclose(after.lse[: order.size], before.lse[order], atol=FLOAT32)


@settings(max_examples=15)
@given(data=st.data())
def test_splitting_a_node_does_not_matter(data):
    """One more request that leaves another's path somewhere forces a split there."""
    lists = data.draw(SMALL.token_lists().filter(lambda lists: len(lists) < SMALL.max_requests))
    split = data.draw(st.sampled_from(lists))
    at = data.draw(st.integers(0, len(split)))
    before, after = (
        attend(*attend_arguments(b, SMALL.plan(b.arrays)), implementation="xla")
        for b in (SMALL.batch(lists), SMALL.batch([*lists, [*split[:at], 9]]))
    )
    rows = slice(len(lists))
    np.testing.assert_allclose(after.out[rows], before.out[rows], atol=FLOAT32)
    np.testing.assert_allclose(after.lse[rows], before.lse[rows], atol=FLOAT32)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_no_live_token_gives_empty_partials(implementation):
    batch = SMALL.batch(LISTS)
    q, kv, plan = attend_arguments(batch, SMALL.plan(batch.arrays))
    kv = dataclasses.replace(kv, kv_len=jnp.zeros_like(kv.kv_len))
    partial = attend(q, kv, plan, implementation=implementation)
    assert (np.asarray(partial.out) == 0).all()
    assert np.isneginf(partial.lse).all()
    out, lse = interpret(plan, batch.q, batch.pages, batch.arrays.page_list, np.asarray(kv.kv_len))
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_an_empty_forest_within_a_capacity_gives_empty_partials():
    batch = SMALL.batch([])
    arguments = attend_arguments(batch, SMALL.plan(batch.arrays))
    partial = attend(*arguments, implementation="xla")
    assert (np.asarray(partial.out) == 0).all()
    assert np.isneginf(partial.lse).all()


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_x64_changes_no_answer_and_no_dtype(implementation):
    """Nor does a scale in NumPy's float64."""
    batch = SMALL.batch(LISTS)
    plan = SMALL.plan(batch.arrays)
    with jax.enable_x64(True):
        arguments = attend_arguments(batch, plan)
        assert_close(attend(*arguments, implementation=implementation), batch.expected())
        q, kv, plan = arguments
        prepared = prepare_plan(plan, implementation=implementation)
        resolved = resolve_plan(prepared, kv.page_list, kv.kv_len, page_size=16)
        scale = np.float64(SMALL.head_dim) ** -0.5
        partial = attend_resolved(
            q, kv.pool, resolved, jnp.int32(0), logits_scale=scale, implementation=implementation
        )
        assert_close(partial, batch.expected())


def test_the_same_call_twice_gives_the_same_bits():
    batch = SMALL.batch(LISTS)
    arguments = attend_arguments(batch, SMALL.plan(batch.arrays))
    first, second = (attend(*arguments, implementation="xla") for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


def test_under_jit():
    batch = SMALL.batch(LISTS)
    arguments = attend_arguments(batch, SMALL.plan(batch.arrays))
    partial = jax.jit(lambda q, kv, plan: attend(q, kv, plan))(*arguments)
    assert_close(partial, batch.expected())


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_gradients_are_finite(implementation):
    """The XLA path's scatters and loops of unknown length have no reverse mode."""
    batch = SMALL.batch(LISTS)
    q, kv, plan = attend_arguments(batch, SMALL.plan(batch.arrays))
    q = jnp.where(jnp.isnan(q), 0.0, q)
    grad = jax.grad(lambda q: attend(q, kv, plan, implementation=implementation).out.sum())(q)
    assert np.isfinite(grad).all()


@pytest.fixture(scope="module")
def arguments():
    batch = SMALL.batch(LISTS)
    return attend_arguments(batch, SMALL.plan(batch.arrays))


def test_an_unknown_implementation_is_refused(arguments):
    rule = r"^`implementation` must be one of mosaic_gpu, xla, reference; got 'cuda'\.$"
    with pytest.raises(ValueError, match=rule):
        attend(*arguments, implementation="cuda")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernels may support this case")
def test_the_kernels_refuse_with_their_reason(arguments):
    rule = (
        r"^`implementation` 'mosaic_gpu' cannot do this: the kernels need an NVIDIA .* Use 'xla'\.$"
    )
    with pytest.raises(NotImplementedError, match=rule):
        attend(*arguments, implementation="mosaic_gpu")


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="the kernels may support this case")
def test_the_choice_says_why():
    def choose(name):
        return choose_implementation((2, 16, 8), np.float32, 2, implementation=name)

    assert choose(None)[0] == "xla"
    assert "the device is a cpu" in choose(None)[1]
    assert choose("reference") == ("reference", "asked for")
    assert default_num_workers() == 8


def test_the_kernels_refuse_a_plan_without_their_tables(arguments):
    q, kv, plan = arguments
    resolved = resolve_plan(
        prepare_plan(plan, implementation="xla"), kv.page_list, kv.kv_len, page_size=16
    )
    rule = r"^`resolved` must be prepared for 'mosaic_gpu'; see `prepare_plan`\.$"
    with pytest.raises(ValueError, match=rule):
        attend_resolved(
            q, kv.pool, resolved, jnp.int32(0), logits_scale=1.0, implementation="mosaic_gpu"
        )


def test_queries_of_another_rank_are_refused(arguments):
    q, kv, plan = arguments
    rule = r"^`q` must be \[batch, num_q_heads, head_dim\]; got shape \(40, 32\)\.$"
    with pytest.raises(ValueError, match=rule):
        attend(q.reshape(40, 32), kv, plan)


@pytest.mark.parametrize("shape", [(39, 4, 8), (40, 2, 8), (40, 4, 16), (40, 6, 8)])
def test_queries_that_do_not_fit_are_refused(arguments, shape):
    _, kv, plan = arguments
    rule = (
        r"^`q` must have shape \(40, 4, 8\) for a plan of 40 requests and groups of 2"
        rf" over this pool; got \({', '.join(map(str, shape))}\)\.$"
    )
    with pytest.raises(ValueError, match=rule):
        attend(jnp.zeros(shape), kv, plan)


def test_a_plan_for_other_kv_heads_is_refused(arguments):
    q, kv, plan = arguments
    pool = KVPool.zeros(4, (4, 16, 8))
    with pytest.raises(
        ValueError, match=r"^`plan` must be made for the pool's 4 KV heads .* it is for 2"
    ):
        attend(jnp.tile(q, (1, 2, 1)), dataclasses.replace(kv, pool=pool), plan)


def test_integers_are_refused_where_floats_are_meant(arguments):
    q, kv, plan = arguments
    with pytest.raises(ValueError, match=r"^`q` must hold floating-point numbers; got int32\.$"):
        attend(jnp.zeros(q.shape, jnp.int32), kv, plan)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_nan_comes_out_as_nan_and_not_as_an_empty_row(arguments, implementation):
    q, kv, plan = arguments
    q = jnp.where(jnp.isnan(q), 0.0, q).at[0, 1].set(jnp.nan)
    result = attend(q, kv, plan, implementation=implementation)
    assert jnp.isnan(result.lse[0, 1]) and jnp.isnan(result.out[0, 1]).all()
    assert jnp.isfinite(result.lse[0, 0])


@pytest.mark.parametrize("layer", [-1, 1, 0.5])
def test_a_layer_outside_the_pool_is_refused(arguments, layer):
    with pytest.raises(
        ValueError, match=rf"^`layer` must be an integer in \[0, 1\); got {layer}\.$"
    ):
        attend(*arguments, layer=layer)


def test_a_pool_whose_keys_and_values_differ_is_refused(arguments):
    q, kv, plan = arguments
    pool = dataclasses.replace(kv.pool, v_pages=kv.pool.v_pages[:, :1])
    with pytest.raises(ValueError, match=r"^`kv\.pool` must have K and V of one shape"):
        attend(q, dataclasses.replace(kv, pool=pool), plan)


def test_a_page_list_of_another_forest_is_refused(arguments):
    """Gathers clamp, so a page list or lengths of another size give answers, but wrong ones."""
    q, kv, plan = arguments
    with pytest.raises(ValueError, match=r"^`kv` must hold the 120 page entries"):
        attend(q, dataclasses.replace(kv, page_list=kv.page_list[:1]), plan)


def test_chunks_are_checked():
    with pytest.raises(ValueError, match=r"^`row_block` must divide 64; got 24\.$"):
        ChunkConfig(row_block=24)
    with pytest.raises(ValueError, match=r"^`row_block` must divide 64; got 0\.$"):
        ChunkConfig(row_block=0)
    with pytest.raises(ValueError, match=r"^`chunk_units` must be positive; got 0\.$"):
        ChunkConfig(chunk_units=0)
    assert ChunkConfig.for_pages(64, 128).chunk_units == 32
    assert ChunkConfig.for_pages(1, 8).chunk_units == 256
