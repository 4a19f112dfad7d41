"""Hydragen's two levels on plain tensors, against the oracle on whole sequences."""

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.attention_hydragen import hydragen_attention

BATCH, NUM_KV_HEADS, GROUP, HEAD_DIM, MAX_SUFFIX = 4, 2, 3, 8, 6


def arguments(prefix_len, suffix_len, *, seed=0, dead_value=np.nan):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((BATCH, NUM_KV_HEADS * GROUP, HEAD_DIM))
    shared = rng.standard_normal((2, prefix_len, NUM_KV_HEADS, HEAD_DIM))
    suffix = rng.standard_normal((2, BATCH, MAX_SUFFIX, NUM_KV_HEADS, HEAD_DIM))
    dead = np.arange(MAX_SUFFIX)[None, :] >= np.array(suffix_len)[:, None]
    suffix[:, dead] = dead_value
    arrays = (q, *shared, *suffix)
    return *(jnp.asarray(x, jnp.float32) for x in arrays), jnp.asarray(suffix_len, jnp.int32)


def expected(q, shared_k, shared_v, suffix_k, suffix_v, suffix_len):
    answers = []
    for row, length in enumerate(np.asarray(suffix_len)):
        k = np.concatenate([shared_k, suffix_k[row, :length]])
        v = np.concatenate([shared_v, suffix_v[row, :length]])
        answers.append(oracle.attention(q[row], k, v))
    return [np.stack(parts) for parts in zip(*answers, strict=True)]


@pytest.mark.parametrize("prefix_len", [0, 1, 50])
@settings(max_examples=20)
@given(
    suffix_len=st.lists(st.integers(0, MAX_SUFFIX), min_size=BATCH, max_size=BATCH),
    seed=st.integers(0, 99),
)
def test_equals_the_oracle_with_ragged_and_empty_suffixes(prefix_len, suffix_len, seed):
    args = arguments(prefix_len, suffix_len, seed=seed)
    partial = hydragen_attention(*args)
    out, lse = expected(*args)
    np.testing.assert_allclose(partial.out, out, atol=1e-5)
    np.testing.assert_allclose(partial.lse, lse, atol=1e-5)


@pytest.mark.parametrize("dead_value", [np.nan, np.inf, -np.inf, 1e30])
def test_padding_changes_no_bit(dead_value):
    lengths = [0, 3, 6, 1]
    filled = hydragen_attention(*arguments(9, lengths, dead_value=dead_value))
    zeroed = hydragen_attention(*arguments(9, lengths, dead_value=0.0))
    np.testing.assert_array_equal(filled.out, zeroed.out)
    np.testing.assert_array_equal(filled.lse, zeroed.lse)


def test_bfloat16_is_rounded_once():
    args = [
        x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in arguments(9, [0, 3, 6, 1])
    ]
    partial = hydragen_attention(*args)
    out, lse = expected(*(np.asarray(x, np.float64) for x in args[:-1]), args[-1])
    assert partial.out.dtype == jnp.bfloat16
    np.testing.assert_allclose(partial.lse, lse, atol=1e-5)
    error = np.abs(np.asarray(partial.out, np.float64) - out)
    assert (error <= 1e-5 + 2.0**-8 * np.abs(out)).all()


def zeros(*shape):
    return jnp.zeros(shape)


GOOD = (zeros(4, 6, 8), zeros(9, 2, 8), zeros(9, 2, 8), zeros(4, 5, 2, 8), zeros(4, 5, 2, 8),
        jnp.zeros(4, jnp.int32))  # fmt: skip


@pytest.mark.parametrize(
    ("place", "array", "message"),
    [
        (0, zeros(4, 48), "`q` must be [batch, num_q_heads, head_dim]; got shape (4, 48)."),
        (
            2,
            zeros(8, 2, 8),
            "`shared_k` and `shared_v` must both be [prefix_len, num_kv_heads, head_dim]; got"
            " (9, 2, 8) and (8, 2, 8).",
        ),
        (
            3,
            zeros(4, 5, 16),
            "`suffix_k` and `suffix_v` must both be"
            " [batch, max_suffix_len, num_kv_heads, head_dim]; got (4, 5, 16) and (4, 5, 2, 8).",
        ),
        (
            0,
            zeros(4, 5, 8),
            "`shared_k` must have head_dim 8 and a number of KV heads that divides the 5 query"
            " heads; got shape (9, 2, 8).",
        ),
        (
            0,
            zeros(3, 6, 8),
            "`suffix_k` must be [3, max_suffix_len, 2, 8]; got shape (4, 5, 2, 8).",
        ),
        (
            5,
            jnp.zeros(3, jnp.int32),
            "`suffix_len` must hold one length for each of the 4 requests; got shape (3,).",
        ),
    ],
)
def test_shapes_that_do_not_fit_are_refused(place, array, message):
    with pytest.raises(ValueError) as error:
        hydragen_attention(*GOOD[:place], array, *GOOD[place + 1 :])
    assert str(error.value) == message
