"""GGUF files for tests: written with gguf.GGUFWriter, their numbers by formulas of the format."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from tokenizers import pre_tokenizers

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CONTROL, USER_DEFINED = 3, 4
BLOCK = 32
TEMPLATE = "{{ bos_token }}{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}"


def tokenizer_fields(**changes) -> dict[str, Any]:
    """Bytes, three merges, and four tokens at the end; None takes a field away."""
    tokens = [*ALPHABET, "ab", "abc", "Ġa", "<s>", "</s>", "<u>", "</u>"]
    types = [1] * (len(tokens) - 4) + [CONTROL] * 3 + [USER_DEFINED]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["a b", "ab c", "Ġ a"],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        "tokenizer.chat_template": TEMPLATE,
    }
    changes = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return {name: value for name, value in (fields | changes).items() if value is not None}


def model_fields(arch: str = "llama", **changes) -> dict[str, Any]:
    """A tiny decoder with 3 query heads for each KV head."""
    fields = {
        "block_count": 2,
        "context_length": 128,
        "embedding_length": 96,
        "feed_forward_length": 64,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | {name.replace("__", "."): value for name, value in changes.items()}
    return {f"{arch}.{name}": value for name, value in fields.items() if value is not None}


def tensor_shapes(vocab_size: int = 263) -> dict[str, tuple[int, ...]]:
    """Of the decoder of `model_fields`, as NumPy has them: [outputs, inputs]."""
    outside = {"token_embd": (vocab_size, 96), "output_norm": (96,), "output": (vocab_size, 96)}
    layer = {
        "attn_norm": (96,),
        "attn_q": (96, 96),
        "attn_k": (32, 96),
        "attn_v": (32, 96),
        "attn_output": (96, 96),
        "ffn_norm": (96,),
        "ffn_gate": (64, 96),
        "ffn_up": (64, 96),
        "ffn_down": (96, 64),
    }
    names = outside | {f"blk.{i}.{name}": shape for i in range(2) for name, shape in layer.items()}
    return {f"{name}.weight": shape for name, shape in names.items()}


def write_gguf(path: Path, fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """A file of these fields; a tensor is a float32 array or (kind, stored bytes)."""
    arch = fields.get("general.architecture", "llama")
    writer = GGUFWriter(path, arch)
    for name, value in fields.items():
        if name != "general.architecture":
            _add_field(writer, name, value)
    for name, tensor in tensors.items():
        kind, stored = tensor if isinstance(tensor, tuple) else ("F32", tensor)
        writer.add_tensor(name, stored, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_field(writer: GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    elif isinstance(value, str):
        writer.add_string(name, value)
    else:
        writer.add_array(name, value)


def stored_and_exact(
    kind: str, shape: tuple[int, ...], rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Random bytes of a kind `[outputs, bytes]`, and the numbers that they stand for in float64.

    A block of 32 numbers of a row is a float16 scale d, for Q4_1 also a float16 offset m, and then
    integers: Q8_0 d * q; the 4-bit kinds hold number i in the low half of byte i and number 16 + i
    in its high half, Q4_0 d * (q - 8), Q4_1 d * q + m.
    """
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
        values = rng.normal(0, 0.1, shape).astype(dtype)
        stored = values.view(np.uint8) if kind == "BF16" else values
        return stored, values.astype(np.float64)
    blocks = (*shape[:-1], shape[-1] // BLOCK)
    scales = rng.normal(0, 0.01, (*blocks, 2 if kind == "Q4_1" else 1)).astype(np.float16)
    num_bytes = BLOCK if kind == "Q8_0" else BLOCK // 2
    numbers = rng.integers(0, 256, (*blocks, num_bytes), np.uint8)
    stored = np.concatenate([scales.view(np.uint8), numbers], axis=-1)
    d = scales[..., :1].astype(np.float64)
    if kind == "Q8_0":
        exact = d * numbers.view(np.int8)
    else:
        halves = np.concatenate([numbers & 15, numbers >> 4], axis=-1).astype(np.float64)
        exact = d * (halves - 8) if kind == "Q4_0" else d * halves + scales[..., 1:]
    return stored.reshape(*shape[:-1], -1), exact.reshape(shape)
