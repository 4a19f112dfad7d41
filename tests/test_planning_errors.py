"""What the planner refuses, and in which words."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plan_cases import SMALL

from codec_jax.forest import Forest
from codec_jax.forest_arrays import export_arrays
from codec_jax.planning.build import PlanOverflowError, build_plan, check_capacity
from codec_jax.planning.cost import CostModel
from codec_jax.planning.interpreter import interpret
from codec_jax.planning.plan import Plan
from codec_jax.planning.policies import POLICIES, policy_named
from codec_jax.planning.spec import PlanCapacity, PlanSpec

CAPACITY_FIELDS = [field.name for field in dataclasses.fields(PlanCapacity)]
TOKEN_LISTS = [[1] * 20 + [i] * 30 for i in range(40)]


@pytest.fixture(scope="module")
def batch():
    return SMALL.batch(TOKEN_LISTS)


def test_overflow_of_several_sizes_names_each_with_need_and_room(batch):
    needed = jax.device_get(SMALL.plan(batch.arrays).counts)
    capacity = dataclasses.replace(SMALL.capacity, steps=9, segments=5, slots=3)
    with pytest.raises(PlanOverflowError) as error:
        build_plan(batch.arrays, SMALL.spec, policy=SMALL.policy, capacity=capacity)
    assert str(error.value) == (
        f"`capacity` is too small for this forest: steps {needed.steps} > 9,"
        f" segments {needed.segments} > 5, slots {needed.slots} > 3."
        " Leave `capacity` out, or plan again with at least these sizes (what did not fit may need"
        " more)."
    )


@pytest.mark.parametrize("name", CAPACITY_FIELDS)
def test_each_size_overflows_below_its_need_and_not_at_it(batch, name):
    """Checked against the counts of the ample plan, so that one compilation serves each."""
    counts = jax.device_get(SMALL.plan(batch.arrays).counts)
    need = int(getattr(counts, name))
    assert need > 1
    exact = PlanCapacity(**{field: int(getattr(counts, field)) for field in CAPACITY_FIELDS})
    check_counts(counts, exact)
    with pytest.raises(PlanOverflowError, match=rf"forest: {name} {need} > {need - 1}\. Leave"):
        check_counts(counts, dataclasses.replace(exact, **{name: need - 1}))


def check_counts(counts, capacity):
    fields = {field.name: None for field in dataclasses.fields(Plan)}
    check_capacity(Plan(**{**fields, "counts": counts}), capacity)


def test_a_planner_without_room_counts_more_than_its_room(batch):
    none = PlanCapacity(virtual_nodes=1, tiles=1, steps=1, items=1, segments=1, slots=1)
    with pytest.raises(PlanOverflowError) as error:
        build_plan(batch.arrays, SMALL.spec, capacity=none)
    for name in ("virtual_nodes", "tiles", "steps", "segments", "slots"):
        assert re.search(rf"\b{name} \d+ > 1\b", str(error.value)), name


def test_a_planner_without_room_for_items_counts_them_all(batch):
    need = int(SMALL.plan(batch.arrays).counts.items)
    capacity = dataclasses.replace(SMALL.capacity, items=need - 1)
    with pytest.raises(PlanOverflowError, match=rf"forest: items {need} > {need - 1}[.,]"):
        build_plan(batch.arrays, SMALL.spec, policy=SMALL.policy, capacity=capacity)


def test_sizes_named_by_an_overflow_of_tiles_suffice():
    """The count is exact, however few tiles there is room for."""
    batch = SMALL.batch([[i] for i in range(40)])
    wide = dataclasses.replace(SMALL.spec, group_size=64)
    capacity = dataclasses.replace(SMALL.capacity, tiles=2)
    with pytest.raises(PlanOverflowError, match="tiles 40 > 2"):
        build_plan(batch.arrays, wide, capacity=capacity)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(PlanSpec)])
def test_spec_refuses_what_is_not_positive(name):
    with pytest.raises(ValueError, match=rf"^`{name}` must be a positive integer; got 0\.$"):
        dataclasses.replace(SMALL.spec, **{name: 0})


@pytest.mark.parametrize("name", CAPACITY_FIELDS)
def test_capacity_refuses_what_is_not_positive(name):
    with pytest.raises(ValueError, match=rf"^`{name}` must be a positive integer; got -1\.$"):
        dataclasses.replace(SMALL.capacity, **{name: -1})


@pytest.mark.parametrize("value", [-1, 0.5])
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(CostModel)])
def test_cost_refuses_what_is_no_number_of_ticks(name, value):
    least = 0 if name in ("slot_ticks", "short_step_ticks") else 1
    rule = rf"^`{name}` must be an integer of at least {least}; got {value}\.$"
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(CostModel.closed_form(SMALL.spec), **{name: value})


def test_a_short_step_costs_no_more_than_another():
    rule = r"^`short_step_ticks` must be at most `step_ticks`, 2; got 3\.$"
    with pytest.raises(ValueError, match=rule):
        CostModel(step_ticks=2, wide_step_ticks=3, segment_ticks=1, short_step_ticks=3)


def test_an_unknown_policy_lists_the_known_ones(batch):
    rule = rf"^`policy` must be one of {', '.join(POLICIES)}; got 'fastest'\.$"
    with pytest.raises(ValueError, match=rule):
        policy_named("fastest")
    with pytest.raises(ValueError, match=rule):
        build_plan(batch.arrays, SMALL.spec, policy="fastest")


def test_work_of_more_than_int32_ticks_is_refused_before_planning(batch):
    arrays = batch.arrays._replace(
        kv_len=np.where(batch.arrays.kv_len > 0, 2**30, 0).astype(np.int32),
        max_kv_len=np.where(batch.arrays.kv_len > 0, 2**30, 0).astype(np.int32),
        first_row=np.zeros_like(batch.arrays.first_row),
        num_pages=np.where(batch.arrays.kv_len > 0, 2**26, 0).astype(np.int32),
    )
    with pytest.raises(ValueError, match=r"^`forest` is too large for one plan: up to \d+ ticks"):
        build_plan(arrays, SMALL.spec, capacity=SMALL.capacity)


def interpret_altered(batch, **fields):
    plan = SMALL.plan(batch.arrays)
    segments = dataclasses.replace(plan.segments, **fields)
    plan = dataclasses.replace(plan, segments=segments)
    interpret(plan, batch.q, batch.pages, batch.arrays.page_list, batch.arrays.kv_len)


def test_interpreter_refuses_a_slot_written_twice(batch):
    slot = np.zeros_like(SMALL.plan(batch.arrays).segments.slot)
    rule = r"^`plan.segments.slot` must be written once; slot 0 is written twice\.$"
    with pytest.raises(ValueError, match=rule):
        interpret_altered(batch, slot=slot)


def test_interpreter_refuses_a_merge_of_a_slot_that_nobody_wrote(batch):
    slot = SMALL.plan(batch.arrays).segments.slot + 1000
    rule = r"^`plan.slot_indptr` must name written slots; no segment writes slot 0\.$"
    with pytest.raises(ValueError, match=rule):
        interpret_altered(batch, slot=slot)


def test_negative_new_tokens_are_refused(batch):
    """A negative number plans fewer pages than are live: tokens are dropped without a word."""
    with pytest.raises(ValueError, match="`num_new_tokens`"):
        build_plan(batch.arrays, SMALL.spec, num_new_tokens=-5, capacity=SMALL.capacity)


@pytest.mark.parametrize("page_size", [8, 32])
def test_a_page_size_that_is_not_the_forests_is_refused(batch, page_size):
    """The plan would read the wrong tokens; `num_pages` tells the forest's page size."""
    spec = dataclasses.replace(SMALL.spec, page_size=page_size)
    with pytest.raises(ValueError, match="`page_size`"):
        build_plan(batch.arrays, spec, capacity=SMALL.capacity)


