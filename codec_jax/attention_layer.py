"""The attention that a decoder is given: write the new keys and values, then attend by the plan."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Int32

from codec_jax.attention import (
    ResolvedPlan,
    attend_resolved,
    choose_implementation,
    prepare_plan,
    resolve_plan,
)
from codec_jax.kv_cache import KVPool, TokenSlots, append
from codec_jax.planning.plan import Plan


class StepView(NamedTuple):
    """What one step sees of the pool, all layers alike.

    Attributes:
      page_list, kv_len: as in `KVCache`; the lengths count the step's own tokens.
      slots: where the step's keys and values go.
    """

    page_list: Int32[Array, " page_entries"]
    kv_len: Int32[Array, " nodes"]
    slots: TokenSlots


def step_attention(
    plan: Plan, view: StepView, *, implementation: str | None = None
) -> Callable[..., tuple]:
    """`layer_attention` for one step under a plan: for decoders that are driven by other loops.

    Args:
      plan: made for the forest whose nodes `view` names, see `build_plan`.
      view: live lengths, pages and slots of this step.
      implementation: "mosaic_gpu", "xla" or "reference"; by default what supports the pool.

    In a loop over steps, `prepare_plan` once outside of it saves what does not change.
    """

    def attention(layer, q, k, v, pool: KVPool):
        chosen, _ = choose_implementation(
            pool.page_shape,
            pool.k_pages.dtype,
            plan.packed_row.shape[1],
            implementation=implementation,
        )
        if chosen not in made:
            prepared = prepare_plan(plan, implementation=chosen)
            resolved = resolve_plan(prepared, view.page_list, view.kv_len, page_size=plan.page_size)
            made[chosen] = layer_attention(resolved, view.slots, implementation=chosen)
        return made[chosen](layer, q, k, v, pool)

    made: dict[str, Callable[..., tuple]] = {}
    return attention


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
