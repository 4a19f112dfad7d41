"""Sampling: each row by its own settings, frequencies, edge values, and what a draw depends on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from codec_jax.sampling import RowSampling, Sampling, draw_keys, sample

NUM_DRAWS = 10_000
INF = float("inf")
LOGITS = {
    "spread": [0.1, 2.0, -1.0, 1.0, 0.0, 0.5],
    "equal": [3.0] * 6,
    "ties": [1.0, 2.0, 2.0, 0.0, 2.0, -1.0],
    "minus infinity": [-INF, 1.0, -INF, 0.0, 2.0, -INF],
    "one token left": [-INF, -INF, -INF, 0.0, -INF, -INF],
    "large": [3e4, 3e4 + 1, -3e4, 0.0, 3e4, -INF],
}
jitted_sample = jax.jit(sample)


def row_sampling(batch, **fields):
    """Settings of `batch` rows: greedy, seed 0, each a sample of its own, unless given."""
    values = {
        "temperature": (0.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "seed": (0, np.uint32),
        "prompt_index": (0, np.int32),
        "sample_index": (np.arange(batch), np.int32),
    }
    arrays = {
        name: np.broadcast_to(np.asarray(fields.pop(name, value), dtype), (batch,))
        for name, (value, dtype) in values.items()
    }
    assert not fields
    return RowSampling(**arrays)


def draw(logits, rows, step=0):
    """Tokens of every row; one row of logits serves all rows."""
    batch = rows.seed.size
    logits = np.broadcast_to(np.asarray(logits, np.float32), (batch, np.shape(logits)[-1]))
    tokens = jitted_sample(logits, rows, np.broadcast_to(np.asarray(step, np.int32), (batch,)))
    return np.asarray(tokens)


def expected_probabilities(logits, *, temperature, top_k=0, top_p=1.0):
    """The documented rule in float64: temperature, then top_k, then top_p, lower ids first."""
    logits = np.asarray(logits, np.float64)
    order = sorted(range(logits.size), key=lambda token: (-logits[token], token))
    kept = order[: top_k or None]
    weights = np.exp((logits[kept] - logits[order[0]]) / temperature)
    weights /= weights.sum()
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
    is_kept = (before < top_p - 1e-7) | (np.arange(len(kept)) == 0) | (top_p == 1)
    probabilities = np.zeros(logits.size)
    probabilities[kept] = np.where(is_kept, weights, 0)
    return probabilities / probabilities.sum()


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 0.7, "top_k": 6},
    {"temperature": 0.7, "top_k": 7},
    {"temperature": 0.7, "top_k": 2**31 - 1},
    {"temperature": 0.7, "top_p": 0.0},
    {"temperature": 0.7, "top_p": 0.5},
    {"temperature": 0.7, "top_p": 1.0},
    {"temperature": 2.0, "top_k": 4, "top_p": 0.7},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", LOGITS)
def test_frequencies(name, settings):
    expected = expected_probabilities(LOGITS[name], **settings)
    tokens = draw(LOGITS[name], row_sampling(NUM_DRAWS, **settings))
    frequency = np.bincount(tokens, minlength=6) / NUM_DRAWS
    error = 4.5 * np.sqrt(expected * (1 - expected) / NUM_DRAWS)
    assert np.all(np.abs(frequency - expected) <= error), (frequency, expected)


@pytest.mark.parametrize("varied", ["seed", "prompt_index", "sample_index", "step"])
def test_frequencies_hold_whatever_makes_draws_differ(varied):
    fields = {"sample_index": 0, "temperature": 1.0}
    step = np.arange(NUM_DRAWS) if varied == "step" else 0
    if varied != "step":
        fields[varied] = np.arange(NUM_DRAWS)
    tokens = draw(LOGITS["spread"], row_sampling(NUM_DRAWS, **fields), step)
    expected = expected_probabilities(LOGITS["spread"], temperature=1.0)
    frequency = np.bincount(tokens, minlength=6) / NUM_DRAWS
    assert np.all(np.abs(frequency - expected) <= 4.5 * np.sqrt(expected / NUM_DRAWS))
    pairs = np.bincount(tokens[1:] * 6 + tokens[:-1], minlength=36) / (NUM_DRAWS - 1)
    assert np.abs(pairs - np.outer(expected, expected).ravel()).max() < 0.015


@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"top_p": 0.0}, {"top_k": 1}], ids=str)
def test_temperature_zero_is_argmax_lowest_id_first(name, settings):
    tokens = draw(LOGITS[name], row_sampling(8, **settings))
    assert tokens.tolist() == [int(np.argmax(LOGITS[name]))] * 8


def test_o21_mixed_rows_keep_to_their_own_settings():
    settings = {
        "temperature": np.tile([0.0, 0.7, 0.0, 1.3], 8),
        "top_k": np.tile([0, 0, 5, 2], 8),
        "top_p": np.tile([1.0, 0.9, 0.0, 1.0], 8),
    }
    tokens = draw(LOGITS["spread"], row_sampling(32, **settings))
    assert (tokens[0::4] == 1).all()
    assert (tokens[2::4] == 1).all()
    for place in range(32):
        alone = {name: value[place] for name, value in settings.items()}
        alone["sample_index"] = place
        assert draw(LOGITS["spread"], row_sampling(1, **alone)) == tokens[place]
    assert set(tokens[3::4].tolist()) <= {1, 3}
    assert len(set(tokens[1::4].tolist())) > 1


def test_o21_top_k_above_the_vocabulary_is_no_top_k():
    free = draw(LOGITS["spread"], row_sampling(NUM_DRAWS, temperature=0.9))
    for top_k in (6, 7, 2**31 - 1):
        rows = row_sampling(NUM_DRAWS, temperature=0.9, top_k=top_k)
        np.testing.assert_array_equal(draw(LOGITS["spread"], rows), free)


def test_top_p_of_one_keeps_a_long_tail():
    vocab = 40_000
    logits = np.zeros(vocab, np.float32)
    tokens = draw(logits, row_sampling(200, temperature=1.0))
    assert tokens.max() > 0.9 * vocab


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1.2e-38, 1e-39])
def test_tiny_temperature_takes_the_most_likely_token(temperature):
    logits = [[-5.0, -7.0, -4.0, -9.0], [-5.0, 8.0, 9.0, 2.0]]
    tokens = draw(logits, row_sampling(2, temperature=np.float32(temperature)))
    assert tokens.tolist() == [2, 2]


def test_huge_temperature_is_uniform_over_finite_logits():
    rows = row_sampling(NUM_DRAWS, temperature=np.float32(3e38))
    frequency = np.bincount(draw(LOGITS["minus infinity"], rows), minlength=6) / NUM_DRAWS
    np.testing.assert_allclose(frequency, [0, 1 / 3, 0, 1 / 3, 1 / 3, 0], atol=0.02)


@pytest.mark.parametrize("batch", [1, 2, 8, 33])
def test_o19_a_draw_is_the_same_in_any_place_of_any_batch(batch):
    rng = np.random.default_rng(batch)
    mine = {"temperature": 0.8, "seed": 42, "prompt_index": 2, "sample_index": 5, "top_p": 0.95}
    logits = rng.standard_normal(64).astype(np.float32)
    alone = draw(logits, row_sampling(1, **mine), step=9)[0]
    for place in {0, min(3, batch - 1), batch - 1}:
        all_logits = rng.standard_normal((batch, 64)).astype(np.float32)
        all_logits[place] = logits
        fields = {
            "temperature": rng.choice([0.0, 0.5, 1.5], batch),
            "seed": rng.integers(0, 2**32, batch, dtype=np.uint32),
            "prompt_index": rng.integers(0, 50, batch),
            "sample_index": rng.integers(0, 50, batch),
            "top_p": rng.choice([0.3, 1.0], batch),
        }
        for name, value in mine.items():
            fields[name][place] = value
        step = rng.integers(0, 100, batch)
        step[place] = 9
        assert draw(all_logits, row_sampling(batch, **fields), step)[place] == alone


def test_every_part_of_a_key_matters_in_its_own_place():
    grid = np.array(list(itertools.product(range(4), repeat=4)))
    rows = row_sampling(256, seed=grid[:, 0], prompt_index=grid[:, 1], sample_index=grid[:, 2])
    keys = jax.random.key_data(jax.jit(draw_keys)(rows, grid[:, 3].astype(np.int32)))
    assert len(np.unique(np.asarray(keys), axis=0)) == 256


def test_seeds_up_to_the_largest_differ():
    logits = np.zeros(2**10, np.float32)
    seeds = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 1], np.uint32)
    rows = row_sampling(5, temperature=1.0, seed=seeds, sample_index=0)
    assert len(set(draw(logits, rows).tolist())) == 5


def test_sample_keeps_shape_and_dtype():
    rows = row_sampling(3, temperature=1.0)
    step = np.zeros(3, np.int32)
    tokens = jax.eval_shape(sample, jnp.zeros((3, 7), jnp.float32), rows, step)
    assert (tokens.shape, tokens.dtype) == ((3,), jnp.int32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_samples": 0}, "`num_samples` must be at least 1; got 0."),
        ({"num_samples": -2}, "`num_samples` must be at least 1; got -2."),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1; got 0."),
        (
            {"temperature": -0.5},
            "`temperature` must be 0 (greedy) or positive and finite in float32; got -0.5.",
        ),
        (
            {"temperature": INF},
            "`temperature` must be 0 (greedy) or positive and finite in float32; got inf.",
        ),
        (
            {"temperature": float("nan")},
            "`temperature` must be 0 (greedy) or positive and finite in float32; got nan.",
        ),
        ({"top_k": -1}, "`top_k` must be 0 (off) or positive; got -1."),
        ({"top_p": -0.1}, "`top_p` must be between 0 and 1; got -0.1."),
        ({"top_p": 1.5}, "`top_p` must be between 0 and 1; got 1.5."),
        ({"top_p": float("nan")}, "`top_p` must be between 0 and 1; got nan."),
        ({"seed": -1}, "`seed` must be at least 0 and below 2**32; got -1."),
        ({"seed": 2**32}, f"`seed` must be at least 0 and below 2**32; got {2**32}."),
    ],
    ids=str,
)
def test_degenerate_settings_are_refused(settings, message):
    with pytest.raises(ValueError) as error:
        Sampling(**settings)
    assert str(error.value) == message


@pytest.mark.parametrize("name", ["num_samples", "max_new_tokens", "top_k", "seed"])
def test_fractions_are_refused_where_integers_are_meant(name):
    with pytest.raises(ValueError, match=f"`{name}` must"):
        Sampling(**{name: 1.5})


def test_temperature_that_float32_cannot_hold_is_refused():
    with pytest.raises(ValueError, match="`temperature` must"):
        Sampling(temperature=1e39)


def test_limits_are_accepted():
    settings = Sampling(num_samples=1, temperature=0, top_k=2**40, top_p=0, seed=2**32 - 1)
    assert settings.top_k == 2**40
    assert Sampling().temperature == 0
