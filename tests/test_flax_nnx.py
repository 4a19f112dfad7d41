"""The NNX door around a model of nobody's: its own answers, and the refusals."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from flax import nnx
from flax_readme import blocks
from generate_cases import ToyTokenizer
from nnx_model import CONFIG, Model

from codec_jax.decode import Decoding, decode_steps, draw_first
from codec_jax.flax import NNXDecoder, Shared, SharedPool, attending
from codec_jax.generate import Generation, Options
from codec_jax.generate_forced import forced_logits
from codec_jax.models import LoadedModel
from codec_jax.sampling import Sampling

OPTIONS = Options(page_size=16, steps_per_visit=4, prefill_chunk=32)
TRUNK = np.random.default_rng(5).integers(2, 32, 19).tolist()
PROMPTS = [[*TRUNK, 3, 4], [*TRUNK, 3, 9], TRUNK, [7]]
CONTINUATIONS = [[5, 6, 7, 8, 9], [2], [11, 30, 4], [12, 13]]


def shared_model(model, pool):
    """The README's block, on a model."""
    names = {"model": model, "pool": pool, "Shared": Shared}
    exec(compile(blocks()["nnx forward"][1], "README.md", "exec"), names)
    return names["forward"]


def as_decoder(model, config=CONFIG):
    return NNXDecoder(
        model,
        config,
        run=lambda model, token_ids, positions: model.hidden(token_ids),
        head=lambda model, hidden: model.scores(hidden),
    )


def test_logits_of_a_forest_are_those_of_its_own_attention():
    model = Model()
    texts = [[*a, *b] for a, b in zip(PROMPTS, CONTINUATIONS, strict=True)]
    own = [Model().logits(text) for text in texts]
    shared_model(model, SharedPool(None))
    loaded = LoadedModel(as_decoder(model), ToyTokenizer(32), "toy")
    found = forced_logits(loaded, PROMPTS, CONTINUATIONS, options=OPTIONS)
    for prompt, rows, expected in zip(PROMPTS, found, own, strict=True):
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(rows, expected[len(prompt) - 1 : -1], atol=2e-5, rtol=0)


def test_generation_updates_the_pool_in_place():
    """The loop of k steps aliases its whole state, and copies no array of the pool's shape."""
    seen = []

    def steps(params, state, plan, **statics):
        compiled = decode_steps.lower(params, state, plan, **statics).compile()
        state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
        shape = ",".join(map(str, state.pool.k_pages.shape))
        copies = re.findall(rf"= f32\[{shape}\]\S* copy\(", compiled.as_text())
        seen.append((compiled.memory_analysis().alias_size_in_bytes - state_bytes, copies))
        return decode_steps(params, state, plan, **statics)

    model = Model()
    shared_model(model, SharedPool(None))
    loaded = LoadedModel(as_decoder(model), ToyTokenizer(32), "toy")
    sampling = Sampling(max_new_tokens=5)
    decoding = Decoding(draw_first, steps)
    Generation(loaded, PROMPTS, sampling=sampling, options=OPTIONS, decoding=decoding).finish()
    assert seen and all(missing == 0 and copies == [] for missing, copies in seen)


def test_a_module_of_another_class_needs_a_forward():
    with pytest.raises(ValueError, match=r"got nnx_model\.Attention\. Give `forward` for it"):
        Shared(Model().layers[0].attn, SharedPool(None), layer=0)


def test_a_shared_layer_runs_in_attending_only():
    model = Model()
    shared_model(model, SharedPool(None))
    with pytest.raises(RuntimeError, match="must run inside `attending"):
        model.hidden(np.zeros((1, 1), np.int32))


def test_attending_ends_with_its_block_and_counts_the_layers():
    model = Model()
    shared_model(model, SharedPool(0))
    x = np.zeros((1, 1, CONFIG.hidden_size), np.float32)
    one = r"each of 2 layers.*ran for \[1\]"
    with pytest.raises(RuntimeError, match=one), attending(model, _echo):
        model.layers[1](x)
    with pytest.raises(KeyError), attending(model, _echo):
        raise KeyError
    assert all(layer.attn.carrier is None for layer in model.layers)
    with attending(model, _echo):
        model.hidden(np.zeros((1, 1), np.int32))
    assert model.layers[0].attn.pool.get_value() == 3


def _echo(layer, q, k, v, pool):
    return q, pool + 1


def test_a_model_without_shared_layers_or_with_two_pools_is_refused():
    with pytest.raises(ValueError, match="its layers have 0 pools"):
        as_decoder(Model())
    with pytest.raises(ValueError, match="its layers have 0 pools"), attending(Model(), _echo):
        pass
    model = Model()
    shared_model(model, SharedPool(None))
    model.layers[1].attn.pool = SharedPool(None)
    with pytest.raises(ValueError, match="its layers have 2 pools"):
        as_decoder(model)


def test_a_pool_of_its_own_is_refused_by_the_decoder():
    model = Model()
    shared_model(model, SharedPool(np.zeros(3)))
    with pytest.raises(ValueError, match=r"must have an empty `SharedPool\(None\)`"):
        as_decoder(model)


@pytest.mark.parametrize("dtype,width", [("bfloat16", 24), ("float32", 12)])
def test_hidden_states_that_are_not_the_configs_are_refused(dtype, width):
    model = Model()
    shared_model(model, SharedPool(None))

    def run(model, token_ids, positions):
        return model.hidden(token_ids)[..., :width].astype(dtype)

    with pytest.raises(ValueError, match=r"`run` must return float32 of shape \(1, 24\)"):
        NNXDecoder(model, CONFIG, run=run, head=lambda model, hidden: hidden)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vocab_size": 20}, "a score for each of 20 tokens"),
        ({"num_kv_heads": CONFIG.num_q_heads}, "num_q_heads, num_kv_heads and head_dim"),
    ],
)
def test_a_config_of_other_sizes_is_refused_before_any_work(change, reason):
    model = Model()
    shared_model(model, SharedPool(None))
    with pytest.raises(ValueError, match=reason):
        as_decoder(model, config=dataclasses.replace(CONFIG, **change))


class Held:
    """A pool of which only the number of layers counts."""

    def __init__(self, num_layers):
        self.num_layers = num_layers


@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_pool_for_other_layers_is_refused(num_layers):
    model = Model()
    shared_model(model, SharedPool(Held(num_layers)))
    wrong = pytest.raises(ValueError, match=rf"for each layer .*, 2; it has {num_layers}\.")
    with wrong, attending(model, _echo):
        pytest.fail("ran")


def test_an_empty_pool_and_another_variable_are_refused():
    model = Model()
    shared_model(model, SharedPool(None))
    wrong = pytest.raises(ValueError, match="`SharedPool` must hold a pool")
    with wrong, attending(model, _echo):
        pytest.fail("ran")
    with pytest.raises(ValueError, match=r"`pool` must be a SharedPool, .*; got Param"):
        Shared(Model().layers[0].attn, nnx.Param(np.zeros(3)), layer=0, forward=lambda *_: None)


def test_the_decoder_holds_the_models_variables():
    model = Model()
    shared_model(model, SharedPool(None))
    decoder = as_decoder(model)
    ids = np.zeros(3, np.int32)
    before, _ = decoder(ids, ids, 0, _echo)
    model.embedding[...] = model.embedding[...] + 1
    after, pool = decoder(ids, ids, 0, _echo)
    assert np.abs(after - before).max() > 0.1 and pool == 2
    assert model.layers[0].attn.pool.get_value() is None
