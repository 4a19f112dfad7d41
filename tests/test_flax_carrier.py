"""The carrier: what a layer's hook may ask, and what it hears when a layer did not run."""

import numpy as np
import pytest

from codec_jax.flax import Carrier

Q = np.random.default_rng(0).standard_normal((3, 2, 4, 16)).astype(np.float32)
KV = np.random.default_rng(1).standard_normal((3, 2, 2, 16)).astype(np.float32)


def recording(calls):
    """An attention that adds one to the pool and returns its queries, twice as large."""

    def attention(layer, q, k, v, pool):
        calls.append((int(layer), q, k, v))
        return 2 * q, pool + 1

    return attention


def test_rows_are_flat_inside_and_as_given_outside():
    calls = []
    carrier = Carrier(recording(calls), 5, num_layers=1)
    out = carrier.attend(0, Q, KV, 3 * KV)
    ((layer, q, k, v),) = calls
    assert layer == 0 and q.shape == (6, 4, 16) and k.shape == v.shape == (6, 2, 16)
    np.testing.assert_array_equal(q, Q.reshape(6, 4, 16))
    np.testing.assert_array_equal(v, 3 * KV.reshape(6, 2, 16))
    np.testing.assert_array_equal(out, 2 * Q)
    assert carrier.finish() == 6


@pytest.mark.parametrize("scale", [1.0, 0.3, 16**-0.5])
def test_another_scale_goes_into_the_queries(scale):
    calls = []
    Carrier(recording(calls), 0, num_layers=1).attend(0, Q, KV, KV, logits_scale=scale)
    np.testing.assert_allclose(calls[0][1] * 16**-0.5, scale * Q.reshape(6, 4, 16), rtol=1e-6)


def test_the_output_has_the_dtype_of_the_queries():
    def attention(layer, q, k, v, pool):
        return q.astype(np.float32), pool

    out = Carrier(attention, num_layers=1).attend(0, Q.astype("bfloat16"), KV, KV)
    assert out.dtype == "bfloat16"


@pytest.mark.parametrize("ran", [[], [0], [0, 0], [1, 0], [0, 1, 1], [0, 2]])
def test_layers_that_did_not_run_once_each_in_order_are_an_error(ran):
    carrier = Carrier(recording([]), 0, num_layers=2)
    for layer in ran:
        carrier.attend(layer, Q, KV, KV)
    assert carrier.next_layer == len(ran)
    with pytest.raises(RuntimeError, match=rf"each of 2 layers.*it ran for \[{str(ran)[1:-1]}\]"):
        carrier.finish()


REFUSED = {
    "k and v differ": ((KV, KV[:1]), "`k` and `v` must have one shape"),
    "other tokens": ((KV[:1], KV[:1]), r"`q` and `k` must be .* of the call's own tokens"),
    "another width": ((KV[..., :8], KV[..., :8]), "`q` and `k` must be"),
    "no group": ((np.zeros((3, 2, 3, 16)),) * 2, "num_q_heads a multiple of num_kv_heads"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_shapes_that_do_not_fit_are_refused(case):
    (k, v), message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        Carrier(recording([]), 0, num_layers=1).attend(0, Q, k, v)
