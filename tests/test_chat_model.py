"""A real model, SmolLM2-135M-Instruct in Q4_1, from the file that `make test-model` fetches."""

import os

import pytest
from conftest import CHAT_MODEL_VARIABLE

from codec_jax.generate import generate
from codec_jax.models import load_model
from codec_jax.sampling import Sampling

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model():
    return load_model(os.environ[CHAT_MODEL_VARIABLE]).as_chat()


def test_sizes(model):
    config = model.decoder.config
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.num_layers, config.vocab_size, config.dtype) == (30, 49152, "bfloat16")
    assert config.tie_embeddings and config.rope_theta == 100_000


def test_tokens(model):
    tokenizer = model.tokenizer
    ids = tokenizer.encode("What is 2048?")
    assert ids[0] == 1 and tokenizer.stop_ids == (2,)
    assert ids.count(1) == 3, "system, user, assistant"
    assert len(tokenizer.encode("2048", bos=False)) == 4
    text = "Straße 12, 東京 🙂\n\tdone"
    assert tokenizer.decode(tokenizer.encode(text, bos=False)) == text


def test_answers(model):
    (france,) = generate(
        model, ["What is the capital of France?"], sampling=Sampling(max_new_tokens=32)
    )
    assert "Paris" in france.text
    assert france.finish_reason == "stop"
