"""Estimates: work counted by brute force over the arrays, and the model by hand."""

import dataclasses

import numpy as np
import pytest
from plan_cases import Case
from plan_editing import cut, pieces_of, with_pieces
from plan_reads import used_segments

from codec_jax.planning.estimate import count_work, estimate
from codec_jax.planning.policies import POLICIES
from codec_jax.planning.profiles import CostProfile

PROFILE = CostProfile(
    dtype="bfloat16",
    head_dim=64,
    page_size=4,
    num_workers=7,
    step_us=0.5,
    wide_step_us=1.25,
    segment_us=2.0,
    slot_us=0.125,
    launch_us=8.0,
    bytes_per_us=1e9,
    flops_per_us=1e12,
    cache_bytes=1e9,
    masked_us=0.25,
    partial_us=0.0625,
    tile_us=0.03125,
)
CASE = Case(group_size=8, page_size=4, max_requests=24)
LISTS = [[2] * 30 + [3 + i] * (5 + i) for i in range(20)] + [[0] * 21, [1], [0, 1]]


@pytest.fixture(scope="module")
def batch():
    return CASE.batch(LISTS)


def plan_of(policy, batch):
    return dataclasses.replace(CASE, policy=policy).plan(batch.arrays)


def brute_force(plan, kv_len):
    """Worker by worker, segment by segment, step by step, tile by tile."""
    worker = np.zeros((plan.worker_indptr.size - 1, 6), int)
    for w in range(len(worker)):
        for i in range(plan.worker_indptr[w], plan.worker_indptr[w + 1]):
            num_tiles, first = plan.segments.num_tiles[i], plan.segments.tile[i] * 64
            worker[w, 0] += 1
            for step in range(plan.segments.num_steps[i]):
                step += plan.segments.step_lo[i]
                end = kv_len[plan.steps.node[step]] - plan.steps.kv_start[step]
                rows = plan.steps.row_lo[step], plan.steps.row_hi[step] - 1
                is_narrow = rows[0] // 64 == rows[1] // 64
                if plan.page_size >= 64 and is_narrow and 0 < end <= 32:
                    worker[w, 5] += 1
                    continue
                worker[w, num_tiles] += 1
                inside = plan.steps.row_lo[step] <= first
                inside &= plan.steps.row_hi[step] >= first + 64 * num_tiles
                worker[w, 3] += 0 if inside else num_tiles
                live = range(
                    max(0, -plan.steps.kv_start[step]),
                    min(plan.page_size, kv_len[plan.steps.node[step]] - plan.steps.kv_start[step]),
                )
                worker[w, 4] += 0 if len(live) == plan.page_size else num_tiles
    return worker


def slots_by_tile(plan):
    """Partial results of each (tile, KV head), from the segments."""
    counts = np.zeros((plan.num_tiles, plan.num_kv_heads), int)
    for i in used_segments(plan):
        for t in range(plan.segments.num_tiles[i]):
            counts[plan.segments.tile[i] + t, plan.segments.kv_head[i]] += 1
    return counts


@pytest.mark.parametrize("policy", POLICIES)
def test_work_is_counted(policy, batch):
    plan = plan_of(policy, batch)
    work = count_work(plan, kv_len=batch.arrays.kv_len)
    np.testing.assert_array_equal(work.worker, brute_force(plan, batch.arrays.kv_len))
    assert work.worker[:, 3].any() and work.worker[:, 4].any()
    counts = slots_by_tile(plan)
    assert work.merged_slots == counts[counts > 1].sum()
    assert work.merged_tiles == (counts != 1).sum()
    assert work.loaded_pages == work.worker[:, 1:3].sum()
    assert work.unique_pages == plan.num_kv_heads * int(batch.arrays.num_page_entries)
    used = slice(int(plan.counts.steps))
    rows = (plan.steps.row_hi - plan.steps.row_lo)[used].sum()
    assert work.live_rows == plan.num_kv_heads * rows


