"""Llama3 and Qwen3 of google-tunix 0.1.7 as decoders for `generate`."""

from typing import Any, cast

import jax.numpy as jnp
from flax import nnx

from codec_jax.flax.nnx_attention import Shared, SharedPool
from codec_jax.flax.nnx_decoder import NNXDecoder
from codec_jax.models import DTypeName, ModelConfig

MODELS = ("tunix.models.llama3.model.Llama3", "tunix.models.qwen3.model.Qwen3")


def tunix_decoder(model: Any, *, max_context: int) -> NNXDecoder:
    """A decoder with the parameters of a Llama3 or Qwen3 of tunix, which stays as it is.

    Args:
      model: the model.
      max_context: most tokens of a request; the model does not know.

    Raises:
      ValueError: the model is of another class, or one of its attention modules is.
    """
    name = f"{type(model).__module__}.{type(model).__qualname__}"
    if name not in MODELS:
        raise ValueError(
            f"`model` must be one of {', '.join(MODELS)}; got {name}. `NNXDecoder` takes others."
        )
    copy = nnx.merge(*nnx.split(model))
    pool = SharedPool(None)
    for i, layer in enumerate(copy.layers):
        layer.attn = Shared(layer.attn, pool, layer=i)
    return NNXDecoder(copy, _config(model, max_context), run=_run, head=_head)


def _config(model: Any, max_context: int) -> ModelConfig:
    theirs = model.config
    dtype = getattr(theirs, "dtype", model.embedder.input_embedding.dtype)
    return ModelConfig(
        vocab_size=theirs.vocab_size,
        hidden_size=theirs.embed_dim,
        intermediate_size=theirs.hidden_dim,
        num_layers=theirs.num_layers,
        num_q_heads=theirs.num_heads,
        num_kv_heads=theirs.num_kv_heads,
        head_dim=theirs.head_dim,
        max_context=max_context,
        dtype=cast(DTypeName, jnp.dtype(dtype).name),
    )


class _Tap(nnx.Module):
    """A module that keeps its last output."""

    def __init__(self, module: nnx.Module):
        self.module = module
        self.output = nnx.data(None)

    def __call__(self, x: Any) -> Any:
        self.output = self.module(x)
        return self.output


def _run(model: Any, token_ids: Any, positions: Any) -> Any:
    """What the model's own call makes before its head, whose scores the compiler drops."""
    model.final_norm = _Tap(model.final_norm)
    model(token_ids, positions, None, None)
    return model.final_norm.output


def _head(model: Any, hidden: Any) -> Any:
    return model.lm_head(hidden) if hasattr(model, "lm_head") else model.embedder.decode(hidden)
