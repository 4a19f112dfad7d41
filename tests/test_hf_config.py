"""config.json: what is read, and every refusal by the name of its field."""

import dataclasses
from pathlib import Path

import pytest
from golden_models import config_fields, golden_config

from codec_jax.models.hf_config import parse_config, stored_dtype
from codec_jax.models.rope_scaling import LinearRope, Llama3Rope, YarnRope

PATH = Path("folder/config.json")
LLAMA_31_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def parse(name="llama2", spelling="config_v4.json", **changes):
    """The config of a golden checkpoint with some fields changed."""
    return parse_config(config_fields(name, spelling) | changes, PATH, dtype="float32")


def test_sizes_and_defaults():
    fields = config_fields("llama2", "config_v4.json")
    for name in ("num_key_value_heads", "head_dim", "rope_theta", "tie_word_embeddings"):
        del fields[name]
    config = parse_config(fields, PATH, dtype="bfloat16")
    assert config == dataclasses.replace(
        golden_config("llama2"), rope_theta=10000.0, dtype="bfloat16"
    )
    assert (config.num_kv_heads, config.head_dim, config.tie_embeddings) == (4, 12, False)


def test_biases_and_norms_of_the_families():
    llama = parse(attention_bias=True, mlp_bias=True)
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias, llama.qk_norm) == (
        True,
        True,
        True,
        False,
    )
    qwen2 = parse("qwen2")
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.mlp_bias, qwen2.qk_norm) == (
        True,
        False,
        False,
        False,
    )
    qwen3 = parse("qwen3", attention_bias=True, head_dim=None)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (True, True, True, 128)


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
    "default": ({"rope_type": "default"}, None),
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


@pytest.mark.parametrize(
    "inert",
    [
        {"use_cache": False, "_name_or_path": "x", "torchscript": True, "pretraining_tp": 2},
        {"sliding_window": 4096, "max_position_embeddings": 4096},
        {"residual_multiplier": 1.0, "final_logit_softcapping": None, "num_experts": 0},
        {"rope_interleaved": False, "is_llama_config": True, "transformers.js_config": {"a": 1}},
        {"attn_pdrop": 0.1, "use_flash_attention": True, "layer_types": ["full_attention"] * 2},
        {"hidden_act": "swish", "partial_rotary_factor": 1.0, "architectures": None},
    ],
)
def test_fields_that_change_nothing_are_accepted(inert):
    expected = parse(
        max_position_embeddings=inert.get("max_position_embeddings", 128),
    )
    assert parse(**inert) == expected


def test_windows_that_the_family_turns_off_are_accepted():
    off = parse("qwen2", use_sliding_window=False, sliding_window=16)
    above = parse("qwen2", use_sliding_window=True, sliding_window=16, max_window_layers=2)
    assert off == above == parse("qwen2")


