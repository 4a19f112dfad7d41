"""What each field of a config.json may hold: its kind, and values that this decoder honours.

A field that would change the mathematics is honoured or refused by its name.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from codec_jax.models.number_checks import (
    check_positive,
    check_positive_integer,
    is_integer,
    is_number,
)

Fields = Mapping[str, Any]


class Family(NamedTuple):
    """What the class of a `model_type` fixes, whatever the file says."""

    architecture: str
    has_bias_fields: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    window: int | None = None  # where the file has no `sliding_window`


SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_q_heads": "num_attention_heads",
    "max_context": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}
"""Fields that every file has, by this decoder's names."""

_BOOLEANS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_COUNTS = ("sliding_window", "max_window_layers")
_KNOWN = {
    *(*SIZES.values(), *_BOOLEANS, *_COUNTS, "num_key_value_heads", "head_dim"),
    *("rope_theta", "rope_scaling", "rope_parameters", "hidden_act", "model_type"),
    *("layer_types", "auto_map", "is_causal"),
    # Of training and of other tasks.
    *("chunk_size_feed_forward", "attn_implementation", "mask_token_id", "pretraining_tp"),
}
_CHANGES_MATHEMATICS = re.compile(
    "window|soft_?cap|sink|expert|moe|lora|latent|alibi|multiplier|scal(e|ing)|rope|rotary|norm"
    "|sparse|linear_|mamba|ssm|conv|residual|nextn|mtp|bias|activation|_act$|attention|attn|layer_"
    "|chunk|parallel|cross|query|qk_|clip|dual|gat(e|ing)|mup|mask|interleav|quanti|compress|vision"
    "|audio|encoder|embed|head_dim|causal|bidirectional|text_config|model_base"
)
_INERT_VALUES = (None, False, 0, [], {})
_FACTOR = re.compile("(multiplier|scaling|scale|factor)$")
# A factor of attention's scores stands in place of head_dim**-0.5, so 1 is a change too.
_OF_SCORES = re.compile("att|softmax|query|qk")


def check_fields(fields: Fields, family: Family, path: Path) -> None:
    """Raises `ValueError` for a field of another kind, or one that is not honoured."""
    _check_sizes(fields, path)
    _check_kinds(fields, path)
    for name in fields:
        _check_unknown(fields, name, path)
    _check_known(fields, family, path)


def value_or(value: Any, default: Any) -> Any:
    """The value, or the default where it is None: a file's null stands for an absent field."""
    return default if value is None else value


def _check_sizes(fields: Fields, path: Path) -> None:
    for name in (*SIZES.values(), "num_key_value_heads", "head_dim"):
        value, is_optional = fields.get(name), name not in SIZES.values()
        if value is not None or not is_optional:
            check = check_positive if name == "rms_norm_eps" else check_positive_integer
            check(name, value, where=f" in {path}")


def _check_kinds(fields: Fields, path: Path) -> None:
    for name in (*_BOOLEANS, *_COUNTS):
        value, is_boolean = fields.get(name), name in _BOOLEANS
        is_kind = isinstance(value, bool) if is_boolean else is_integer(value)
        if value is not None and not is_kind:
            rule = "true or false" if is_boolean else "an integer or null"
            raise ValueError(f"`{name}` in {path} must be {rule}; got {value!r}.")


def _check_unknown(fields: Fields, name: str, path: Path) -> None:
    """Refuses a field that no family here has, if its name says that it changes the mathematics."""
    is_inert = name in _KNOWN or name.startswith("_") or re.search("dropout|pdrop|flash", name)
    if is_inert or not _CHANGES_MATHEMATICS.search(name):
        return
    if not _is_inert_value(name, fields[name]):
        raise ValueError(
            f"`{name}` in {path} must be absent: this decoder has nothing like it; got"
            f" {fields[name]!r}."
        )


def _is_inert_value(name: str, value: Any) -> bool:
    if _FACTOR.search(name) and is_number(value):
        return value == 1 and not _OF_SCORES.search(name)
    return value in _INERT_VALUES


def _check_known(fields: Fields, family: Family, path: Path) -> None:
    layer_types, num_layers = fields.get("layer_types"), fields["num_hidden_layers"]
    rules: dict[str, tuple[bool, str]] = {
        "auto_map": (not fields.get("auto_map"), "absent: code from a folder is never run"),
        "hidden_act": (value_or(fields.get("hidden_act"), "silu") in ("silu", "swish"), "silu"),
        "is_causal": (value_or(fields.get("is_causal"), True) is True, "true: attention is causal"),
        "layer_types": (
            layer_types is None or _are_full(layer_types, num_layers),
            f"full_attention for each of {num_layers} layers",
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


def _are_full(layer_types: Any, num_layers: int) -> bool:
    is_for_each = isinstance(layer_types, list) and len(layer_types) == num_layers
    return is_for_each and all(kind == "full_attention" for kind in layer_types)


def _has_window(fields: Fields, family: Family) -> bool:
    """Whether some layer sees less than the context."""
    if family.architecture.startswith("Qwen") and not fields.get("use_sliding_window"):
        return False
    first_layer = fields.get("max_window_layers") if "use_sliding_window" in fields else 0
    if (first_layer or 0) >= fields["num_hidden_layers"]:
        return False
    window = fields.get("sliding_window", family.window)
    return window is not None and window < fields["max_position_embeddings"]
