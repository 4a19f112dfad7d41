"""Merging partial results: neutral, associative, in natural logarithms (bug reports O01, O02)."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.partial import Partial, merge, merge_stacked, softmax_with_lse

DTYPES = ("float32", "bfloat16")
HEAD_DIM = 4
MERGES = {
    "plain": merge,
    "jit": jax.jit(merge),
    "vmap": jax.vmap(merge),
    "jit vmap": jax.jit(jax.vmap(merge)),
}
merge_jitted = jax.jit(merge)
merge_stacked_jitted = jax.jit(merge_stacked)


def bits(array):
    """The array's bits: tells -0.0 from 0.0, and one NaN from another."""
    return np.asarray(array).view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def assert_same_bits(first, second):
    assert first.out.dtype == second.out.dtype
    np.testing.assert_array_equal(bits(first.out), bits(second.out))
    np.testing.assert_array_equal(bits(first.lse), bits(second.lse))


def partial_of(out, lse, dtype="float32"):
    return Partial(jnp.asarray(out, dtype), jnp.asarray(lse, jnp.float32))


def some_partial(dtype):
    out = [[0.0, -0.5, 1.5, -3e30], [0.0, 0.0, 0.0, 0.0], [1e-30, 7.0, -1.0, 0.25]]
    return partial_of(out, [3.5, -1e4, 50.0], dtype)


def empty(dtype, *, garbage=0.0):
    return partial_of(np.full((3, HEAD_DIM), garbage), np.full(3, -np.inf), dtype)


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("garbage", [0.0, -0.0, np.nan, np.inf, 7.0])
def test_o01_the_empty_partial_is_neutral_bit_for_bit(garbage, dtype, name):
    """Whatever `out` holds beside a log-sum-exp of -inf, on either side."""
    whole, nothing = some_partial(dtype), empty(dtype, garbage=garbage)
    assert_same_bits(MERGES[name](whole, nothing), whole)
    assert_same_bits(MERGES[name](nothing, whole), whole)


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("garbage", [0.0, np.nan, -np.inf])
def test_o01_two_empty_partials_make_an_empty_one(garbage, dtype, name):
    nothing = empty(dtype, garbage=garbage)
    assert_same_bits(MERGES[name](nothing, nothing), empty(dtype))


