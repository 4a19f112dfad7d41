"""Plans that no policy makes: the arrays decide what is computed, and not the forest."""

import dataclasses

import jax
import numpy as np
import pytest
from forests import random_token_lists
from plan_cases import Case, attend_arguments
from plan_editing import cut, move_steps, pieces_of, with_pieces, without
from plan_reads import step_tokens, times_read, token_counts, wanted_reads

from codec_jax.attention import attend
from codec_jax.planning.interpreter import interpret

CASE = Case(group_size=8, page_size=4)


@pytest.fixture(scope="module")
def batch():
    """A root of 30 tokens that 20 requests share, over several tiles, and random branches."""
    root = [2] * 30
    branches = random_token_lists(np.random.default_rng(5), num_requests=16, max_len=20)
    lists = [root + tokens for tokens in branches]
    return CASE.batch([*lists, root, [0] * 20, [1], [0, 1]])


@pytest.fixture(scope="module")
def plan(batch):
    return CASE.plan(batch.arrays)


@pytest.fixture(scope="module")
def pieces(plan):
    return pieces_of(plan)


def run(plan, batch):
    """Interpreter's and XLA's answers, found equal."""
    out, lse = interpret(plan, batch.q, batch.pages, batch.arrays.page_list, batch.arrays.kv_len)
    partial = attend(*attend_arguments(batch, plan), implementation="xla")
    np.testing.assert_allclose(partial.lse, lse, atol=1e-5)
    np.testing.assert_allclose(partial.out, out, atol=1e-5)
    return out, lse


def assert_answers(plan, batch):
    """Interpreter and XLA give what the oracle says of the reads that the arrays name."""
    answers = run(plan, batch)
    expected = batch.expected(token_counts(plan, batch))
    for answer, wanted in zip(answers, expected, strict=True):
        np.testing.assert_allclose(answer, wanted, atol=1e-11)
    return answers


def test_the_plan_has_all_kinds_of_segments(plan, pieces):
    assert {piece.num_tiles for piece in pieces} == {1, 2}
    assert len({piece.pair for piece in pieces}) < len(pieces)
    assert sorted({piece.worker for piece in pieces}) == list(range(CASE.num_workers))


def test_taking_a_plan_apart_and_together_changes_nothing(plan, pieces):
    jax.tree.map(np.testing.assert_array_equal, with_pieces(plan, pieces), plan)


@pytest.mark.parametrize("num_tiles", [1, 2])
@pytest.mark.parametrize("kv_head", [0, 1])
def test_a_dropped_segment_takes_its_tokens_from_its_heads_and_rows(
    batch, plan, pieces, kv_head, num_tiles
):
    """Every other head and row keeps its answer bit for bit in the interpreter."""
    dropped = next(
        i for i, piece in enumerate(pieces)
        if piece.kv_head == kv_head and piece.num_tiles == num_tiles
    )  # fmt: skip
    altered = with_pieces(plan, without(pieces, dropped))
    out, lse = assert_answers(altered, batch)
    whole_out, whole_lse = run(plan, batch)
    counts, gone = lost_tokens(batch, plan, pieces[dropped])
    wanted_out, wanted_lse = batch.expected(counts)
    heads = slice(kv_head * CASE.group_size, (kv_head + 1) * CASE.group_size)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-11)
    np.testing.assert_allclose(out, wanted_out, atol=1e-11)
    assert 0 < gone.sum() < gone.size
    assert (lse[gone, heads] < whole_lse[gone, heads]).all()
    untouched = np.ones(out.shape[:2], bool)
    untouched[gone, heads] = False
    np.testing.assert_array_equal(out[untouched], whole_out[untouched])
    np.testing.assert_array_equal(lse[untouched], whole_lse[untouched])


def lost_tokens(batch, plan, piece):
    """Reads of each request's tokens without a segment, and which requests lose any."""
    counts, gone = [], np.zeros(batch.q.shape[0], bool)
    for request, tokens in enumerate(batch.token_lists):
        counts.append(np.ones((CASE.num_kv_heads, len(tokens)), int))
        row = plan.packed_row[request, 0]
        for step in range(piece.step_lo, piece.step_lo + piece.num_steps):
            if row in piece.rows and plan.steps.row_lo[step] <= row < plan.steps.row_hi[step]:
                start = batch.arrays.position[plan.steps.node[step]]
                lost = [start + token for token in step_tokens(plan, batch, step)]
                counts[request][piece.kv_head, lost] = 0
                gone[request] = True
    return counts, gone


def test_shuffled_workers_change_nothing(batch, plan, pieces):
    rng = np.random.default_rng(0)
    shuffled = [
        dataclasses.replace(piece, worker=int(rng.integers(CASE.num_workers))) for piece in pieces
    ]
    altered = with_pieces(plan, shuffled)
    assert altered.segments.slot.tolist() != plan.segments.slot.tolist()
    for answer, before in zip(assert_answers(altered, batch), run(plan, batch), strict=True):
        np.testing.assert_array_equal(answer, before)


def test_one_worker_does_all(batch, plan, pieces):
    altered = with_pieces(plan, [dataclasses.replace(piece, worker=3) for piece in pieces])
    assert np.diff(altered.worker_indptr).tolist() == [0, 0, 0, len(pieces), 0, 0, 0]
    assert_answers(altered, batch)


def test_every_segment_cut_in_three(batch, plan, pieces):
    parts = []
    for piece in pieces:
        third = piece.num_steps // 3
        parts += cut(piece, third, 2 * third) if third else [piece]
    altered = with_pieces(plan, parts)
    assert altered.counts.segments > plan.counts.segments
    np.testing.assert_array_equal(times_read(altered, batch), wanted_reads(plan, batch))
    assert_answers(altered, batch)


