"""Llama3 and Qwen3 of google-tunix, unmodified, with the shared attention: their own answers."""

import base64
import dataclasses
import hashlib
import importlib.metadata
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from generate_cases import ToyTokenizer, compilations
from lifting import lifted
from tunix_models import MAX_CONTEXT, VOCAB, OwnAttention, qwen3, tunix_model

from codec_jax import Options, generate
from codec_jax.flax import Shared, SharedPool, tunix_decoder
from codec_jax.flax.tunix import tunix_forward
from codec_jax.generate_forced import forced_logits
from codec_jax.models import LoadedModel

OPTIONS = Options(page_size=16, steps_per_visit=4, prefill_chunk=32)
TOLERANCE = 2e-5
"""Absolute, on float32 logits of up to about 5."""
RNG = np.random.default_rng(3)


def ids(length):
    return RNG.integers(2, VOCAB, length).tolist()


TRUNK, BRANCH = ids(21), ids(9)
# Five levels with the leaves, a fork inside a page, a request that ends at an inner node.
FOREST = [
    [*TRUNK, *BRANCH, *ids(20)],
    [*TRUNK, *BRANCH, *ids(3)],
    [*TRUNK, *BRANCH],
    [*TRUNK, *ids(7)],
    [*TRUNK, *ids(7)],
    ids(5),
]
SAMPLES = [*FOREST, FOREST[1], FOREST[1]]
UNSHARED = [ids(30), ids(17), ids(1)]
CONTINUATIONS = [ids(length) for length in (9, 6, 11, 1, 7, 5, 8, 8)]


def loaded(model):
    decoder = tunix_decoder(model, max_context=MAX_CONTEXT)
    return LoadedModel(decoder, ToyTokenizer(VOCAB), "tunix")


def worst(rows, others):
    return max(np.abs(a - b).max() for a, b in zip(rows, others, strict=True))


def shared_and_alone(model, prompts):
    """Logits of forced continuations: shared decoding, and each request by itself."""
    continuations = CONTINUATIONS[: len(prompts)]
    shared = forced_logits(loaded(model), prompts, continuations, options=OPTIONS)
    alone = OwnAttention(model).logits(prompts, continuations)
    assert max(np.abs(rows).max() for rows in alone) > 1
    return shared, alone


@pytest.mark.parametrize("kind", ["llama3", "qwen3"])
def test_unshared_logits_are_those_of_its_own_attention_and_cache(kind):
    model = tunix_model(kind)
    shared, alone = shared_and_alone(model, UNSHARED)
    assert worst(shared, alone) < TOLERANCE
    cached = OwnAttention(model).cached_logits(UNSHARED[1], CONTINUATIONS[1])
    assert np.abs(shared[1] - cached).max() < TOLERANCE


@pytest.mark.parametrize("kind", ["llama3", "qwen3-tied", "qwen3-experts"])
def test_logits_of_a_forest_are_those_of_each_request_alone(kind):
    assert worst(*shared_and_alone(tunix_model(kind), SAMPLES)) < TOLERANCE


def test_rematerialised_layers():
    model = tunix_model("qwen3", remat_config=qwen3.RematConfig.DECODER)
    assert worst(*shared_and_alone(model, FOREST)) < TOLERANCE


def test_bfloat16():
    dtypes = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    model = tunix_model("qwen3", **dtypes)
    assert tunix_decoder(model, max_context=MAX_CONTEXT).config.dtype == "bfloat16"
    assert worst(*shared_and_alone(model, FOREST)) < 0.1


@pytest.mark.parametrize("kind", ["llama3", "qwen3"])
def test_the_file_is_that_of_the_installed_package(kind):
    file = Path(sys.modules[type(tunix_model(kind)).__module__].__file__)
    assert "site-packages" in file.parts
    package = importlib.metadata.distribution("google-tunix")
    assert package.version == "0.1.7"
    (record,) = [entry for entry in package.files if Path(entry.locate()).samefile(file)]
    digest = hashlib.sha256(file.read_bytes()).digest()
    assert record.hash.value == base64.urlsafe_b64encode(digest).decode().rstrip("=")


