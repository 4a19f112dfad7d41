"""A Linen model as a decoder: its own answers on a forest, and refusals before any work."""

import functools

import jax
import jax.numpy as jnp
import linen_model
import numpy as np
import pytest
from flax import nnx
from flax_readme import blocks
from generate_cases import ToyTokenizer, compilations
from linen_model import HOOK, Model

from codec_jax.flax import LinenDecoder, LinenHook
from codec_jax.generate import Options, generate
from codec_jax.generate_forced import forced_logits
from codec_jax.models import LoadedModel
from codec_jax.sampling import Sampling

OPTIONS = Options(page_size=8, steps_per_visit=3, prefill_chunk=16)
MODEL = Model(salt="decoder")
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 9, 30], [7, 1], [7, 1]]
CONTINUATIONS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8], [9, 7, 9], [9, 7, 3, 2]]


def run(model, token_ids, positions):
    return model(token_ids, positions)[1]


def head(model, hidden):
    return model.head(hidden)


@functools.cache
def variables():
    return jax.jit(MODEL.init)(jax.random.key(0), *linen_model.tokens())


def decoder(config=None, **changes):
    functions = {"hook": HOOK, "run": run, "head": head} | changes
    return LinenDecoder(MODEL, variables(), config or linen_model.config(), **functions)


def loaded():
    return LoadedModel(decoder(), ToyTokenizer(linen_model.VOCAB), "linen")


def own_logits(prompt, continuation):
    """Scores of each new token by the model's own attention on that request alone."""
    ids = np.array([prompt + continuation[:-1]], np.int32)
    logits, _ = MODEL.apply(variables(), ids, np.arange(ids.size, dtype=np.int32)[None])
    return logits[0, len(prompt) - 1 :]


def test_a_forest_has_the_scores_of_each_request_alone():
    got = forced_logits(loaded(), PROMPTS, CONTINUATIONS, options=OPTIONS)
    for prompt, continuation, logits in zip(PROMPTS, CONTINUATIONS, got, strict=True):
        np.testing.assert_allclose(logits, own_logits(prompt, continuation), rtol=0, atol=2e-5)


def test_the_page_shows_how():
    names = {name: getattr(linen_model, name) for name in ("Attention", "SCALE")}
    names |= {"LinenHook": LinenHook, "LinenDecoder": LinenDecoder, "config": linen_model.config()}
    names |= {"model": MODEL, "variables": variables()}
    exec(compile(blocks()["linen forward"][1], "README.md", "exec"), names)
    model = LoadedModel(names["decoder"], ToyTokenizer(linen_model.VOCAB), "linen")
    (got,) = forced_logits(model, PROMPTS[:1], CONTINUATIONS[:1], options=OPTIONS)
    np.testing.assert_allclose(got, own_logits(PROMPTS[0], CONTINUATIONS[0]), rtol=0, atol=2e-5)


def test_it_generates_and_the_same_again_compiles_nothing():
    sampling = Sampling(num_samples=2, max_new_tokens=7)
    model = loaded()
    first = generate(model, PROMPTS, sampling=sampling, options=OPTIONS)
    with compilations() as events:
        again = generate(loaded(), PROMPTS[::-1], sampling=sampling, options=OPTIONS)
    assert not events
    by_prompt = {tuple(done.prompt): done.token_ids for done in first}
    assert all(by_prompt[tuple(done.prompt)] == done.token_ids for done in again)
    for done in first:
        greedy = own_logits(list(done.prompt), list(done.token_ids)).argmax(-1)
        assert tuple(greedy.tolist()) == done.token_ids


def test_it_goes_through_split_and_merge():
    graphdef, params = nnx.split(decoder())
    other, _ = nnx.split(decoder())
    assert graphdef == other
    assert hash(graphdef) == hash(other)
    arrays = jax.tree.leaves(nnx.merge(graphdef, params).arrays())
    want = jax.tree.leaves(variables())
    assert len(arrays) == len(want) > 0
    for got, value in zip(arrays, want, strict=True):
        np.testing.assert_array_equal(got, value)


def test_its_parameters_are_arguments_of_the_loop_and_no_constants():
    graphdef, params = nnx.split(decoder())

    def logits(params, hidden):
        return nnx.merge(graphdef, params).logits(hidden)

    hidden = jnp.ones((2, linen_model.HIDDEN))
    zeros = jax.tree.map(jnp.zeros_like, params)
    assert np.abs(jax.jit(logits)(params, hidden)).max() > 0
    assert np.abs(jax.jit(logits)(zeros, hidden)).max() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 23}, "float32 of shape \\(1, 23\\), by `config`; got float32"),
        ({"dtype": "bfloat16"}, "bfloat16 of shape \\(1, 24\\), by `config`; got float32"),
        ({"vocab_size": 30}, "score for each of 30 tokens, by `config`; got \\(31,\\)"),
    ],
)
def test_sizes_that_are_not_the_models_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        decoder(linen_model.config(**changes))


def test_a_model_of_more_layers_is_refused():
    with pytest.raises(RuntimeError, match=r"each of 3 layers, in order; it ran for \[0, 1\]"):
        decoder(linen_model.config(num_layers=3))
