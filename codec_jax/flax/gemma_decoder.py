"""A Transformer of google-deepmind's gemma 4.0.1 as a decoder for `generate`."""

from typing import Any

import jax.numpy as jnp

from codec_jax.flax.gemma import GEMMA_HOOK
from codec_jax.flax.linen_decoder import LinenDecoder
from codec_jax.models import ModelConfig

TRANSFORMER = "gemma.gm.nn._transformer.Transformer"


def gemma_decoder(model: Any, variables: Any, *, max_context: int) -> LinenDecoder:
    """A decoder around a `gemma.gm.nn.Transformer`, or around a `LoRA` of one.

    Args:
      model: the model.
      variables: what `model.apply` takes.
      max_context: most tokens of a request; the model does not know.

    Raises:
      NotImplementedError: the model has a soft cap on its scores, or layers with a window.
      ValueError: it is of another class, its attention is not that of gemma 4.0.1, or
        `return_last_only` is set.
    """
    wrapped = getattr(model, "model", model)
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(wrapped).__mro__]
    if TRANSFORMER not in names:
        raise ValueError(
            f"`model` must be a {TRANSFORMER} or a `LoRA` of one; got {names[0]}. `LinenDecoder`"
            " takes others."
        )
    if model.return_last_only:
        raise ValueError("`return_last_only` must not be set: every token's hidden state is asked.")
    theirs = model.config
    dtype = variables["params"]["embedder"]["input_embedding"].dtype
    config = ModelConfig(
        vocab_size=theirs.num_embed,
        hidden_size=theirs.embed_dim,
        intermediate_size=theirs.hidden_dim,
        num_layers=theirs.num_layers,
        num_q_heads=theirs.num_heads,
        num_kv_heads=theirs.num_kv_heads,
        head_dim=theirs.head_dim,
        max_context=max_context,
        dtype=dtype.name,
    )
    return LinenDecoder(model, variables, config, hook=GEMMA_HOOK, run=_run, head=_head)


def _run(model: Any, token_ids: Any, positions: Any) -> Any:
    """The hidden states of the model's own call, whose scores the compiler drops."""
    mask = jnp.ones((*token_ids.shape, 1), bool)
    output = model(token_ids, positions=positions, attention_mask=mask, return_hidden_states=True)
    return output.hidden_states


def _head(model: Any, hidden: Any) -> Any:
    logits = model.embedder.decode(hidden)
    cap = model.config.final_logit_softcap
    return logits if cap is None else jnp.tanh(logits / cap) * cap
