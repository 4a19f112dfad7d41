"""Blocks of 64 KV tokens: several small pages gathered, a part of a large one, or two starts.

Read by the memory warpgroup from the steps in shared memory.
"""

import enum
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.config import BLOCK_KV, HALF, NUM_CHUNKS
from pallas_kernels.tables import STEP_CHUNK, StepTable


class Live(NamedTuple):
    """What of a block is live: for each page in it, its columns and its packed rows.

    Columns count from the block's first token.
    """

    col_lo: tuple
    col_hi: tuple
    row_lo: tuple
    row_hi: tuple

    def is_live(self):
        """Whether any token of the block is live."""
        return any_of(hi > lo for lo, hi in zip(self.col_lo, self.col_hi, strict=True))

    def is_plain(self, size):
        """Whether the first `size` tokens of every page are live, for the same rows."""
        others = [
            (lo != self.row_lo[0]) | (hi != self.row_hi[0])
            for lo, hi in zip(self.row_lo[1:], self.row_hi[1:], strict=True)
        ]
        return self.is_full(size) & ~any_of([jnp.bool_(False), *others])

    def is_full(self, size):
        """Whether the first `size` tokens of every page are live."""
        spans = zip(self.col_lo, self.col_hi, strict=True)
        return ~any_of(hi - lo != size for lo, hi in spans)


class Block(NamedTuple):
    """A block of 64 KV tokens: its pages, what is live in them, and where they lie."""

    pages: tuple
    live: Live
    part: Any  # which 64 tokens of the page, where a page is larger than a block
    sources: tuple  # where each page lies

    def is_short(self):
        """Whether the block, of one page, has live tokens, all in its first half."""
        return self.live.is_live() & (self.live.col_hi[0] <= HALF)


class Contents(NamedTuple):
    """What a stage holds: a block, or the starts of two pages.

    Attributes:
      block: by itself; of one page, the first half if the stage is shared.
      other: a later block, whose start is the second half; None where pages are small.
      is_shared: whether that is so.
    """

    block: Block
    other: Block | None
    is_shared: Any

    def live(self) -> Live:
        """What is live in the stage, of as many pages as a label has.

        A block of one page is two halves, whether both are of one page or not.
        """
        if self.other is None:
            return self.block.live
        (lo,), (hi,), *rows = self.block.live
        (other_lo,), (other_hi,), *other_rows = self.other.live
        pick = functools.partial(jnp.where, self.is_shared)
        return Live(
            (jnp.minimum(lo, HALF), pick(HALF + other_lo, jnp.maximum(lo, HALF))),
            (jnp.minimum(hi, HALF), pick(HALF + other_hi, jnp.maximum(hi, HALF))),
            *(
                (mine[0], pick(other[0], mine[0]))
                for mine, other in zip(rows, other_rows, strict=True)
            ),
        )

    def mask(self, page_size: int):
        """The `Mask` of the stage."""
        live = self.block.live
        if self.other is None:
            return jnp.where(live.is_plain(page_size), Mask.ROWS, Mask.PAGES)
        is_plain = live.is_full(BLOCK_KV) & ~self.is_shared
        return jnp.where(is_plain, Mask.ROWS, Mask.PAGES)

    def is_dirty(self, page_size: int):
        """Whether a token of the stage is dead."""
        live = self.block.live
        if self.other is None:
            return ~live.is_full(page_size)
        both = live.is_full(HALF) & self.other.live.is_full(HALF)
        return ~jnp.where(self.is_shared, both, live.is_full(BLOCK_KV))


class Mask(enum.IntEnum):
    """Which scores of a stage are live.

    ROWS: all of the first page's rows, whatever the token. PAGES: for each page of the label, those
    of its rows and live tokens.
    """

    ROWS, PAGES = range(2)


def any_of(masks: Iterable):
    """Elementwise or of the masks."""
    return functools.reduce(jnp.logical_or, masks)


class Held(NamedTuple):
    """A short block that is held back until another one shares its stage.

    Attributes:
      block: of one page.
      number: 1 if there is one, else 0.
    """

    block: Block
    number: Any

    @classmethod
    def none(cls) -> "Held":
        """No such block."""
        zero = jnp.int32(0)
        return cls(Block((zero,), Live(*[(zero,)] * 4), zero, (zero,)), zero)


class Passing(NamedTuple):
    """What a turn of the memory warpgroup passes on.

    Attributes:
      contents: of the stage.
      is_any: whether anything is passed on.
      is_last: whether nothing of the segment follows.
      held: what is held back then.
    """

    contents: Contents
    is_any: Any
    is_last: Any
    held: Held


class Cursor(NamedTuple):
    """Where the memory warpgroup is.

    Attributes:
      block: of the segment.
      chunk: of the step table, counted over all segments.
      ring: blocks passed on before this one, over all segments: its stage, modulo their number.
    """

    block: Any
    chunk: Any
    ring: Any

    @classmethod
    def start(cls) -> "Cursor":
        """Before the first segment."""
        return cls(jnp.int32(0), jnp.int32(-1), jnp.int32(0))


