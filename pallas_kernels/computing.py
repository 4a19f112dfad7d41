"""The compute warpgroups: attention of 64 query rows over a segment's blocks.

S = Q K^T, queries from registers where there is room for them, O += P V, weights from registers.
With two of them, a segment of two tiles gives each its tile, and both read every block; a segment
of one tile gives each every other block, and the one that is done first hands its state to the
other. Every warpgroup waits for every arrival and lets go of every buffer; what is outside its
share it only passes by. What a block is, its label says (`labels`).
"""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import any_of
from pallas_kernels.compat import plgpu
from pallas_kernels.config import BLOCK_KV, BLOCK_Q
from pallas_kernels.labels import PARTLY, PLAIN, Label, read_label, read_live
from pallas_kernels.launch import Launch, Segment, over_segments, read_work
from pallas_kernels.softmax import MASKED, State


class _Task(NamedTuple):
    """One warpgroup's part of a segment.

    Attributes:
      warpgroup: 0 or 1.
      is_wide: the segment has two tiles, one for each warpgroup.
      tile: this warpgroup's tile of the whole line.
      queries: of the tile, in shared memory or in registers.
    """

    warpgroup: Any
    is_wide: Any
    tile: Any
    queries: Any

    def has(self, ring):
        """Whether the block is this warpgroup's."""
        return self.is_wide | ((ring & 1) == self.warpgroup)


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
    head_dim = smem["q"].shape[2]

    def run_segment(segment: Segment, step_after, carry):
        del step_after
        ring, num_queries, num_handed = carry
        is_wide = segment.num_tiles > 1 if is_pair else jnp.bool_(True)
        mine = jnp.where(is_wide, warpgroup, 0) if is_pair else jnp.int32(0)
        _for_queries(launch, segment, lambda t: wait_for("q", num_queries + t))
        queries = smem["q"].at[launch.place("q", num_queries + mine)]
        in_registers = config.queries_in_registers and not config.interpretable
        if in_registers:
            queries = plgpu.load(queries, layout=plgpu.Layout.WGMMA, optimized=False)
            _for_queries(launch, segment, lambda t: let_go("q", num_queries + t))
        task = _Task(warpgroup, is_wide, segment.tile + mine, queries)
        end, state = _attend(launch, task, ring, State.empty(head_dim))
        if not in_registers:
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


def _attend(launch: Launch, task: _Task, ring, state: State):
    """The number of the block past the segment, and the state with the task's blocks."""
    labels = launch.smem["labels"]

    def let_go(ring):
        plgpu.barrier_arrive(launch.barrier("kv_free", ring))

    def look(ring):
        plgpu.barrier_wait(launch.barrier("kv_full", ring))
        return _Place(ring, jnp.int32(0), read_label(labels, launch.place("kv", ring)))

    def after(place: _Place):
        past = _Place(place.ring + 1, jnp.int32(1), place.label)
        return lax.cond(place.label.is_last == 1, lambda: past, lambda: look(place.ring + 1))

    def pass_by(place: _Place):
        let_go(place.ring)
        return after(place)

    def stop_at_mine(place: _Place):
        """At most one block of the other's lies between two of this warpgroup's."""
        is_foreign = (place.is_past == 0) & ~task.has(place.ring)
        return lax.cond(is_foreign, pass_by, lambda place: place, place)

    # With two stages, a foreign block holds the other one: the next can come only after this one.
    looks_ahead = launch.config.num_stages > 2

    def run_block(carry):
        place, state = carry
        stage = launch.place("kv", place.ring)
        scores = _scores(launch, task, stage, place.label)
        state, weights = state.with_scores(scores, launch.scale)
        _drop_dead_values(launch, task, stage, place.label)
        acc, following = _add_product(
            launch,
            task,
            state.acc,
            weights.astype(launch.smem["v"].dtype),
            stage,
            meanwhile=(lambda: stop_at_mine(after(place))) if looks_ahead else lambda: None,
        )
        let_go(place.ring)
        state = state._replace(acc=acc)
        return following if looks_ahead else stop_at_mine(after(place)), state

    place, state = lax.while_loop(
        lambda carry: carry[0].is_past == 0, run_block, (stop_at_mine(look(ring)), state)
    )
    return place.ring, state


