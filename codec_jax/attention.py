"""The seam: queries, a KV cache and a plan in; exact attention out, by the chosen implementation.

Nothing above this module knows kernels, and nothing below it knows models.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from codec_jax import attention_xla
from codec_jax.attention_reference import attend_rows_densely
from codec_jax.kv_cache import KVCache, KVPool
from codec_jax.partial import Partial
from codec_jax.planning.plan import Plan
from codec_jax.planning.resolve import ResolvedSteps, resolve
from codec_jax.planning.spec import TILE_ROWS
from pallas_kernels import supports

IMPLEMENTATIONS = ("mosaic_gpu", "xla", "reference")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResolvedPlan:
    """A plan with its steps resolved: made once for each decode step, used by all layers.

    Attributes:
      plan: the plan.
      steps: physical pages and live columns.
      q_position: absolute position of each batch row's query, for causal masks; None when every
        key in the cache precedes every query (decoding).
    """

    plan: Plan
    steps: ResolvedSteps
    q_position: Int32[Array, " batch"] | None = None


def attend(
    q: Float[Array, "batch num_q_heads head_dim"],
    kv: KVCache,
    plan: Plan,
    *,
    layer: int = 0,
    logits_scale: float | None = None,
    implementation: str | None = None,
) -> Partial:
    """Attention of every request's query over the keys and values on its path.

    `out = softmax(logits_scale * q K^T) V`, each shared node read once for all its sharers
    (Hydragen, arXiv 2402.05099, section 3; CoDec, arXiv 2505.17694).

    Args:
      q: one query token for each request, in the order in which requests were added; query heads of
        one KV head follow each other.
      kv: the pool and the batch's view of it.
      plan: made for the same forest, see `build_plan`.
      layer: layer of the pool.
      logits_scale: default head_dim**-0.5.
      implementation: "mosaic_gpu", "xla" or "reference"; by default the first that supports the
        case, see `choose_implementation`.

    Returns:
      Partial: out in q's dtype, lse float32 `[batch, num_q_heads]`; (0, -inf) for a request
      without keys.

    Raises:
      ValueError: shapes that do not fit each other, or an unknown implementation.
      NotImplementedError: the implementation cannot do this case, with its reason.
    """
    _check_shapes(q, kv, plan, layer)
    chosen, _ = choose_implementation(
        kv.pool.page_shape,
        kv.pool.k_pages.dtype,
        plan.packed_row.shape[1],
        implementation=implementation,
    )
    scale = float(q.shape[-1] ** -0.5 if logits_scale is None else logits_scale)
    return _attend(q, kv, plan, jnp.int32(layer), logits_scale=scale, implementation=chosen)


@functools.partial(jax.jit, static_argnames=("logits_scale", "implementation"))
def _attend(q, kv: KVCache, plan: Plan, layer, *, logits_scale, implementation) -> Partial:
    steps = resolve(plan, kv.page_list, kv.kv_len, page_size=kv.pool.page_size)
    return attend_resolved(
        q,
        kv.pool,
        ResolvedPlan(plan, steps),
        layer,
        logits_scale=logits_scale,
        implementation=implementation,
    )


def attend_resolved(
    q: Float[Array, "batch num_q_heads head_dim"],
    pool: KVPool,
    resolved: ResolvedPlan,
    layer: Int32[Array, ""],
    *,
    logits_scale: float,
    implementation: str,
) -> Partial:
    """`attend` inside a jitted step: nothing is checked, `implementation` is already chosen."""
    rows = pack_rows(q.astype(jnp.float32) * logits_scale, resolved.plan)
    steps = resolved.steps
    if resolved.q_position is not None:
        position = jnp.repeat(resolved.q_position[:, None], resolved.plan.packed_row.shape[1], 1)
        position = _scatter_rows(position[:, :, None, None], resolved.plan)[0, :, 0]
        packed = attention_xla.Rows(rows, position)
    else:
        packed = attention_xla.Rows(rows)
    if implementation == "reference":
        partial = attend_rows_densely(packed, pool, steps, layer, plan=resolved.plan)
    else:
        config = attention_xla.ChunkConfig.for_pages(pool.page_size, q.shape[-1])
        segments = resolved.plan.segments
        partial = attention_xla.attend_rows(packed, pool, segments, steps, layer, config=config)
    return unpack_rows(partial, resolved.plan, dtype=q.dtype)


def pack_rows(
    q: Float[Array, "batch num_q_heads head_dim"], plan: Plan
) -> Float[Array, "num_kv_heads rows head_dim"]:
    """Queries at their packed rows, the group folded into rows; zeros in padding rows."""
    batch, group = plan.packed_row.shape
    grouped = q.reshape(batch, plan.num_kv_heads, group, q.shape[-1])
    return _scatter_rows(jnp.swapaxes(grouped, 1, 2), plan)


def unpack_rows(partial: Partial, plan: Plan, *, dtype) -> Partial:
    """Packed results back in batch order; (0, -inf) for batch rows without a request."""
    batch, group = plan.packed_row.shape
    out = partial.out.at[:, plan.packed_row].get(mode="fill", fill_value=0.0)
    lse = partial.lse.at[:, plan.packed_row].get(mode="fill", fill_value=-jnp.inf)
    heads = partial.out.shape[0] * group
    out = jnp.moveaxis(out, 0, 1).reshape(batch, heads, out.shape[-1])
    return Partial(out.astype(dtype), jnp.moveaxis(lse, 0, 1).reshape(batch, heads))


def _scatter_rows(values, plan: Plan):
    """[batch, group, heads, ...] to [heads, packed rows, ...]."""
    rows = jnp.zeros((values.shape[2], plan.num_tiles * TILE_ROWS, values.shape[3]), values.dtype)
    return rows.at[:, plan.packed_row].set(jnp.moveaxis(values, 2, 0), mode="drop")


def choose_implementation(
    shape: tuple[int, int, int], dtype: np.dtype, group_size: int, *, implementation: str | None
) -> tuple[str, str]:
    """The implementation that will run, and why.

    Args:
      shape: (num_kv_heads, page_size, head_dim) of the pool.
      dtype: of keys and values.
      group_size: query heads of each KV head.
      implementation: a name, or None for the first that supports the case.

    Raises:
      ValueError: unknown name.
      NotImplementedError: the named implementation cannot do this case.
    """
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        names = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"`implementation` must be one of {names}; got {implementation!r}.")
    if implementation in ("xla", "reference"):
        return implementation, "asked for"
    refusal = supports(
        platform=jax.default_backend(),
        dtype=dtype,
        head_dim=shape[2],
        page_size=shape[1],
        group_size=group_size,
    )
    if refusal is None:
        return "mosaic_gpu", "asked for" if implementation else "the kernels support this case"
    if implementation == "mosaic_gpu":
        raise NotImplementedError(
            f"`implementation` 'mosaic_gpu' cannot do this: {refusal.reason} Use 'xla'."
        )
    return "xla", refusal.reason


def default_num_workers() -> int:
    """Streaming multiprocessors of the default device; 8 without (XLA ignores workers)."""
    return getattr(jax.devices()[0], "core_count", 8) if jax.default_backend() == "gpu" else 8


def _check_shapes(q, kv: KVCache, plan: Plan, layer: int) -> None:
    if q.ndim != 3:
        raise ValueError(f"`q` must be [batch, num_q_heads, head_dim]; got shape {q.shape}.")
    num_kv_heads, _, head_dim = kv.pool.k_pages.shape[1:]
    batch, group = plan.packed_row.shape
    expected = (batch, num_kv_heads * group, head_dim)
    if q.shape != expected or plan.num_kv_heads != num_kv_heads:
        raise ValueError(
            f"`q` must have shape {expected} for a plan of {batch} requests, {plan.num_kv_heads} KV"
            f" heads and groups of {group} over a pool of {num_kv_heads} KV heads; got {q.shape}."
        )
    if not 0 <= layer < kv.pool.num_layers:
        raise ValueError(f"`layer` must be in [0, {kv.pool.num_layers}); got {layer}.")
