"""What the memory warpgroup says of a block to the compute warpgroups, in shared memory.

It alone walks the step table. A label is written before the block's loads are issued and is read
after the block has arrived, so the arrival guards it; it is overwritten with the block.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.blocks import Live

PLAIN, FULL, PARTLY = range(3)
"""Every token is live, for the same rows; every token is live; some token is dead."""
_IS_LAST, _KIND, _SPANS = range(3)
_SPAN = len(Live._fields)


class Label(NamedTuple):
    """A block's label, but for the spans of its pages.

    Attributes:
      is_last: 1 for the segment's last block, else 0.
      kind: PLAIN, FULL or PARTLY.
      row_lo, row_hi: packed rows that see the block, if it is PLAIN.
    """

    is_last: Any
    kind: Any
    row_lo: Any
    row_hi: Any


def write_label(labels, stage, live: Live, *, is_last, page_size: int) -> None:
    """Labels the block in this stage."""
    kind = jnp.where(live.is_full(page_size), jnp.int32(FULL), jnp.int32(PARTLY))
    labels[stage, _IS_LAST] = jnp.where(is_last, jnp.int32(1), jnp.int32(0))
    labels[stage, _KIND] = jnp.where(live.is_plain(page_size), jnp.int32(PLAIN), kind)
    for page, span in enumerate(zip(*live, strict=True)):
        for column, value in enumerate(span):
            labels[stage, _SPANS + page * _SPAN + column] = value


def read_label(labels, stage) -> Label:
    """The label of the block in this stage."""
    rows = (_SPANS + Live._fields.index(name) for name in ("row_lo", "row_hi"))
    return Label(*(labels[stage, column] for column in (_IS_LAST, _KIND, *rows)))


def read_live(labels, stage, num_pages: int) -> Live:
    """What is live of the block in this stage."""
    first = (_SPANS + page * _SPAN for page in range(num_pages))
    spans = ([labels[stage, at + column] for column in range(_SPAN)] for at in first)
    return Live(*zip(*spans, strict=True))