def test_short_pages_are_counted_by_themselves_and_by_what_is_read():
    """Leaves of 1 to 96 tokens behind 64 that all share: 32 or 64 tokens of a page are read."""
    case = Case(group_size=8, page_size=64, max_requests=24, max_tail=100)
    lengths = [1, 16, 17, 31, 32, 33, 63, 64, 65, 96]
    batch = case.batch([[1] * 64 + [2 + i] * length for i, length in enumerate(lengths)])
    plan, kv_len = case.plan(batch.arrays), batch.arrays.kv_len
    work = count_work(plan, kv_len=kv_len)
    np.testing.assert_array_equal(work.worker, brute_force(plan, kv_len))
    heads = plan.num_kv_heads
    assert work.worker[:, 5].sum() == heads * 7
    parts = 1 + 0.5 * 5 + 1 * 3 + (1 + 0.5) * 2
    assert work.unique_pages == heads * parts
    by_plan = count_work(plan)
    assert by_plan.worker[:, 5].sum() == heads * 7
    assert by_plan.unique_pages == work.unique_pages  # 33 and 63 tokens are read as 64
    profile = dataclasses.replace(PROFILE, page_size=64, short_us=0.375)
    found = estimate(plan, spec=case.spec, profile=profile, kv_len=kv_len)
    assert found.work_us == (work.worker @ [2.0, 0.5, 1.25, 0.25, 0.0625, 0.375]).max()


def test_a_page_that_many_read_is_one_page(batch):
    shared, alone = (count_work(plan_of(p, batch)) for p in ("balanced", "flash_decoding"))
    assert alone.unique_pages == shared.unique_pages
    assert alone.loaded_pages > shared.loaded_pages


def test_padding_is_not_counted(batch):
    plan = plan_of("balanced", batch)
    stale = dataclasses.replace(plan.segments, num_steps=np.copy(plan.segments.num_steps))
    stale.num_steps[int(plan.counts.segments) :] = 9
    expected, found = count_work(plan), count_work(dataclasses.replace(plan, segments=stale))
    np.testing.assert_array_equal(found.worker, expected.worker)
    assert found[1:] == expected[1:]


def test_a_cut_costs_a_segment_and_its_slots(batch):
    plan = plan_of("one_task_per_node", batch)
    pieces = pieces_of(plan)
    wide = next(i for i, piece in enumerate(pieces) if piece.num_tiles == 2)
    parts = [*pieces[:wide], *cut(pieces[wide], 3), *pieces[wide + 1 :]]
    before, after = count_work(plan), count_work(with_pieces(plan, parts))
    assert after.worker.sum(axis=0)[0] == before.worker.sum(axis=0)[0] + 1
    assert (after.worker.sum(axis=0)[1:] == before.worker.sum(axis=0)[1:]).all()
    assert after.merged_slots == before.merged_slots + 2


def test_the_busiest_worker_and_what_is_fixed(batch):
    plan = plan_of("balanced", batch)
    work = count_work(plan, kv_len=batch.arrays.kv_len)
    costs = np.array([2.0, 0.5, 1.25, 0.25, 0.0625, 0.75])
    found = estimate(plan, spec=CASE.spec, profile=PROFILE, kv_len=batch.arrays.kv_len)
    assert found.work_us == (work.worker @ costs).max()
    fixed = 8.0 + 0.125 * work.merged_slots + 0.03125 * work.merged_tiles
    assert found.fixed_us == fixed
    assert found.predicted_us == found.work_us + fixed
    whole = estimate(plan, spec=CASE.spec, profile=PROFILE)
    assert whole.work_us < found.work_us
    assert fixed < found.lower_bound_us <= found.predicted_us


def test_memory_and_products_bound(batch):
    plan = plan_of("flash_decoding", batch)
    work, page_bytes = count_work(plan), 2 * 4 * 64 * 2
    slow = dataclasses.replace(PROFILE, bytes_per_us=10.0)
    found = estimate(plan, spec=CASE.spec, profile=slow)
    assert found.memory_us == work.unique_pages * page_bytes / 10
    assert found.predicted_us == found.memory_us + found.fixed_us == found.lower_bound_us
    # A quarter of the pages fits: three quarters of what is read again come from memory again.
    quarter = dataclasses.replace(slow, cache_bytes=work.unique_pages * page_bytes / 4)
    found = estimate(plan, spec=CASE.spec, profile=quarter)
    pages = work.unique_pages + 0.75 * (work.loaded_pages - work.unique_pages)
    assert found.memory_us == pages * page_bytes / 10
    thin = dataclasses.replace(PROFILE, flops_per_us=10.0)
    found = estimate(plan, spec=CASE.spec, profile=thin)
    assert found.compute_us == 4 * work.live_rows * 4 * 64 / 10
    assert found.predicted_us == found.compute_us + found.fixed_us
