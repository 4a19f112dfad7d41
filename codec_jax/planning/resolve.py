"""Resolving a plan: page entries and nodes become physical pages and live columns."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from codec_jax.planning.plan import Plan


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResolvedSteps:
    """What a kernel sees of a step; a step with no live column is dead and is skipped.

    Attributes:
      page: physical page of a layer's share of the pool; 0 in dead steps.
      col_lo, col_hi: live rows of the page.
      row_lo, row_hi: packed query rows it is for.
      position: absolute position of the page's row 0 in its requests, for causal masks; None when
        no mask is needed (decoding: every key precedes every query).
    """

    page: Int32[Array, " steps"]
    col_lo: Int32[Array, " steps"]
    col_hi: Int32[Array, " steps"]
    row_lo: Int32[Array, " steps"]
    row_hi: Int32[Array, " steps"]
    position: Int32[Array, " steps"] | None = None


def resolve(
    plan: Plan,
    page_list: Int32[Array, " page_entries"],
    kv_len: Int32[Array, " nodes"],
    *,
    page_size: int,
    position: Int32[Array, " nodes"] | None = None,
) -> ResolvedSteps:
    """The steps with pages and live columns: once for each decode step, for all layers.

    Args:
      plan: the plan.
      page_list: physical page of each entry; -1 where none was popped yet.
      kv_len: live tokens of each node.
      page_size: tokens of a page.
      position: absolute position of each node's first token; give it for causal masks.

    `col_lo = max(0, -kv_start)`, `col_hi = clip(kv_len[node] - kv_start, 0, page_size)`.
    """
    steps = plan.steps
    col_lo = jnp.maximum(0, -steps.kv_start)
    col_hi = jnp.clip(kv_len[steps.node] - steps.kv_start, 0, page_size)
    # Padding has no rows; a node may also have shrunk to nothing before this page.
    live = (steps.row_hi > steps.row_lo) & (col_hi > col_lo)
    page = page_list[steps.page_entry]
    return ResolvedSteps(
        page=jnp.where(live, page, 0),
        col_lo=jnp.where(live, col_lo, 0),
        col_hi=jnp.where(live, col_hi, 0),
        row_lo=steps.row_lo,
        row_hi=steps.row_hi,
        position=None if position is None else position[steps.node] + steps.kv_start,
    )