def test_the_model_stays_as_it_was_and_shares_its_parameters():
    model = tunix_model("llama3")
    decoder = tunix_decoder(model, max_context=MAX_CONTEXT)
    assert not any(isinstance(module, Shared) for _, module in nnx.iter_modules(model))
    theirs = model.layers[1].attn.q_proj.w
    assert any(x is theirs[...] for x in jax.tree.leaves(decoder.arrays()))
    assert len(jax.tree.leaves(decoder.arrays())) == len(jax.tree.leaves(nnx.state(model)))


def test_an_update_of_the_model_reaches_the_decoder_and_compiles_nothing():
    model = tunix_model("llama3")
    shared = loaded(model)
    before = forced_logits(shared, FOREST, CONTINUATIONS[:6], options=OPTIONS)
    weights = model.layers[0].attn.v_proj.w
    weights[...] = 2 * weights[...]
    with compilations() as events:
        after = forced_logits(shared, FOREST, CONTINUATIONS[:6], options=OPTIONS)
    assert not events and worst(before, after) > 0.1
    assert worst(after, OwnAttention(model).logits(FOREST, CONTINUATIONS[:6])) < TOLERANCE


def attention_of(kind):
    return tunix_model(kind).layers[0].attn


@pytest.mark.parametrize("name", ["cache", "attn_mask", "segment_ids"])
def test_arguments_that_would_be_ignored_are_refused(name):
    forward = tunix_forward(attention_of("qwen3"))
    with pytest.raises(ValueError, match=rf"`{name}` must be None in a shared layer"):
        forward(attention_of("qwen3"), None, None, None, **{name: np.ones((1, 1))})


def test_the_modules_own_scale_is_kept():
    attn, scales = attention_of("llama3"), []
    attn.scale = 0.7

    def attend(q, k, v, *, logits_scale):
        scales.append(logits_scale)
        return q

    with lifted():
        tunix_forward(attn)(
            attn, attend, np.ones((1, 1, 32), np.float32), np.ones((1, 1), np.int32)
        )
    assert scales == [0.7]


def test_an_attribute_that_is_not_known_is_refused():
    attn = attention_of("llama3")
    attn.sliding_window = 4096
    with pytest.raises(ValueError, match=r"\['sliding_window'\] differ"):
        Shared(attn, SharedPool(None), layer=0)


def test_another_class_is_refused():
    attn = attention_of("llama3")
    other = type("Attention", (type(attn),), {"__module__": "tunix.models.other.model"})
    attn.__class__ = other
    with pytest.raises(ValueError, match=r"got tunix\.models\.other\.model\.Attention\. Give"):
        Shared(attn, SharedPool(None), layer=0)


def test_another_model_is_refused():
    with pytest.raises(ValueError, match=r"`model` must be one of tunix.*`NNXDecoder` takes"):
        tunix_decoder(attention_of("llama3"), max_context=8)


def test_a_layer_that_is_shared_is_refused():
    model = tunix_model("llama3")
    model.layers[0].attn = Shared(model.layers[0].attn, SharedPool(None), layer=0)
    with pytest.raises(ValueError, match="`attn` must be the model's own module"):
        tunix_decoder(model, max_context=8)


def test_a_layer_that_keeps_its_own_attention_is_an_error():
    """The silent case: the model runs, but one layer attends without pool and plan."""
    decoder = tunix_decoder(tunix_model("llama3"), max_context=MAX_CONTEXT)
    decoder.config = dataclasses.replace(decoder.config, num_layers=3)
    model = LoadedModel(decoder, ToyTokenizer(VOCAB), "tunix")
    with pytest.raises(RuntimeError, match=r"once for each of 3 layers.*ran for \[0, 1\]"):
        generate(model, FOREST[:1], options=OPTIONS)
