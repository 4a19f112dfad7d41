"""The seam: queries, a KV cache and a plan in; exact attention out, by the chosen implementation.

Nothing above this module knows kernels, and nothing below it knows models.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from codec_jax.attention_reference import attend_rows_densely
from codec_jax.attention_rows import Rows, pack_positions, pack_rows, row_sources, unpack_rows
from codec_jax.attention_xla import ChunkConfig, attend_rows
from codec_jax.kv_cache import KVCache, KVPool
from codec_jax.partial import Partial
from codec_jax.planning.device import device_slug
from codec_jax.planning.merge_order import merge_order
from codec_jax.planning.plan import Plan, Segments
from codec_jax.planning.resolve import ResolvedSteps, resolve
from codec_jax.planning.scans import iota
from pallas_kernels import KernelConfig, Tables, pack_table, pack_tables, padded_head_dim, supports

IMPLEMENTATIONS = ("mosaic_gpu", "xla", "reference")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedPlan:
    """A plan with what an implementation derives from it: made once, outside the decode loop.

    Attributes:
      plan: the plan.
      row_sources: which query each packed row holds, see `row_sources`.
      tables: the kernels' tables, the steps still empty; None for the others.
    """

    plan: Plan
    row_sources: Int32[Array, " rows"]
    tables: Tables | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResolvedPlan:
    """A prepared plan with its steps resolved: once for each decode step, for all its layers.

    Attributes:
      prepared: the plan.
      steps: physical pages and live columns.
      tables: the kernels' tables; None for the others.
      q_position: absolute position of each batch row's query, for causal masks; None when every
        key in the cache precedes every query (decoding).
    """

    prepared: PreparedPlan
    steps: ResolvedSteps
    tables: Tables | None = None
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
      without keys. A NaN or an infinity in a live key comes out in the rows that see it; one in a
      live value may also reach rows computed beside them (a tile of 64 packed rows: 0 * NaN).

    Raises:
      ValueError: shapes that do not fit each other, or an unknown implementation.
      NotImplementedError: the implementation cannot do this case, with its reason.
    """
    if not isinstance(layer, int | np.integer) or not 0 <= layer < kv.pool.num_layers:
        raise ValueError(f"`layer` must be an integer in [0, {kv.pool.num_layers}); got {layer}.")
    chosen = check_call(q, kv, plan, implementation=implementation)
    scale = float(q.shape[-1] ** -0.5 if logits_scale is None else logits_scale)
    return _attend(q, kv, plan, jnp.int32(layer), logits_scale=scale, implementation=chosen)


@functools.partial(jax.jit, static_argnames=("logits_scale", "implementation"))
def _attend(q, kv: KVCache, plan: Plan, layer, *, logits_scale, implementation) -> Partial:
    prepared = prepare_plan(plan, implementation=implementation)
    resolved = resolve_plan(prepared, kv.page_list, kv.kv_len, page_size=kv.pool.page_size)
    return attend_resolved(
        q, kv.pool, resolved, layer, logits_scale=logits_scale, implementation=implementation
    )


def prepare_plan(plan: Plan, *, implementation: str) -> PreparedPlan:
    """The plan with the tables of that implementation."""
    tables = kernel_tables(plan) if implementation == "mosaic_gpu" else None
    return PreparedPlan(plan, row_sources(plan), tables)


def kernel_tables(plan: Plan) -> Tables:
    """The kernels' tables without steps.

    The kernels number slots in merge order, so that a tile's slots follow each other.
    """
    segments, order = plan.segments, merge_order(plan)
    place = jnp.where(iota(plan.num_slots) < order.indptr[-1], order.slots, plan.num_slots)
    new_slot = jnp.zeros(plan.num_slots, jnp.int32).at[place].set(iota(place.shape[0]), mode="drop")
    second = jnp.minimum(segments.slot + 1, plan.num_slots - 1)
    table = pack_table(
        segments.kv_head,
        segments.tile,
        segments.num_tiles,
        segments.step_lo,
        segments.num_steps,
        new_slot[segments.slot],
        new_slot[second],
        _final_tiles(plan, order.indptr),
    )
    return pack_tables(table, plan.worker_indptr, order.indptr)


def _final_tiles(plan: Plan, indptr: Int32[Array, " pairs+1"]) -> Int32[Array, " segments"]:
    """A bit for each tile of a segment whose slot is the only one: nothing is left to merge."""
    is_alone = (jnp.diff(indptr) == 1).astype(jnp.int32)
    pair = plan.segments.tile * plan.num_kv_heads + plan.segments.kv_head
    second = jnp.minimum(pair + plan.num_kv_heads, is_alone.shape[0] - 1)
    return is_alone[pair] + jnp.where(plan.segments.num_tiles > 1, 2 * is_alone[second], 0)


