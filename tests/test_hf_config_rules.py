"""Fields of config.json: what changes nothing, and every refusal by the name of its field."""

import math

import pytest
from golden_models import config_fields
from hf_configs import PATH, parse, refusal

from codec_jax.models.hf_config import parse_config


@pytest.mark.parametrize(
    "inert",
    [
        {"use_cache": False, "_name_or_path": "x", "torchscript": True, "pretraining_tp": 2},
        {"sliding_window": 4096, "max_position_embeddings": 4096},
        {"residual_multiplier": 1.0, "final_logit_softcapping": None, "num_experts": 0},
        {"rope_interleaved": False, "is_llama_config": True, "transformers.js_config": {"a": 1}},
        {"attn_pdrop": 0.1, "use_flash_attention": True, "layer_types": ["full_attention"] * 2},
        {"is_causal": True, "is_decoder": False, "use_mup": False, "logit_scale": 1},
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
        "`layer_types` in folder/config.json must be full_attention for each of 2 layers; got"
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
        "`num_hidden_layers` in folder/config.json must be an integer from 1 to 2147483647;"
        " got None.",
    ),
    "a size is a text": (
        {"hidden_size": "48"},
        "`hidden_size` in folder/config.json must be an integer from 1 to 2147483647; got '48'.",
    ),
    "no heads": (
        {"num_attention_heads": 0},
        "`num_attention_heads` in folder/config.json must be an integer from 1 to"
        " 2147483647; got 0.",
    ),
    "epsilon": (
        {"rms_norm_eps": "small"},
        "`rms_norm_eps` in folder/config.json must be a positive number up to 3.4e38; got 'small'.",
    ),
    "heads": (
        {"num_key_value_heads": 3},
        "folder/config.json describes no decoder that can be: `num_attention_heads` must be a"
        " multiple of `num_key_value_heads`; got 4 and 3. Grouped-query attention shares each KV"
        " head evenly.",
    ),
    "layers beyond any model": (
        {"num_hidden_layers": 10**9, "layer_types": None},
        "folder/config.json describes no decoder that can be: `num_hidden_layers` must be an"
        " integer from 1 to 65536; got 1000000000.",
    ),
    "a context that no int32 counts": (
        {"max_position_embeddings": 10**12},
        "`max_position_embeddings` in folder/config.json must be an integer from 1 to 2147483647;"
        " got 1000000000000.",
    ),
    "an epsilon of 400 digits": (
        {"rms_norm_eps": 10**400},
        "`rms_norm_eps` in folder/config.json must be a positive number up to 3.4e38; got"
        f" {10**400}.",
    ),
    "an epsilon that is infinite": (
        {"rms_norm_eps": math.inf},
        "`rms_norm_eps` in folder/config.json must be a positive number up to 3.4e38; got inf.",
    ),
    "too few layer types": (
        {"layer_types": ["full_attention"]},
        "`layer_types` in folder/config.json must be full_attention for each of 2 layers; got"
        " ['full_attention'].",
    ),
    "layer types that are no list": (
        {"layer_types": 3},
        "`layer_types` in folder/config.json must be full_attention for each of 2 layers; got 3.",
    ),
    "attention to what follows": (
        {"is_causal": False},
        "`is_causal` in folder/config.json must be true: attention is causal; got False.",
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
    # A factor of 0 is no factor of 1; one of the scores stands in place of head_dim**-0.5.
    "embedding_scale": 0,
    "logits_multiplier": 0.0,
    "use_scale": True,
    "softmax_scale": 1.0,
    "attn_scale": 1,
    "use_bidirectional_attention": True,
    "text_config": {"hidden_size": 3},
    "dim_model_base": 256,
}
KINDS = {
    "tie_word_embeddings": ("false", "true or false"),
    "attention_bias": ("no", "true or false"),
    "mlp_bias": (1, "true or false"),
    "use_sliding_window": ("true", "true or false"),
    "sliding_window": ("8", "an integer or null"),
    "max_window_layers": ("x", "an integer or null"),
}


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


@pytest.mark.parametrize("name", KINDS)
def test_a_field_of_another_kind_is_refused_by_name(name):
    value, rule = KINDS[name]
    expected = f"`{name}` in folder/config.json must be {rule}; got {value!r}."
    assert refusal("qwen2", **{name: value}) == expected


def test_mistrals_window_is_there_unless_the_file_says_null():
    fields = config_fields("mistral") | {"max_position_embeddings": 32768}
    assert parse_config(fields, PATH, dtype="float32").max_context == 32768
    del fields["sliding_window"]
    with pytest.raises(ValueError, match=r"`sliding_window` .* must be null: .*; got 4096\."):
        parse_config(fields, PATH, dtype="float32")


def test_qwens_window_is_refused_where_some_layer_has_it():
    changes = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
    assert "`sliding_window` in" in refusal("qwen2", layer_types=None, **changes)