def _scores(launch: Launch, task: _Task, stage, label: Label):
    """Scores, masked, the first part of their scale applied, [64 query rows, 64 tokens]."""
    k = launch.smem["k"].at[stage]

    def product(acc):
        plgpu.wgmma(acc, task.queries, k.transpose((1, 0)))
        return acc[...]

    scores = pl.run_scoped(product, plgpu.ACC((BLOCK_Q, BLOCK_KV), jnp.float32))
    scores = scores if launch.scale.first == 1 else scores * launch.scale.first
    first_row = task.tile * BLOCK_Q

    def mask_none(scores):
        return scores

    def mask_rows(scores):
        row = first_row + plgpu.broadcasted_iota(
            jnp.int32, (BLOCK_Q,), 0, layout=plgpu.Layout.WGMMA.reduce(1)
        )
        mine = (row >= label.row_lo) & (row < label.row_hi)
        # A select, not a bias: what is no number must not reach the rows of others.
        return jnp.where(lax.broadcast_in_dim(mine, scores.shape, [0]), scores, MASKED)

    def mask_all(scores):
        # Dead rows of K may hold NaN: select, do not add.
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        row += first_row
        live = read_live(launch.smem["labels"], stage, launch.pages_per_block)
        seen = any_of(
            (column >= lo) & (column < hi) & (row >= row_lo) & (row < row_hi)
            for lo, hi, row_lo, row_hi in zip(*live, strict=True)
        )
        return jnp.where(seen, scores, MASKED)

    covers = (label.row_lo <= first_row) & (label.row_hi >= first_row + BLOCK_Q)
    masks = jnp.where(label.kind == PLAIN, jnp.where(covers, 0, 1), 2)
    return lax.switch(masks, [mask_none, mask_rows, mask_all], scores)


def _drop_dead_values(launch: Launch, task: _Task, stage, label: Label) -> None:
    """Zeroes the dead rows of V: their weights are 0, but 0 * NaN is NaN.

    Where both warpgroups read the block, the first zeroes for both.
    """
    v = launch.smem["v"].at[stage]

    def zero():
        row = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
        live = read_live(launch.smem["labels"], stage, launch.pages_per_block)
        spans = zip(live.col_lo, live.col_hi, strict=True)
        alive = any_of((row >= lo) & (row < hi) for lo, hi in spans)
        values = plgpu.load(v, layout=plgpu.Layout.WGMMA, optimized=False)
        v[...] = jnp.where(alive, values, jnp.zeros_like(values))
        plgpu.commit_smem()

    @pl.when(label.kind == PARTLY)
    def _():
        if launch.config.num_compute_warpgroups == 1:
            zero()
            return
        clean = launch.barriers["v_clean"].at[stage]
        waits = task.is_wide & (task.warpgroup == 1)

        @pl.when(~waits)
        def _():
            zero()

            @pl.when(task.is_wide)
            def _():
                plgpu.barrier_arrive(clean)

        @pl.when(waits)
        def _():
            plgpu.barrier_wait(clean)


def _add_product(launch: Launch, task: _Task, acc, weights, stage, *, meanwhile):
    """The accumulator with weights @ V added, and what `meanwhile()` gave beside the product."""
    v = launch.smem["v"].at[stage]

    def add(ref):
        ref[...] = acc
        plgpu.wgmma(ref, weights, v)
        result = meanwhile()
        return ref[...], result

    if not launch.config.interpretable:
        return pl.run_scoped(add, plgpu.ACC(acc.shape, jnp.float32))
    in_smem = launch.smem["weights"].at[task.warpgroup]
    in_smem[...] = weights
    plgpu.commit_smem()

    def product(ref):
        plgpu.wgmma(ref, in_smem, v)
        return ref[...]

    return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32)), meanwhile()


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


def _write(launch: Launch, segment: Segment, task: _Task, state: State) -> None:
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
