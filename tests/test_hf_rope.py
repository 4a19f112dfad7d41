"""RoPE fields of config.json in both spellings: what is read, what is refused by its name."""

import math

import pytest
from golden_models import config_fields
from hf_configs import PATH, parse, refusal

from codec_jax.models.hf_config import parse_config
from codec_jax.models.rope_scaling import LinearRope, Llama3Rope, YarnRope

LLAMA_31_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


ROPES = {
    "linear, oldest spelling": ({"type": "linear", "factor": 2}, LinearRope(factor=2)),
    "llama3": (
        LLAMA_31_ROPE,
        Llama3Rope(
            factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=8192
        ),
    ),
    "yarn": (
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        YarnRope(factor=4.0, original_max_context=32),
    ),
    "yarn without its original context": (
        {"rope_type": "yarn", "factor": 4.0},
        YarnRope(factor=4.0, original_max_context=128),
    ),
    "yarn without its factor": (
        {"rope_type": "yarn", "original_max_position_embeddings": 16},
        YarnRope(factor=8.0, original_max_context=16),
    ),
    "yarn with all": (
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.2, "truncate": False},
        YarnRope(factor=4.0, original_max_context=128, attention_factor=1.2, truncate=False),
    ),
    "yarn with mscale": (
        {"rope_type": "yarn", "factor": 4.0, "mscale": 1, "mscale_all_dim": 1},
        YarnRope(factor=4.0, original_max_context=128, attention_factor=1.0),
    ),
    "yarn with nulls and zeros that stand for defaults": (
        {"rope_type": "yarn", "factor": 4.0, "truncate": None, "beta_fast": None, "mscale": 0},
        YarnRope(factor=4.0, original_max_context=128),
    ),
    "default": ({"rope_type": "default", "type": "default", "factor": 1.0}, None),
    "empty": ({}, None),
    "none": (None, None),
}


@pytest.mark.parametrize("name", ROPES)
def test_rope_in_both_spellings(name):
    given, expected = ROPES[name]
    old = parse(rope_scaling=given, rope_theta=7e4)
    assert (old.rope_scaling, old.rope_theta) == (expected, 7e4)
    new = config_fields("llama2") | {"rope_parameters": {**(given or {}), "rope_theta": 7e4}}
    assert parse_config(new, PATH, dtype="float32") == old


def test_the_same_rope_in_both_fields_is_read():
    rope = {"rope_type": "linear", "factor": 2.0}
    assert parse(rope_scaling=rope, rope_parameters=rope).rope_scaling == LinearRope(factor=2.0)


