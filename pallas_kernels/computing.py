"""The compute warpgroups: attention of 64 query rows over a segment's blocks.

With two of them, a segment of two tiles gives each its tile, and both read every block; a segment
of one tile gives each every other block, and the one that is done first hands its state to the
other. Every warpgroup waits for every arrival and lets go of every buffer; what is outside its
share it only passes by. What a block is, its label says (`labels`).
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_attention import (
    Task,
    attend_block,
    attend_block_and_start_next,
    times_keys,
)
from pallas_kernels.compat import plgpu
from pallas_kernels.config import BLOCK_Q
from pallas_kernels.labels import Label, read_label
from pallas_kernels.launch import Launch, Segment, over_segments, read_work
from pallas_kernels.softmax import State


class _Place(NamedTuple):
    """Where a warpgroup is.

    Attributes:
      ring: blocks before this one, over all segments.
      is_past: 1 past the segment's last block, else 0.
      label: the block's; past the last one, that one's.
    """

    ring: Any
    is_past: Any
    label: Label


def compute_segments(launch: Launch, warpgroup) -> None:
    """Writes the results of this warpgroup's parts of all segments."""
    config, smem = launch.config, launch.smem
    is_pair = config.num_compute_warpgroups > 1

    def run_segment(segment: Segment, step_after, carry):
        del step_after
        ring, num_queries, num_handed = carry
        is_wide = segment.num_tiles > 1 if is_pair else jnp.bool_(True)
        mine = jnp.where(is_wide, warpgroup, 0) if is_pair else jnp.int32(0)
        _for_queries(launch, segment, lambda t: wait_for("q", num_queries + t))
        queries = smem["q"].at[launch.place("q", num_queries + mine)]
        task = Task(warpgroup, is_wide, segment.tile + mine, queries)
        end, state = _attend(launch, task, ring)
        _for_queries(launch, segment, lambda t: let_go("q", num_queries + t))
        if not is_pair:
            _write(launch, segment, task, state)
            return end, num_queries + segment.num_tiles, num_handed

        # There is nothing to hand over if there was but one block.
        is_split = ~is_wide & (end - ring > 1)
        is_last = task.has(end - 1)

        @pl.when(is_last & ~is_split)
        def _():
            _write(launch, segment, task, state)

        @pl.when(is_split & (num_handed > 0))
        def _():
            plgpu.barrier_wait(launch.barriers["state_free"])

        @pl.when(is_split & ~is_last)
        def _():
            _hand_over(launch, state)

        @pl.when(is_split & is_last)
        def _():
            _write(launch, segment, task, state.merged(_take_over(launch), launch.scale))

        handed = jnp.where(is_split, jnp.int32(1), jnp.int32(0))
        return end, num_queries + segment.num_tiles, num_handed + handed

    def wait_for(name, count):
        plgpu.barrier_wait(launch.barrier(f"{name}_full", count))

    def let_go(name, count):
        plgpu.barrier_arrive(launch.barrier(f"{name}_free", count))

    start = (jnp.int32(0), jnp.int32(0), jnp.int32(0))
    _, _, num_handed = over_segments(launch, read_work(launch), run_segment, start)
    if is_pair:

        @pl.when(num_handed > 0)
        def _():
            plgpu.barrier_wait(launch.barriers["state_free"])


def _for_queries(launch: Launch, segment: Segment, action) -> None:
    """Does it for each of the segment's query tiles."""
    action(0)
    if launch.config.num_compute_warpgroups > 1:

        @pl.when(segment.num_tiles > 1)
        def _():
            action(1)


