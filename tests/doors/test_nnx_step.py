"""A loop of one's own around tunix, the README's: pool in place, one compilation, same logits."""

import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx
from flax_readme import diff_block
from generate_cases import compilations
from lifting import lifted
from own_loop import LENGTH, NUM_PAGES, PAGE_SIZE, TEXTS, forest_and_places, view_at
from tunix_models import MAX_CONTEXT, SIZES, OwnAttention, empty_cache, tunix_model

from codec_jax import KVPool, PlanSpec, build_plan
from codec_jax.flax import SharedPool

BLOCK = diff_block("nnx step")


def names(text, model, **more):
    """What a block of the README defines for a model."""
    given = {"functools": functools, "jax": jax, "nnx": nnx, "model": model} | more
    with lifted():
        exec(compile(text, "README.md", "exec"), given)
    return given


class OwnLoop:
    """The README's step, on all texts from their first token on."""

    def __init__(self, kind, **settings):
        self.model = tunix_model(kind, **settings)
        shape = (SIZES["num_kv_heads"], PAGE_SIZE, SIZES["head_dim"])
        pool = SharedPool(KVPool.zeros(NUM_PAGES, shape, num_layers=SIZES["num_layers"]))
        self.pool_bytes = sum(x.nbytes for x in jax.tree.leaves(pool.get_value()))
        self.own = OwnAttention(nnx.clone(self.model))
        self.forest, self.node = forest_and_places()
        group_size = SIZES["num_heads"] // SIZES["num_kv_heads"]
        spec = PlanSpec(num_kv_heads=shape[0], group_size=group_size, page_size=PAGE_SIZE)
        self.plan = build_plan(self.forest, spec)
        self.names = names(BLOCK.after, self.model, pool=pool)
        self.step = self.names["step"]

    def arguments(self, position):
        tokens = np.array([text[position] for text in TEXTS], np.int32)
        positions = np.full(len(TEXTS), position, np.int32)
        view = view_at(position, self.forest, self.node)
        return self.names["params"], *jax.device_put((tokens, positions)), self.plan, view

    def logits(self):
        """[row, position, vocab]"""
        rows = []
        for position in range(LENGTH):
            with lifted():
                logits, self.names["cache"] = self.step(
                    self.names["cache"], *self.arguments(position)
                )
            rows.append(np.asarray(logits))
        return np.stack(rows, axis=1)


@pytest.mark.parametrize("kind", ["llama3", "qwen3"])
def test_logits_are_its_own_and_one_program_makes_them(kind):
    loop = OwnLoop(kind)
    found = loop.logits()
    assert loop.step._cache_size() == 1
    firsts, rests = [text[:1] for text in TEXTS], [text[1:] for text in TEXTS]
    for row, expected in enumerate(loop.own.logits(firsts, rests)):
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(found[row, :-1], expected, atol=2e-5, rtol=0)
    with compilations() as events:
        loop.logits()
    assert not events


def test_the_pool_is_updated_in_place():
    loop = OwnLoop("llama3")
    with lifted():
        compiled = loop.step.lower(loop.names["cache"], *loop.arguments(0)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == loop.pool_bytes
    pages = loop.names["model"].layers[0].attn.pool.get_value().k_pages
    shape = ",".join(map(str, pages.shape))
    text = compiled.as_text()
    assert f"f32[{shape}]" in text
    copies = [line for line in text.splitlines() if re.search(rf"= f32\[{shape}\]\S* copy\(", line)]
    assert copies == []


def test_the_step_before_is_the_models_own():
    model = tunix_model("llama3")
    given = names(BLOCK.before, model)
    cache, rows = empty_cache(), []
    for position, token in enumerate(TEXTS[0]):
        mask = (np.arange(MAX_CONTEXT) <= position)[None, None]
        tokens, positions = np.array([token], np.int32), np.array([position], np.int32)
        with lifted():
            logits, cache = given["step"](cache, given["params"], tokens, positions, mask)
        rows.append(logits[0])
    expected = OwnAttention(model).cached_logits(TEXTS[0][:1], TEXTS[0][1:])
    np.testing.assert_allclose(np.stack(rows)[:-1], expected, atol=2e-5, rtol=0)


def test_a_layer_that_does_not_run_is_an_error():
    loop = OwnLoop("llama3")
    loop.model.idle = loop.model.layers.pop()
    text = BLOCK.after.replace("enumerate(model.layers)", "()")
    loop.names = names(text, loop.model)
    with lifted(), pytest.raises(RuntimeError, match=r"each of 2 layers.*ran for \[0\]"):
        loop.names["step"](loop.names["cache"], *loop.arguments(0))