class Walk(NamedTuple):
    """The blocks of one segment, in order.

    Attributes:
      steps: shared memory, [NUM_CHUNKS, STEP_CHUNK, 8].
      num_steps: of the segment.
      page_size: tokens of a page.
      num_sources: that pages can lie in.
      enter: called with the number of the chunk that is read next.
    """

    steps: Any
    num_steps: Any
    page_size: int
    num_sources: int
    enter: Callable[[Any], None]

    @property
    def pages_per_block(self) -> int:
        """Pages that are gathered into a block."""
        return max(1, BLOCK_KV // self.page_size)

    @property
    def blocks_per_page(self) -> int:
        """Blocks that a page is cut into."""
        return max(1, self.page_size // BLOCK_KV)

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of a chunk of steps."""
        return STEP_CHUNK * self.blocks_per_page // self.pages_per_block

    @property
    def num_blocks(self):
        """Blocks of the segment; a dead one if it has no steps."""
        blocks = self.num_steps * self.blocks_per_page
        if self.pages_per_block > 1:
            pages = jnp.int32(self.pages_per_block)
            blocks = lax.div(self.num_steps + (pages - 1), pages)
        return jnp.maximum(blocks, 1)

    def begin(self, cursor: Cursor) -> Cursor:
        """At the segment's first block."""
        chunk = cursor.chunk + 1
        self.enter(chunk)
        return cursor._replace(block=jnp.int32(0), chunk=chunk)

    def is_inside(self, cursor: Cursor):
        """Whether there is a block here."""
        return cursor.block < self.num_blocks

    def is_first_of_chunk(self, cursor: Cursor):
        """Whether the block here is a chunk's first."""
        return lax.rem(cursor.block, jnp.int32(self.blocks_per_chunk)) == 0

    def read(self, cursor: Cursor) -> Block:
        """The block here; past the end, whatever the chunk holds."""
        block = lax.rem(cursor.block, jnp.int32(self.blocks_per_chunk))
        steps = self.steps.at[lax.rem(cursor.chunk, jnp.int32(NUM_CHUNKS))]
        part = lax.rem(block, jnp.int32(self.blocks_per_page))
        first = lax.div(block, jnp.int32(self.blocks_per_page)) * self.pages_per_block
        before = lax.div(cursor.block, jnp.int32(self.blocks_per_chunk)) * STEP_CHUNK
        columns = []
        for j in range(self.pages_per_block):
            inside = before + first + j < self.num_steps
            lo = jnp.maximum(steps[first + j, StepTable.COL_LO] - part * BLOCK_KV, 0)
            hi = jnp.minimum(steps[first + j, StepTable.COL_HI] - part * BLOCK_KV, BLOCK_KV)
            hi = jnp.where(inside, jnp.maximum(hi, lo), lo)
            source = steps[first + j, StepTable.SOURCE] if self.num_sources > 1 else jnp.int32(0)
            columns.append(
                (
                    jnp.where(inside, steps[first + j, StepTable.PAGE], 0),
                    lo + j * self.page_size,
                    hi + j * self.page_size,
                    steps[first + j, StepTable.ROW_LO],
                    steps[first + j, StepTable.ROW_HI],
                    source,
                )
            )
        pages, col_lo, col_hi, row_lo, row_hi, sources = zip(*columns, strict=True)
        return Block(pages, Live(col_lo, col_hi, row_lo, row_hi), part, sources)

    def pass_on(self, cursor: Cursor, held: Held, *, may_hold) -> Passing:
        """What to do at the block here, or, past the end, with the one that is held.

        The last one is passed on even if it is dead: it ends the segment.
        """
        here, is_past = self.read(cursor), ~self.is_inside(cursor)
        is_end, is_live = cursor.block >= self.num_blocks - 1, here.live.is_live() & ~is_past
        if self.pages_per_block > 1:
            alone = Contents(here, None, jnp.bool_(False))
            return Passing(alone, is_live | is_end, is_end, held)
        has, is_short = held.number == 1, may_hold & is_live & here.is_short()
        is_shared, is_held = is_short & has, is_short & ~has & ~is_end
        number = jnp.where(is_held, 1, jnp.where(is_shared | is_past, 0, held.number))
        after = Held(_select(is_held, here, held.block), number)
        contents = Contents(_select(is_past | is_shared, held.block, here), here, is_shared)
        is_any = is_past | (is_live & ~is_held) | (is_end & ~has)
        return Passing(contents, is_any, is_end & (number == 0), after)

    def skip(self, cursor: Cursor, *, is_passed_on) -> Cursor:
        """At the next block."""
        one = jnp.where(is_passed_on, jnp.int32(1), jnp.int32(0))
        cursor = Cursor(cursor.block + 1, cursor.chunk, cursor.ring + one)
        crosses = self.is_first_of_chunk(cursor) & self.is_inside(cursor)

        @pl.when(crosses)
        def _():
            self.enter(cursor.chunk + 1)

        chunk = cursor.chunk + jnp.where(crosses, jnp.int32(1), jnp.int32(0))
        return cursor._replace(chunk=chunk)


def _select(condition, yes, no):
    """Leaf by leaf."""
    return jax.tree.map(functools.partial(jnp.where, condition), yes, no)
