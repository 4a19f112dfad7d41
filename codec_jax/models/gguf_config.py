"""From the metadata of a GGUF file to a `ModelConfig`, or a refusal that names the key.

A key of the architecture that is not known here would change the mathematics, so it is refused
unless its value turns it off.
"""

from collections.abc import Mapping
from typing import Any

from codec_jax.models.config import DTypeName, ModelConfig, RopePairing
from codec_jax.models.gguf_file import GGUFFile, dequantise, stored_dtype
from codec_jax.models.number_checks import (
    check_positive,
    check_positive_integer,
    in_words_of,
    is_integer,
)
from codec_jax.models.rope_scaling import FactorsRope, LinearRope, RopeScaling, YarnRope

EMBEDDING = "token_embd.weight"
ROPE_FACTORS = "rope_freqs.weight"

# The converter of llama.cpp permutes q and k of llama, and of no other architecture here.
_PAIRINGS: dict[str, RopePairing] = {"llama": "interleaved", "qwen2": "halves", "qwen3": "halves"}
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_layers": "block_count",
    "num_q_heads": "attention.head_count",
    "max_context": "context_length",
}
_EPSILON = "attention.layer_norm_rms_epsilon"
_ORIGINAL = "rope.scaling.original_context_length"
_WORDS = {
    **_SIZES,
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
    "rms_norm_eps": _EPSILON,
    "factor": "rope.scaling.factor",
    "original_max_context": _ORIGINAL,
}
_KNOWN = {
    *_SIZES.values(),
    *(_EPSILON, "attention.head_count_kv", "attention.key_length", "attention.value_length"),
    *("vocab_size", "attention.sliding_window", "rope.freq_base", "rope.dimension_count"),
    *("rope.scaling.type", "rope.scaling.factor", _ORIGINAL),
    *("rope.scaling.finetuned", "rope.scale_linear"),
}
# What a key that is not known must hold, so that there is nothing to honour.
_INERT = (None, False, 0, "", [])
_INERT_VALUES = {
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_beta_fast": 32.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}


def parse_gguf_config(file: GGUFFile, *, dtype: DTypeName | None = None) -> ModelConfig:
    """The decoder that a file describes, in `dtype` or in the one that it is stored in.

    Biases are there where the file has them for its first layer, the head is tied where it has no
    tensor of its own.

    Raises:
      ValueError: an architecture, a key or a value that this decoder does not have; the message
        names it.
    """
    _check_general(file)
    arch = file.fields["general.architecture"]
    keys = _keys_of(file, arch)
    _check_keys(keys, file, arch)
    sizes: dict[str, Any] = {ours: _size(keys, key, file, arch) for ours, key in _SIZES.items()}
    kv_heads = "attention.head_count_kv"
    kv_heads = _size(keys, kv_heads if kv_heads in keys else _SIZES["num_q_heads"], file, arch)
    try:
        return ModelConfig(
            **sizes,
            vocab_size=_vocab_size(file, keys),
            num_kv_heads=kv_heads,
            head_dim=_head_dim(keys, sizes),
            rope_theta=_number(keys, "rope.freq_base", default=10000.0),
            rope_pairing=_PAIRINGS[arch],
            rope_scaling=_rope_scaling(file, keys, sizes["max_context"]),
            rms_norm_eps=_number(keys, _EPSILON),
            tie_embeddings="output.weight" not in file.tensors,
            qkv_bias="blk.0.attn_q.bias" in file.tensors,
            o_bias="blk.0.attn_output.bias" in file.tensors,
            mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
            qk_norm=arch == "qwen3",
            dtype=dtype or stored_dtype(file),
        )
    except ValueError as error:
        raise ValueError(
            f"{file.path} describes no decoder that can be: {in_words_of(_WORDS, error)}"
        ) from error


def _check_general(file: GGUFFile) -> None:
    rules = {
        "general.architecture": (tuple(_PAIRINGS), None),
        "general.type": (("model",), "model"),
        "split.count": ((0, 1), 0),
    }
    for name, (allowed, default) in rules.items():
        value = file.fields.get(name, default)
        if not isinstance(value, str | int) or value not in allowed:
            known = ", ".join(map(str, allowed))
            raise ValueError(f"`{name}` in {file.path} must be one of {known}; got {value!r}.")


def _keys_of(file: GGUFFile, arch: str) -> dict[str, Any]:
    """The keys of the architecture, without its name in front."""
    prefix = f"{arch}."
    named = {name: value for name, value in file.fields.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): value for name, value in named.items()}


