"""Models in one GGUF file: metadata, tensors, tokenizer and chat template."""

from pathlib import Path

from codec_jax.models.config import DTypeName, ModelConfig
from codec_jax.models.gguf_config import EMBEDDING, ROPE_FACTORS, parse_gguf_config
from codec_jax.models.gguf_file import GGUFFile, check_kinds, dequantise, read_gguf
from codec_jax.models.gguf_tokenizer import gguf_chat_template, gguf_tokenizer
from codec_jax.models.llama import Decoder
from codec_jax.models.loaded import LoadedModel
from codec_jax.models.param_places import check_names, check_shapes, param_places
from codec_jax.models.param_stream import ParamStream

_OUTSIDE = {
    "embedding": EMBEDDING,
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
}
_LAYER = "blk.{layer}"
_IN_LAYER = {
    "attention_norm": f"{_LAYER}.attn_norm.weight",
    "mlp_norm": f"{_LAYER}.ffn_norm.weight",
    "q_norm": f"{_LAYER}.attn_q_norm.weight",
    "k_norm": f"{_LAYER}.attn_k_norm.weight",
    "o_proj": f"{_LAYER}.attn_output.weight",
    "o_bias": f"{_LAYER}.attn_output.bias",
    **{f"{x}_proj": f"{_LAYER}.attn_{x}.weight" for x in "qkv"},
    **{f"{x}_bias": f"{_LAYER}.attn_{x}.bias" for x in "qkv"},
    **{f"{x}_proj": f"{_LAYER}.ffn_{x}.weight" for x in ("gate", "up", "down")},
    **{f"{x}_bias": f"{_LAYER}.ffn_{x}.bias" for x in ("gate", "up", "down")},
}


def read_gguf_config(path: Path, *, dtype: DTypeName | None = None) -> ModelConfig:
    """The sizes of a file's decoder; no weights are read.

    In `dtype`, or in the one that all matrices are stored in; bfloat16 where they are quantised.

    Raises `ValueError` for a file that no decoder here fits.
    """
    return parse_gguf_config(read_gguf(path), dtype=dtype)


def load_gguf(path: Path, *, dtype: DTypeName | None = None) -> LoadedModel:
    """The model of a GGUF file, dequantised; `dtype` as in `read_gguf_config`.

    Everything small is read and checked first, then the weights go to the device one by one.

    Raises `ValueError` for a file that this library cannot run; the message names the file and the
    key or tensor.
    """
    file = read_gguf(path)
    config = parse_gguf_config(file, dtype=dtype)
    tokenizer, template = gguf_tokenizer(file), gguf_chat_template(file)
    if tokenizer.vocab_size != config.vocab_size:
        raise ValueError(
            f"`tokenizer.ggml.tokens` in {path} must be {config.vocab_size}, one for each row of"
            f" {EMBEDDING}; got {tokenizer.vocab_size}."
        )
    return LoadedModel(_load_weights(file, config), tokenizer, path.name, template)


def _load_weights(file: GGUFFile, config: ModelConfig) -> Decoder:
    places = param_places(config, _OUTSIDE, _IN_LAYER)
    check_names(places, file.tensors, file.path, may_be_left=lambda name: name == ROPE_FACTORS)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    check_shapes(places, shapes, config, file.path)
    check_kinds(file, places)
    stream = ParamStream(config)
    for name, (param, layer) in places.items():
        tensor = dequantise(file, name, config.array_dtype)
        stream.put(param, tensor, layer=layer, place=f"`{name}` in {file.path}")
    return stream.finish()
