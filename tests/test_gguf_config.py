"""Metadata of GGUF files: what is read, and every refusal by the name of its key."""

import math
from pathlib import Path

import numpy as np
import pytest
from gguf_files import model_fields, tensor_shapes

from codec_jax.models import ModelConfig
from codec_jax.models.gguf_config import parse_gguf_config
from codec_jax.models.gguf_file import GGUFFile, StoredTensor
from codec_jax.models.rope_scaling import FactorsRope, LinearRope, Llama3Rope, YarnRope

PATH = Path("tiny.gguf")


def parse(arch="llama", without=(), also=(), general=None, **changes):
    """The config of the tiny decoder with some keys changed, and tensors taken or added."""
    fields = {"general.architecture": arch} | model_fields(arch, **changes) | (general or {})
    shapes = {name: shape for name, shape in tensor_shapes().items() if name not in without}
    shapes |= dict.fromkeys(also, (1,))
    tensors = {name: StoredTensor("F32", shape, 0, 0) for name, shape in shapes.items()}
    return parse_gguf_config(GGUFFile(PATH, fields, tensors))


def refusal(*args, **changes):
    with pytest.raises(ValueError, match="`") as error:
        parse(*args, **changes)
    return str(error.value)


def test_sizes_and_defaults():
    assert parse() == ModelConfig(
        vocab_size=263,
        hidden_size=96,
        intermediate_size=64,
        num_layers=2,
        num_q_heads=6,
        num_kv_heads=2,
        head_dim=16,
        max_context=128,
        rope_theta=10000.0,
        rope_pairing="interleaved",
        rms_norm_eps=1e-5,
        dtype="float32",
    )
    assert parse(attention__head_count_kv=None).num_kv_heads == 6
    assert parse(attention__key_length=32).head_dim == 32


@pytest.mark.parametrize(
    ("arch", "pairing", "qk_norm"),
    [("llama", "interleaved", False), ("qwen2", "halves", False), ("qwen3", "halves", True)],
)
def test_what_the_architecture_fixes(arch, pairing, qk_norm):
    config = parse(arch)
    assert (config.rope_pairing, config.qk_norm) == (pairing, qk_norm)


def test_biases_and_a_tied_head_are_seen_by_their_tensors():
    tied = parse(without=["output.weight"])
    assert tied.tie_embeddings and not parse().tie_embeddings
    for name, field in {
        "attn_q": "qkv_bias",
        "attn_output": "o_bias",
        "ffn_gate": "mlp_bias",
    }.items():
        config = parse(also=[f"blk.0.{name}.bias"])
        assert [x for x in ("qkv_bias", "o_bias", "mlp_bias") if getattr(config, x)] == [field]


def test_rope():
    assert parse(rope__freq_base=5e5).rope_theta == 5e5
    linear = {"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}
    assert parse(**linear).rope_scaling == LinearRope(factor=4.0)
    assert parse(rope__scale_linear=4.0).rope_scaling == LinearRope(factor=4.0)
    assert parse(rope__scaling__factor=4.0).rope_scaling == LinearRope(factor=4.0)
    assert parse(rope__scaling__type="none").rope_scaling is None
    assert parse(rope__scaling__type="none", rope__scaling__factor=1.0).rope_scaling is None
    assert parse(rope__scale_linear=0.0).rope_scaling is None
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}
    assert parse(**yarn, rope__scaling__original_context_length=32).rope_scaling == YarnRope(
        factor=4.0, original_max_context=32
    )


