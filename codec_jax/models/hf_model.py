"""Checkpoint folders in the Hugging Face layout: config.json, safetensors, tokenizer.json."""

from pathlib import Path

from codec_jax.models.config import DTypeName, ModelConfig
from codec_jax.models.hf_config import parse_config, stored_dtype
from codec_jax.models.hf_files import CONFIG, read_json
from codec_jax.models.hf_tokenizer import load_chat_template, load_tokenizer
from codec_jax.models.hf_weights import EMBEDDING, load_weights, stored_dtype_of
from codec_jax.models.loaded import LoadedModel

_DTYPES: dict[str | None, DTypeName] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def read_hf_config(folder: Path, *, dtype: DTypeName | None = None) -> ModelConfig:
    """The sizes of a folder's decoder; no weights are read.

    In `dtype`, or in the one that config.json names, or in that of the stored embedding.

    Raises `ValueError` if the folder holds no config.json, or one that no decoder here fits.
    """
    path = folder / CONFIG
    fields = read_json(path)
    if fields is None:
        raise ValueError(f"`{folder}` must hold {CONFIG}; got a folder without it.")
    dtype = dtype or stored_dtype(fields, path)
    dtype = dtype or _DTYPES.get(stored_dtype_of(folder, EMBEDDING), "float32")
    return parse_config(fields, path, dtype=dtype)


def load_hf(folder: Path, *, dtype: DTypeName | None = None) -> LoadedModel:
    """The model of a checkpoint folder, in its own dtype unless `dtype` is given.

    Everything small is read and checked first, then the weights go to the device one by one.

    Raises `ValueError` for a folder that this library cannot run; the message names the file and
    the field or tensor.
    """
    config = read_hf_config(folder, dtype=dtype)
    tokenizer = load_tokenizer(folder, read_json(folder / CONFIG) or {})
    template = load_chat_template(folder)
    name = folder.resolve().name if folder.name in ("", "..") else folder.name
    return LoadedModel(load_weights(folder, config), tokenizer, name, template)
