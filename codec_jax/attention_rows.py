"""Queries packed for a plan: the group folded into rows, requests at the rows of their tiles."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from codec_jax.partial import Partial
from codec_jax.planning.plan import Plan
from codec_jax.planning.spec import TILE_ROWS


class Rows(NamedTuple):
    """Packed queries.

    Attributes:
      q: `[num_kv_heads, rows, head_dim]`, zeros in padding rows.
      position: absolute position of each row's query, for causal masks; None without.
    """

    q: Float[Array, "num_kv_heads rows head_dim"]
    position: Int32[Array, " rows"] | None = None


def pack_rows(
    q: Float[Array, "batch num_q_heads head_dim"], plan: Plan
) -> Float[Array, "num_kv_heads rows head_dim"]:
    """Queries at their packed rows; zeros in padding rows."""
    batch, group = plan.packed_row.shape
    grouped = q.reshape(batch, plan.num_kv_heads, group, q.shape[-1])
    rows = jnp.zeros((plan.num_kv_heads, plan.num_tiles * TILE_ROWS, q.shape[-1]), q.dtype)
    # [batch, heads, group, ...] to [heads, batch, group, ...]
    return rows.at[:, plan.packed_row].set(jnp.swapaxes(grouped, 0, 1), mode="drop")


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
