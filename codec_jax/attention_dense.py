"""Dense keys and values read by the kernels where they lie: a shared prefix, a suffix for each.

No page is filled and nothing is copied: a step names the first of 64 rows of a tensor. A block that
would pass the tensor's end starts earlier, and its live columns lie as much further on.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from codec_jax.attention import (
    choose_implementation,
    keep_apart,
    kernel_tables,
    launch_kernels,
)
from codec_jax.attention_rows import pack_rows, unpack_rows
from codec_jax.forest import Forest
from codec_jax.forest_arrays import export_arrays
from codec_jax.partial import Partial
from codec_jax.planning.build import build_plan
from codec_jax.planning.plan import Plan
from codec_jax.planning.resolve import resolve
from codec_jax.planning.spec import PlanSpec

BLOCK_ROWS, DENSE_ROWS = 64, 8
"""Rows of a step, the kernels' block; rows that a block's start is a multiple of."""


class TwoLevels(NamedTuple):
    """A plan for one prefix and a suffix for each request, made from sizes alone.

    Attributes:
      plan: as for pages of 64 tokens.
      first_row: row of its tensor at which each page entry starts.
      is_suffix: whether a page entry lies in the suffixes.
      request: the request whose suffix each node is; `batch` for the prefix and for empty nodes.
      prefix: 1 for the prefix, 0 for all other nodes.
    """

    plan: Plan
    first_row: np.ndarray
    is_suffix: np.ndarray
    request: np.ndarray
    prefix: np.ndarray


@functools.lru_cache(maxsize=64)
def plan_two_levels(
    batch: int, prefix_len: int, max_suffix_len: int, *, spec: PlanSpec
) -> TwoLevels:
    """The plan for suffixes of full length; shorter ones leave steps dead. On the host."""
    forest = Forest(page_size=BLOCK_ROWS)
    root = forest.insert(np.zeros(prefix_len, np.int32)) if prefix_len else None
    for request in range(batch):
        leaf = root
        if max_suffix_len:
            leaf = forest.insert(np.full(max_suffix_len, request, np.int32), parent=root)
        forest.add_request([], parent=leaf)
    arrays = export_arrays(forest)
    with jax.ensure_compile_time_eval():
        plan = jax.device_get(build_plan(arrays, spec))

    is_root = (arrays.parent < 0) & (arrays.kv_len > 0) & (prefix_len > 0)
    is_leaf = ~is_root & (arrays.kv_len > 0)
    owner = arrays.request_row[np.minimum(arrays.request_lo, batch - 1)]
    request = np.where(is_leaf, owner, batch).astype(np.int32)
    node = np.repeat(np.arange(arrays.parent.size), arrays.num_pages)
    block = np.arange(node.size) - arrays.page_lo[node]
    start = np.where(is_leaf, request * max_suffix_len, 0)
    first_row = np.zeros(arrays.page_list.size, np.int32)
    is_suffix = np.zeros(arrays.page_list.size, bool)
    first_row[: node.size] = start[node] + BLOCK_ROWS * block
    is_suffix[: node.size] = is_leaf[node]
    return TwoLevels(plan, first_row, is_suffix, request, is_root.astype(np.int32))


def choose_dense_implementation(
    q_shape: tuple[int, ...], keys: tuple[Array, Array], *, implementation: str | None
) -> str:
    """The implementation that will run on these keys (of the prefix, of the suffixes).

    Raises:
      ValueError: unknown name.
      NotImplementedError: the named implementation cannot do this case, with its reason.
    """
    num_kv_heads, head_dim = keys[0].shape[1:]
    chosen, _ = choose_implementation(
        (num_kv_heads, BLOCK_ROWS, head_dim),
        keys[0].dtype,
        q_shape[1] // num_kv_heads,
        implementation=implementation,
    )
    if chosen == "reference":
        raise NotImplementedError(
            "`implementation` 'reference' cannot do this: it takes paged keys. Use 'xla'."
        )
    reason = None if chosen == "xla" else _dense_refusal(keys)
    if reason is not None and implementation is not None:
        raise NotImplementedError(
            f"`implementation` 'mosaic_gpu' cannot do this: {reason} Use 'xla'."
        )
    return chosen if reason is None else "xla"


def _dense_refusal(keys: tuple[Array, Array]) -> str | None:
    """Why the kernels cannot read these tensors where they lie."""
    head_dim, rows = keys[0].shape[2], [k.size // max(1, k.shape[-2] * k.shape[-1]) for k in keys]
    if keys[0].dtype != keys[1].dtype:
        return f"prefix and suffixes must be of one dtype; got {keys[0].dtype}, {keys[1].dtype}."
    if head_dim % 64:
        return f"dense keys are not padded, head_dim must be a multiple of 64; got {head_dim}."
    if not any(rows):
        return "there are no keys."
    lengths = [k.shape[-3] for k in keys]
    if any(length % DENSE_ROWS for length in lengths):
        return f"lengths of dense keys must be multiples of {DENSE_ROWS}; got {lengths}."
    if any(0 < count < BLOCK_ROWS for count in rows):
        return f"a dense tensor must have at least {BLOCK_ROWS} rows of keys; got {rows}."
    return None


@functools.partial(jax.jit, static_argnames="num_workers")
def attend_two_levels(
    q: Float[Array, "batch num_q_heads head_dim"],
    shared_k: Float[Array, "prefix_len num_kv_heads head_dim"],
    shared_v: Float[Array, "prefix_len num_kv_heads head_dim"],
    suffix_k: Float[Array, "batch max_suffix_len num_kv_heads head_dim"],
    suffix_v: Float[Array, "batch max_suffix_len num_kv_heads head_dim"],
    suffix_len: Int32[Array, " batch"],
    *,
    num_workers: int,
) -> Partial:
    """`hydragen_attention` on the kernels; shapes are checked, and the kernels support them."""
    levels, sources = plan_and_sources(
        q.shape[1], (shared_k, shared_v), (suffix_k, suffix_v), num_workers=num_workers
    )
    columns = step_columns(levels, sources, suffix_len, shared_k.shape[0])
    tables = kernel_tables(levels.plan).with_steps(*columns)
    rows, offset = pack_rows(q.astype(shared_k.dtype), levels.plan), jnp.zeros(1, jnp.int32)
    scale = q.shape[2] ** -0.5
    packed = launch_kernels(rows, sources, tables, offset, logits_scale=scale)
    return unpack_rows(keep_apart(packed), levels.plan, dtype=q.dtype)


def plan_and_sources(
    num_q_heads: int,
    shared: tuple[Array, Array],
    suffix: tuple[Array, Array],
    *,
    num_workers: int,
) -> tuple[TwoLevels, tuple[tuple[Array, Array], ...]]:
    """The plan for these shapes, and the tensors that hold any keys, flat over rows."""
    (prefix_len, num_kv_heads, head_dim), (batch, max_suffix_len) = (
        shared[0].shape,
        suffix[0].shape[:2],
    )
    spec = PlanSpec(
        num_kv_heads=num_kv_heads,
        group_size=num_q_heads // num_kv_heads,
        page_size=BLOCK_ROWS,
        num_workers=num_workers,
    )
    flat = (
        suffix[0].reshape(-1, num_kv_heads, head_dim),
        suffix[1].reshape(-1, num_kv_heads, head_dim),
    )
    sources = tuple(pair for pair in (shared, flat) if pair[0].shape[0])
    levels = plan_two_levels(batch, prefix_len, max_suffix_len, spec=spec)
    return levels._replace(plan=jax.tree.map(jnp.asarray, levels.plan)), sources


def step_columns(
    levels: TwoLevels,
    sources: tuple[tuple[Array, Array], ...],
    suffix_len: Int32[Array, " batch"],
    prefix_len: int,
) -> tuple[Int32[Array, " steps"], ...]:
    """Columns of the step table, every block inside its tensor."""
    lengths = jnp.append(suffix_len, jnp.zeros(1, suffix_len.dtype)).astype(jnp.int32)
    kv_len = lengths[levels.request] + levels.prefix * prefix_len
    steps = resolve(levels.plan, jnp.asarray(levels.first_row), kv_len, page_size=BLOCK_ROWS)
    is_second = jnp.asarray(levels.is_suffix & (len(sources) > 1)).astype(jnp.int32)
    source = is_second[levels.plan.steps.page_entry]
    most = jnp.array([k.shape[0] - BLOCK_ROWS for k, _ in sources], jnp.int32)[source]
    moved = jnp.maximum(steps.page - most, 0)
    return (
        steps.page - moved,
        steps.col_lo + moved,
        steps.col_hi + moved,
        steps.row_lo,
        steps.row_hi,
        source,
    )