def test_factors_of_llama3_are_its_scaling():
    """From the definition, independent of `Llama3Rope`: wavelengths in tokens against bounds."""
    theta, factor, low, high, original = 500.0, 8.0, 1.0, 4.0, 64
    wavelengths = 2 * np.pi * theta ** (np.arange(0, 16, 2) / 16)
    factors = []
    for wavelength in wavelengths:
        smooth = (original / wavelength - low) / (high - low)
        factors.append(1 / ((1 - smooth) / factor + smooth) if 0 < smooth < 1 else None)
        if factors[-1] is None:
            factors[-1] = 1.0 if wavelength < original / high else factor
    assert {1.0, 8.0} < set(factors)
    given = FactorsRope(factors=tuple(factors)).frequencies(16, theta)
    expected = Llama3Rope(
        factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_context=original
    ).frequencies(16, theta)
    np.testing.assert_allclose(given, expected, rtol=1e-12)
    with pytest.raises(ValueError, match=r"^`factors` must be 6, one for each pair .*; got 8\.$"):
        FactorsRope(factors=tuple(factors)).frequencies(12, theta)
    with pytest.raises(ValueError, match=r"^`factors` must be positive numbers; got \(0\.0,\)\.$"):
        FactorsRope(factors=(0.0,))


@pytest.mark.parametrize(
    "inert",
    [
        {"expert_count": 0, "expert_used_count": 0, "attention__causal": True},
        {"rope__scaling__attn_factor": 1.0, "rope__scaling__finetuned": True},
        {"attention__sliding_window": 128, "vocab_size": 263},
        {"general": {"general.type": "model", "split.count": 1, "general.file_type": 3}},
        {"use_parallel_residual": False, "logit_scale": 0.0, "rope__dimension_count": 16},
    ],
)
def test_keys_that_change_nothing_are_accepted(inert):
    assert parse(**inert) == parse()


