"""Sizes that the stated formulae promise, room that is too little, one compilation for all."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import Case

from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestCapacity, export_arrays
from codec_jax.pages import PagePool
from codec_jax.planning.build import PlanOverflowError, build_plan, plan_forest
from codec_jax.planning.policies import MAX_STREAM_PAGES, POLICIES
from codec_jax.planning.spec import PlanCapacity, PlanSpec


def ceil_div(numerator, denominator):
    return -(-numerator // denominator)


def promised(arrays, spec, policy):
    """The formulae of `PlanCapacity.for_forest`, written out node by node."""
    units_per_request = 1 if spec.group_size <= 64 else spec.group_size
    units_per_tile = 64 // spec.group_size if spec.group_size <= 64 else 64
    fewest = ceil_div(units_per_tile, 2)
    tiles = 2 * ceil_div(int(arrays.num_requests) * units_per_request, units_per_tile) + 1
    steps = blocks = virtual = 0
    for node in range(int(arrays.num_nodes)):
        sharers = int(arrays.request_hi[node] - arrays.request_lo[node])
        pages = ceil_div(int(arrays.first_row[node] + arrays.kv_len[node]), 16)
        pages = pages if arrays.kv_len[node] else 0
        is_shared = {"flash_decoding": False, "hydragen": arrays.parent[node] < 0}.get(policy, True)
        copies, units = (min(sharers, 1), sharers) if is_shared else (sharers, 1)
        units *= units_per_request
        touched = ceil_div(units, fewest) + 1 if units > 1 else 1
        repeated = policy == "auto" and touched > 1 and 0 < pages <= MAX_STREAM_PAGES
        virtual += touched if repeated else copies
        steps += pages * (touched if repeated else copies)
        blocks += copies * ceil_div(touched, 2) if touched > 1 else 0
    items = tiles + blocks
    cuts = 2 * spec.num_workers if policy == "codec" else spec.num_workers - 1
    segments = spec.num_kv_heads * items + cuts
    return {
        "virtual_nodes": max(virtual, int(arrays.num_nodes)),
        "tiles": tiles,
        "steps": steps,
        "items": items,
        "segments": segments,
        "slots": 2 * segments,
    }


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "shape", [{"group_size": 2}, {"group_size": 71, "max_requests": 8}], ids=str
)
@settings(max_examples=25)
@given(data=st.data())
def test_no_plan_exceeds_the_formulae(policy, shape, data):
    case = Case(policy=policy, **shape)
    arrays = case.batch(data.draw(case.token_lists())).arrays
    counts, limits = case.plan(arrays).counts, promised(arrays, case.spec, policy)
    for name, limit in limits.items():
        assert getattr(counts, name) <= limit, name
    default = PlanCapacity.for_forest(arrays, case.spec, policy=POLICIES[policy])
    for name in ("tiles", "segments", "slots", "steps", "virtual_nodes"):
        assert getattr(counts, name) <= getattr(default, name), name


@pytest.mark.parametrize("name", ["virtual_nodes", "tiles", "steps", "items", "segments", "slots"])
@pytest.mark.parametrize("policy", ["flash_decoding", "codec", "auto"])
def test_too_little_room_is_an_error_that_names_the_array(policy, name):
    """Each array alone, against the counts of an ample plan: the planner's own counts."""
    case = Case(policy=policy)
    arrays = case.batch([[1] * 20 + [i] * 20 for i in range(40)]).arrays
    need = int(getattr(case.plan(arrays).counts, name))
    short = dataclasses.replace(case.capacity, **{name: need - 1})
    with pytest.raises(PlanOverflowError, match=rf"\b{name} \d+ > {need - 1}\b"):
        build_plan(arrays, case.spec, policy=policy, capacity=short)


@pytest.mark.parametrize("policy", ["balanced", "codec", "auto"])
def test_a_living_forest_stays_within_one_compilation(policy):
    """Requests come, fork, grow over page borders and go; sizes of the arrays never change."""
    capacity = ForestCapacity(nodes=64, requests=64, page_entries=256)
    spec = PlanSpec(num_kv_heads=2, group_size=16, page_size=16, num_workers=7)
    forest = Forest(page_size=16, pages=PagePool(256))
    first = forest.add_request([1] * 40, max_new_tokens=100)
    room = PlanCapacity(
        virtual_nodes=256 if POLICIES[policy].repeats else 64,
        tiles=33,
        steps=512 if POLICIES[policy].repeats else 256,
        items=128,
        segments=512,
        slots=1024,
    )

    def check():
        arrays = export_arrays(forest, capacity)
        plan = build_plan(arrays, spec, policy=policy, capacity=room, num_new_tokens=8)
        assert int(plan.counts.virtual_nodes) >= forest.num_requests

    check()
    num_compiled = plan_forest._cache_size()
    for i in range(12):  # comes, and forks inside and outside a page
        forest.add_request([1] * (20 + i) + [i + 2] * (3 * i + 1), max_new_tokens=100)
        check()
    forest.pages.lend()
    popped = forest.pages.settle(256 - forest.pages.num_used - 7)
    for kv_len in range(20, 101, 20):  # grows
        pages = popped[: ceil_div(kv_len, 16)]
        forest.set_leaf_progress(first, kv_len=kv_len, page_ids=pages)
        check()
    for request in range(10):  # shrinks
        forest.remove_request(request)
        check()
    assert plan_forest._cache_size() == num_compiled
