"""Flax decoders whose attention is injected, their checkpoints and their tokenizers."""

from codec_jax.models.config import DTypeName, ModelConfig, RopePairing, param_shapes
from codec_jax.models.llama import AttentionFn, Decoder, cast, init_decoder
from codec_jax.models.llama2c import load_llama2c
from codec_jax.models.registry import LoadedModel, load_model, model_names
from codec_jax.models.tokenizer import Llama2cTokenizer, Tokenizer

__all__ = [
    "AttentionFn",
    "DTypeName",
    "Decoder",
    "Llama2cTokenizer",
    "LoadedModel",
    "ModelConfig",
    "RopePairing",
    "Tokenizer",
    "cast",
    "init_decoder",
    "load_llama2c",
    "load_model",
    "model_names",
    "param_shapes",
]
