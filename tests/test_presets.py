"""Presets with random weights: their arithmetic on a small scale, their tokenizer."""

import dataclasses

import jax
import numpy as np
import pytest
from test_models import logits_of

from codec_jax.models import Tokenizer, init_decoder, registry
from codec_jax.models.byte_tokenizer import ByteTokenizer
from codec_jax.models.presets import PRESETS

SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 3,
    "max_context": 512,
}


def small(name):
    return dataclasses.replace(PRESETS[name], **SMALL)


@pytest.mark.parametrize("name", PRESETS)
def test_a_small_copy_has_activations_of_unit_scale(name):
    decoder = init_decoder(dataclasses.replace(small(name), dtype="float32"))
    logits = logits_of(decoder, np.arange(20))
    assert 0.5 < logits.std() < 2 and np.isfinite(logits).all()
    assert not np.allclose(decoder.arrays()["q_proj"][0], decoder.arrays()["q_proj"][1])


@pytest.mark.parametrize(
    ("few", "many"),
    [({"num_layers": 4}, {"num_layers": 32}), ({"vocab_size": 20_000}, {"vocab_size": 200_000})],
)
def test_weights_are_drawn_piece_by_piece(few, many):
    """The temporaries of more layers, or of a larger vocabulary, take no more memory."""
    from codec_jax.models.llama import _init_params

    def temporaries(changes):
        config = dataclasses.replace(small("random-codellama-7b"), **changes)
        compiled = _init_params.lower(np.uint32(0), config=config).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporaries(many) < temporaries(few) * 1.1 + 10_000


def test_every_row_of_a_vocabulary_is_drawn_once():
    config = dataclasses.replace(small("random-llama-3.1-8b"), vocab_size=20_000, num_layers=1)
    arrays = init_decoder(config).arrays()
    for name in ("embedding", "lm_head"):
        rows = np.asarray(arrays[name], np.float32)
        assert len(np.unique(rows, axis=0)) == 20_000, name
        assert rows.std() == pytest.approx(64**-0.5, rel=0.01)
    assert not np.array_equal(arrays["embedding"], arrays["lm_head"])
    np.testing.assert_array_equal(arrays["final_norm"], 1)


def test_load_model_makes_a_preset(monkeypatch):
    monkeypatch.setitem(registry.PRESETS, "random-qwen3-4b", small("random-qwen3-4b"))
    loaded = registry.load_model("random-qwen3-4b", dtype="float16")
    assert loaded.name == "random-qwen3-4b"
    assert {str(array.dtype) for array in loaded.decoder.arrays().values()} == {"float16"}
    assert isinstance(loaded.tokenizer, ByteTokenizer)
    assert loaded.tokenizer.vocab_size == 300
    assert isinstance(jax.tree.leaves(loaded.decoder.arrays())[0], jax.Array)


def test_bytes_are_tokens():
    tokenizer = ByteTokenizer(300)
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("é") == [0, 0xC3 + 1, 0xA9 + 1]
    assert tokenizer.encode("", bos=False) == []
    assert tokenizer.decode([0, 0xC3 + 1, 0xA9 + 1, 257, 299]) == "é··"
    assert tokenizer.decode([0xC3 + 1]) == "\ufffd"
    assert tokenizer.stop_ids == ()
    with pytest.raises(ValueError, match=r"^`ids` must be in \[0, 300\); got 300\.$"):
        tokenizer.decode([300])
    with pytest.raises(ValueError, match="surrogates"):
        tokenizer.encode("\ud800")
    with pytest.raises(ValueError, match=r"^`vocab_size` must be at least 257, .*; got 256\.$"):
        ByteTokenizer(256)
