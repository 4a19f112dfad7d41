"""Plans read every token for every request once, balance, and fit the sizes that are promised."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import CASES, SMALL, Case
from plan_reads import step_tokens, times_read, used_segments, wanted_reads

from codec_jax.planning.build import build_plan, plan_forest
from codec_jax.planning.cost import CostModel
from codec_jax.planning.policies import POLICIES, policy_named
from codec_jax.planning.spec import PlanCapacity, PlanSpec

TILE_ROWS = 64


def check_segments(plan):
    segments, used = plan.segments, used_segments(plan)
    assert plan.worker_indptr[0] == 0
    assert (np.diff(plan.worker_indptr) >= 0).all()
    assert used == list(range(int(plan.counts.segments)))
    assert (segments.num_steps[used] > 0).all()
    assert (segments.num_steps[len(used) :] == 0).all()
    slots = np.concatenate([segments.slot[used], (segments.slot + 1)[used][two_tiles(plan, used)]])
    assert sorted(slots) == list(range(int(plan.counts.slots)))


def two_tiles(plan, used):
    assert set(plan.segments.num_tiles[used].tolist()) <= {1, 2}
    return plan.segments.num_tiles[used] == 2


def check_pairs(plan):
    """The segments of each (item, KV head) pair, in slot order, walk its item's steps."""
    segments, items = plan.segments, plan.items
    assert plan.slot_indptr[0] == 0
    assert plan.slot_indptr[-1] == plan.counts.slots
    by_slot = sorted(used_segments(plan), key=lambda i: segments.slot[i])
    for pair in np.flatnonzero(np.diff(plan.slot_indptr)):
        item, kv_head = divmod(pair, plan.num_kv_heads)
        lo, hi = plan.slot_indptr[pair : pair + 2]
        mine = [i for i in by_slot if lo <= segments.slot[i] < hi]
        assert {(segments.kv_head[i], segments.tile[i], segments.num_tiles[i]) for i in mine} == {
            (kv_head, items.tile[item], items.num_tiles[item])
        }
        assert hi - lo == len(mine) * items.num_tiles[item]
        walked = [segments.step_lo[i] + np.arange(segments.num_steps[i]) for i in mine]
        whole = items.step_lo[item] + np.arange(items.num_steps[item])
        assert np.concatenate(walked).tolist() == whole.tolist()


def check_items(plan):
    """The lists by tile name each item once for each of its tiles, and no other."""
    num_items = int(plan.counts.items)
    items = plan.items
    assert (items.num_steps[:num_items] > 0).all()
    assert (items.num_tiles[num_items:] == 0).all()
    for tile in range(plan.num_tiles):
        listed = plan.tile_items[plan.tile_indptr[tile] : plan.tile_indptr[tile + 1]]
        touching = (items.tile <= tile) & (tile < items.tile + items.num_tiles)
        assert listed.tolist() == np.flatnonzero(touching).tolist()


