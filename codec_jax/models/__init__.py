"""Flax decoders whose attention is injected, their checkpoints and their tokenizers."""

from codec_jax.models.chat import ChatTemplate
from codec_jax.models.config import DTypeName, ModelConfig, RopePairing, param_shapes
from codec_jax.models.gguf_model import load_gguf, read_gguf_config
from codec_jax.models.hf_model import load_hf, read_hf_config
from codec_jax.models.llama import AttentionFn, Decoder, cast, init_decoder
from codec_jax.models.llama2c import load_llama2c
from codec_jax.models.loaded import LoadedModel
from codec_jax.models.registry import load_model, model_config, model_names
from codec_jax.models.tokenizer import Llama2cTokenizer, Tokenizer

__all__ = [
    "AttentionFn",
    "ChatTemplate",
    "DTypeName",
    "Decoder",
    "Llama2cTokenizer",
    "LoadedModel",
    "ModelConfig",
    "RopePairing",
    "Tokenizer",
    "cast",
    "init_decoder",
    "load_gguf",
    "load_hf",
    "load_llama2c",
    "load_model",
    "model_config",
    "model_names",
    "param_shapes",
    "read_gguf_config",
    "read_hf_config",
]
