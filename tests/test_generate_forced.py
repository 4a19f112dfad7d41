"""Teacher forcing: the logits of given continuations, step by step, against float64 NumPy."""

import numpy as np
import pytest
from generate_cases import ToyTokenizer, stories, stories_oracle, toy_model

from codec_jax.decode_forced import forced_steps
from codec_jax.generate import Generation, Options
from codec_jax.generate_forced import forced_logits
from codec_jax.sampling import Sampling

OPTIONS = Options(page_size=16, steps_per_visit=4)
LOGITS_TOLERANCE = 2e-4
"""Absolute, on logits of up to 20, as for the decode loop's own."""
STOP = ToyTokenizer.stop_ids[0]


@pytest.fixture(scope="module")
def prompts():
    """Two equal prompts, one that goes on, a stranger; ids that nobody would draw."""
    rng = np.random.default_rng(6)
    first = [1, *rng.integers(3, 512, 40).tolist()]
    return [first, first, [*first, 9, 8], rng.integers(3, 512, 5).tolist()]


@pytest.fixture(scope="module")
def continuations():
    rng = np.random.default_rng(7)
    return [rng.integers(3, 512, size).tolist() for size in (21, 8, 1, 17)]


def test_logits_of_every_step_are_those_of_unshared_decoding(prompts, continuations):
    logits = forced_logits(stories(), prompts, continuations, options=OPTIONS)
    assert len(logits) == 4
    for prompt, ids, row in zip(prompts, continuations, logits, strict=True):
        expected = stories_oracle().logits([*prompt, *ids])[len(prompt) - 1 : -1]
        assert row.dtype == np.float32 and row.shape == (len(ids), 512)
        np.testing.assert_allclose(row, expected, atol=LOGITS_TOLERANCE, rtol=0)


def test_forcing_what_was_drawn_changes_nothing(prompts):
    sampling = Sampling(max_new_tokens=9)
    drawn = Generation(stories(), prompts, sampling=sampling, options=OPTIONS).finish()
    ids = [completion.token_ids for completion in drawn]
    logits = forced_logits(stories(), prompts, ids, options=OPTIONS)
    assert [tuple(row.argmax(axis=1).tolist()) for row in logits] == ids


def test_a_stop_token_stops_nothing():
    table = np.asarray(toy_model().decoder.arrays()["lm_head"])
    prompts, continuations = [[5], [STOP]], [[STOP, 7, STOP, 3], [STOP, STOP]]
    logits = forced_logits(toy_model(), prompts, continuations, options=OPTIONS)
    for prompt, ids, row in zip(prompts, continuations, logits, strict=True):
        assert (row.argmax(axis=1) == table[:, [*prompt, *ids[:-1]]].argmax(axis=0)).all()
        assert row.shape[0] == len(ids)


def test_steps_are_called_as_the_librarys_own():
    calls = []

    def steps(*arguments, **statics):
        calls.append(statics["num_steps"])
        return forced_steps(*arguments, **statics)

    forced_logits(toy_model(), [[5]], [[2] * 10], options=OPTIONS, steps=steps)
    assert calls == [4, 4, 4]


def test_no_prompts_give_no_logits():
    assert forced_logits(toy_model(), [], []) == []


REFUSED = {
    "too few": ([[2]], r"`continuations` must be one for each of the 2 prompts; got 1\."),
    "an empty one": ([[2], []], r"`continuations\[1\]` must hold at least one token; got none\."),
    "an id outside": ([[2], [32]], r"`continuations\[1\]` must hold ids in \[0, 32\); got 32\."),
    "a negative id": ([[-1], [2]], r"`continuations\[0\]` .*; got -1\."),
    "a long one": ([[2], [2] * 256], r"`prompts\[1\]` must fit the model's context of 256"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case):
    continuations, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        forced_logits(toy_model(), [[5], [6]], continuations)
