"""The golden checkpoints that `tests/data/golden_models/make.py` made, as models and as numbers."""

import functools
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from generate_cases import ToyTokenizer
from safetensors.numpy import load_file

from codec_jax.models import LoadedModel, ModelConfig
from codec_jax.models.hf_config import parse_config
from codec_jax.models.hf_weights import load_weights

FOLDER = Path(__file__).parent / "data" / "golden_models"
NAMES = sorted(path.name for path in FOLDER.iterdir() if path.is_dir())
PROMPT_LENS = (30, 27)


class Golden(NamedTuple):
    """One sequence: prompt, then greedy tokens; and float32 logits `[tokens, vocab]`."""

    ids: list[int]
    prompt_len: int
    logits: np.ndarray


@functools.cache
def goldens(name: str) -> list[Golden]:
    """The sequences of a checkpoint."""
    arrays = load_file(FOLDER / name / "golden.safetensors")
    return [
        Golden(arrays[f"ids_{index}"].tolist(), length, arrays[f"logits_{index}"])
        for index, length in enumerate(PROMPT_LENS)
    ]


def config_fields(name: str, spelling: str = "config.json") -> dict:
    """The object of a config file."""
    return json.loads((FOLDER / name / spelling).read_text())


def golden_config(name: str, spelling: str = "config.json") -> ModelConfig:
    """The checkpoint's sizes, in float32."""
    path = FOLDER / name / spelling
    return parse_config(config_fields(name, spelling), path, dtype="float32")


@functools.cache
def golden_model(name: str) -> LoadedModel:
    """The checkpoint in float32, with a tokenizer that ends no text."""
    decoder = load_weights(FOLDER / name, golden_config(name))
    tokenizer = ToyTokenizer(decoder.config.vocab_size)
    tokenizer.stop_ids = ()  # pyright: ignore[reportAttributeAccessIssue]
    return LoadedModel(decoder, tokenizer, name)


def copy_of(name: str, folder: Path, **changes) -> Path:
    """A copy of a checkpoint in `folder`, with changes to its config; None takes a field away."""
    target = folder / name
    shutil.copytree(FOLDER / name, target)
    fields = config_fields(name) | changes
    kept = {key: value for key, value in fields.items() if value is not None}
    (target / "config.json").write_text(json.dumps(kept))
    return target
