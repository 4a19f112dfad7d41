"""What one call of a foreign decoder carries to the attention of its layers while it is traced."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from codec_jax.models import AttentionFn


class Carrier:
    """The attention of one call of a decoder, and the pool as the layers so far have left it.

    One for each trace, in the hands of every layer's hook. `finish` closes it: a hook that never
    ran would leave the decoder with its own attention, and nobody would hear of it.

    Attributes:
      pool: the cache that `attention` is given next; any pytree.
    """

    def __init__(self, attention: AttentionFn, pool: Any = None, *, num_layers: int):
        self.pool = pool
        self._attention = attention
        self._num_layers = num_layers
        self._ran: list[int] = []

    @property
    def next_layer(self) -> int:
        """Number of the layer whose turn it is, from 0, for hooks that cannot tell."""
        return len(self._ran)

    def attend(
        self,
        layer: int,
        q: Float[Array, "*batch num_q_heads head_dim"],
        k: Float[Array, "*batch num_kv_heads head_dim"],
        v: Float[Array, "*batch num_kv_heads head_dim"],
        *,
        logits_scale: float | None = None,
    ) -> Float[Array, "*batch num_q_heads head_dim"]:
        """One layer's attention, in the dtype of `q`; its keys and values are in the pool then.

        Args:
          layer: which one, from 0.
          q, k, v: rotated and normed as the layer wants them; `*batch` holds one position for each
            token of the call, in the order of its tokens.
          logits_scale: what the scores are multiplied by; head_dim**-0.5 by default.

        Raises:
          ValueError: the shapes do not fit each other.
        """
        _check_shapes(q, k, v)
        self._ran.append(layer)
        head_dim = q.shape[-1]
        rows = q.reshape(-1, *q.shape[-2:])
        if logits_scale is not None and logits_scale != head_dim**-0.5:
            # The attention multiplies by head_dim**-0.5.
            rows = (rows.astype(jnp.float32) * (logits_scale * head_dim**0.5)).astype(q.dtype)
        keys, values = (x.reshape(-1, *x.shape[-2:]) for x in (k, v))
        out, self.pool = self._attention(jnp.int32(layer), rows, keys, values, self.pool)
        return out.astype(q.dtype).reshape(q.shape)

    def finish(self) -> Any:
        """The pool after all layers.

        Raises:
          RuntimeError: the layers did not run once each, in order.
        """
        expected = list(range(self._num_layers))
        if self._ran != expected:
            raise RuntimeError(
                f"The shared attention must run once for each of {self._num_layers} layers, in"
                f" order; it ran for {self._ran}. A layer keeps its own attention, a compiled"
                " function was reused from before the hook, or one trace stands for several layers"
                " (a scan)."
            )
        return self.pool


def check_layers(pool: Any, *, num_layers: int) -> None:
    """Raises ValueError where a pool is not for that many layers: some would keep their own."""
    held = getattr(pool, "num_layers", num_layers)
    if held != num_layers:
        raise ValueError(
            f"`pool` must have a layer for each layer that shares it, {num_layers}; it has {held}."
        )


def _check_shapes(q: Array, k: Array, v: Array) -> None:
    *batch, num_q_heads, head_dim = q.shape
    *kv_batch, num_kv_heads, kv_head_dim = k.shape
    if k.shape != v.shape:
        raise ValueError(f"`k` and `v` must have one shape; got {k.shape} and {v.shape}.")
    if batch != kv_batch or head_dim != kv_head_dim or num_q_heads % num_kv_heads:
        raise ValueError(
            "`q` and `k` must be [*batch, num_q_heads, head_dim] and [*batch, num_kv_heads,"
            " head_dim] of the call's own tokens, num_q_heads a multiple of num_kv_heads; got"
            f" {q.shape} and {k.shape}."
        )