def check_rows(plan, batch, spec):
    """Packed rows are distinct, a request's are consecutive, and in one tile where they fit."""
    num_requests = len(batch.token_lists)
    rows = plan.packed_row[:num_requests]
    assert np.unique(rows).size == rows.size
    assert (plan.packed_row[num_requests:] == plan.num_tiles * TILE_ROWS).all()
    assert (np.diff(rows, axis=1) == 1).all()
    if spec.group_size <= TILE_ROWS:
        assert (rows // TILE_ROWS == rows[:, :1] // TILE_ROWS).all()
    assert plan.counts.tiles == rows.max() // TILE_ROWS + 1
    units = num_requests * spec.units_per_request
    assert plan.counts.tiles <= 2 * -(-units // spec.units_per_tile) + 1


def check_steps(plan, batch, case):
    """A node has one run of steps where it is shared, and one for each reader where it is not."""
    num_steps, policy = int(plan.counts.steps), POLICIES[case.policy]
    share = np.asarray(policy.share(batch.arrays.parent))
    sharers = batch.arrays.request_hi - batch.arrays.request_lo
    runs = np.where(share, np.minimum(sharers, 1), sharers)
    if policy.streams_short:
        runs = np.where(streamed(plan, batch, case), touched_tiles(plan, batch), runs)
    per_node = np.bincount(plan.steps.node[:num_steps], minlength=runs.size)
    assert per_node.tolist() == (runs * batch.arrays.num_pages).tolist()
    assert (plan.steps.row_hi[num_steps:] == 0).all()
    assert plan.steps.is_short.tolist() == [
        is_short(plan, batch, s) for s in range(capacity_of(plan))
    ]


def capacity_of(plan):
    return plan.steps.node.size


def is_short(plan, batch, step):
    """1 for a page of at least 64 tokens, for one tile, whose live tokens lie in the first 32."""
    steps, page_size = plan.steps, batch.forest.page_size
    if page_size < 64 or steps.row_hi[step] == 0:
        return 0
    tiles = steps.row_lo[step] // TILE_ROWS, (steps.row_hi[step] - 1) // TILE_ROWS
    end = step_tokens(plan, batch, step).stop - steps.kv_start[step]
    return int(tiles[0] == tiles[1] and end <= 32)


def touched_tiles(plan, batch):
    """In how many tiles each node's rows lie."""
    arrays, tiles = batch.arrays, plan.packed_row // TILE_ROWS
    of_request = tiles[arrays.request_row[: int(arrays.num_requests)]]
    pairs = zip(arrays.request_lo, arrays.request_hi, strict=True)
    return np.array([np.unique(of_request[lo:hi]).size for lo, hi in pairs])


def streamed(plan, batch, case):
    """Nodes of at most 8 pages whose steps in every tile cost no more than blocks of two tiles."""
    cost, pages = CostModel.closed_form(case.spec), batch.arrays.num_pages
    tiles = touched_tiles(plan, batch)
    blocks = -(-tiles // 2) * cost.segment_ticks + tiles * cost.slot_ticks
    blocks += pages * (tiles // 2 * cost.wide_step_ticks + tiles % 2 * cost.step_ticks)
    cheap = tiles * pages * cost.step_ticks <= blocks
    return (tiles > 1) & (pages > 0) & (pages <= 8) & cheap


def check_balance(plan, case):
    """No worker exceeds its share by more than a segment and a step.

    A cut inside a pair is at most half a step off, and costs a segment.
    """
    cost = CostModel.closed_form(case.spec)
    most_step_ticks = max(cost.step_ticks, cost.wide_step_ticks)
    whole = ticks(plan.items, plan, cost).sum() * plan.num_kv_heads
    allowed = whole / case.num_workers + 1 + cost.segment_ticks + most_step_ticks
    ranges = zip(plan.worker_indptr[:-1], plan.worker_indptr[1:], strict=True)
    of_segment = ticks(plan.segments, plan, cost)
    assert max(of_segment[lo:hi].sum() for lo, hi in ranges) <= allowed


def ticks(work, plan, cost):
    """Cost of each item or segment; none for padding."""
    narrow = np.where(plan.steps.is_short == 1, cost.short_step_ticks, cost.step_ticks)
    runs = zip(work.num_tiles, work.step_lo, work.num_steps, strict=True)
    prices = [
        np.full(n, cost.wide_step_ticks) if t == 2 else narrow[lo : lo + n] for t, lo, n in runs
    ]
    steps = np.array([price.sum() for price in prices])
    return np.where(work.num_tiles > 0, cost.segment_ticks + steps, 0)


def check_default_capacity(plan, batch, case):
    """The default sizes suffice, and are at most twice the need or what the forest has room for."""
    policy = POLICIES[case.policy]
    capacity = PlanCapacity.for_forest(batch.arrays, case.spec, policy=policy)
    for field in dataclasses.fields(PlanCapacity):
        assert getattr(plan.counts, field.name) <= getattr(capacity, field.name), field.name
    if policy.streams_short:
        return  # what could be repeated counts as repeated
    room = case.forest_capacity
    assert capacity.virtual_nodes <= max(2 * plan.counts.virtual_nodes, room["nodes"])
    assert capacity.steps <= max(2 * plan.counts.steps, room["page_entries"])


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=30)
@given(data=st.data())
def test_plan_reads_every_token_once_for_every_row(case, data):
    batch = data.draw(case.batches())
    plan = case.plan(batch.arrays)
    np.testing.assert_array_equal(times_read(plan, batch), wanted_reads(plan, batch))
    check_segments(plan)
    check_pairs(plan)
    check_items(plan)
    check_rows(plan, batch, case.spec)
    check_steps(plan, batch, case)
    check_default_capacity(plan, batch, case)
    if POLICIES[case.policy].division == "ranges":
        check_balance(plan, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_jitted_planner_equals_unjitted(case):
    """XLA on some CPUs miscompiles shifted slices mixed with gathers.

    Un-jitted planning compiles every operation for itself: a few examples of each case have to do.
    The jitted plans of all examples are checked in full above.
    """

    @settings(max_examples=3)
    @given(batch=case.batches())
    def check(batch):
        plan = case.plan(batch.arrays)
        with jax.disable_jit():
            unjitted = case.plan(batch.arrays)
        jax.tree.map(np.testing.assert_array_equal, plan, unjitted)

    check()


def test_planning_without_a_capacity():
    batch = SMALL.batch([[1] * 40, [1] * 20 + [2], [1] * 20, [0]])
    plan = jax.device_get(build_plan(batch.arrays, SMALL.spec, policy="hydragen"))
    np.testing.assert_array_equal(times_read(plan, batch), wanted_reads(plan, batch))


def test_largest_capacity_has_room_for_each():
    small = dataclasses.replace(SMALL.capacity, tiles=3, items=900)
    large = dataclasses.replace(SMALL.capacity, tiles=40, items=8)
    assert PlanCapacity.largest([small]) == small
    largest = PlanCapacity.largest([small, large, small])
    assert largest == dataclasses.replace(SMALL.capacity, tiles=40, items=900)


@settings(max_examples=15)
@given(batch=SMALL.batches())
def test_spare_room_for_virtual_nodes_changes_no_plan(batch):
    """With room for exactly the nodes, the planner takes them as they come, without a sort."""
    spare = dataclasses.replace(SMALL.capacity, virtual_nodes=SMALL.capacity.virtual_nodes + 1)
    with_spare = build_plan(batch.arrays, SMALL.spec, policy=SMALL.policy, capacity=spare)
    plan = jax.device_get(with_spare)
    jax.tree.map(np.testing.assert_array_equal, plan, SMALL.plan(batch.arrays))


def test_a_border_is_placed_where_it_cuts_no_node():
    """Two groups of 20 requests, 32 to a tile: the border goes between the groups, not at 32."""
    batch = SMALL.batch([[group] * 20 + [i] for group in (1, 2) for i in range(20)])
    plan = SMALL.plan(batch.arrays)
    tile = plan.packed_row[:, 0] // TILE_ROWS
    assert tile.tolist() == [0] * 20 + [1] * 20
    assert set(plan.items.num_tiles.tolist()) == {0, 1}


def test_new_tokens_reserve_steps_on_private_leaves_only():
    case = Case(max_requests=4)
    batch = case.batch([[1] * 20, [1] * 20 + [2]])
    arrays = batch.arrays._replace(max_kv_len=batch.arrays.kv_len + np.array([0, 9] + [0] * 94))
    arrays = arrays._replace(max_kv_len=arrays.max_kv_len.astype(np.int32))
    steps = [int(case.plan(arrays, num_new_tokens=k).counts.steps) for k in (0, 9, 900)]
    assert steps == [3, 3, 3]


def test_a_page_that_will_grow_is_not_short():
    """30 tokens are; with 2 more to come still, with 3 no more. A shared wide node never is."""
    case = Case(page_size=64, group_size=64, max_requests=8)
    batch = case.batch([[1] * 64 + [2 + i] * 30 for i in range(3)] + [[9] * 20, [9] * 20 + [8]])
    kv_len = batch.arrays.kv_len
    may_grow = (kv_len > 0) & (kv_len < 64)
    arrays = batch.arrays._replace(max_kv_len=np.where(may_grow, kv_len + 3, kv_len))
    for num_new_tokens, shortest in ((0, 30), (2, 30), (3, 29)):
        plan = case.plan(arrays, num_new_tokens=num_new_tokens)
        steps = plan.steps
        used = steps.row_hi > 0
        narrow = steps.row_lo // 64 == (steps.row_hi - 1) // 64
        length = batch.arrays.kv_len[steps.node]
        expected = used & narrow & (length <= shortest)
        assert steps.is_short.tolist() == expected.astype(int).tolist()
        assert expected.any() and (used & ~narrow & (length == 20)).any()


def test_plans_are_int32_under_x64():
    """Policy hydragen takes the path with a sort."""
    case = dataclasses.replace(SMALL, policy="hydragen")
    batch = case.batch([[1] * 40, [1] * 20 + [2], [1] * 20, [0]])
    with jax.enable_x64(True):
        plan = case.plan(batch.arrays)
    assert {leaf.dtype for leaf in jax.tree.leaves(plan)} == {np.dtype(np.int32)}
    np.testing.assert_array_equal(times_read(plan, batch), wanted_reads(plan, batch))


def test_planning_again_compiles_nothing():
    SMALL.plan(SMALL.batch([[1] * 40, [1] * 20 + [2]]).arrays)
    num_compiled = plan_forest._cache_size()
    SMALL.plan(SMALL.batch([[1], [2], [2, 3]]).arrays)
    assert plan_forest._cache_size() == num_compiled


@pytest.mark.parametrize("group_size", [1, 2, 3, 7, 8, 33, 64, 65, 71])
def test_units_of_a_tile(group_size):
    spec = PlanSpec(num_kv_heads=1, group_size=group_size, page_size=16)
    assert spec.units_per_request * spec.rows_per_unit == group_size
    assert spec.units_per_tile * spec.rows_per_unit <= TILE_ROWS
    assert (spec.units_per_tile + 1) * spec.rows_per_unit > TILE_ROWS
    assert 2 * spec.min_units_per_tile >= spec.units_per_tile


def test_policies_are_found_by_name():
    assert [policy_named(name).name for name in POLICIES] == list(POLICIES)
