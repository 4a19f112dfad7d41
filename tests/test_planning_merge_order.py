"""The flat merge order names, for each tile and KV head, the slots that the plan's offsets name."""

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import Case
from plan_editing import cut, pieces_of, with_pieces

from codec_jax.planning.merge_order import merge_order

CASE = Case(group_size=8, page_size=4)
merge_order_jitted = jax.jit(merge_order)


def slots_by_hand(plan):
    """Slots of each (tile, KV head), item by item: each segment's for that tile."""
    lists = []
    for tile in range(plan.num_tiles):
        for kv_head in range(plan.num_kv_heads):
            slots = []
            for item in plan.tile_items[plan.tile_indptr[tile] : plan.tile_indptr[tile + 1]]:
                pair = item * plan.num_kv_heads + kv_head
                lo, hi = plan.slot_indptr[pair : pair + 2]
                second = tile - plan.items.tile[item]
                slots += range(lo + second, hi, plan.items.num_tiles[item])
            lists.append(slots)
    return lists


def check(plan):
    order = jax.device_get(merge_order_jitted(plan))
    wanted = slots_by_hand(plan)
    assert np.diff(order.indptr).tolist() == [len(slots) for slots in wanted]
    assert order.slots[: order.indptr[-1]].tolist() == [slot for slots in wanted for slot in slots]
    assert sorted(order.slots[: order.indptr[-1]]) == list(range(int(plan.counts.slots)))
    assert {leaf.dtype for leaf in order} == {np.dtype(np.int32)}


@settings(max_examples=30)
@given(batch=CASE.batches())
def test_every_slot_is_merged_once_in_line_order(batch):
    check(CASE.plan(batch.arrays))


@settings(max_examples=30)
@given(batch=CASE.batches(), data=st.data())
def test_plans_that_no_policy_makes(batch, data):
    """Segments dropped, whole pairs too, and segments cut anywhere."""
    plan = CASE.plan(batch.arrays)
    pieces = []
    for piece in pieces_of(plan):
        choice = data.draw(st.sampled_from(["keep", "drop", "cut"]))
        if choice == "cut" and piece.num_steps > 1:
            pieces += cut(piece, data.draw(st.integers(1, piece.num_steps - 1)))
        elif choice != "drop":
            pieces.append(piece)
    check(with_pieces(plan, pieces))
