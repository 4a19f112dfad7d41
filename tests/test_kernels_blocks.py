"""Which blocks the memory warpgroup passes on: every live token once, and short pages in pairs.

Were pages no longer to share blocks, results would stay right and only times would tell.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.blocks import Cursor, Held, Mask, Walk
from pallas_kernels.config import BLOCK_KV, HALF, NUM_CHUNKS
from pallas_kernels.tables import STEP_CHUNK, StepTable

PAGE = 64
NUM_STEPS = NUM_CHUNKS * STEP_CHUNK
"""All chunks lie in shared memory from the start."""


class Stage(NamedTuple):
    """What was passed on: live (page, token) with its rows, and whether two pages share it."""

    tokens: list[tuple[int, int, int]]
    is_shared: bool
    is_last: bool
    is_dirty: bool


@functools.partial(jax.jit, static_argnames="page_size")
def turn(table, num_steps, cursor, held, may_hold, *, page_size):
    """One turn of the memory warpgroup: what it passes on, its label, and where it is then."""
    walk = Walk(jax.new_ref(table), num_steps, page_size, 1, lambda chunk: None)
    passing = walk.pass_on(cursor, held, may_hold=may_hold)
    contents = passing.contents
    label = contents.live(), contents.mask(page_size), contents.is_dirty(page_size)
    after = walk.skip(cursor, is_passed_on=passing.is_any)
    return passing, label, after, walk.is_inside(after)


def walked(spans, *, page_size=PAGE, may_hold=True) -> list[Stage]:
    """The stages of a segment whose steps have these live columns; step i is page 100 + i."""
    table = np.zeros((NUM_STEPS, 8), np.int32)
    for i, (lo, hi) in enumerate(spans):
        table[i, StepTable.PAGE] = 100 + i
        table[i, StepTable.COL_LO], table[i, StepTable.COL_HI] = lo, hi
        table[i, StepTable.ROW_LO], table[i, StepTable.ROW_HI] = 4 * i, 4 * i + 4
    table = table.reshape(NUM_CHUNKS, STEP_CHUNK, 8)
    cursor, held, stages = Cursor.start()._replace(chunk=jnp.int32(0)), Held.none(), []
    is_inside = True
    while is_inside or held.number:
        passing, label, cursor, is_inside = turn(
            table, np.int32(len(spans)), cursor, held, may_hold, page_size=page_size
        )
        held = passing.held
        if passing.is_any:
            assert not any(stage.is_last for stage in stages)
            stages.append(_stage(jax.device_get(passing), jax.device_get(label)))
    assert [stage.is_last for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert int(cursor.ring) == len(stages)
    return stages


def _stage(passing, label) -> Stage:
    live, mask, is_dirty = label
    block, other, is_shared = passing.contents
    first = (int(block.pages[0]), int(block.part) * BLOCK_KV)
    second = (int(other.pages[0]), int(other.part) * BLOCK_KV)
    tokens = []
    spans = list(zip(*live, strict=True))
    for token in range(BLOCK_KV):
        page, at = first if not is_shared or token < HALF else second
        at += token - HALF * bool(is_shared and token >= HALF)
        rows = [(lo <= token < hi, row_lo) for lo, hi, row_lo, _ in spans]
        seen = {Mask.ROWS: [(True, rows[0][1])], Mask.PAGES: rows}[Mask(int(mask))]
        found = [(page, at, int(row)) for is_seen, row in seen if is_seen]
        assert len(found) <= 1
        assert found or is_dirty
        tokens += found
    return Stage(tokens, bool(is_shared), bool(passing.is_last), bool(is_dirty))


def live_tokens(spans):
    return [(100 + i, t, 4 * i) for i, (lo, hi) in enumerate(spans) for t in range(lo, hi)]


def pages_of(stage):
    return sorted({page - 100 for page, _, _ in stage.tokens})


SPANS = st.lists(
    st.one_of(
        st.just((0, 0)),
        st.just((0, PAGE)),
        st.tuples(st.integers(0, 20), st.integers(21, HALF)),
        st.tuples(st.integers(0, PAGE - 1), st.integers(HALF + 1, PAGE)).filter(
            lambda span: span[0] < span[1]
        ),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60)
@given(SPANS, st.booleans())
def test_every_live_token_is_passed_on_once_and_short_pages_in_pairs(spans, may_hold):
    stages = walked(spans, may_hold=may_hold)
    assert sorted(t for stage in stages for t in stage.tokens) == live_tokens(spans)
    num_short = sum(lo < hi <= HALF for lo, hi in spans)
    num_others = sum(lo < hi > HALF for lo, hi in spans)
    num_shared = num_short // 2 if may_hold else 0
    assert sum(stage.is_shared for stage in stages) == num_shared
    # A segment whose last page is dead ends with it, unless a held page does.
    num_live = num_others + num_short - num_shared
    is_end_dead = spans[-1][0] >= spans[-1][1] and not (may_hold and num_short % 2)
    assert len(stages) == num_live + is_end_dead


def test_short_pages_share_whatever_lies_between_them():
    """Pages that are reserved for growth, and full ones (a node of two pages)."""
    short, full, reserved = (0, 20), (0, PAGE), (0, 0)
    spans = [short, reserved, full, short, reserved, short, full]
    stages = walked(spans)
    assert [pages_of(stage) for stage in stages] == [[2], [0, 3], [6], [5]]
    assert [stage.is_shared for stage in stages] == [False, True, False, False]


def test_a_shared_block_of_two_half_pages_has_nothing_dead():
    (stage,) = walked([(0, HALF), (0, HALF)])
    assert stage.is_shared and not stage.is_dirty
    (stage,) = walked([(0, HALF), (0, HALF - 1)])
    assert stage.is_shared and stage.is_dirty


def test_a_segment_without_live_tokens_still_ends():
    (stage,) = walked([(0, 0), (0, 0)])
    assert stage.tokens == [] and stage.is_dirty


def test_the_last_blocks_of_large_pages_share_too():
    """Pages of 128 tokens: two blocks each, the second one short."""
    stages = walked([(0, 90), (0, 70), (0, 128)], page_size=128)
    assert sorted(t for stage in stages for t in stage.tokens) == live_tokens(
        [(0, 90), (0, 70), (0, 128)]
    )
    assert sum(stage.is_shared for stage in stages) == 1 and len(stages) == 5


@pytest.mark.parametrize("page_size", [16, 32])
def test_small_pages_are_gathered_and_never_held(page_size):
    table = np.zeros((NUM_CHUNKS, STEP_CHUNK, 8), np.int32)
    table[..., StepTable.COL_HI] = 5
    cursor = Cursor.start()._replace(chunk=jnp.int32(0))
    num_steps = np.int32(BLOCK_KV // page_size)
    passing, *_ = turn(table, num_steps, cursor, Held.none(), True, page_size=page_size)
    assert passing.contents.other is None
    assert bool(passing.is_any) and bool(passing.is_last) and not int(passing.held.number)