def resolve_plan(
    prepared: PreparedPlan,
    page_list: Int32[Array, " page_entries"],
    kv_len: Int32[Array, " nodes"],
    *,
    page_size: int,
    causal: tuple[Int32[Array, " nodes"], Int32[Array, " batch"]] | None = None,
) -> ResolvedPlan:
    """The plan for these pages and lengths.

    Args:
      prepared: the plan.
      page_list, kv_len: the batch's view of the pool, see `KVCache`.
      page_size: tokens of a page.
      causal: absolute positions of each node's first token and of each batch row's query, for a
        causal mask.
    """
    position, q_position = (None, None) if causal is None else causal
    steps = resolve(prepared.plan, page_list, kv_len, page_size=page_size, position=position)
    tables = prepared.tables
    if tables is not None:
        columns = (steps.page, steps.col_lo, steps.col_hi, steps.row_lo, steps.row_hi)
        tables = tables.with_steps(*columns)
    return ResolvedPlan(prepared, steps, tables, q_position)


def attend_resolved(
    q: Float[Array, "batch num_q_heads head_dim"],
    pool: KVPool,
    resolved: ResolvedPlan,
    layer: Int32[Array, ""],
    *,
    logits_scale: float,
    implementation: str,
) -> Partial:
    """`attend` inside a jitted step: nothing is checked, `implementation` is already chosen.

    The pool's head_dim may be larger than q's: keys and values are padded with zeros there.
    """
    prepared, head_dim = resolved.prepared, q.shape[-1]
    # NumPy's float64 is a float too, but no weak one: under x64 it would widen what it scales.
    logits_scale = float(logits_scale)
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, pool.head_dim - head_dim)))
    partial = attend_packed(
        pack_rows(padded, prepared.plan, prepared.row_sources),
        pool,
        resolved,
        layer,
        logits_scale=logits_scale,
        implementation=implementation,
    )
    cut = Partial(partial.out[..., :head_dim], partial.lse)
    return unpack_rows(cut, prepared.plan, dtype=q.dtype)


def attend_packed(
    rows: Float[Array, "num_kv_heads rows head_dim"],
    pool: KVPool,
    resolved: ResolvedPlan,
    layer: Int32[Array, ""],
    *,
    logits_scale: float,
    implementation: str,
) -> Partial:
    """`attend_resolved` on packed rows as wide as the pool's heads: float32 out and natural lse."""
    if implementation == "mosaic_gpu":
        rows = rows.astype(pool.k_pages.dtype)
        return keep_apart(run_kernels(rows, pool, resolved, layer, logits_scale=logits_scale))
    plan, position = resolved.prepared.plan, resolved.q_position
    packed = Rows(
        rows.astype(jnp.float32) * logits_scale,
        None if position is None else pack_positions(position, plan),
    )
    if implementation == "reference":
        return attend_rows_densely(packed, pool, resolved.steps, layer, plan=plan)
    config = ChunkConfig.for_pages(pool.page_size, pool.head_dim)
    return attend_rows(packed, pool, _used(plan), resolved.steps, layer, config=config)


def _used(plan: Plan) -> Segments:
    """The segments, those past the last worker's emptied: nothing may read them."""
    segments = plan.segments
    is_used = iota(segments.num_steps.shape[0]) < plan.worker_indptr[-1]
    return dataclasses.replace(segments, num_steps=jnp.where(is_used, segments.num_steps, 0))


def run_kernels(
    rows: Float[Array, "num_kv_heads rows head_dim"],
    pool: KVPool,
    resolved: ResolvedPlan,
    layer: Int32[Array, ""],
    *,
    logits_scale: float,
    config: KernelConfig | None = None,
) -> Partial:
    """Two launches and nothing else: every segment's partial result, then their merge.

    For measurements, in the device's tuned configuration or another one. A row without keys is
    empty by its lse alone: its out may hold anything.
    """
    if resolved.tables is None:
        raise ValueError("`resolved` must be prepared for 'mosaic_gpu'; see `prepare_plan`.")
    offset = jnp.reshape(layer * pool.num_pages, (1,))
    kv = ((pool.k_pages, pool.v_pages),)
    return launch_kernels(
        rows, kv, resolved.tables, offset, logits_scale=logits_scale, config=config
    )


