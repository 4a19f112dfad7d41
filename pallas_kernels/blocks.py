"""Blocks of 64 KV tokens: several small pages gathered, or a part of a large one.

Read from the step table by every warpgroup of the kernel, so that all agree on what is live.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.config import BLOCK_KV, BLOCK_Q
from pallas_kernels.tables import StepTable


class Block(NamedTuple):
    """A block of 64 KV tokens: per page in it, the page, its live columns and its query rows.

    Columns count from the block's first token, rows from the tile's first row.
    """

    pages: tuple
    col_lo: tuple
    col_hi: tuple
    row_lo: tuple
    row_hi: tuple
    part: Any  # which 64 tokens of the page, where a page is larger than a block

    def is_live(self):
        """Whether any token of the block is live."""
        return any_of(hi > lo for lo, hi in zip(self.col_lo, self.col_hi, strict=True))

    def is_plain(self, page_size: int):
        """Whether every token of the block is live, for the same rows."""
        others = [
            (lo != self.row_lo[0]) | (hi != self.row_hi[0])
            for lo, hi in zip(self.row_lo[1:], self.row_hi[1:], strict=True)
        ]
        return self.is_full(page_size) & ~any_of([jnp.bool_(False), *others])

    def is_full(self, page_size: int):
        """Whether every token of the block is live."""
        size = min(page_size, BLOCK_KV)
        spans = zip(self.col_lo, self.col_hi, strict=True)
        return ~any_of(hi - lo != size for lo, hi in spans)


class Place(NamedTuple):
    """Where a tile's queries come from and its result goes."""

    kv_head: Any
    tile: Any
    slot: Any
    is_final: Any  # the result is the tile's only one

    def rows(self):
        """Its packed rows."""
        return pl.ds(pl.multiple_of(self.tile * BLOCK_Q, BLOCK_Q), BLOCK_Q)


def any_of(masks: Iterable):
    """Elementwise or of the masks."""
    return functools.reduce(jnp.logical_or, masks)


def num_blocks(num_steps, page_size: int):
    """Blocks of a segment with that many steps."""
    if page_size >= BLOCK_KV:
        return num_steps * (page_size // BLOCK_KV)
    pages = BLOCK_KV // page_size
    return lax.div(num_steps + (pages - 1), jnp.int32(pages))


def read_block(steps_gmem, step_lo, num_steps, block, *, tile, page_size: int) -> Block:
    """The `block`-th block of a segment's steps."""
    pages_per_block = max(1, BLOCK_KV // page_size)
    blocks_per_page = max(1, page_size // BLOCK_KV)
    part = lax.rem(block, jnp.int32(blocks_per_page))
    first = lax.div(block, jnp.int32(blocks_per_page)) * pages_per_block
    columns = []
    for j in range(pages_per_block):
        inside = first + j < num_steps
        step = step_lo + jnp.minimum(first + j, num_steps - 1)
        lo = jnp.maximum(steps_gmem[step, StepTable.COL_LO] - part * BLOCK_KV, 0)
        hi = jnp.minimum(steps_gmem[step, StepTable.COL_HI] - part * BLOCK_KV, BLOCK_KV)
        hi = jnp.where(inside, jnp.maximum(hi, lo), lo)
        columns.append(
            (
                steps_gmem[step, StepTable.PAGE],
                lo + j * page_size,
                hi + j * page_size,
                steps_gmem[step, StepTable.ROW_LO] - tile * BLOCK_Q,
                steps_gmem[step, StepTable.ROW_HI] - tile * BLOCK_Q,
            )
        )
    pages, col_lo, col_hi, row_lo, row_hi = zip(*columns, strict=True)
    return Block(pages, col_lo, col_hi, row_lo, row_hi, part)


def next_live(read_block, block, num_blocks):
    """The first block from this one on that has a live token; num_blocks when there is none."""

    def is_dead(b):
        # The last block is read once more past the end, and not used.
        return (b < num_blocks) & ~read_block(jnp.minimum(b, num_blocks - 1)).is_live()

    return lax.while_loop(is_dead, lambda b: b + 1, block)