def _check_keys(keys: Mapping[str, Any], file: GGUFFile, arch: str) -> None:
    for key, value in keys.items():
        is_inert = value == _INERT_VALUES[key] if key in _INERT_VALUES else value in _INERT
        if key not in _KNOWN and not is_inert:
            raise ValueError(
                f"`{arch}.{key}` in {file.path} must be absent: this decoder has nothing like it;"
                f" got {value!r}."
            )
    window = keys.get("attention.sliding_window") or 0
    if not is_integer(window) or 0 < window < _size(keys, "context_length", file, arch):
        raise ValueError(
            f"`{arch}.attention.sliding_window` in {file.path} must be absent: attention here sees"
            f" all of its context; got {window!r}."
        )


def _size(keys: Mapping[str, Any], key: str, file: GGUFFile, arch: str) -> int:
    value: Any = keys.get(key)
    check_positive_integer(f"{arch}.{key}", value, where=f" in {file.path}")
    return value


def _vocab_size(file: GGUFFile, keys: Mapping[str, Any]) -> int:
    """Rows of the embedding."""
    if EMBEDDING not in file.tensors:
        raise ValueError(f"`{EMBEDDING}` must be among its tensors; got none.")
    num_rows = file.tensors[EMBEDDING].shape[0]
    if keys.get("vocab_size", num_rows) != num_rows:
        raise ValueError(
            f"`vocab_size` must be {num_rows}, the rows of {EMBEDDING}; got {keys['vocab_size']!r}."
        )
    return num_rows


def _head_dim(keys: Mapping[str, Any], sizes: Mapping[str, int]) -> int:
    hidden_size, num_heads = sizes["hidden_size"], sizes["num_q_heads"]
    if "attention.key_length" not in keys and hidden_size % num_heads:
        raise ValueError(
            f"`attention.key_length` must be given where `embedding_length` is no multiple of"
            f" `attention.head_count`; got {hidden_size} and {num_heads}."
        )
    head_dim = keys.get("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.get(key, head_dim) != head_dim:
            raise ValueError(f"`{key}` must be {head_dim}, all of a head; got {keys[key]!r}.")
    return head_dim


def _rope_scaling(file: GGUFFile, keys: Mapping[str, Any], max_context: int) -> RopeScaling | None:
    """Scaling by factors in the file (llama3 is stored so), or by its metadata."""
    factor = _scaling_factor(keys)
    kind = keys.get("rope.scaling.type", "none" if factor is None else "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"`rope.scaling.type` must be one of none, linear, yarn; got {kind!r}.")
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise ValueError(
                f"`rope.scaling.type` must be absent beside {ROPE_FACTORS}; got {kind!r}."
            )
        return FactorsRope(
            factors=tuple(dequantise(file, ROPE_FACTORS).astype(float).ravel().tolist())
        )
    if kind == "none":
        if factor not in (None, 1):
            raise ValueError(
                f"`rope.scaling.factor` must be absent from RoPE of type none; got {factor!r}."
            )
        return None
    factor = _number({"rope.scaling.factor": factor}, "rope.scaling.factor")
    if kind == "linear":
        return LinearRope(factor=factor)
    return YarnRope(factor=factor, original_max_context=keys.get(_ORIGINAL, max_context))


def _scaling_factor(keys: Mapping[str, Any]) -> Any:
    """What the key of today or of old says; None where there is nothing.

    A factor without a type is linear scaling (llama.cpp, src/llama-model.cpp, load_hparams); in the
    old key 0 is none.
    """
    new, old = keys.get("rope.scaling.factor"), keys.get("rope.scale_linear") or None
    if new is not None and old not in (None, new):
        raise ValueError(
            f"`rope.scale_linear` must be absent beside `rope.scaling.factor`; got {old!r}."
        )
    return old if new is None else new


def _number(keys: Mapping[str, Any], key: str, *, default: float | None = None) -> float:
    value = keys.get(key, default)
    check_positive(key, value)
    return float(value)
