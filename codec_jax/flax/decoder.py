"""A decoder that somebody else wrote, as the rest of the library takes one."""

import abc
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from codec_jax.flax.carrier import Carrier
from codec_jax.models import AttentionFn, ModelConfig


class ForeignDecoder(nnx.Module, abc.ABC):
    """Base of the doors' decoders: `models.LoadedModel` and `generate` take them as their own.

    The foreign model sees every token as a batch row of length one, so that its rotary embedding
    and masks know nothing of prefixes.

    Attributes:
      config: the model's sizes, and the dtype of its hidden states and of the pool.
    """

    config: ModelConfig

    @abc.abstractmethod
    def run(
        self,
        token_ids: Int32[Array, "tokens 1"],
        positions: Int32[Array, "tokens 1"],
        carrier: Carrier,
    ) -> Float[Array, "tokens 1 hidden"]:
        """Hidden states after the final norm; each layer's attention is `carrier.attend`."""

    @abc.abstractmethod
    def head(self, hidden: Float[Array, "tokens 1 hidden"]) -> Float[Array, "tokens 1 vocab"]:
        """Scores of the next token."""

    @abc.abstractmethod
    def arrays(self) -> Any:
        """Every parameter, in a pytree."""

    def __call__(
        self,
        token_ids: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        cache: Any,
        attention: AttentionFn,
    ) -> tuple[Float[Array, "tokens hidden"], Any]:
        """Hidden states after the final norm, and the cache after all layers.

        Raises:
          RuntimeError: `attention` did not run once for each layer.
          ValueError: the hidden states have not the width and dtype of `config`.
        """
        carrier = Carrier(attention, cache, num_layers=self.config.num_layers)
        hidden = self.run(token_ids[:, None], positions[:, None], carrier)[:, 0]
        cache = carrier.finish()
        expected = (*token_ids.shape, self.config.hidden_size)
        if hidden.shape != expected or hidden.dtype != self.config.array_dtype:
            raise ValueError(
                f"`run` must return {self.config.dtype} of shape {expected}, by `config`; got"
                f" {hidden.dtype} of shape {hidden.shape}."
            )
        return hidden, cache

    def logits(self, hidden: Float[Array, "tokens hidden"]) -> Float32[Array, "tokens vocab"]:
        """Scores of the next token, in float32, for hidden states that `__call__` returned."""
        return self.head(hidden[:, None])[:, 0].astype(jnp.float32)

    def check_sizes(self) -> None:
        """Traces one token; raises ValueError where a size or the dtype is not that of `config`."""
        config = self.config

        def own_values(layer, q, k, v, cache):
            """The attention of a token that sees itself only."""
            found = (q.shape[1], k.shape[1], q.shape[2])
            expected = (config.num_q_heads, config.num_kv_heads, config.head_dim)
            if found != expected:
                raise ValueError(
                    f"`config` must have the model's num_q_heads, num_kv_heads and head_dim,"
                    f" {found}; it has {expected}."
                )
            return jnp.repeat(v, q.shape[1] // v.shape[1], axis=1), cache

        def one_token(token_ids):
            hidden, _ = self(token_ids, token_ids, None, own_values)
            return self.logits(hidden)

        logits = jax.eval_shape(one_token, jax.ShapeDtypeStruct((1,), jnp.int32))
        if logits.shape != (1, config.vocab_size):
            raise ValueError(
                f"`head` must return a score for each of {config.vocab_size} tokens, by"
                f" `config`; got {logits.shape[1:]}."
            )
