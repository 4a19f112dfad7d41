"""google-deepmind's gemma, unmodified, with the shared attention: its own answers."""

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
from flax import linen as nn
from gemma_models import (
    GLOBAL,
    KINDS,
    LOCAL,
    MAX_CONTEXT,
    NUM_LAYERS,
    VOCAB,
    LoRA,
    OwnAttention,
    gemma_model,
    gemma_variables,
)
from generate_cases import ToyTokenizer, compilations
from lifting import lifted

from codec_jax import KVPool, Options, Sampling, generate
from codec_jax.decode import Decoding, decode_steps, draw_first
from codec_jax.flax import GEMMA_HOOK, gemma_decoder, linen_attending
from codec_jax.generate import Generation
from codec_jax.generate_forced import forced_logits
from codec_jax.models import LoadedModel

OPTIONS = Options(page_size=16, steps_per_visit=4, prefill_chunk=32)
TOLERANCE = 2e-5
"""Absolute, on float32 logits of up to about 5."""
RNG = np.random.default_rng(3)


def ids(length):
    return RNG.integers(1, VOCAB, length).tolist()


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


def loaded(model, variables=None):
    variables = gemma_variables(model) if variables is None else variables
    decoder = gemma_decoder(model, variables, max_context=MAX_CONTEXT)
    return LoadedModel(decoder, ToyTokenizer(VOCAB), "gemma")


