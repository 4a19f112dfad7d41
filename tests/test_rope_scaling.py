"""RoPE scalings against formulas written another way, and what they refuse."""

import math

import numpy as np
import pytest

from codec_jax.models.rope import rope_angles
from codec_jax.models.rope_scaling import (
    LinearRope,
    Llama3Rope,
    YarnRope,
    rope_frequencies,
    yarn_attention_factor,
)

HEAD_DIM, THETA = 64, 5000.0
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_context": 8192,
}


def test_frequencies_are_powers():
    expected = [THETA ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]
    np.testing.assert_allclose(rope_frequencies(HEAD_DIM, THETA), expected, rtol=1e-14)


def test_linear_divides_all():
    np.testing.assert_allclose(
        LinearRope(factor=2.5).frequencies(HEAD_DIM, THETA) * 2.5, rope_frequencies(HEAD_DIM, THETA)
    )


def test_llama3_by_wavelength():
    for plain, got in zip(
        rope_frequencies(HEAD_DIM, 5e5),
        Llama3Rope(**LLAMA3).frequencies(HEAD_DIM, 5e5),
        strict=True,
    ):
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            expected = plain
        elif wavelength > 8192:
            expected = plain / 8
        else:
            smooth = (8192 / wavelength - 1) / 3
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_by_pairs(truncate):
    yarn = YarnRope(factor=4.0, original_max_context=2048, beta_fast=8, truncate=truncate)
    ends = [
        HEAD_DIM / 2 * math.log(2048 / (2 * math.pi * turns)) / math.log(THETA) for turns in (8, 1)
    ]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
    assert 0 < low < high < HEAD_DIM // 2
    for pair, got in enumerate(yarn.frequencies(HEAD_DIM, THETA)):
        plain = THETA ** (-2 * pair / HEAD_DIM)
        share = min(max((pair - low) / (high - low), 0), 1)
        assert got == pytest.approx(plain * (1 - share) + plain / 4 * share, rel=1e-12)


def test_yarn_with_both_ends_in_one_place_is_finite():
    yarn = YarnRope(factor=4.0, original_max_context=4, beta_fast=1e9, beta_slow=1e9)
    assert np.isfinite(yarn.frequencies(HEAD_DIM, THETA)).all()


def test_yarn_multiplies_cosines_and_sines():
    factor = yarn_attention_factor(4.0)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    assert yarn_attention_factor(0.5) == 1
    assert yarn_attention_factor(4.0, mscale=0.7, mscale_all_dim=0.7) == 1
    yarn = YarnRope(factor=4.0, original_max_context=2048)
    assert yarn.attention_factor == factor
    positions = np.arange(3, dtype=np.int32)
    cos, sin = rope_angles(positions, head_dim=HEAD_DIM, theta=THETA, scaling=yarn)
    np.testing.assert_allclose(np.hypot(cos, sin), factor, rtol=1e-6)
    given = YarnRope(factor=4.0, original_max_context=2048, attention_factor=1.5)
    assert given.attention_factor == 1.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearRope(factor=0), "`factor` must be a positive number up to 3.4e38; got 0."),
        (
            lambda: LinearRope(factor=math.inf),
            "`factor` must be a positive number up to 3.4e38; got inf.",
        ),
        (
            lambda: LinearRope(factor=True),
            "`factor` must be a positive number up to 3.4e38; got True.",
        ),
        (
            lambda: Llama3Rope(**LLAMA3 | {"original_max_context": -1}),
            "`original_max_context` must be an integer from 1 to 2147483647; got -1.",
        ),
        (
            lambda: Llama3Rope(**LLAMA3 | {"high_freq_factor": 1.0}),
            "`high_freq_factor` must be above `low_freq_factor`; got 1.0 and 1.0.",
        ),
        (
            lambda: YarnRope(factor=2, original_max_context=8, beta_slow=64),
            "`beta_fast` must be at least `beta_slow`; got 32.0 and 64.",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match="`") as error:
        make()
    assert str(error.value) == message