def test_every_segment_cut_into_single_steps(batch, plan, pieces):
    parts = [part for piece in pieces for part in cut(piece, *range(1, piece.num_steps))]
    altered = with_pieces(plan, parts)
    np.testing.assert_array_equal(times_read(altered, batch), wanted_reads(plan, batch))
    assert_answers(altered, batch)


def test_steps_moved_between_segments_of_a_pair(batch, plan, pieces):
    first = next(i for i in range(len(pieces)) if pieces[i].pair == pieces[i + 1].pair)
    moved = move_steps(pieces[first], pieces[first + 1], 1)
    altered = with_pieces(plan, [*pieces[:first], *moved, *pieces[first + 2 :]])
    np.testing.assert_array_equal(times_read(altered, batch), wanted_reads(plan, batch))
    assert_answers(altered, batch)


def test_steps_that_two_segments_read_count_twice(batch, plan, pieces):
    first = next(i for i in range(len(pieces)) if pieces[i].pair == pieces[i + 1].pair)
    overlapping = [pieces[first], *move_steps(pieces[first], pieces[first + 1], 1)[1:]]
    altered = with_pieces(plan, [*pieces[:first], *overlapping, *pieces[first + 2 :]])
    assert times_read(altered, batch).max() == 2
    assert_answers(altered, batch)


def test_steps_for_other_rows_do_nothing(batch, plan, pieces):
    """A stream that runs on into the next tile's steps: their rows are not in its tile."""
    first = next(
        i for i, piece in enumerate(pieces)
        if piece.num_tiles == 1 and times_read_beyond(plan, piece, 3)
    )  # fmt: skip
    longer = dataclasses.replace(pieces[first], num_steps=pieces[first].num_steps + 3)
    altered = with_pieces(plan, [*pieces[:first], longer, *pieces[first + 1 :]])
    np.testing.assert_array_equal(times_read(altered, batch), wanted_reads(plan, batch))
    assert_answers(altered, batch)


def times_read_beyond(plan, piece, count):
    """Whether the next `count` steps are live and for rows outside the segment's tiles."""
    after = np.arange(piece.step_lo + piece.num_steps, piece.step_lo + piece.num_steps + count)
    return (plan.steps.row_lo[after] >= piece.rows.stop).all()


def test_no_segment_at_all(batch, plan):
    out, lse = assert_answers(with_pieces(plan, []), batch)
    assert (out == 0).all()
    assert (lse == -np.inf).all()


def test_segments_past_the_last_worker_are_not_read(batch, plan, pieces):
    """Plan: "nothing reads past its last entry" (of `worker_indptr`); the XLA path does."""
    altered = with_pieces(plan, pieces)
    used = int(plan.counts.segments)
    stale = jax.tree.map(np.copy, altered.segments)
    for name in ("kv_head", "tile", "num_tiles", "step_lo", "num_steps"):
        getattr(stale, name)[used] = getattr(stale, name)[0]
    assert_answers(dataclasses.replace(altered, segments=stale), batch)


def test_a_long_node_is_cut_where_its_cost_says():
    """44 pages for each of 2 heads, 7 workers: the line is 2 * (128 + 44 * 16) = 1664 ticks.

    Cuts at w * 1664 / 7 = 237, 475, 713, 950, 1188, 1426, less the segment's 128 in steps of 16,
    rounded: after 7, 22 and 37 steps of head 0, on the border of the heads, after 14 and 29 of 1.
    """
    case = Case(max_requests=2, max_tail=700, max_kept=0)
    plan = case.plan(case.batch([[1] * 700]).arrays)
    used = slice(int(plan.counts.segments))
    assert plan.segments.step_lo[used].tolist() == [0, 7, 22, 37, 0, 14, 29]
    assert plan.segments.num_steps[used].tolist() == [7, 15, 15, 7, 14, 15, 15]
    assert plan.segments.kv_head[used].tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert plan.segments.slot[used].tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert plan.worker_indptr.tolist() == list(range(8))
    assert plan.slot_indptr[:4].tolist() == [0, 4, 7, 7]


def test_a_small_forest_is_planned_as_by_hand():
    """Requests 5 5 5 6, 5 5 7 and 5 5 5 6 8 on pages of 4 tokens, two query heads each.

    In depth-first order: root 5 5 (all), 5 (0 and 2), 6 (0 and 2), 8 (2), 7 (1). The first two
    splits leave page 0 shared by the root, by "5 6", and by its halves. Head 0 and head 1 of
    requests 0, 2, 1 are rows 0 to 5.
    """
    case = Case(page_size=4, policy="one_task_per_node", num_workers=1, max_requests=3)
    plan = case.plan(case.batch([[5, 5, 5, 6], [5, 5, 7], [5, 5, 5, 6, 8]]).arrays)
    used = slice(int(plan.counts.steps))
    assert plan.packed_row.tolist() == [[0, 1], [4, 5], [2, 3]]
    assert plan.steps.node[used].tolist() == [0, 1, 2, 3]
    assert plan.steps.kv_start[used].tolist() == [0, -2, 0, 0]
    assert plan.steps.row_lo[used].tolist() == [0, 0, 2, 4]
    assert plan.steps.row_hi[used].tolist() == [6, 4, 4, 6]
    assert plan.segments.num_steps[: int(plan.counts.segments)].tolist() == [4, 4]
    assert plan.tile_items[: plan.tile_indptr[1]].tolist() == [0]
