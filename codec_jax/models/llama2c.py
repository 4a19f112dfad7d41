"""Reader of the version-0 checkpoint format of github.com/karpathy/llama2.c (`*.bin`).

Seven little-endian int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len;
a negative vocab_size says that the head is not tied to the embedding), then float32 arrays
without any padding. Matrices are [outputs, inputs].
"""

import math
import struct
from pathlib import Path

import numpy as np

from codec_jax.models.config import DTypeName, ModelConfig
from codec_jax.models.llama import Decoder

_HEADER = struct.Struct("<7i")


def load_llama2c(path: str | Path, *, dtype: DTypeName = "float32") -> Decoder:
    """The decoder of a checkpoint, its weights cast to `dtype` on the host; compiles nothing.

    Raises `ValueError` if the header is impossible or the file has not the length that its header
    implies.
    """
    path = Path(path)
    config = read_llama2c_config(path, dtype=dtype)
    sections = _sections(config)
    _check_length(path, sections)
    values = np.memmap(path, dtype="<f4", mode="r", offset=_HEADER.size)
    arrays, offset = {}, 0
    for name, shape in sections.items():
        size = math.prod(shape)
        arrays[name] = values[offset : offset + size].reshape(shape)
        offset += size
    return Decoder.from_arrays(config, _to_params(arrays))


def read_llama2c_config(path: str | Path, *, dtype: DTypeName = "float32") -> ModelConfig:
    """The sizes that a checkpoint's header gives, in `dtype`.

    Raises `ValueError` if the header is impossible.
    """
    path = Path(path)
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    if len(header) != _HEADER.size:
        raise ValueError(
            f"`path` must be a llama2.c checkpoint of at least {_HEADER.size} bytes; got "
            f"{len(header)} bytes in {path}."
        )
    dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len = _HEADER.unpack(header)
    if n_heads < 1 or dim % n_heads:
        raise ValueError(
            f"`path` must have a header whose dim is a multiple of n_heads; got {dim} and "
            f"{n_heads} in {path}. Is it a llama2.c checkpoint of version 0?"
        )
    try:
        return ModelConfig(
            vocab_size=abs(vocab_size),
            hidden_size=dim,
            intermediate_size=hidden_dim,
            num_layers=n_layers,
            num_q_heads=n_heads,
            num_kv_heads=n_kv_heads,
            head_dim=dim // n_heads,
            max_context=seq_len,
            rope_pairing="interleaved",
            tie_embeddings=vocab_size > 0,
            dtype=dtype,
        )
    except ValueError as error:
        raise ValueError(f"`path` names {path}, whose header is not usable. {error}") from error


def _sections(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every array of the file, in the order of the file."""
    layers, hidden, intermediate = config.num_layers, config.hidden_size, config.intermediate_size
    kv_size = config.num_kv_heads * config.head_dim
    vocabulary = (config.vocab_size, hidden)
    rope_table = (config.max_context, config.head_dim // 2)
    head = {} if config.tie_embeddings else {"lm_head": vocabulary}
    return {
        "embedding": vocabulary,
        "attention_norm": (layers, hidden),
        "q_proj": (layers, hidden, hidden),
        "k_proj": (layers, kv_size, hidden),
        "v_proj": (layers, kv_size, hidden),
        "o_proj": (layers, hidden, hidden),
        "mlp_norm": (layers, hidden),
        "gate_proj": (layers, intermediate, hidden),
        "down_proj": (layers, hidden, intermediate),
        "up_proj": (layers, intermediate, hidden),
        "final_norm": (hidden,),
        "rope_cos": rope_table,
        "rope_sin": rope_table,
        **head,
    }


def _check_length(path: Path, sections: dict[str, tuple[int, ...]]) -> None:
    expected_bytes = _HEADER.size + 4 * sum(math.prod(shape) for shape in sections.values())
    actual_bytes = path.stat().st_size
    if actual_bytes != expected_bytes:
        raise ValueError(
            f"`path` must have the length that its header implies, {expected_bytes} bytes; got "
            f"{actual_bytes} bytes in {path}. Copy the file again."
        )


def _to_params(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The decoder's parameters: RoPE tables dropped, matrices of layers as [inputs, outputs]."""
    return {
        name: array.swapaxes(1, 2) if name.endswith("_proj") else array
        for name, array in arrays.items()
        if not name.startswith("rope_")
    }
