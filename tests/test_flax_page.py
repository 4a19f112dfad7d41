"""The page on Flax: its changes are short, and its decoder that is neither answers as it should."""

import numpy as np
import pytest
from flax_readme import blocks, diff_block
from generate_cases import ToyTokenizer
from nnx_model import CONFIG

from codec_jax.generate import Options
from codec_jax.generate_forced import forced_logits
from codec_jax.models import LoadedModel

MAX_CHANGED = 14
DIFFS = [name for name, (language, _) in blocks().items() if language == "diff"]


@pytest.mark.parametrize("name", DIFFS)
def test_changes_are_under_15_lines(name):
    diff = diff_block(name)
    assert 0 < diff.num_removed + diff.num_added <= MAX_CHANGED


def test_the_doors_have_their_changes():
    assert {f"{door} {kind}" for door in ("nnx", "linen") for kind in ("generate", "step")} == set(
        DIFFS
    )


def plain_params(rng):
    shape = (CONFIG.hidden_size, CONFIG.num_q_heads, CONFIG.head_dim)
    kv_shape = (CONFIG.hidden_size, CONFIG.num_kv_heads, CONFIG.head_dim)
    shapes = {"q": shape, "k": kv_shape, "v": kv_shape, "o": (*shape[1:], shape[0])}

    def draw(shape, scale=0.3):
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    layers = [{name: draw(shape) for name, shape in shapes.items()} for _ in range(2)]
    return {"embedding": draw((CONFIG.vocab_size, CONFIG.hidden_size), 1.0), "layers": layers}


def plain_logits(layer, params, text):
    """[tokens, vocab] of a text, attention in float64 NumPy."""

    def attend(q, k, v):
        k, v = (np.repeat(np.float64(x[0]), 2, axis=1) for x in (k, v))
        scores = np.einsum("tnh,snh->nts", np.float64(q[0]), k) * CONFIG.head_dim**-0.5
        scores = np.where(np.tri(len(text), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return np.einsum("nts,snh->tnh", weights, v)[None].astype(np.float32)

    x = params["embedding"][np.array([text])]
    for layer_params in params["layers"]:
        x = layer(layer_params, x, np.arange(len(text), dtype=np.float32)[None], attend)
    return np.asarray(x[0]) @ params["embedding"].T


def test_a_decoder_that_is_neither():
    names = {}
    exec(compile(blocks()["neither"][1], "README.md", "exec"), names)
    params = plain_params(np.random.default_rng(0))
    model = LoadedModel(names["PlainDecoder"](CONFIG, params), ToyTokenizer(32), "plain")
    trunk = np.random.default_rng(1).integers(2, 32, 18).tolist()
    prompts, new = [[*trunk, 3], [*trunk, 4], trunk], [[5, 6, 7], [8], [9, 10]]
    found = forced_logits(model, prompts, new, options=Options(page_size=16, prefill_chunk=32))
    for prompt, ids, rows in zip(prompts, new, found, strict=True):
        expected = plain_logits(names["layer"], params, [*prompt, *ids])
        np.testing.assert_allclose(rows, expected[len(prompt) - 1 : -1], atol=1e-4, rtol=0)