@pytest.mark.parametrize("name", MERGES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_minus_zero_beside_an_empty_partial_keeps_its_sign(dtype, name):
    """`merge`: "changes no bit"; but un-jitted, XLA's sum on a CPU starts at +0.0."""
    whole = partial_of(np.full((3, HEAD_DIM), -0.0), [0.5, 1.0, 2.0], dtype)
    assert_same_bits(MERGES[name](whole, empty(dtype)), whole)
    assert_same_bits(MERGES[name](empty(dtype), whole), whole)


@pytest.mark.parametrize("name", MERGES)
def test_a_log_sum_exp_of_minus_zero_keeps_its_sign(name):
    """`merge`: "merging with an empty partial changes no bit"; -0.0 + log(1) is +0.0."""
    whole = partial_of(np.ones((3, HEAD_DIM)), np.full(3, -0.0))
    assert_same_bits(MERGES[name](whole, empty("float32")), whole)


@pytest.mark.parametrize("lse", [np.nan, np.inf])
def test_what_is_not_finite_is_no_empty_side(lse):
    bad, good = partial_of(np.ones((3, HEAD_DIM)), np.full(3, lse)), some_partial("float32")
    for merged in (merge(bad, good), merge(good, bad)):
        assert np.isnan(merged.lse).all()


def test_empty_is_zero_and_minus_infinity():
    assert_same_bits(Partial.empty((3,), HEAD_DIM), empty("float32"))
    assert Partial.empty((2, 5), 7).out.shape == (2, 5, 7)
    assert Partial.empty((2, 5), 7).lse.shape == (2, 5)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
@pytest.mark.parametrize("dtype", DTYPES)
def test_o01_stacks_of_none_of_one_and_of_empties(dtype, transform):
    run = transform(merge_stacked)
    none = Partial(jnp.zeros((0, 3, HEAD_DIM), dtype), jnp.zeros((0, 3), jnp.float32))
    whole, nothing = some_partial(dtype), empty(dtype, garbage=np.nan)
    assert_same_bits(run(none), empty(dtype))
    assert_same_bits(run(stacked([whole])), whole)
    assert_same_bits(run(stacked([nothing])), empty(dtype))
    assert_same_bits(run(stacked([nothing] * 5)), empty(dtype))
    assert_same_bits(run(stacked([nothing, nothing, whole, nothing])), whole)


def parts_of(num_keys, splits, *, head_dim=64, seed=0):
    """Partials of the runs of one request's keys, by the oracle, and of all keys together."""
    rng = np.random.default_rng(seed)
    q = 2 * rng.standard_normal((3, head_dim))
    k, v = rng.standard_normal((2, num_keys, 1, head_dim))
    borders = [0, *np.cumsum(splits)]
    assert borders[-1] == num_keys
    parts = [
        partial_of(*oracle.attention(q, k[lo:hi], v[lo:hi]))
        for lo, hi in itertools.pairwise(borders)
    ]
    return parts, oracle.attention(q, k, v)


def stacked(parts):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


@pytest.mark.parametrize(
    "splits", [(4096, 1), (1, 4096), (3072, 64), (1, 1, 4095), (0, 7), (5, 0, 0, 3), (1,) * 9]
)
def test_o02_lopsided_splits_equal_one_pass_in_natural_logarithms(splits):
    """A log-sum-exp in base 2 on either side would be off by some hundredths here."""
    parts, (out, lse) = parts_of(sum(splits), splits)
    for merged in (functools.reduce(merge_jitted, parts), merge_stacked_jitted(stacked(parts))):
        np.testing.assert_allclose(merged.lse, lse, rtol=1e-6)
        np.testing.assert_allclose(merged.out, out, atol=1e-6)


@pytest.mark.parametrize("gap", [50.0, -50.0, 1e4, -1e4])
@pytest.mark.parametrize("base", [0.0, 1e4, -1e4])
def test_lopsided_log_sum_exps_neither_overflow_nor_lose_the_large_side(base, gap):
    first = partial_of(np.full((1, HEAD_DIM), 2.0), [base])
    second = partial_of(np.full((1, HEAD_DIM), -5.0), [base + gap])
    merged = merge_jitted(first, second)
    weights = np.exp(np.array([base, base + gap]) - max(base, base + gap))
    expected = (2.0 * weights[0] - 5.0 * weights[1]) / weights.sum()
    np.testing.assert_allclose(merged.out, np.full((1, HEAD_DIM), expected), rtol=1e-6)
    np.testing.assert_allclose(merged.lse, [np.logaddexp(base, base + gap)], rtol=1e-6, atol=1e-6)


LSE = st.one_of(
    st.just(-np.inf),
    st.floats(-60, 60, width=32, allow_subnormal=False),
    st.sampled_from([-1e4, 1e4, 0.0, -50.0, 50.0]),
)
OUT = st.lists(st.floats(-100, 100, width=32), min_size=HEAD_DIM, max_size=HEAD_DIM)


@st.composite
def partials(draw):
    lse = np.float32(draw(LSE))
    return partial_of([draw(OUT)], [lse])


def assert_close(first, second):
    """Weights are as exact as float32 holds the log-sum-exp; outputs reach 100."""
    size = np.abs(np.where(np.isneginf(first.lse), 0.0, first.lse)).max()
    tolerance = 1e-6 + 8 * np.finfo(np.float32).eps * size
    np.testing.assert_allclose(first.out, second.out, rtol=0, atol=100 * tolerance)
    np.testing.assert_allclose(first.lse, second.lse, rtol=0, atol=tolerance)


@settings(max_examples=200)
@given(a=partials(), b=partials(), c=partials())
def test_merging_is_associative_and_commutative(a, b, c):
    assert_close(merge_jitted(a, b), merge_jitted(b, a))
    left = merge_jitted(merge_jitted(a, b), c)
    assert_close(left, merge_jitted(a, merge_jitted(b, c)))
    assert_close(left, merge_stacked_jitted(stacked([c, a, b])))


@settings(max_examples=200)
@given(a=partials())
def test_o01_every_partial_is_its_own_merge_with_the_empty_one(a):
    """Subnormal numbers aside, which XLA may flush to zero."""
    normal = np.abs(np.asarray(a.out)) >= np.finfo(np.float32).tiny
    nothing = Partial.empty((1,), HEAD_DIM)
    for merged in (merge_jitted(a, nothing), merge_jitted(nothing, a)):
        if np.isneginf(a.lse[0]):
            assert_same_bits(merged, nothing)
        else:
            np.testing.assert_array_equal(merged.out[normal], a.out[normal])
            np.testing.assert_array_equal(merged.lse, a.lse)


@settings(max_examples=30)
@given(data=st.data())
def test_regrouping_the_parts_of_one_pass(data):
    """Any binary tree over any order of 6 parts, some of them empty, gives the one-pass answer."""
    splits = data.draw(st.lists(st.integers(0, 40), min_size=6, max_size=6).filter(any))
    parts, (out, lse) = parts_of(sum(splits), splits, head_dim=HEAD_DIM)
    parts = [parts[i] for i in data.draw(st.permutations(range(6)))]
    while len(parts) > 1:
        i = data.draw(st.integers(0, len(parts) - 2))
        parts[i : i + 2] = [merge_jitted(parts[i], parts[i + 1])]
    np.testing.assert_allclose(parts[0].out, out, atol=1e-5)
    np.testing.assert_allclose(parts[0].lse, lse, atol=1e-5)


def test_bfloat16_outputs_are_merged_in_float32():
    """Rounded once, at the end: 1 + 2^-8 and 1 average to 1 + 2^-9, which rounds to 1."""
    first = partial_of([[1.0, 1.0078125]], [0.0], "bfloat16")
    second = partial_of([[1.0, 1.0]], [0.0], "bfloat16")
    merged = merge(first, second)
    assert merged.out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        np.asarray(merged.out, np.float32), [[1.0, jnp.asarray(1.00390625, jnp.bfloat16)]]
    )


