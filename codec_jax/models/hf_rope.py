"""RoPE fields of a config.json, in the spelling of transformers 4 or 5."""

from collections.abc import Mapping
from typing import Any

from codec_jax.models.rope_scaling import (
    LinearRope,
    Llama3Rope,
    RopeScaling,
    YarnRope,
    yarn_attention_factor,
)

Fields = Mapping[str, Any]

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "finetuned"}
_ORIGINAL = "original_max_position_embeddings"
_OWN = {
    "default": set(),
    "linear": set(),
    "llama3": {_ORIGINAL, "low_freq_factor", "high_freq_factor"},
    "yarn": {
        *(_ORIGINAL, "beta_fast", "beta_slow", "attention_factor"),
        *("mscale", "mscale_all_dim", "truncate"),
    },
}
_NOT_NUMBERS = {"rope_type", "type", "truncate", "finetuned"}
_DEFAULT_THETA = 10000.0


def read_rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling of RoPE.

    Raises `ValueError` for a scaling that this decoder does not have, and for a bad value.
    """
    rope = _one_of_two(fields)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _OWN:
        raise ValueError(f"`rope_type` must be one of {', '.join(_OWN)}; got {kind!r}.")
    for name, value in rope.items():
        if name not in _COMMON | _OWN[kind] and value is not None:
            raise ValueError(f"`{name}` must be absent from RoPE of type {kind}; got {value!r}.")
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name not in _NOT_NUMBERS and value is not None and not is_number:
            raise ValueError(f"`{name}` must be a number; got {value!r}.")
    if rope.get("partial_rotary_factor") not in (None, 1):
        value = rope["partial_rotary_factor"]
        raise ValueError(f"`partial_rotary_factor` must be 1: all of a head; got {value!r}.")
    return _theta(fields, rope), _scaling(kind, rope, fields)


def _one_of_two(fields: Fields) -> Fields:
    """The object of `rope_parameters` or `rope_scaling`."""
    given = {name: fields[name] for name in ("rope_parameters", "rope_scaling") if fields.get(name)}
    for name, value in given.items():
        if not isinstance(value, Mapping) or any(isinstance(x, Mapping) for x in value.values()):
            raise ValueError(f"`{name}` must be one object for all layers; got {value!r}.")
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise ValueError(
            f"`rope_scaling` must be absent beside `rope_parameters`; got"
            f" {given['rope_scaling']!r}."
        )
    return next(iter(given.values()), {})


def _theta(fields: Fields, rope: Fields) -> float:
    inner, outer = rope.get("rope_theta"), fields.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(f"`rope_theta` must be given once; got {outer!r} and {inner!r}.")
    theta = next((value for value in (inner, outer) if value is not None), _DEFAULT_THETA)
    if isinstance(theta, bool) or not isinstance(theta, int | float):
        raise ValueError(f"`rope_theta` must be a number; got {theta!r}.")
    return float(theta)


def _scaling(kind: str, rope: Fields, fields: Fields) -> RopeScaling | None:
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRope(factor=_need(rope, "factor"))
    if kind == "llama3":
        return Llama3Rope(
            factor=_need(rope, "factor"),
            low_freq_factor=_need(rope, "low_freq_factor"),
            high_freq_factor=_need(rope, "high_freq_factor"),
            original_max_context=_need(rope, _ORIGINAL),
        )
    return _yarn(rope, fields["max_position_embeddings"])


def _yarn(rope: Fields, max_context: int) -> YarnRope:
    """YaRN's defaults are those of transformers 5."""
    original = rope.get(_ORIGINAL) or max_context
    factor = rope.get("factor") or max_context / original
    mscale, mscale_all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    attention_factor = rope.get("attention_factor")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = yarn_attention_factor(
            factor, mscale=mscale, mscale_all_dim=mscale_all_dim
        )
    return YarnRope(
        factor=factor,
        original_max_context=original,
        attention_factor=attention_factor or 0.0,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        truncate=rope.get("truncate", True),
    )


def _need(rope: Fields, name: str) -> Any:
    if rope.get(name) is None:
        raise ValueError(f"`{name}` must be given for this RoPE scaling; got none.")
    return rope[name]
