"""Configs of the golden checkpoints with some fields changed, parsed or refused."""

from pathlib import Path

import pytest
from golden_models import config_fields

from codec_jax.models import ModelConfig
from codec_jax.models.hf_config import parse_config

PATH = Path("folder/config.json")


def parse(name="llama2", spelling="config_v4.json", **changes) -> ModelConfig:
    """The config of a golden checkpoint with some fields changed."""
    return parse_config(config_fields(name, spelling) | changes, PATH, dtype="float32")


def refusal(*args, **changes) -> str:
    """What `parse` says when it refuses."""
    with pytest.raises(ValueError, match="`") as error:
        parse(*args, **changes)
    return str(error.value)