def worst_difference(model, prompts, variables=None):
    """Of logits of forced continuations, between shared decoding and each request by itself."""
    variables = gemma_variables(model) if variables is None else variables
    continuations = CONTINUATIONS[: len(prompts)]
    shared = forced_logits(loaded(model, variables), prompts, continuations, options=OPTIONS)
    own = OwnAttention(model, variables)
    alone = [own.logits(*pair) for pair in zip(prompts, continuations, strict=True)]
    assert max(np.abs(rows).max() for rows in alone) > 1
    return max(np.abs(a - b).max() for a, b in zip(shared, alone, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_unshared_logits_are_those_of_its_own_attention(kind):
    assert worst_difference(gemma_model(kind), UNSHARED) < TOLERANCE


@pytest.mark.parametrize("kind", ["gemma1", "gemma3"])
def test_logits_of_a_forest_are_those_of_each_request_alone(kind):
    assert worst_difference(gemma_model(kind), SAMPLES) < TOLERANCE


def test_a_lora_around_the_model():
    """A hook of gemma's own, in a module around the one whose call is jitted."""
    with lifted():
        model = LoRA(rank=2, model=gemma_model(), dtype=jnp.float32)
        variables = gemma_variables(model, seed=1)
    assert worst_difference(model, FOREST[:3], variables) < TOLERANCE
    without = OwnAttention(gemma_model(), variables).logits(FOREST[0], CONTINUATIONS[0])
    with_lora = OwnAttention(model, variables).logits(FOREST[0], CONTINUATIONS[0])
    assert np.abs(with_lora - without).max() > 0.1


def test_bfloat16():
    model = gemma_model(dtype=jnp.bfloat16)
    variables = jax.tree.map(lambda x: x.astype(jnp.bfloat16), gemma_variables(gemma_model()))
    got = forced_logits(loaded(model, variables), FOREST[:2], CONTINUATIONS[:2], options=OPTIONS)
    variables = jax.tree.map(lambda x: x.astype(jnp.float32), variables)
    own = OwnAttention(gemma_model(), variables)
    for prompt, continuation, logits in zip(FOREST, CONTINUATIONS, got, strict=False):
        assert np.abs(logits - own.logits(prompt, continuation)).max() < 0.5


def test_the_file_is_that_of_the_installed_package():
    for module in ("gemma.gm.nn._modules", "gemma.gm.nn._transformer"):
        file = Path(sys.modules[module].__file__)
        assert "site-packages" in file.parts
        package = importlib.metadata.distribution("gemma")
        assert package.version == "4.0.1"
        (record,) = [entry for entry in package.files if Path(entry.locate()) == file]
        digest = hashlib.sha256(file.read_bytes()).digest()
        assert record.hash.value == base64.urlsafe_b64encode(digest).decode().rstrip("=")


def test_programs_are_compiled_once():
    """One for all visits of the host, for other tokens, and for another decoder of the model."""

    def run(prompts, seed):
        sampling = Sampling(max_new_tokens=14, num_samples=2, temperature=0.7, seed=seed)
        generate(loaded(gemma_model()), prompts, sampling=sampling, options=OPTIONS)

    run(FOREST, 0)
    with compilations() as events:
        run([[VOCAB - token for token in prompt] for prompt in FOREST], 1)
    assert not events


def test_the_pool_is_updated_in_place():
    """A step program over a pool of 1 GiB aliases all of it, and needs no second one."""
    compiled = []

    def steps(params, state, plan, **statics):
        if not compiled:
            num_layers, num_pages = NUM_LAYERS, 2**30 // (NUM_LAYERS * 2 * 4 * 2 * 16 * 8)
            pages = jax.ShapeDtypeStruct((num_layers * num_pages, 2, 16, 8), np.float32)
            pool = KVPool(pages, pages, num_layers)
            free_pages = jax.ShapeDtypeStruct((num_pages,), np.int32)
            large = dataclasses.replace(state, pool=pool, free_pages=free_pages)
            compiled.append(decode_steps.lower(params, large, plan, **statics).compile())
        return decode_steps(params, state, plan, **statics)

    model = loaded(gemma_model())
    Generation(model, FOREST, options=OPTIONS, decoding=Decoding(draw_first, steps)).finish()
    memory = compiled[0].memory_analysis()
    assert memory.alias_size_in_bytes >= 2**30
    assert memory.temp_size_in_bytes < 2**25


def scores(logits):
    return np.asarray(logits[0, -1])


IDS = np.array([FOREST[0]], np.int32)
POSITIONS = np.arange(IDS.size, dtype=np.int32)[None]


def plain(model):
    with lifted():
        return scores(model.apply(gemma_variables(model), IDS).logits)


def hooked(model, attention, **changes):
    settings = {"hook": GEMMA_HOOK, "num_layers": NUM_LAYERS} | changes

    @jax.jit
    def run(variables):
        with lifted(), linen_attending(attention, 0, **settings) as carrier:
            logits = model.apply(variables, IDS, positions=POSITIONS).logits
        return logits, carrier.pool

    logits, _ = run(gemma_variables(model))
    return scores(logits)


def sees_all(layer, q, k, v, cache):
    """Causal attention of one request."""
    k, v = (jnp.repeat(heads, q.shape[1] // k.shape[1], axis=1) for heads in (k, v))
    logits = q.shape[-1] ** -0.5 * jnp.einsum("tnh,snh->nts", q, k)
    mask = jnp.tril(jnp.ones((q.shape[0],) * 2, bool))
    weights = jax.nn.softmax(jnp.where(mask[None], logits, -1e30))
    return jnp.einsum("nts,snh->tnh", weights, v), cache


def sees_itself(layer, q, k, v, cache):
    return jnp.repeat(v, q.shape[1] // k.shape[1], axis=1), cache


def fresh(base_frequency):
    """A model that nothing was traced for yet."""
    return gemma_model(global_base_frequency=base_frequency)


def test_plain_then_hooked_then_plain():
    model = fresh(1001)
    want = plain(model)
    assert np.abs(hooked(model, sees_itself) - want).max() > 0.1
    assert np.abs(hooked(model, sees_all) - want).max() < TOLERANCE
    np.testing.assert_array_equal(plain(model), want)


def test_hooked_then_plain():
    model, other = fresh(1002), fresh(1003)
    strange = hooked(model, sees_itself)
    want = plain(model)
    assert np.abs(strange - want).max() > 0.1
    assert np.abs(hooked(model, sees_all) - want).max() < TOLERANCE
    assert np.abs(plain(other) - want).max() < 0.5


def test_two_hooks():
    model = fresh(1004)
    first = hooked(model, sees_itself)
    assert np.abs(hooked(model, sees_all) - first).max() > 0.1
    np.testing.assert_array_equal(hooked(model, sees_itself), first)


def test_an_error_inside_leaves_nothing_hooked():
    model = fresh(1005)

    def broken(*_):
        raise ArithmeticError("mine")

    with pytest.raises(ArithmeticError, match="mine"):
        hooked(model, broken)
    assert np.abs(hooked(model, sees_all) - plain(model)).max() < TOLERANCE


def test_the_hook_must_run_for_every_layer():
    with pytest.raises(RuntimeError, match=r"each of 3 layers, in order; it ran for \[0, 1\]"):
        hooked(gemma_model(), sees_all, num_layers=3)
    other = dataclasses.replace(GEMMA_HOOK, attention_class="gemma.gm.nn.Attention")
    with pytest.raises(RuntimeError, match=r"it ran for \[\]"):
        hooked(gemma_model(), sees_all, hook=other)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logits_soft_cap": 50.0}, "`attn_logits_soft_cap` must be None: .*; got 50.0"),
        (
            {"attention_types": (GLOBAL, LOCAL), "sliding_window_size": 4},
            "`attention_types` must all be GLOBAL: .*; got LOCAL_SLIDING with .* 4",
        ),
    ],
)
def test_what_changes_the_mathematics_is_refused_by_name(changes, message):
    model = gemma_model(**changes)
    with pytest.raises(NotImplementedError, match=message):
        loaded(model)


def test_a_model_of_another_class_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"`model` must be a .*; got flax.linen.linear.Dense\."):
        gemma_decoder(nn.Dense(3), {}, max_context=MAX_CONTEXT)


def test_return_last_only_is_refused():
    model = gemma_model().copy(return_last_only=True)
    with pytest.raises(ValueError, match="`return_last_only` must not be set"):
        loaded(model)


def test_a_cache_is_refused():
    model = gemma_model()

    def run():
        cache = model.config.init_cache(1, jnp.float32, cache_length=IDS.size)
        with linen_attending(sees_all, 0, hook=GEMMA_HOOK, num_layers=NUM_LAYERS):
            model.apply(gemma_variables(model), IDS, positions=POSITIONS, cache=cache)

    with lifted(), pytest.raises(ValueError, match="`cache` must be None: the pool holds"):
        run()


def test_an_attention_of_other_fields_is_refused_by_their_names():
    """That of gemma 4 shares keys between layers, norms values, rotates a part of a head."""
    with lifted():
        from gemma.gm.nn.gemma4 import _modules as gemma4
    attn = gemma4.Attention(
        num_heads=2, num_kv_heads=1, features=8, key_size=4, attn_type=gemma4.AttentionType.GLOBAL
    )
    with pytest.raises(ValueError, match=r"gemma 4.0.1; fields \[.*'k_eq_v', 'key_size', .*differ"):
        GEMMA_HOOK.forward(attn, None, None, None)
