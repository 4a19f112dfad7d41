"""From a checkpoint's config.json to a `ModelConfig`, or a refusal that names the field.

Both spellings are read: `rope_theta` and `rope_scaling` with `torch_dtype`, and transformers 5's
`rope_parameters` with `dtype`. A field that would change the mathematics is honoured or refused.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from codec_jax.models.config import DTypeName, ModelConfig
from codec_jax.models.hf_rope import read_rope

Fields = Mapping[str, Any]


class _Family(NamedTuple):
    """What the class of a `model_type` fixes, whatever the file says."""

    architecture: str
    has_bias_fields: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    window: int | None = None  # where the file has no `sliding_window`


_FAMILIES = {
    "llama": _Family("LlamaForCausalLM", has_bias_fields=True),
    "mistral": _Family("MistralForCausalLM", window=4096),
    "qwen2": _Family("Qwen2ForCausalLM", qkv_bias=True),
    "qwen3": _Family("Qwen3ForCausalLM", has_bias_fields=True, qk_norm=True, head_dim=128),
}
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_q_heads": "num_attention_heads",
    "max_context": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}
_KNOWN = {
    *_SIZES.values(),
    *("num_key_value_heads", "head_dim", "attention_bias", "mlp_bias", "tie_word_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters", "hidden_act", "model_type"),
    *("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "auto_map"),
    # Of training and of other tasks.
    *("chunk_size_feed_forward", "attn_implementation", "mask_token_id", "pretraining_tp"),
}
_CHANGES_MATHEMATICS = re.compile(
    "window|soft_?cap|sink|expert|moe|lora|latent|alibi|multiplier|scal(e|ing)|rope|rotary|norm"
    "|sparse|linear_|mamba|ssm|conv|residual|nextn|mtp|bias|activation|_act$|attention|attn|layer_"
    "|chunk|parallel|cross|query|qk_|clip|dual|gat(e|ing)|mup|mask|interleav|quanti|compress|vision"
    "|audio|encoder|embed|head_dim"
)
_INERT_VALUES = (None, False, 0, [], {})


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
    _check_sizes(fields, path)
    for name in fields:
        _check_unknown(fields, name, path)
    _check_known(fields, family, path)
    sizes: dict[str, Any] = {ours: fields[theirs] for ours, theirs in _SIZES.items()}
    has_bias = family.has_bias_fields and bool(fields.get("attention_bias"))
    try:
        theta, scaling = read_rope(fields)
        return ModelConfig(
            **sizes,
            num_kv_heads=_or(fields.get("num_key_value_heads"), sizes["num_q_heads"]),
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
        raise ValueError(f"{path} describes no decoder that can be: {error}") from error


def stored_dtype(fields: Fields, path: Path) -> DTypeName | None:
    """The dtype that a config.json says its parameters have; None where it does not say.

    Raises `ValueError` for one that a decoder cannot have.
    """
    field = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(field)
    if value in (None, "auto"):
        return None
    for name in get_args(DTypeName):
        if value in (name, f"torch.{name}"):
            return name
    known = ", ".join(get_args(DTypeName))
    raise ValueError(f"`{field}` in {path} must be one of {known}; got {value!r}.")


def _family(fields: Fields, path: Path) -> _Family:
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise ValueError(f"`model_type` in {path} must be one of {known}; got {model_type!r}.")
    family = _FAMILIES[model_type]
    architectures = _or(fields.get("architectures"), [family.architecture])
    if architectures != [family.architecture]:
        raise ValueError(
            f"`architectures` in {path} must be {[family.architecture]} for {model_type}; got"
            f" {architectures!r}."
        )
    return family


def _check_sizes(fields: Fields, path: Path) -> None:
    for name in (*_SIZES.values(), "num_key_value_heads", "head_dim"):
        value, is_optional = fields.get(name), name not in _SIZES.values()
        if value is None and is_optional:
            continue
        kinds, kind = (int | float, "number") if name == "rms_norm_eps" else (int, "integer")
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if value is None or not is_number or not 0 < value < math.inf:
            raise ValueError(f"`{name}` in {path} must be a positive {kind}; got {value!r}.")


def _check_unknown(fields: Fields, name: str, path: Path) -> None:
    """Refuses a field that no family here has, if its name says that it changes the mathematics."""
    is_inert = name in _KNOWN or name.startswith("_") or re.search("dropout|pdrop|flash", name)
    if is_inert or not _CHANGES_MATHEMATICS.search(name) or fields[name] in _INERT_VALUES:
        return
    if name.endswith(("multiplier", "scaling", "scale", "factor")) and fields[name] == 1:
        return
    raise ValueError(
        f"`{name}` in {path} must be absent: this decoder has nothing like it; got"
        f" {fields[name]!r}."
    )


def _check_known(fields: Fields, family: _Family, path: Path) -> None:
    rules: dict[str, tuple[bool, str]] = {
        "auto_map": (not fields.get("auto_map"), "absent: code from a folder is never run"),
        "hidden_act": (_or(fields.get("hidden_act"), "silu") in ("silu", "swish"), "silu"),
        "layer_types": (
            all(kind == "full_attention" for kind in _or(fields.get("layer_types"), [])),
            "full_attention for every layer",
        ),
        "sliding_window": (
            not _has_window(fields, family),
            "null: attention here sees all of its context",
        ),
    }
    for name, (holds, rule) in rules.items():
        if not holds:
            value = fields.get(name, family.window)
            raise ValueError(f"`{name}` in {path} must be {rule}; got {value!r}.")


def _has_window(fields: Fields, family: _Family) -> bool:
    """Whether some layer sees less than the context."""
    if family.architecture.startswith("Qwen") and not fields.get("use_sliding_window"):
        return False
    first_layer = fields.get("max_window_layers") if "use_sliding_window" in fields else 0
    if (first_layer or 0) >= (fields.get("num_hidden_layers") or 1):
        return False
    window = fields.get("sliding_window", family.window)
    return window is not None and window < (fields.get("max_position_embeddings") or window + 1)


def _head_dim(fields: Fields, family: _Family) -> int:
    given = _or(fields.get("head_dim"), family.head_dim)
    if given is not None:
        return given
    hidden_size, num_heads = fields["hidden_size"], fields["num_attention_heads"]
    if hidden_size % num_heads:
        raise ValueError(
            f"`head_dim` must be given where `hidden_size` is no multiple of"
            f" `num_attention_heads`; got {hidden_size} and {num_heads}."
        )
    return hidden_size // num_heads


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
