"""Gradients of the XLA path from its output and log-sum-exp, in the same chunks.

With P = exp(S - lse) recomputed for each unit, and D the sum over a row of d_out * out:
dV += P^T d_out, dS = P * (d_out V^T - D + d_lse), dQ += dS K, dK += dS^T Q. Memory is that of the
gradients plus O(chunk); dead keys and values get 0.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from codec_jax.attention_xla_units import Units, Work, over_units
from codec_jax.partial import Partial


class Gradients(NamedTuple):
    """Of the row blocks' queries, and of the pool's keys and values."""

    query: Float32[Array, "blocks row_block head_dim"]
    key: Float32[Array, "pages num_kv_heads page_size head_dim"]
    value: Float32[Array, "pages num_kv_heads page_size head_dim"]


class _Rows(NamedTuple):
    """Per row block: the result's gradient, its log-sum-exp, and d_lse less sum(d_out * out)."""

    out: Float32[Array, "blocks row_block head_dim"]
    lse: Float32[Array, "blocks row_block"]
    shift: Float32[Array, "blocks row_block"]


def gradients(work: Work, result: Partial, cotangent: Partial) -> Gradients:
    """Gradients of attention with respect to queries, keys and values, float32."""
    blocked = (-1, work.config.row_block)
    d_out = cotangent.out.reshape(*blocked, result.out.shape[-1])
    inner = jnp.sum(cotangent.out * result.out, axis=-1)
    # An empty row's lse is a constant; its -inf must not meet the products.
    some = result.lse > -jnp.inf
    shift = jnp.where(some, cotangent.lse - inner, 0.0)
    lse = jnp.where(some, result.lse, 0.0)
    rows = _Rows(d_out, lse.reshape(blocked), shift.reshape(blocked))
    zeros = Gradients(
        jnp.zeros(d_out.shape, jnp.float32),
        jnp.zeros(work.pool.k_pages.shape, jnp.float32),
        jnp.zeros(work.pool.v_pages.shape, jnp.float32),
    )
    return over_units(work, lambda sums, units: _add(sums, units, rows), zeros)


def _add(sums: Gradients, units: Units, rows: _Rows) -> Gradients:
    exact = lax.Precision.HIGHEST
    score = jnp.einsum("urd,ucd->urc", units.query, units.key, precision=exact)
    score -= rows.lse[units.block][:, :, None]
    weight = jnp.where(units.live, jnp.exp(jnp.where(units.live, score, 0.0)), 0.0)
    d_out = rows.out[units.block]
    d_weight = jnp.einsum("urd,ucd->urc", d_out, units.value, precision=exact)
    d_score = weight * (d_weight + rows.shift[units.block][:, :, None])
    d_query = jnp.einsum("urc,ucd->urd", d_score, units.key, precision=exact)
    d_key = jnp.einsum("urc,urd->ucd", d_score, units.query, precision=exact)
    d_value = jnp.einsum("urc,urd->ucd", weight, d_out, precision=exact)
    place = (units.page, units.kv_head)
    return Gradients(
        sums.query.at[units.block].add(d_query),
        sums.key.at[place].add(d_key),
        sums.value.at[place].add(d_value),
    )
