"""The dense check on the device: its distance is the oracle's, and it sees what is not a number."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from forests import make_batch

from codec_jax import Partial
from experiments.dense_check import max_relative_error

LISTS = [[1] * 40 + [2 + i] * (5 + 9 * i) for i in range(4)]


@pytest.fixture(scope="module")
def batch():
    return make_batch(LISTS, num_kv_heads=2, group_size=2, head_dim=8)


def errors_of(batch, out, lse, **options):
    result = Partial(jnp.asarray(out, jnp.float32), jnp.asarray(lse, jnp.float32))
    q, cache = jnp.asarray(batch.q), batch.cache()
    return max_relative_error(result, q, cache, batch.arrays, logits_scale=8**-0.5, **options)


def test_the_oracle_is_no_distance_away(batch):
    error, lse_error = errors_of(batch, *batch.expected())
    assert error < 1e-5
    assert lse_error < 1e-5


def test_errors_are_the_largest_of_any_row(batch):
    out, lse = batch.expected()
    out[2, 3] *= 1.25
    lse[1, 0] += 0.5
    np.testing.assert_allclose(errors_of(batch, out, lse), (0.25, 0.5), rtol=1e-4)


def test_nan_in_any_row_is_no_small_error(batch):
    out, lse = batch.expected()
    out[1, 2, 3] = np.nan
    lse[0, 1] = np.nan
    assert np.isnan(errors_of(batch, out, lse)).all()


def test_requests_are_spread_over_the_batch(batch):
    out, lse = batch.expected()
    out[1:3] = 7.0
    assert errors_of(batch, out, lse, max_requests=2)[0] < 1e-5
    assert errors_of(batch, out, lse, max_requests=4)[0] > 1


def test_dead_slots_of_the_pool_are_not_read(batch):
    cleaned = dataclasses.replace(batch, pages=tuple(map(np.nan_to_num, batch.pages)))
    arguments = batch.expected()
    assert errors_of(batch, *arguments) == errors_of(cleaned, *arguments)