@pytest.mark.parametrize("under_x64", [False, True])
def test_merge_dtypes_under_x64(under_x64):
    with jax.enable_x64(under_x64):
        merged = merge(some_partial("bfloat16"), empty("bfloat16"))
        assert (merged.out.dtype, merged.lse.dtype) == (jnp.bfloat16, jnp.float32)


def test_gradients_through_empty_sides_are_finite():
    def loss(out, lse):
        merged = merge(Partial(out, lse), Partial.empty((3,), HEAD_DIM))
        return merged.out.sum() + jnp.where(merged.lse > -jnp.inf, merged.lse, 0.0).sum()

    lse = jnp.array([1.0, -jnp.inf, 2.0])
    for gradient in jax.grad(loss, argnums=(0, 1))(jnp.ones((3, HEAD_DIM)), lse):
        assert np.isfinite(gradient).all()


def test_softmax_with_lse():
    score = jnp.array([[0.0, 1.0, -jnp.inf], [-jnp.inf] * 3, [1e4, -1e4, 1e4]])
    weight, lse = softmax_with_lse(score)
    e = np.e
    expected = [[1 / (1 + e), e / (1 + e), 0.0], [0.0] * 3, [0.5, 0.0, 0.5]]
    np.testing.assert_allclose(weight, expected, rtol=1e-6)
    np.testing.assert_allclose(lse, [np.log(1 + e), -np.inf, 1e4 + np.log(2)], rtol=1e-6)
    weight, lse = softmax_with_lse(jnp.zeros((2, 0)))
    assert weight.shape == (2, 0)
    assert np.isneginf(lse).all()
