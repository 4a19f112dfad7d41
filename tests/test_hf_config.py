"""config.json: the decoder and the dtype that it describes."""

import dataclasses

import pytest
from golden_models import config_fields, golden_config
from hf_configs import PATH, parse

from codec_jax.models.hf_config import parse_config, stored_dtype


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


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": "float16", "torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "auto", "torch_dtype": "float16"}, "float16"),
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


def test_two_dtypes_that_differ_are_refused():
    with pytest.raises(ValueError, match="`torch_dtype`") as error:
        stored_dtype({"dtype": "bfloat16", "torch_dtype": "float32"}, PATH)
    assert str(error.value) == (
        "`torch_dtype` in folder/config.json must be absent beside `dtype`, or the same; got"
        " 'float32' and 'bfloat16'."
    )