GONE = "this decoder has nothing like it; got"
REFUSED = {
    "window": (
        {"sliding_window": 64},
        "`sliding_window` in folder/config.json must be null: attention here sees all of its"
        " context; got 64.",
    ),
    "layers with a window": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "`layer_types` in folder/config.json must be full_attention for every layer; got"
        " ['full_attention', 'sliding_attention'].",
    ),
    "activation": (
        {"hidden_act": "gelu"},
        "`hidden_act` in folder/config.json must be silu; got 'gelu'.",
    ),
    "code": (
        {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}},
        "`auto_map` in folder/config.json must be absent: code from a folder is never run; got"
        " {'AutoModelForCausalLM': 'modeling.Own'}.",
    ),
    "family": (
        {"model_type": "gemma2"},
        "`model_type` in folder/config.json must be one of llama, mistral, qwen2, qwen3; got"
        " 'gemma2'.",
    ),
    "no family": (
        {"model_type": None},
        "`model_type` in folder/config.json must be one of llama, mistral, qwen2, qwen3; got None.",
    ),
    "task": (
        {"architectures": ["LlamaForSequenceClassification"]},
        "`architectures` in folder/config.json must be ['LlamaForCausalLM'] for llama; got"
        " ['LlamaForSequenceClassification'].",
    ),
    "a size is missing": (
        {"num_hidden_layers": None},
        "`num_hidden_layers` in folder/config.json must be a positive integer; got None.",
    ),
    "a size is a text": (
        {"hidden_size": "48"},
        "`hidden_size` in folder/config.json must be a positive integer; got '48'.",
    ),
    "no heads": (
        {"num_attention_heads": 0},
        "`num_attention_heads` in folder/config.json must be a positive integer; got 0.",
    ),
    "epsilon": (
        {"rms_norm_eps": "small"},
        "`rms_norm_eps` in folder/config.json must be a positive number; got 'small'.",
    ),
    "heads": (
        {"num_key_value_heads": 3},
        "folder/config.json describes no decoder that can be: `num_q_heads` must be a multiple of"
        " `num_kv_heads`; got 4 and 3. Grouped-query attention shares each KV head evenly.",
    ),
    "head_dim": (
        {"head_dim": None, "num_attention_heads": 5, "num_key_value_heads": 5},
        "folder/config.json describes no decoder that can be: `head_dim` must be given where"
        " `hidden_size` is no multiple of `num_attention_heads`; got 48 and 5.",
    ),
}
OTHERS = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "num_local_experts": 8,
    "n_routed_experts": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "attention_sinks": True,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
    "embedding_multiplier": 12.0,
    "query_pre_attn_scalar": 256,
    "no_rope_layers": [1, 0],
    "use_qk_norm": True,
    "qk_layernorm": True,
    "clip_qkv": 8.0,
    "alibi": True,
    "position_embedding_type": "alibi",
    "quantization_config": {"quant_method": "gptq"},
    "is_encoder_decoder": True,
    "rope_interleaved": True,
    "attn_output_gate": True,
    "num_nextn_predict_layers": 1,
    "dual_chunk_attention_config": {"chunk_size": 262144},
    "rotary_pct": 0.25,
    "v_head_dim": 128,
    "parallel_residual": True,
    "partial_rotary_factor": 0.5,
    "attention_multiplier": 0.5,
    "mamba_d_state": 16,
}
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
    "a text": ({"type": "linear", "factor": "2"}, "`factor` must be a number; got '2'."),
    "no context": (
        {name: value for name, value in LLAMA_31_ROPE.items() if "original" not in name},
        "`original_max_position_embeddings` must be given for this RoPE scaling; got none.",
    ),
    "another base": (
        {"type": "linear", "factor": 2.0, "rope_theta": 1e6},
        "`rope_theta` must be given once; got 5000.0 and 1000000.0.",
    ),
}


def refusal(*args, **changes):
    with pytest.raises(ValueError, match="`") as error:
        parse(*args, **changes)
    return str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    changes, message = REFUSED[name]
    assert refusal(**changes) == message


@pytest.mark.parametrize("name", OTHERS)
def test_what_changes_the_mathematics_is_refused_by_name(name):
    value = OTHERS[name]
    expected = f"`{name}` in folder/config.json must be absent: {GONE} {value!r}."
    assert refusal(**{name: value}) == expected
    assert parse(**{name: None}) == parse()


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
    assert refusal(rope_theta="big").endswith("`rope_theta` must be a number; got 'big'.")


def test_mistrals_window_is_there_unless_the_file_says_null():
    fields = config_fields("mistral") | {"max_position_embeddings": 32768}
    assert parse_config(fields, PATH, dtype="float32").max_context == 32768
    del fields["sliding_window"]
    with pytest.raises(ValueError, match=r"`sliding_window` .* must be null: .*; got 4096\."):
        parse_config(fields, PATH, dtype="float32")


def test_qwens_window_is_refused_where_some_layer_has_it():
    changes = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    assert "`sliding_window` in" in refusal("qwen2", layer_types=None, **changes)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "float16"),
        ({"dtype": "auto"}, None),
        ({}, None),
    ],
)
def test_stored_dtype(fields, expected):
    assert stored_dtype(fields, PATH) == expected


def test_a_dtype_that_no_decoder_has_is_refused():
    with pytest.raises(ValueError, match="`torch_dtype`") as error:
        stored_dtype({"torch_dtype": "float8_e4m3fn"}, PATH)
    assert str(error.value) == (
        "`torch_dtype` in folder/config.json must be one of float32, bfloat16, float16; got"
        " 'float8_e4m3fn'."
    )