def test_a_spec_of_fractions_is_refused():
    """The message promises "a positive integer"."""
    with pytest.raises(ValueError, match=r"`num_kv_heads` must be a positive integer; got 2\.5"):
        PlanSpec(num_kv_heads=2.5, group_size=1, page_size=16)


def test_the_largest_of_no_capacities_is_a_clear_error():
    with pytest.raises(ValueError, match="capacit"):
        PlanCapacity.largest([])


def test_an_empty_forest_is_planned_or_refused_by_name():
    """It says "`virtual_nodes` must be a positive integer; got 0", which helps nobody."""
    with pytest.raises(ValueError, match="`forest`"):
        build_plan(export_arrays(Forest(page_size=16)), SMALL.spec)


def test_requests_left_after_a_removal_keep_their_rows_or_are_refused():
    """Ids are never reused, so ids reach past the exact capacity, and those rows vanish."""
    forest = Forest.from_token_lists([[1] * 20, [2] * 20], page_size=16)
    forest.remove_request(0)
    try:
        plan = build_plan(export_arrays(forest), SMALL.spec, capacity=SMALL.capacity)
    except ValueError as error:
        assert "`forest`" in str(error)
    else:
        assert int(jnp.sum(plan.packed_row < plan.num_tiles * 64)) == SMALL.group_size


def test_a_forest_that_was_not_exported_is_refused():
    rule = r"^`forest` must be ForestArrays, see `export_arrays`; got Forest\.$"
    with pytest.raises(ValueError, match=rule):
        build_plan(Forest(page_size=16), SMALL.spec)


def test_a_fraction_of_new_tokens_is_refused(batch):
    with pytest.raises(ValueError, match=r"^`num_new_tokens` must be a whole number; got 1\.5\.$"):
        build_plan(batch.arrays, SMALL.spec, num_new_tokens=1.5, capacity=SMALL.capacity)