def _attend(launch: Launch, task: Task, ring):
    """The number of the block past the segment, and the state of the task's blocks."""
    labels, head_dim = launch.smem["labels"], launch.smem["q"].shape[2]

    def let_go(ring):
        plgpu.barrier_arrive(launch.barrier("kv_free", ring))

    def look(ring):
        plgpu.barrier_wait(launch.barrier("kv_full", ring))
        return _Place(ring, jnp.int32(0), read_label(labels, launch.place("kv", ring)))

    def after(place: _Place):
        past = _Place(place.ring + 1, jnp.int32(1), place.label)
        return lax.cond(place.label.is_last == 1, lambda: past, lambda: look(place.ring + 1))

    def until_past(run, place: _Place):
        carry = place, State.empty(head_dim)
        place, state = lax.while_loop(lambda carry: carry[0].is_past == 0, run, carry)
        return place.ring, state

    def run_every_block(task: Task):
        # The next block is waited for beside the product with this one's values.
        def run(carry):
            place, state = carry
            stage = launch.place("kv", place.ring)
            state, following = attend_block(
                launch, task, stage, place.label, state, lambda: after(place)
            )
            let_go(place.ring)
            return following, state

        return until_past(run, look(ring))

    def run_every_block_ahead(task: Task):
        # The next block is waited for before this one's softmax.
        def run(carry):
            place, products, state = carry
            following = after(place)
            # Past the end this block's keys once more: the products are not used.
            next_stage = launch.place("kv", following.ring - following.is_past)
            stage = launch.place("kv", place.ring)
            state, products = attend_block_and_start_next(
                launch, task, stage, place.label, products, state, next_stage
            )
            let_go(place.ring)
            return following, products, state

        first = look(ring)
        products = times_keys(launch, task, launch.place("kv", ring))
        carry = first, products, State.empty(head_dim)
        place, _, state = lax.while_loop(lambda carry: carry[0].is_past == 0, run, carry)
        return place.ring, state

    def run_every_other_block():
        # The other warpgroup multiplies meanwhile: a block is let go as early as possible.
        def stop_at_mine(place: _Place):
            """At most one block of the other's lies between two of this warpgroup's."""
            is_foreign = (place.is_past == 0) & ~task.has(place.ring)
            return lax.cond(is_foreign, pass_by, lambda place: place, place)

        def pass_by(place: _Place):
            let_go(place.ring)
            return after(place)

        def run(carry):
            place, state = carry
            stage = launch.place("kv", place.ring)
            state, _ = attend_block(launch, task, stage, place.label, state)
            let_go(place.ring)
            return stop_at_mine(after(place)), state

        return until_past(run, stop_at_mine(look(ring)))

    def run_with_own_queries():
        ahead = launch.config.products_ahead
        run_segment = run_every_block_ahead if ahead else run_every_block
        if not launch.config.queries_in_registers or launch.config.interpretable:
            return run_segment(task)
        queries = plgpu.load(task.queries, layout=plgpu.Layout.WGMMA, optimized=False)
        return run_segment(task._replace(queries=queries))

    if launch.config.num_compute_warpgroups == 1:
        return run_with_own_queries()
    return lax.cond(task.is_wide, run_with_own_queries, run_every_other_block)


def _hand_over(launch: Launch, state: State) -> None:
    """This warpgroup's state into shared memory, for the other."""
    for name, values in state._asdict().items():
        launch.smem[name][...] = values
    plgpu.commit_smem()
    plgpu.barrier_arrive(launch.barriers["state_full"])
    # Nothing to wait for; but who waits for a barrier once must wait for its every phase.
    plgpu.barrier_wait(launch.barriers["state_full"])


def _take_over(launch: Launch) -> State:
    """The other warpgroup's state."""
    smem, by_row = launch.smem, plgpu.Layout.WGMMA.reduce(1)
    plgpu.barrier_wait(launch.barriers["state_full"])
    state = State(
        plgpu.load(smem["acc"], layout=plgpu.Layout.WGMMA, optimized=False),
        plgpu.load(smem["top"], layout=by_row, optimized=False),
        plgpu.load(smem["total"], layout=by_row, optimized=False),
    )
    plgpu.barrier_arrive(launch.barriers["state_free"])
    return state


def _write(launch: Launch, segment: Segment, task: Task, state: State) -> None:
    """The task's result to its slot, or to its final place if the tile has no other slot."""
    out, lse = state.normalised(launch.scale)
    outputs, second = launch.outputs, task.tile - segment.tile
    slot = jnp.where(second == 0, segment.slot, segment.second_slot)
    is_final = (lax.shift_right_logical(segment.final, second) & 1) == 1
    rows = pl.ds(pl.multiple_of(task.tile * BLOCK_Q, BLOCK_Q), BLOCK_Q)

    @pl.when(is_final)
    def _():
        outputs.merged_out[segment.kv_head, rows] = out
        outputs.merged_lse[segment.kv_head, rows] = lse

    @pl.when(~is_final)
    def _():
        outputs.out[slot] = out
        outputs.lse[slot] = lse
