"""Hydragen's door on dense tensors, on a real GPU: against float64, in a loop, without a copy."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax import lax

from codec_jax import hydragen_attention

pytestmark = pytest.mark.gpu

TOLERANCE = {"bfloat16": 1e-2, "float16": 1.5e-3}


def make_case(batch, prefix_len, max_suffix_len, heads, head_dim, dtype):
    """Random tensors and suffix lengths, NaN in every dead row."""
    num_q_heads, num_kv_heads = heads
    rng = np.random.default_rng(0)

    def draw(*sizes):
        return rng.standard_normal((*sizes, head_dim), np.float32).astype(dtype)

    q = draw(batch, num_q_heads)
    shared = [draw(prefix_len, num_kv_heads) for _ in range(2)]
    suffix = [draw(batch, max_suffix_len, num_kv_heads) for _ in range(2)]
    suffix_len = rng.integers(0, max_suffix_len + 1, batch).astype(np.int32)
    for values in suffix:
        values[np.arange(max_suffix_len)[None] >= suffix_len[:, None]] = np.nan
    return q, shared, suffix, suffix_len


def expected(q, shared, suffix, suffix_len):
    rows = []
    for request, length in enumerate(suffix_len):
        k, v = (
            np.concatenate([whole, own[request, :length]]).astype(np.float64)
            for whole, own in zip(shared, suffix, strict=True)
        )
        rows.append(oracle.attention(q[request].astype(np.float64), k, v))
    outs, lses = zip(*rows, strict=True)
    return np.stack(outs), np.stack(lses)


@pytest.mark.parametrize(
    ("batch", "prefix_len", "max_suffix_len", "heads", "head_dim", "dtype"),
    [
        (40, 1000, 72, (8, 1), 128, "bfloat16"),
        (9, 200, 136, (32, 8), 64, "float16"),
        (3, 0, 520, (9, 3), 256, "bfloat16"),
        (70, 1096, 0, (4, 4), 128, "float16"),
    ],
)
def test_right(batch, prefix_len, max_suffix_len, heads, head_dim, dtype):
    q, shared, suffix, suffix_len = make_case(
        batch, prefix_len, max_suffix_len, heads, head_dim, jnp.dtype(dtype)
    )
    arrays = [jnp.asarray(x) for x in (q, *shared, *suffix, suffix_len)]
    result = hydragen_attention(*arrays, implementation="mosaic_gpu")
    out, lse = expected(q, shared, suffix, suffix_len)
    live = np.isfinite(lse)
    gap = np.abs(np.asarray(result.out, np.float64) - out)
    assert gap.max() < TOLERANCE[dtype]
    np.testing.assert_allclose(np.asarray(result.lse)[live], lse[live], rtol=0, atol=1e-4)
    assert (np.asarray(result.lse)[~live] == -np.inf).all()


def test_suffixes_that_grow_in_a_loop():
    q, shared, suffix, _ = make_case(16, 256, 64, (8, 2), 128, jnp.dtype("bfloat16"))
    suffix = [np.nan_to_num(x.astype(np.float32)).astype(jnp.bfloat16) for x in suffix]
    arrays = [jnp.asarray(x) for x in (q, *shared, *suffix)]

    def run(implementation):
        def step(_, length):
            lens = jnp.full(16, length, jnp.int32)
            return length + 7, hydragen_attention(*arrays, lens, implementation=implementation).out

        return jax.jit(lambda: lax.scan(lambda c, _: step(None, c), jnp.int32(0), length=9)[1])()

    np.testing.assert_allclose(
        np.asarray(run("mosaic_gpu"), np.float32),
        np.asarray(run("xla"), np.float32),
        rtol=0,
        atol=2e-2,
    )