def launch_kernels(
    rows: Float[Array, "num_kv_heads rows head_dim"],
    kv: tuple[tuple[Array, Array], ...],
    tables: Tables,
    page_offset: Int32[Array, " 1"],
    *,
    logits_scale: float,
    config: KernelConfig | None = None,
) -> Partial:
    """`run_kernels` on any sources of keys and values, see `pallas_kernels.partial_attention`."""
    # Loaded here: without a GPU nobody needs Pallas.
    from pallas_kernels.merge import merge_partials
    from pallas_kernels.partial_attention import partial_attention, tokens_of_a_page
    from pallas_kernels.tuning import best_config

    config = config or best_config(
        device_slug(), rows.dtype, head_dim=rows.shape[2], page_size=tokens_of_a_page(kv)
    )

    partials, merged = partial_attention(
        rows, kv, tables, page_offset, logits_scale=logits_scale, config=config
    )
    return Partial(*merge_partials(partials, tables.slot_indptr, merged))


def keep_apart(partial: Partial) -> Partial:
    """The same values, out of XLA's sight of where they come from.

    XLA lets a custom call write straight into a slice of a larger array (the results of a `scan`),
    and forgets that the merge updates its operands in place: the slice stays as it was. An
    operation in between prevents that; it is fused into whatever reads the result.
    """
    is_empty = partial.lse == -jnp.inf
    out = jnp.where(is_empty[..., None], 0.0, partial.out)
    return Partial(out, jnp.minimum(partial.lse, jnp.finfo(jnp.float32).max))


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
        jax.devices()[0],
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


def stored_head_dim(head_dim: int, *, implementation: str) -> int:
    """Width that a pool's heads must have for an implementation; the model's, or padded."""
    return padded_head_dim(head_dim) if implementation == "mosaic_gpu" else head_dim


def default_num_workers() -> int:
    """Streaming multiprocessors of the default device; 8 without (XLA ignores workers)."""
    return getattr(jax.devices()[0], "core_count", 8) if jax.default_backend() == "gpu" else 8


def check_call(q, kv: KVCache, plan: Plan, *, implementation: str | None) -> str:
    """The implementation that will run, once everything fits each other; see `attend`."""
    _check_kinds(q, kv)
    chosen, _ = choose_implementation(
        kv.pool.page_shape,
        kv.pool.k_pages.dtype,
        plan.packed_row.shape[1],
        implementation=implementation,
    )
    _check_shapes(q, kv, plan, implementation=chosen)
    return chosen


def _check_kinds(q, kv: KVCache) -> None:
    if q.ndim != 3:
        raise ValueError(f"`q` must be [batch, num_q_heads, head_dim]; got shape {q.shape}.")
    for name, array in (("q", q), ("kv.pool", kv.pool.k_pages), ("kv.pool", kv.pool.v_pages)):
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"`{name}` must hold floating-point numbers; got {array.dtype}.")


def _check_shapes(q, kv: KVCache, plan: Plan, *, implementation: str) -> None:
    pool, (batch, group) = kv.pool, plan.packed_row.shape
    if pool.v_pages.shape != pool.k_pages.shape:
        raise ValueError(
            f"`kv.pool` must have K and V of one shape; got {pool.k_pages.shape} and"
            f" {pool.v_pages.shape}."
        )
    num_kv_heads, page_size, head_dim = pool.page_shape
    if (plan.num_kv_heads, plan.page_size) != (num_kv_heads, page_size):
        raise ValueError(
            f"`plan` must be made for the pool's {num_kv_heads} KV heads and page_size {page_size};"
            f" it is for {plan.num_kv_heads} and {plan.page_size}."
        )
    check_view(kv.page_list, kv.kv_len, plan)
    stored = stored_head_dim(q.shape[2], implementation=implementation)
    expected = (batch, num_kv_heads * group, q.shape[2] if stored == head_dim else head_dim)
    if q.shape != expected:
        raise ValueError(
            f"`q` must have shape {expected} for a plan of {batch} requests and groups of {group}"
            f" over this pool; got {q.shape}."
        )


def check_view(page_list, kv_len, plan: Plan, *, argument: str = "kv") -> None:
    """Raises ValueError where a batch's view of the pool is not of the plan's forest."""
    sizes = (page_list.shape, kv_len.shape)
    if sizes != ((plan.num_page_entries,), (plan.num_nodes,)):
        raise ValueError(
            f"`{argument}` must hold the {plan.num_page_entries} page entries and {plan.num_nodes}"
            f" nodes of the plan's forest; got page_list {sizes[0]} and kv_len {sizes[1]}."
        )
