"""Models, golden cases and spies for the tests of generation."""

import contextlib
import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
from oracle_llama import OracleLlama, read_llama2c

from codec_jax.models import Decoder, LoadedModel, ModelConfig, load_model, param_shapes
from codec_jax.sampling import Sampling

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "codec_jax" / "models" / "data" / "stories260k" / "stories260K.bin"
GOLDEN = json.loads((ROOT / "tests" / "data" / "golden" / "stories260K_greedy.json").read_text())
CASES = GOLDEN["cases"]
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@functools.cache
def stories() -> LoadedModel:
    """The trained model in float32."""
    return load_model("stories260k")


@functools.cache
def stories_oracle() -> OracleLlama:
    """The same model in float64 NumPy."""
    return read_llama2c(CHECKPOINT)


@functools.cache
def stories_hidden_oracle() -> OracleLlama:
    """An oracle whose "logits" are the hidden states after the final norm."""
    oracle = stories_oracle()
    return dataclasses.replace(oracle, head=np.eye(oracle.head.shape[1]))


def golden_sampling(case) -> Sampling:
    """Greedy, 201 tokens in all, as the golden ids were made."""
    return Sampling(max_new_tokens=201 - len(case["prompt_ids"]))


def golden_new_ids(case, limit: int | None = None) -> tuple[int, ...]:
    """The golden ids after the prompt, at most `limit` of them."""
    return tuple(case["ids"][len(case["prompt_ids"]) :][:limit])


@contextlib.contextmanager
def compilations():
    """A list that grows by one at every compilation inside the block."""
    events = []

    def record(event, duration_secs, **_):
        if event == COMPILE_EVENT:
            events.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(record)


class ToyTokenizer:
    """Ids are characters 'a', 'b', ...; id 1 ends a text; BOS is optional."""

    stop_ids = (1,)

    def __init__(self, vocab_size: int, bos_id: int | None = None):
        self.vocab_size, self.bos_id = vocab_size, bos_id

    def encode(self, text, *, bos=True):
        start = [self.bos_id] if bos and self.bos_id is not None else []
        return start + [ord(character) - ord("a") for character in text]

    def decode(self, ids):
        return "".join(chr(ord("a") + token) for token in ids if token != self.bos_id)


TOY_VOCAB = 32


@functools.cache
def toy_model(bos_id: int | None = None) -> LoadedModel:
    """A model whose logits are exactly a row of a table: they depend on the last token alone.

    Embeddings are one-hot and attention and MLP add zero, so no batch changes a bit of them.
    """
    config = ModelConfig(
        vocab_size=TOY_VOCAB,
        hidden_size=TOY_VOCAB,
        intermediate_size=4,
        num_layers=1,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=4,
        max_context=256,
    )
    rng = np.random.default_rng(5)
    params = {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in param_shapes(config).items()
    }
    params |= {name: np.ones_like(x) for name, x in params.items() if name.endswith("_norm")}
    params |= {name: np.zeros_like(params[name]) for name in ("o_proj", "down_proj")}
    params["embedding"] = np.eye(TOY_VOCAB, dtype=np.float32)
    return LoadedModel(Decoder.from_arrays(config, params), ToyTokenizer(TOY_VOCAB, bos_id), "toy")


def toy_greedy(token: int, limit: int) -> tuple[int, ...]:
    """What the toy model says greedily after `token`."""
    table = np.asarray(toy_model().decoder.arrays()["lm_head"])
    ids = []
    while len(ids) < limit and (not ids or ids[-1] != 1):
        ids.append(int(table[:, ids[-1] if ids else token].argmax()))
    return tuple(ids)