POSITIVE = "a positive number up to 3.4e38"
ROPE_REFUSED = {
    "dynamic": (
        {"type": "dynamic", "factor": 2.0},
        "`rope_type` must be one of default, linear, llama3, yarn; got 'dynamic'.",
    ),
    "sections": (
        {"type": "default", "mrope_section": [16, 24, 24]},
        "`mrope_section` must be absent from RoPE of type default; got [16, 24, 24].",
    ),
    "partial": (
        {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
        "`partial_rotary_factor` must be 1: all of a head; got 0.5.",
    ),
    "per layer": (
        {"full_attention": {"rope_type": "default"}},
        "`rope_scaling` must be one object for all layers; got"
        " {'full_attention': {'rope_type': 'default'}}.",
    ),
    "a word": ("linear", "`rope_scaling` must be one object for all layers; got 'linear'."),
    "no factor": (
        {"type": "linear"},
        "`factor` must be given for this RoPE scaling; got none.",
    ),
    "a text": (
        {"type": "linear", "factor": "2"},
        "`factor` must be a positive number up to 3.4e38; got '2'.",
    ),
    "a list of types": (
        {"rope_type": ["linear"], "factor": 2.0},
        "`rope_type` must be one of default, linear, llama3, yarn; got ['linear'].",
    ),
    "no type": (
        {"rope_type": "", "factor": 2.0},
        "`rope_type` must be one of default, linear, llama3, yarn; got ''.",
    ),
    "two types": (
        {"rope_type": "default", "type": "linear", "factor": 2.0},
        "`type` must be absent beside `rope_type`, or the same; got 'linear' and 'default'.",
    ),
    "a factor without a type": (
        {"factor": 2.0},
        "`factor` must be absent from RoPE of type default; got 2.0.",
    ),
    "a list": ([1], "`rope_scaling` must be one object for all layers; got [1]."),
    "an empty list": ([], "`rope_scaling` must be one object for all layers; got []."),
    "a factor beyond float32": (
        {"type": "linear", "factor": 10**400},
        f"`factor` must be a positive number up to 3.4e38; got {10**400}.",
    ),
    "frequencies beyond float32": (
        {"type": "linear", "factor": 1e-40},
        "`rope_scaling` must give finite frequencies with `rope_theta` 5000.0; got"
        " LinearRope(factor=1e-40).",
    ),
    **{
        f"yarn, {name} {value}": (
            {"type": "yarn", name: value},
            f"`{name}` must be {rule}; got {value!r}.",
        )
        for name, value, rule in (
            ("factor", 0, POSITIVE),
            ("beta_fast", 0, POSITIVE),
            ("beta_slow", 0, POSITIVE),
            ("attention_factor", 0, POSITIVE),
            ("mscale", -1, "a number of at least 0"),
            ("mscale_all_dim", "1", "a number of at least 0"),
            ("truncate", "x", "true or false"),
            ("finetuned", 1, "true or false"),
            ("original_max_position_embeddings", 0, "an integer from 1 to 2147483647"),
            ("original_max_position_embeddings", 1.5, "an integer from 1 to 2147483647"),
        )
    },
    "yarn with its ramp upside down": (
        {"type": "yarn", "beta_fast": 1, "beta_slow": 2},
        "`beta_fast` must be at least `beta_slow`; got 1 and 2.",
    ),
    "a ramp beyond all numbers": (
        {"type": "yarn", "factor": 2, "beta_slow": 5e-324},
        "`rope_scaling` must give finite frequencies with `rope_theta` 5000.0; got"
        " YarnRope(factor=2, original_max_context=128, attention_factor=1.0693147180559945,"
        " beta_fast=32.0, beta_slow=5e-324, truncate=True).",
    ),
    "no context": (
        {name: value for name, value in LLAMA_31_ROPE.items() if "original" not in name},
        "`original_max_position_embeddings` must be given for this RoPE scaling; got none.",
    ),
    "another base": (
        {"type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "`rope_theta` must be given once; got 5000.0 and 1000000.0.",
    ),
}


@pytest.mark.parametrize("name", ROPE_REFUSED)
def test_rope_is_refused_by_name(name):
    rope, message = ROPE_REFUSED[name]
    expected = f"folder/config.json describes no decoder that can be: {message}"
    assert refusal(rope_scaling=rope) == expected


def test_rope_twice_is_refused():
    rope = {"rope_type": "linear", "factor": 2.0}
    assert refusal(rope_scaling=rope, rope_parameters=rope | {"factor": 3.0}).endswith(
        "`rope_scaling` must be absent beside `rope_parameters`; got"
        " {'rope_type': 'linear', 'factor': 2.0}."
    )


@pytest.mark.parametrize("theta", ["big", 0, -1.0, True, 10**400, math.inf, math.nan])
def test_a_base_that_is_no_positive_number_is_refused(theta):
    assert refusal(rope_theta=theta) == (
        "folder/config.json describes no decoder that can be: `rope_theta` must be a positive"
        f" number up to 3.4e38; got {theta!r}."
    )


def test_the_ramp_of_yarn_needs_a_base_above_1():
    assert refusal(rope_scaling={"type": "yarn", "factor": 2}, rope_theta=1).endswith(
        "`rope_theta` must be above 1 for YaRN; got 1.0."
    )
    assert parse(rope_theta=1).rope_theta == 1
