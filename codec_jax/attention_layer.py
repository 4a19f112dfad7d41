"""The attention that a decoder is given: write the new keys and values, then attend by the plan."""

from collections.abc import Callable

from codec_jax.attention import ResolvedPlan, attend_resolved
from codec_jax.kv_cache import KVPool, TokenSlots, append


def layer_attention(
    resolved: ResolvedPlan, slots: TokenSlots, *, implementation: str
) -> Callable[..., tuple]:
    """`attention(layer, q, k, v, pool) -> (out, pool)` for one step of a decoder.

    Args:
      resolved: the plan for this step, all layers alike.
      slots: where the step's keys and values go.
      implementation: chosen before.

    Scores are scaled by head_dim**-0.5, by q's width: the pool's heads may be padded.
    """

    def attention(layer, q, k, v, pool: KVPool):
        pool = append(pool, layer, slots, k, v)
        partial = attend_resolved(
            q,
            pool,
            resolved,
            layer,
            logits_scale=q.shape[-1] ** -0.5,
            implementation=implementation,
        )
        return partial.out, pool

    return attention
