"""What the memory warpgroup says of a block to the compute warpgroups, in shared memory.

It alone walks the step table. A label is written before the block's last arrival and is read after
all of them, so they guard it; it is overwritten with the block.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.blocks import Contents, Live


class Label(NamedTuple):
    """A block's label, but for the spans of its pages.

    Attributes:
      is_last: 1 for the segment's last block, else 0.
      is_dirty: 1 if a token of the block is dead, else 0.
      mask: see `blocks.Mask`.
      row_lo, row_hi: packed rows of the first page.
    """

    is_last: Any
    is_dirty: Any
    mask: Any
    row_lo: Any
    row_hi: Any


_HEAD = 3
_SPAN = len(Live._fields)


def write_label(labels, stage, contents: Contents, *, is_last, page_size: int) -> None:
    """Labels what this stage will hold."""
    flags = (jnp.where(flag, 1, 0) for flag in (is_last, contents.is_dirty(page_size)))
    for column, value in enumerate((*flags, contents.mask(page_size))):
        labels[stage, column] = jnp.asarray(value, jnp.int32)
    for page, span in enumerate(zip(*contents.live(), strict=True)):
        for column, value in enumerate(span):
            labels[stage, _HEAD + page * _SPAN + column] = value


def read_label(labels, stage) -> Label:
    """The label of the block in this stage."""
    rows = (_HEAD + Live._fields.index(name) for name in ("row_lo", "row_hi"))
    return Label(*(labels[stage, column] for column in (*range(_HEAD), *rows)))


def read_live(labels, stage, num_pages: int) -> Live:
    """What is live of the block in this stage."""
    first = (_HEAD + page * _SPAN for page in range(num_pages))
    spans = ([labels[stage, at + column] for column in range(_SPAN)] for at in first)
    return Live(*zip(*spans, strict=True))
