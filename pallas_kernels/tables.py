"""The integer tables that the kernels read, one row each, so that a row is one memory sector."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class StepTable(NamedTuple):
    """Columns of a step: physical page, live columns, packed rows."""

    PAGE, COL_LO, COL_HI, ROW_LO, ROW_HI = range(5)


class SegmentTable(NamedTuple):
    """Columns of a segment.

    SLOT and SECOND_SLOT: partial results of its first and second tile; a tile's slots are one run.
    FINAL: a bit for each of its tiles that has no other slot.
    """

    KV_HEAD, TILE, NUM_TILES, STEP_LO, NUM_STEPS, SLOT, SECOND_SLOT, FINAL = range(8)


ROW = 8
"""Integers of a table row: 32 bytes."""


def pack_table(*columns: Int32[Array, " rows"]) -> Int32[Array, "rows 8"]:
    """The columns side by side, padded with zeros to a row of 32 bytes."""
    zeros = jnp.zeros_like(columns[0])
    return jnp.stack([*columns, *[zeros] * (ROW - len(columns))], axis=1)
