"""Queries packed for a plan: the group folded into rows, requests at the rows of their tiles."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from codec_jax.partial import Partial
from codec_jax.planning.plan import Plan
from codec_jax.planning.scans import iota
from codec_jax.planning.spec import TILE_ROWS


class Rows(NamedTuple):
    """Packed queries.

    Attributes:
      q: `[num_kv_heads, rows, head_dim]`, zeros in padding rows.
      position: absolute position of each row's query, for causal masks; None without.
    """

    q: Float[Array, "num_kv_heads rows head_dim"]
    position: Int32[Array, " rows"] | None = None


def row_sources(plan: Plan) -> Int32[Array, " rows"]:
    """Which query of its KV head each packed row holds, counted over batch rows and their groups.

    Past the last one for padding rows. Made once a plan: to gather queries by it is one pass, which
    XLA joins with what makes them; to scatter them by `packed_row` would be three.
    """
    count = plan.packed_row.size
    padding = jnp.full(plan.num_tiles * TILE_ROWS, count, jnp.int32)
    return padding.at[plan.packed_row].set(iota(count).reshape(plan.packed_row.shape), mode="drop")


def pack_rows(
    q: Float[Array, "batch num_q_heads head_dim"],
    plan: Plan,
    sources: Int32[Array, " rows"] | None = None,
) -> Float[Array, "num_kv_heads rows head_dim"]:
    """Queries at their packed rows, zeros in padding rows; `sources` are those of the plan."""
    batch, group = plan.packed_row.shape
    grouped = q.reshape(batch, plan.num_kv_heads, group, q.shape[-1])
    # [batch, heads, group, ...] to [heads, batch * group, ...]
    by_head = jnp.swapaxes(grouped, 0, 1).reshape(plan.num_kv_heads, batch * group, q.shape[-1])
    sources = row_sources(plan) if sources is None else sources
    return by_head.at[:, sources].get(mode="fill", fill_value=0)


def pack_positions(position: Int32[Array, " batch"], plan: Plan) -> Int32[Array, " rows"]:
    """Each packed row's position; 0 in padding rows."""
    rows = jnp.zeros(plan.num_tiles * TILE_ROWS, jnp.int32)
    spread = jnp.broadcast_to(position[:, None], plan.packed_row.shape)
    return rows.at[plan.packed_row].set(spread, mode="drop")


def unpack_rows(partial: Partial, plan: Plan, *, dtype) -> Partial:
    """Packed results back in batch order; (0, -inf) for batch rows without a request."""
    batch, group = plan.packed_row.shape
    out = partial.out.at[:, plan.packed_row].get(mode="fill", fill_value=0.0)
    lse = partial.lse.at[:, plan.packed_row].get(mode="fill", fill_value=-jnp.inf)
    heads = partial.out.shape[0] * group
    out = jnp.moveaxis(out, 0, 1).reshape(batch, heads, out.shape[-1])
    return Partial(out.astype(dtype), jnp.moveaxis(lse, 0, 1).reshape(batch, heads))
