"""From a checkpoint's config.json to a `ModelConfig`, or a refusal that names the field.

Both spellings are read: `rope_theta` and `rope_scaling` with `torch_dtype`, and transformers 5's
`rope_parameters` with `dtype`.
"""

from pathlib import Path
from typing import Any, get_args

from codec_jax.models.config import DTypeName, ModelConfig
from codec_jax.models.hf_config_rules import SIZES, Family, Fields, check_fields, value_or
from codec_jax.models.hf_rope import ORIGINAL, read_rope
from codec_jax.models.number_checks import in_words_of

_FAMILIES = {
    "llama": Family("LlamaForCausalLM", has_bias_fields=True),
    "mistral": Family("MistralForCausalLM", window=4096),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": Family("Qwen3ForCausalLM", has_bias_fields=True, qk_norm=True, head_dim=128),
}
_WORDS = {**SIZES, "num_kv_heads": "num_key_value_heads", "original_max_context": ORIGINAL}


def parse_config(fields: Fields, path: Path, *, dtype: DTypeName) -> ModelConfig:
    """The decoder that a config.json describes, in `dtype`.

    Args:
      fields: the object of the file.
      path: of the file, for messages.
      dtype: of the parameters; see `stored_dtype`.

    Raises:
      ValueError: a family, a field or a value that this decoder does not have; the message names
        it.
    """
    family = _family(fields, path)
    check_fields(fields, family, path)
    sizes: dict[str, Any] = {ours: fields[theirs] for ours, theirs in SIZES.items()}
    has_bias = family.has_bias_fields and bool(fields.get("attention_bias"))
    try:
        theta, scaling = read_rope(fields)
        return ModelConfig(
            **sizes,
            num_kv_heads=value_or(fields.get("num_key_value_heads"), sizes["num_q_heads"]),
            head_dim=_head_dim(fields, family),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_embeddings=bool(fields.get("tie_word_embeddings")),
            qkv_bias=family.qkv_bias or has_bias,
            o_bias=has_bias,
            mlp_bias=family.architecture == "LlamaForCausalLM" and bool(fields.get("mlp_bias")),
            qk_norm=family.qk_norm,
            dtype=dtype,
        )
    except ValueError as error:
        raise ValueError(
            f"{path} describes no decoder that can be: {in_words_of(_WORDS, error)}"
        ) from error


def stored_dtype(fields: Fields, path: Path) -> DTypeName | None:
    """The dtype that a config.json says its parameters have; None where it does not say.

    Raises `ValueError` for one that a decoder cannot have, and for two that differ.
    """
    given: dict[str, DTypeName] = {
        field: _dtype(fields[field], field, path)
        for field in ("dtype", "torch_dtype")
        if fields.get(field) not in (None, "auto")
    }
    if len(set(given.values())) > 1:
        raise ValueError(
            f"`torch_dtype` in {path} must be absent beside `dtype`, or the same; got"
            f" {fields['torch_dtype']!r} and {fields['dtype']!r}."
        )
    return next(iter(given.values()), None)


def _dtype(value: Any, field: str, path: Path) -> DTypeName:
    for name in get_args(DTypeName):
        if value in (name, f"torch.{name}"):
            return name
    known = ", ".join(get_args(DTypeName))
    raise ValueError(f"`{field}` in {path} must be one of {known}; got {value!r}.")


def _family(fields: Fields, path: Path) -> Family:
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ValueError(f"`model_type` in {path} must be one of {known}; got {model_type!r}.")
    family = _FAMILIES[model_type]
    architectures = value_or(fields.get("architectures"), [family.architecture])
    if architectures != [family.architecture]:
        raise ValueError(
            f"`architectures` in {path} must be {[family.architecture]} for {model_type}; got"
            f" {architectures!r}."
        )
    return family


def _head_dim(fields: Fields, family: Family) -> int:
    given = value_or(fields.get("head_dim"), family.head_dim)
    if given is not None:
        return given
    hidden_size, num_heads = fields["hidden_size"], fields["num_attention_heads"]
    if hidden_size % num_heads:
        raise ValueError(
            f"`head_dim` must be given where `hidden_size` is no multiple of"
            f" `num_attention_heads`; got {hidden_size} and {num_heads}."
        )
    return hidden_size // num_heads
