"""The attention that a decoder is given: write the new keys and values, then attend by the plan."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from codec_jax.attention import (
    ResolvedPlan,
    attend_resolved,
    check_call,
    check_view,
    prepare_plan,
    resolve_plan,
)
from codec_jax.kv_cache import KVCache, KVPool, TokenSlots, append, check_values
from codec_jax.planning.plan import Plan


class StepView(NamedTuple):
    """What one step sees of the pool, all layers alike.

    Attributes:
      page_list, kv_len: as in `KVCache`, of the plan's forest; the lengths count the step's own
        tokens.
      slots: where each token's keys and values go, tokens in the order of the requests.
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

    The pool must go whole from layer to layer (the carry of a scan, not its xs and ys), and no two
    tokens may share a slot.

    Raises:
      ValueError: `view` is no `StepView`; in a layer, its queries, the pool or the view do not fit
        the plan.
      NotImplementedError: in a layer, the implementation cannot do this.
    """
    if not isinstance(view, StepView):
        raise ValueError(f"`view` must be a StepView; got {type(view).__name__}.")
    # Before any layer: one that is traced by itself must not make what others use.
    may_be_kernels = jax.default_backend() == "gpu" and implementation in (None, "mosaic_gpu")
    prepared = prepare_plan(plan, implementation="mosaic_gpu" if may_be_kernels else "xla")
    check_view(view.page_list, view.kv_len, plan, argument="view")
    resolved = resolve_plan(prepared, view.page_list, view.kv_len, page_size=plan.page_size)

    def attention(layer, q, k, v, pool: KVPool):
        cache = KVCache(pool, view.page_list, view.kv_len)
        chosen = check_call(q, cache, plan, implementation=implementation)
        if view.slots.page.shape != q.shape[:1]:
            raise ValueError(
                f"`view.slots` must hold a slot for each of {q.shape[0]} tokens; got"
                f" {view.slots.page.shape}."
            )
        return layer_attention(resolved, view.slots, implementation=chosen)(layer, q, k, v, pool)

    return attention


def layer_attention(
    resolved: ResolvedPlan, slots: TokenSlots, *, implementation: str
) -> Callable[..., tuple]:
    """`attention(layer, q, k, v, pool) -> (out, pool)` for one step of a decoder.

    Args:
      resolved: the plan for this step, all layers alike.
      slots: where the step's keys and values go.
      implementation: chosen before; "mosaic_gpu" writes them in one launch too.

    Scores are scaled by head_dim**-0.5, by q's width: the pool's heads may be padded.
    """
    write = append_in_one_launch if implementation == "mosaic_gpu" else append

    def attention(layer, q, k, v, pool: KVPool):
        pool = write(pool, layer, slots, k, v)
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


def append_in_one_launch(
    pool: KVPool,
    layer: Int32[Array, ""],
    slots: TokenSlots,
    k: Float[Array, "tokens num_kv_heads head_dim"],
    v: Float[Array, "tokens num_kv_heads head_dim"],
) -> KVPool:
    """`append` by a kernel: for pools that the kernels support, see `choose_implementation`.

    No two tokens that are written may have the same page and row. The pool must go whole from layer
    to layer, never as a slice of a larger array: see `pallas_kernels.append.append_rows`.

    Raises:
      ValueError: as `append` does.
    """
    check_values(pool, slots, k, v)
    if not k.shape[0]:
        return pool  # there is no launch of no blocks
    # Loaded here: without a GPU nobody needs Pallas.
    from pallas_kernels.append import append_rows

    k_pages, v_pages = append_rows(
        (pool.k_pages, pool.v_pages),
        (k.astype(pool.k_pages.dtype), v.astype(pool.v_pages.dtype)),
        slots.page,
        slots.row,
        jnp.reshape(layer * pool.num_pages, (1,)),
        num_pages=pool.num_pages,
    )
    return dataclasses.replace(pool, k_pages=k_pages, v_pages=v_pages)
