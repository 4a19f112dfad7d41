"""RoPE fields of a config.json, in the spelling of transformers 4 or 5."""

from collections.abc import Mapping
from typing import Any

from codec_jax.models.number_checks import check_positive, check_positive_integer, is_number
from codec_jax.models.rope_scaling import (
    LinearRope,
    Llama3Rope,
    RopeScaling,
    YarnRope,
    yarn_attention_factor,
)

Fields = Mapping[str, Any]

ORIGINAL = "original_max_position_embeddings"
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "finetuned"}
_OWN = {
    "default": set(),
    "linear": set(),
    "llama3": {ORIGINAL, "low_freq_factor", "high_freq_factor"},
    "yarn": {
        *(ORIGINAL, "beta_fast", "beta_slow", "attention_factor"),
        *("mscale", "mscale_all_dim", "truncate"),
    },
}
_TYPES = ("rope_type", "type")
_BOOLEANS = ("truncate", "finetuned")
_DEFAULT_THETA = 10000.0


def read_rope(fields: Fields) -> tuple[float, RopeScaling | None]:
    """Base and scaling of RoPE.

    Raises `ValueError` for a scaling that this decoder does not have, and for a bad value.
    """
    rope = _one_of_two(fields)
    kind = _kind(rope)
    for name, value in rope.items():
        _check_place(name, value, kind)
        _check_value(name, value)
    return _theta(fields, rope), _scaling(kind, rope, fields)


def _one_of_two(fields: Fields) -> Fields:
    """The object of `rope_parameters` or `rope_scaling`, without its nulls."""
    names = ("rope_parameters", "rope_scaling")
    given = {name: fields[name] for name in names if fields.get(name) not in (None, {})}
    for name, value in given.items():
        if not isinstance(value, Mapping) or any(isinstance(x, Mapping) for x in value.values()):
            raise ValueError(f"`{name}` must be one object for all layers; got {value!r}.")
    if len(given) == 2 and given["rope_parameters"] != given["rope_scaling"]:
        raise ValueError(
            f"`rope_scaling` must be absent beside `rope_parameters`; got"
            f" {given['rope_scaling']!r}."
        )
    rope = next(iter(given.values()), {})
    return {name: value for name, value in rope.items() if value is not None}


def _kind(rope: Fields) -> str:
    given = [rope[name] for name in _TYPES if name in rope]
    if len(given) == 2 and given[0] != given[1]:
        raise ValueError(
            f"`type` must be absent beside `rope_type`, or the same; got {given[1]!r} and"
            f" {given[0]!r}."
        )
    kind = given[0] if given else "default"
    if not isinstance(kind, str) or kind not in _OWN:
        raise ValueError(f"`rope_type` must be one of {', '.join(_OWN)}; got {kind!r}.")
    return kind


def _check_place(name: str, value: Any, kind: str) -> None:
    """Refuses what RoPE of a kind does not have; a factor of 1 is nothing to have."""
    scales_nothing = name == "factor" and kind == "default" and value != 1
    if scales_nothing or name not in _COMMON | _OWN[kind]:
        raise ValueError(f"`{name}` must be absent from RoPE of type {kind}; got {value!r}.")


def _check_value(name: str, value: Any) -> None:
    if name in _TYPES:
        return
    if name in _BOOLEANS:
        if not isinstance(value, bool):
            raise ValueError(f"`{name}` must be true or false; got {value!r}.")
    elif name == ORIGINAL:
        check_positive_integer(name, value)
    elif name.startswith("mscale"):
        if not is_number(value) or value < 0:
            raise ValueError(f"`{name}` must be a number of at least 0; got {value!r}.")
    else:
        check_positive(name, value)
        if name == "partial_rotary_factor" and value != 1:
            raise ValueError(f"`{name}` must be 1: all of a head; got {value!r}.")


def _theta(fields: Fields, rope: Fields) -> float:
    inner, outer = rope.get("rope_theta"), fields.get("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(f"`rope_theta` must be given once; got {outer!r} and {inner!r}.")
    theta = next((value for value in (inner, outer) if value is not None), _DEFAULT_THETA)
    check_positive("rope_theta", theta)
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
            original_max_context=_need(rope, ORIGINAL),
        )
    return _yarn(rope, fields["max_position_embeddings"])


def _yarn(rope: Fields, max_context: int) -> YarnRope:
    """YaRN's defaults are those of transformers 5."""
    original = rope.get(ORIGINAL, max_context)
    factor = rope.get("factor", max_context / original)
    attention_factor = rope.get("attention_factor")
    mscale, mscale_all_dim = rope.get("mscale", 0), rope.get("mscale_all_dim", 0)
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = yarn_attention_factor(
            factor, mscale=mscale, mscale_all_dim=mscale_all_dim
        )
    elif attention_factor is None:
        attention_factor = yarn_attention_factor(factor)
    settings = {name: rope[name] for name in ("beta_fast", "beta_slow", "truncate") if name in rope}
    return YarnRope(
        factor=factor,
        original_max_context=original,
        attention_factor=attention_factor,
        **settings,
    )


def _need(rope: Fields, name: str) -> Any:
    if name not in rope:
        raise ValueError(f"`{name}` must be given for this RoPE scaling; got none.")
    return rope[name]
