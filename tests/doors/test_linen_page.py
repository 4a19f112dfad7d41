"""The page's Linen changes, run inside gemma: the same texts, the same logits, one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax_readme import diff_block
from gemma_models import (
    MAX_CONTEXT,
    NUM_LAYERS,
    SIZES,
    VOCAB,
    OwnAttention,
    gemma_model,
    gemma_variables,
)
from generate_cases import ToyTokenizer, compilations
from lifting import lifted
from own_loop import LENGTH, NUM_PAGES, PAGE_SIZE, TEXTS, forest_and_places, view_at

from codec_jax import KVPool, PlanSpec, build_plan

MODEL = gemma_model()
PROMPTS = ["defdefghij", "defdefgxyz", "defde", "q"]  # id 0 is padding to gemma


def run_block(text, **given):
    """What a side of a change defines."""
    names = {"model": MODEL, "variables": gemma_variables(MODEL)} | given
    names |= {"functools": functools, "jax": jax, "jnp": jnp}
    exec(compile(text, "README.md", "exec"), names)
    return names


def test_the_texts_are_the_same():
    block = diff_block("linen generate")
    given = {"prompts": PROMPTS, "tokenizer": ToyTokenizer(VOCAB)}
    with lifted():
        before = run_block(block.before, **given)["texts"]
    after = run_block(block.after, **given)["texts"]
    assert after == before and len(set(after)) == len(PROMPTS)
    assert all(len(text) == 8 for text in after)


class OwnLoop:
    """The page's step on all texts from their first token on."""

    def __init__(self):
        shape = (SIZES["num_kv_heads"], PAGE_SIZE, SIZES["head_dim"])
        self.pool = KVPool.zeros(NUM_PAGES, shape, num_layers=NUM_LAYERS)
        self.forest, self.node = forest_and_places()
        group_size = SIZES["num_heads"] // SIZES["num_kv_heads"]
        spec = PlanSpec(num_kv_heads=shape[0], group_size=group_size, page_size=PAGE_SIZE)
        self.plan = build_plan(self.forest, spec)
        self.step = run_block(diff_block("linen step").after)["step"]

    def arguments(self, position):
        tokens = np.array([text[position] for text in TEXTS], np.int32)
        positions = np.full(len(TEXTS), position, np.int32)
        view = view_at(position, self.forest, self.node)
        return *jax.device_put((tokens, positions)), self.plan, view

    def logits(self):
        """[row, position, vocab]"""
        rows, variables = [], gemma_variables(MODEL)
        for position in range(LENGTH):
            with lifted():
                logits, self.pool = self.step(variables, self.pool, *self.arguments(position))
            rows.append(np.asarray(logits))
        return np.stack(rows, axis=1)


def test_a_loop_of_ones_own_has_its_logits_and_one_program():
    loop = OwnLoop()
    found = loop.logits()
    assert loop.step._cache_size() == 1
    own = OwnAttention(MODEL, gemma_variables(MODEL))
    for row, text in enumerate(TEXTS):
        expected = own.logits(text[:1], text[1:])
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(found[row, :-1], expected, atol=2e-5, rtol=0)
    with compilations() as events:
        loop.logits()
    assert not events


def test_its_pool_is_aliased():
    loop = OwnLoop()
    with lifted():
        lowered = loop.step.lower(gemma_variables(MODEL), loop.pool, *loop.arguments(0))
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in jax.tree.leaves(loop.pool))


def test_the_step_before_is_the_models_own():
    step = run_block(diff_block("linen step").before)["step"]
    own = OwnAttention(MODEL, gemma_variables(MODEL))
    with lifted():
        cache = MODEL.config.init_cache(1, jnp.float32, cache_length=MAX_CONTEXT)
    rows = []
    for position, token in enumerate(TEXTS[0]):
        mask = jnp.arange(MAX_CONTEXT)[None, None] <= position
        ids, positions = jnp.array([token]), jnp.array([position])
        with lifted():
            logits, cache = step(gemma_variables(MODEL), cache, ids, positions, mask)
        rows.append(logits[0])
    np.testing.assert_allclose(
        np.stack(rows)[:-1], own.logits(TEXTS[0][:1], TEXTS[0][1:]), atol=2e-5, rtol=0
    )
