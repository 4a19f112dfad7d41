"""Pieces of (item, KV head) pairs, in line order: item by item, an item's KV heads in turn."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from codec_jax.planning.cost import CostModel, StepTicks
from codec_jax.planning.plan import Items
from codec_jax.planning.scans import exclusive_sum, inclusive_sum


class Pieces(NamedTuple):
    """Runs of steps that one worker walks with one accumulator; none is empty.

    Attributes:
      pair: item * num_kv_heads + kv_head.
      begin, end: run of the item's steps.
      per_pair: pieces of each pair; 0 in padding.
      total: pieces in use.
    """

    pair: Int32[Array, " pieces"]
    begin: Int32[Array, " pieces"]
    end: Int32[Array, " pieces"]
    per_pair: Int32[Array, " pairs"]
    total: Int32[Array, ""]


class Pairs(NamedTuple):
    """(item, KV head) pairs laid on one line of cost, each as one piece."""

    num_tiles: Int32[Array, " pairs"]
    step_lo: Int32[Array, " pairs"]
    num_steps: Int32[Array, " pairs"]
    line_end: Int32[Array, " pairs"]
    line_start: Int32[Array, " pairs"]


def lay_on_line(
    items: Items, step_ticks: StepTicks, *, num_kv_heads: int, cost: CostModel
) -> Pairs:
    """The pairs of all items; an item of padding costs nothing."""
    ticks = cost.segment_ticks + step_ticks.of_items(items)
    ticks = jnp.repeat(jnp.where(items.num_steps > 0, ticks, 0), num_kv_heads)
    columns = items.num_tiles, items.step_lo, items.num_steps
    columns = (jnp.repeat(column, num_kv_heads) for column in columns)
    return Pairs(*columns, inclusive_sum(ticks), exclusive_sum(ticks))
