"""Dense attention over a plan: every packed row against every step's columns, masked.

Plain and quadratic: the named reference of the XLA path and of the kernels. It follows the steps of
a plan (who may read which page) and ignores how they are cut into segments.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from codec_jax.attention_rows import Rows
from codec_jax.kv_cache import KVPool
from codec_jax.partial import Partial, softmax_with_lse
from codec_jax.planning.plan import Plan
from codec_jax.planning.resolve import ResolvedSteps
from codec_jax.planning.scans import iota


def attend_rows_densely(
    rows: Rows, pool: KVPool, steps: ResolvedSteps, layer: Int32[Array, ""], *, plan: Plan
) -> Partial:
    """Attention of packed rows over all steps of a plan: float32 out and natural lse.

    Memory: num_kv_heads * rows * steps * page_size scores.
    """
    num_heads, num_rows, head_dim = rows.q.shape
    column, row = iota(pool.page_size)[None, :], iota(num_rows)[:, None]
    in_page = (column >= steps.col_lo[:, None]) & (column < steps.col_hi[:, None])
    in_page &= (iota(steps.page.shape[0]) < plan.counts.steps)[:, None]
    mine = (row >= steps.row_lo[None, :]) & (row < steps.row_hi[None, :])
    live = mine[:, :, None] & in_page[None, :, :]
    if steps.position is not None and rows.position is not None:
        key_position = steps.position[:, None] + column
        live &= key_position[None, :, :] <= rows.position[:, None, None]
    live = live.reshape(num_rows, -1)

    def read(pages):
        read = pages[steps.page + layer * pool.num_pages].astype(jnp.float32)
        read = jnp.where(in_page[:, None, :, None], read, 0.0)
        return jnp.moveaxis(read, 1, 0).reshape(num_heads, -1, head_dim)

    exact = lax.Precision.HIGHEST
    query = rows.q.astype(jnp.float32)
    score = jnp.einsum("hrd,hcd->hrc", query, read(pool.k_pages), precision=exact)
    weight, lse = softmax_with_lse(jnp.where(live[None], score, -jnp.inf))
    out = jnp.einsum("hrc,hcd->hrd", weight, read(pool.v_pages), precision=exact)
    return Partial(out, lse)
