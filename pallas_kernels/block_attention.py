"""Attention of 64 query rows over one block of keys and values, by one warpgroup.

S = Q K^T, then O += P V, weights from registers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import Mask, any_of
from pallas_kernels.compat import plgpu
from pallas_kernels.config import BLOCK_KV, BLOCK_Q, HALF
from pallas_kernels.labels import Label, read_live
from pallas_kernels.launch import Launch
from pallas_kernels.softmax import MASKED, State


class Task(NamedTuple):
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


def attend_block(
    launch: Launch,
    task: Task,
    stage,
    label: Label,
    state: State,
    meanwhile: Callable[[], Any] = lambda: None,
) -> tuple[State, Any]:
    """The state with the block's tokens, and what `meanwhile()` gave beside the product with V."""
    scores = _masked(launch, task, stage, label, _times_keys(launch, task, stage))
    state, weights = state.with_scores(scores, launch.scale)
    _drop_dead_values(launch, task, stage, label)
    weights = weights.astype(launch.smem["v"].dtype)
    acc, result = _add_values(launch, task, state.acc, weights, stage, meanwhile)
    return state._replace(acc=acc), result


def _times_keys(launch: Launch, task: Task, stage):
    """Products of queries and keys, [64 query rows, 64 tokens]."""
    keys = launch.smem["k"].at[stage]

    def product(acc):
        plgpu.wgmma(acc, task.queries, keys.transpose((1, 0)))
        return acc[...]

    return pl.run_scoped(product, plgpu.ACC((BLOCK_Q, BLOCK_KV), jnp.float32))


def _masked(launch: Launch, task: Task, stage, label: Label, scores):
    """Scores, masked, the first part of their scale applied."""
    scores = scores if launch.scale.first == 1 else scores * launch.scale.first
    first_row = task.tile * BLOCK_Q

    def mask_none(scores):
        return scores

    def rows():
        by_row = plgpu.Layout.WGMMA.reduce(1)
        return first_row + plgpu.broadcasted_iota(jnp.int32, (BLOCK_Q,), 0, layout=by_row)

    def mask_rows(scores):
        mine = (rows() >= label.row_lo) & (rows() < label.row_hi)
        # A select, not a bias: what is no number must not reach the rows of others.
        return jnp.where(lax.broadcast_in_dim(mine, scores.shape, [0]), scores, MASKED)

    def column_of(scores):
        return plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)

    def length_of(page, shape):
        """The page's live tokens for each row: none, if the row is none of its."""
        lo, hi, row_lo, row_hi = page
        mine = (rows() >= row_lo) & (rows() < row_hi)
        return lax.broadcast_in_dim(jnp.where(mine, hi - lo, 0), shape, [0])

    def is_within(offset, length):
        # Without a sign, what lies before the first token is past the last one: one comparison.
        return offset.astype(jnp.uint32) < length.astype(jnp.uint32)

    def mask_pages(scores):
        # Dead rows of K may hold NaN: select, do not add.
        column, shape = column_of(scores), scores.shape
        live = read_live(launch.smem["labels"], stage, launch.pages_of_a_label)
        pages = list(zip(*live, strict=True))
        if len(pages) > 2:
            seen = any_of(is_within(column - page[0], length_of(page, shape)) for page in pages)
            return jnp.where(seen, scores, MASKED)
        # A page in each half: which half a column is in is known when this is compiled.
        first, second = pages
        is_first = column < HALF
        start = jnp.where(is_first, first[0], second[0])
        length = jnp.where(is_first, length_of(first, shape), length_of(second, shape))
        return jnp.where(is_within(column - start, length), scores, MASKED)

    covers = (label.row_lo <= first_row) & (label.row_hi >= first_row + BLOCK_Q)
    plain = jnp.where(covers, 0, 1)
    mask = jnp.where(label.mask == Mask.ROWS, plain, 2)
    return lax.switch(mask, [mask_none, mask_rows, mask_pages], scores)


def _drop_dead_values(launch: Launch, task: Task, stage, label: Label) -> None:
    """Zeroes the dead rows of V: their weights are 0, but 0 * NaN is NaN.

    Where both warpgroups read the block, the first zeroes for both.
    """
    v = launch.smem["v"].at[stage]

    def zero():
        row = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
        live = read_live(launch.smem["labels"], stage, launch.pages_of_a_label)
        spans = zip(live.col_lo, live.col_hi, strict=True)
        alive = any_of((row >= lo) & (row < hi) for lo, hi in spans)
        values = plgpu.load(v, layout=plgpu.Layout.WGMMA, optimized=False)
        v[...] = jnp.where(alive, values, jnp.zeros_like(values))
        plgpu.commit_smem()

    @pl.when(label.is_dirty == 1)
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


def _add_values(launch: Launch, task: Task, acc, weights, stage, meanwhile):
    """The accumulator with weights @ V added, and what `meanwhile()` gave."""
    values = launch.smem["v"].at[stage]
    if launch.config.interpretable:
        in_smem = launch.smem["weights"].at[task.warpgroup]
        in_smem[...] = weights
        plgpu.commit_smem()

        def product(ref):
            plgpu.wgmma(ref, in_smem, values)
            return ref[...]

        return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32)), meanwhile()

    def add(ref):
        ref[...] = acc
        plgpu.wgmma(ref, weights, values)
        result = meanwhile()
        return ref[...], result

    return pl.run_scoped(add, plgpu.ACC(acc.shape, jnp.float32))