GONE = "must be absent: this decoder has nothing like it; got"
NO_DECODER = "tiny.gguf describes no decoder that can be: "
REFUSED = {
    "architecture": (
        {"arch": "gemma2"},
        "`general.architecture` in tiny.gguf must be one of llama, qwen2, qwen3; got 'gemma2'.",
    ),
    "adapter": (
        {"general": {"general.type": "adapter"}},
        "`general.type` in tiny.gguf must be one of model; got 'adapter'.",
    ),
    "split": (
        {"general": {"split.count": 2}},
        "`split.count` in tiny.gguf must be one of 0, 1; got 2.",
    ),
    "window": (
        {"attention__sliding_window": 64},
        "`llama.attention.sliding_window` in tiny.gguf must be absent: attention here sees all of"
        " its context; got 64.",
    ),
    "no size": (
        {"block_count": None},
        "`llama.block_count` in tiny.gguf must be an integer from 1 to 2147483647; got None.",
    ),
    "heads by layer": (
        {"attention__head_count": [6, 4]},
        "`llama.attention.head_count` in tiny.gguf must be an integer from 1 to"
        " 2147483647; got [6, 4].",
    ),
    "KV heads by layer": (
        {"attention__head_count_kv": [2, 1]},
        "`llama.attention.head_count_kv` in tiny.gguf must be an integer from 1 to"
        " 2147483647; got [2, 1].",
    ),
    "epsilon": (
        {"attention__layer_norm_rms_epsilon": None},
        f"{NO_DECODER}`attention.layer_norm_rms_epsilon` must be a positive number up to"
        " 3.4e38; got None.",
    ),
    "base": (
        {"rope__freq_base": "big"},
        f"{NO_DECODER}`rope.freq_base` must be a positive number up to 3.4e38; got 'big'.",
    ),
    "kv heads": (
        {"attention__head_count_kv": 4},
        f"{NO_DECODER}`attention.head_count` must be a multiple of `attention.head_count_kv`; got 6"
        " and 4. Grouped-query attention shares each KV head evenly.",
    ),
    "head_dim": (
        {"attention__head_count": 7, "attention__head_count_kv": 7},
        f"{NO_DECODER}`attention.key_length` must be given where `embedding_length` is no multiple"
        " of `attention.head_count`; got 96 and 7.",
    ),
    "head_dim of values": (
        {"attention__value_length": 8},
        f"{NO_DECODER}`attention.value_length` must be 16, all of a head; got 8.",
    ),
    "part of a head": (
        {"rope__dimension_count": 8},
        f"{NO_DECODER}`rope.dimension_count` must be 16, all of a head; got 8.",
    ),
    "scaling": (
        {"rope__scaling__type": "longrope"},
        f"{NO_DECODER}`rope.scaling.type` must be one of none, linear, yarn; got 'longrope'.",
    ),
    "scaling twice": (
        {
            "rope__scaling__type": "linear",
            "rope__scaling__factor": 2.0,
            "also": ["rope_freqs.weight"],
        },
        f"{NO_DECODER}`rope.scaling.type` must be absent beside rope_freqs.weight; got 'linear'.",
    ),
    "no factor": (
        {"rope__scaling__type": "yarn"},
        f"{NO_DECODER}`rope.scaling.factor` must be a positive number up to 3.4e38; got None.",
    ),
    "window that is a text": (
        {"attention__sliding_window": "8"},
        "`llama.attention.sliding_window` in tiny.gguf must be absent: attention here sees all of"
        " its context; got '8'.",
    ),
    "windows by layer": (
        {"attention__sliding_window": [8, 8]},
        "`llama.attention.sliding_window` in tiny.gguf must be absent: attention here sees all of"
        " its context; got [8, 8].",
    ),
    "infinite base": (
        {"rope__freq_base": math.inf},
        f"{NO_DECODER}`rope.freq_base` must be a positive number up to 3.4e38; got inf.",
    ),
    "layers beyond any model": (
        {"block_count": 10**6},
        f"{NO_DECODER}`block_count` must be an integer from 1 to 65536; got 1000000.",
    ),
    "size of a text": (
        {"attention__key_length": "16"},
        f"{NO_DECODER}`attention.key_length` must be an integer from 1 to 65536; got '16'.",
    ),
    "another vocabulary": (
        {"vocab_size": 264},
        f"{NO_DECODER}`vocab_size` must be 263, the rows of token_embd.weight; got 264.",
    ),
    "no embedding": (
        {"without": ["token_embd.weight"]},
        f"{NO_DECODER}`token_embd.weight` must be among its tensors; got none.",
    ),
    "scaling that is a list": (
        {"rope__scaling__type": ["linear"]},
        f"{NO_DECODER}`rope.scaling.type` must be one of none, linear, yarn; got ['linear'].",
    ),
    "factor of nothing": (
        {"rope__scaling__type": "none", "rope__scaling__factor": 2.0},
        f"{NO_DECODER}`rope.scaling.factor` must be absent from RoPE of type none; got 2.0.",
    ),
    "two factors": (
        {"rope__scale_linear": 4.0, "rope__scaling__factor": 2.0},
        f"{NO_DECODER}`rope.scale_linear` must be absent beside `rope.scaling.factor`; got 4.0.",
    ),
    "factor of 0": (
        {"rope__scaling__factor": 0.0},
        f"{NO_DECODER}`rope.scaling.factor` must be a positive number up to 3.4e38; got 0.0.",
    ),
    "fraction of a context": (
        {
            "rope__scaling__type": "yarn",
            "rope__scaling__factor": 2.0,
            "rope__scaling__original_context_length": 32.5,
        },
        f"{NO_DECODER}`rope.scaling.original_context_length` must be an integer from 1 to"
        " 2147483647; got 32.5.",
    ),
}
OTHERS = {
    "expert_count": 8,
    "attention.causal": False,
    "attention.scale": 0.5,
    "attention.kv_lora_rank": 512,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.1,
    "residual_scale": 0.2,
    "embedding_scale": 12.0,
    "use_parallel_residual": True,
    "rope.dimension_sections": [8, 8],
    "rope.scaling.attn_factor": 1.2,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "rope.scaling.yarn_beta_fast": 16.0,
    "nextn_predict_layers": 1,
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    changes, message = REFUSED[name]
    assert refusal(**changes) == message


@pytest.mark.parametrize("key", OTHERS)
def test_what_changes_the_mathematics_is_refused_by_name(key):
    value = OTHERS[key]
    assert refusal(**{key: value}) == f"`llama.{key}` in tiny.gguf {GONE} {value!r}."
