"""Attention over a plan in plain XLA: any device, head_dim, group and page size.

The plan's work is flattened to (segment, step, block of rows) units, see `attention_xla_units`, and
accumulated with an online softmax. Memory is the packed result plus O(chunk). Each unit reads its
page once, so a shared page is read once for every `row_block` stacked query rows. Differentiable in
queries, keys and values.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from codec_jax.attention_rows import Rows
from codec_jax.attention_xla_grad import gradients
from codec_jax.attention_xla_units import ChunkConfig as ChunkConfig
from codec_jax.attention_xla_units import Units, Work, over_units
from codec_jax.kv_cache import KVPool
from codec_jax.partial import Partial
from codec_jax.planning.plan import Segments
from codec_jax.planning.resolve import ResolvedSteps
from codec_jax.planning.scans import iota

MASKED = -1e30
"""A masked score: finite, since exp(-inf - -inf) is NaN."""
START = -1e29
"""The running maximum before any key: above MASKED, so that exp(MASKED - START) is 0."""


class _Running(NamedTuple):
    """Online softmax of every row block: maximum, sum of weights, weighted sum of values."""

    top: Float32[Array, "blocks row_block"]
    total: Float32[Array, "blocks row_block"]
    out: Float32[Array, "blocks row_block head_dim"]


def attend_rows(
    rows: Rows,
    pool: KVPool,
    segments: Segments,
    steps: ResolvedSteps,
    layer: Int32[Array, ""],
    *,
    config: ChunkConfig,
) -> Partial:
    """Attention of packed rows over all segments of a plan, merged: float32 out and natural lse.

    Args:
      rows: packed queries, already scaled by the logits scale.
      pool: keys and values.
      segments: who reads which steps for which tiles; empty ones do nothing.
      steps: resolved steps; with `position`, key columns later than a row's position are masked.
      layer: offset on the page ids.
      config: chunk sizes.
    """
    indices = (rows.position, segments, steps, layer)
    return _attend((config, pool.num_layers), rows.q, pool.k_pages, pool.v_pages, indices)


def _as_work(static, q, k_pages, v_pages, indices) -> Work:
    config, num_layers = static
    position, segments, steps, layer = indices
    pool = KVPool(k_pages, v_pages, num_layers)
    return Work(Rows(q, position), pool, layer, segments, steps, config)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, q, k_pages, v_pages, indices) -> Partial:
    work = _as_work(static, q, k_pages, v_pages, indices)
    num_heads, num_rows, head_dim = q.shape
    shape = (num_heads * num_rows // work.config.row_block, work.config.row_block)
    empty = _Running(
        jnp.full(shape, START, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, head_dim), jnp.float32),
    )
    return _finish(over_units(work, _accumulate, empty), q.shape)


def _attend_forward(static, *arguments):
    result = _attend(static, *arguments)
    return result, (arguments, result)


def _attend_backward(static, residuals, cotangent: Partial):
    arguments, result = residuals
    q, k_pages, v_pages, _ = arguments
    sums = gradients(_as_work(static, *arguments), result, cotangent)
    return (
        sums.query.reshape(q.shape).astype(q.dtype),
        sums.key.astype(k_pages.dtype),
        sums.value.astype(v_pages.dtype),
        None,
    )


_attend.defvjp(_attend_forward, _attend_backward)


def _accumulate(running: _Running, units: Units) -> _Running:
    """One step of the online softmax; several units of a chunk may belong to one row block."""
    score = jnp.einsum("urd,ucd->urc", units.query, units.key, precision=lax.Precision.HIGHEST)
    score = jnp.where(units.live, score, MASKED)
    top = running.top.at[units.block].max(jnp.max(score, axis=-1))
    weight = jnp.exp(score - top[units.block][:, :, None])
    decay = jnp.exp(running.top - top)
    value = jnp.einsum("urc,ucd->urd", weight, units.value, precision=lax.Precision.HIGHEST)

    # A block's sum decays once, however many of the chunk's units it owns.
    order = iota(units.block.shape[0])
    first = jnp.full(top.shape[0], order.shape[0], jnp.int32).at[units.block].min(order)
    factor = jnp.where((first[units.block] == order)[:, None], decay[units.block], 1.0)
    out = running.out.at[units.block].multiply(factor[:, :, None]).at[units.block].add(value)
    total = (running.total * decay).at[units.block].add(jnp.sum(weight, axis=-1))
    return _Running(top, total, out)


def _finish(running: _Running, shape: tuple[int, ...]) -> Partial:
    some = running.total != 0  # NaN included: only a row without a key is empty
    total = jnp.where(some, running.total, 1.0)
    out = jnp.where(some[:, :, None], running.out / total[:, :, None], 0.0)
    lse = jnp.where(some, running.top + jnp.log(total), -jnp.inf)
    return Partial(out.reshape(shape), lse.reshape(shape[:2]))
