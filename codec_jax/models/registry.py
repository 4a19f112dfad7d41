"""Models by name."""

from collections.abc import Callable
from pathlib import Path

from codec_jax.models.config import DTypeName, ModelConfig
from codec_jax.models.hf_model import load_hf
from codec_jax.models.llama import Decoder, init_decoder
from codec_jax.models.llama2c import load_llama2c
from codec_jax.models.loaded import LoadedModel
from codec_jax.models.tokenizer import Llama2cTokenizer

_STORIES_DIR = Path(__file__).parent / "data" / "stories260k"


def load_model(name: str, *, dtype: DTypeName | None = None) -> LoadedModel:
    """The named model, in its own dtype unless `dtype` is given.

    `name` is one of `model_names()`, or a folder with config.json, safetensors and tokenizer.json.
    "stories260k" is a trained model of 260 thousand parameters (float32) that writes short stories;
    "random-4l-128" has random weights (bfloat16) and the shapes of a layer of a real model, for
    benchmarks. Raises `ValueError` for an unknown name, and for a folder that cannot be run.
    """
    if name not in _PRESETS:
        return load_hf(_existing_path(name), dtype=dtype)
    tokenizer = Llama2cTokenizer.from_file(_STORIES_DIR / "tok512.bin")
    return LoadedModel(_PRESETS[name](dtype), tokenizer, name)


def model_names() -> tuple[str, ...]:
    """Every name that `load_model` takes."""
    return tuple(_PRESETS)


def _existing_path(name: str) -> Path:
    path = Path(name)
    if not path.is_dir():
        raise ValueError(
            f"`name` must be a folder with config.json or one of {', '.join(model_names())}; got"
            f" {name!r}."
        )
    return path


def _load_stories260k(dtype: DTypeName | None) -> Decoder:
    return load_llama2c(_STORIES_DIR / "stories260K.bin", dtype=dtype or "float32")


def _init_random_4l_128(dtype: DTypeName | None) -> Decoder:
    config = ModelConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=2816,
        num_layers=4,
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=128,
        max_context=4096,
        dtype=dtype or "bfloat16",
    )
    return init_decoder(config)


_PRESETS: dict[str, Callable[[DTypeName | None], Decoder]] = {
    "stories260k": _load_stories260k,
    "random-4l-128": _init_random_4l_128,
}
