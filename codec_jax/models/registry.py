"""Models by name or path."""

import dataclasses
from pathlib import Path

from codec_jax.models.byte_tokenizer import ByteTokenizer
from codec_jax.models.config import DTypeName, ModelConfig
from codec_jax.models.gguf_model import load_gguf, read_gguf_config
from codec_jax.models.hf_model import load_hf, read_hf_config
from codec_jax.models.llama import init_decoder
from codec_jax.models.llama2c import load_llama2c, read_llama2c_config
from codec_jax.models.loaded import LoadedModel
from codec_jax.models.memory import check_fits
from codec_jax.models.presets import PRESETS
from codec_jax.models.tokenizer import Llama2cTokenizer

_STORIES = "stories260k"
_STORIES_DIR = Path(__file__).parent / "data" / _STORIES


def load_model(name: str, *, dtype: DTypeName | None = None) -> LoadedModel:
    """The model of a name or path, in its own dtype unless `dtype` is given.

    `name` is one of `model_names()`, a folder with config.json, safetensors and tokenizer.json or a
    GGUF file (`*.gguf`; needs the package `gguf`), which is dequantised; "~" is the home folder.
    "stories260k" is a trained model of 260 thousand parameters (float32) that writes short stories;
    names that start with "random-" are random weights (bfloat16) in the sizes of real models, for
    measurements.

    Raises `ValueError` for an unknown name, for files that cannot be run, and before anything is
    allocated if the device says that it has less memory than the weights take.
    """
    config = model_config(name, dtype=dtype)
    check_fits(config, name)
    if name == _STORIES:
        return _load_stories(config.dtype)
    if name in PRESETS:
        return LoadedModel(init_decoder(config), _preset_tokenizer(config), name)
    path = _path(name)
    return load_hf(path, dtype=dtype) if path.is_dir() else load_gguf(path, dtype=dtype)


def model_config(name: str, *, dtype: DTypeName | None = None) -> ModelConfig:
    """The sizes of the model that `load_model` would load; no weights are read or made.

    Raises `ValueError` as `load_model` does.
    """
    if name == _STORIES:
        return read_llama2c_config(_STORIES_DIR / "stories260K.bin", dtype=dtype or "float32")
    if name in PRESETS:
        return dataclasses.replace(PRESETS[name], dtype=dtype or PRESETS[name].dtype)
    check_model_name(name)
    path = _path(name)
    read = read_hf_config if path.is_dir() else read_gguf_config
    return read(path, dtype=dtype)


def model_names() -> tuple[str, ...]:
    """Every name that `load_model` takes, besides paths."""
    return (_STORIES, *PRESETS)


def check_model_name(name: str, *, argument: str = "name") -> None:
    """Raises `ValueError` for what `load_model` takes for neither a name nor a path.

    `argument` is what the message calls it.
    """
    path = _path(name)
    try:
        exists = path.is_dir() or (path.is_file() and path.suffix == ".gguf")
    except OSError as error:
        raise ValueError(
            f"`{argument}` must be a path that can be read; got {name!r}: {error.strerror}."
        ) from error
    if not name or not (exists or name in model_names()):
        raise ValueError(
            f"`{argument}` must be a folder with config.json, a .gguf file or one of"
            f" {', '.join(model_names())}; got {name!r}."
        )


def _load_stories(dtype: DTypeName) -> LoadedModel:
    decoder = load_llama2c(_STORIES_DIR / "stories260K.bin", dtype=dtype)
    return LoadedModel(decoder, _stories_tokenizer(), _STORIES)


def _stories_tokenizer() -> Llama2cTokenizer:
    return Llama2cTokenizer.from_file(_STORIES_DIR / "tok512.bin")


def _preset_tokenizer(config: ModelConfig) -> Llama2cTokenizer | ByteTokenizer:
    tokenizer = _stories_tokenizer()
    fits = config.vocab_size == tokenizer.vocab_size
    return tokenizer if fits else ByteTokenizer(config.vocab_size)


def _path(name: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError:  # "~" of nobody here
        return Path(name)
