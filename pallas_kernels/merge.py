"""Merging partial results by log-sum-exp: one launch on a Hopper GPU.

A thread block owns 8 rows of one KV head. The slots of a tile are one run, and the block goes
through them in that order, a few at a time: the few's weights from their log-sum-exps first, then
their outputs, whose loads are in flight together. The same bits every time. What was not written is
selected away, never multiplied. A tile with a single slot has its final result already, and a tile
with none gets (0, -inf). The launch overlaps the end of the kernel before it (programmatic
dependent launch).

Memory traffic: each slot once, 64 * (head_dim + 1) * 4 bytes; the result once. The time is latency:
the loads of a round of slots follow those of the round before.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from pallas_kernels.compat import plgpu, rows_of_8_layout, store
from pallas_kernels.config import BLOCK_Q

BLOCK_ROWS = 8
"""Rows of a thread block: loads are long, and there are blocks for all processors."""
ROUND = 6
"""Slots whose loads are in flight together; of 4, 6, 8 and 16 the fastest on an H200."""
EMPTY = -1e30
"""A finite stand-in for the log-sum-exp of an empty slot: exp(-inf - -inf) is NaN."""


def _kernel(
    # inputs
    out_gmem,  # [slots, 64, head_dim] float32
    lse_gmem,  # [slots, 64] float32
    indptr_gmem,  # [tiles * num_kv_heads + 1]
    # inputs and outputs
    merged_gmem,  # [num_kv_heads, rows, head_dim] float32
    merged_lse_gmem,  # [num_kv_heads, rows] float32
):
    # Before the first read: the bounds of the slots may come from a kernel still at work, too.
    plgpu.griddepcontrol_wait()
    block, kv_head = lax.axis_index("block"), lax.axis_index("kv_head")
    blocks_per_tile = jnp.int32(BLOCK_Q // BLOCK_ROWS)
    pair = lax.div(block, blocks_per_tile) * lax.axis_size("kv_head") + kv_head
    first, last = indptr_gmem[pair], indptr_gmem[pair + 1]
    in_tile = pl.multiple_of(lax.rem(block, blocks_per_tile) * BLOCK_ROWS, BLOCK_ROWS)
    in_all = pl.ds(pl.multiple_of(block * BLOCK_ROWS, BLOCK_ROWS), BLOCK_ROWS)
    by_element = rows_of_8_layout()
    by_row = by_element.reduce(1)

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def load(place):
        """A slot's log-sum-exp and output; past the end the last slot's, and EMPTY."""
        slot = jnp.minimum(place, last - 1)
        rows = pl.ds(in_tile, BLOCK_ROWS)
        lse = plgpu.load(lse_gmem.at[slot, rows], layout=by_row, optimized=False)
        part = plgpu.load(out_gmem.at[slot, rows], layout=by_element, optimized=False)
        return jnp.where((lse > EMPTY) & (place < last), lse, EMPTY), part

    def add_round(i, carry):
        top, acc, total = carry
        loaded = [load(first + i * ROUND + j) for j in range(ROUND)]
        new_top = functools.reduce(jnp.maximum, [lse for lse, _ in loaded], top)
        decay = jnp.exp(top - new_top)
        acc, total = acc * lax.broadcast_in_dim(decay, acc.shape, [0]), total * decay
        for lse, part in loaded:
            weight = jnp.where(lse > EMPTY, jnp.exp(lse - new_top), 0.0)
            total += weight
            weight = lax.broadcast_in_dim(weight, part.shape, [0])
            acc += jnp.where(weight > 0, weight * part, 0.0)
        return new_top, acc, total

    @pl.when(last - first != 1)
    def _merge():
        shape = (BLOCK_ROWS, merged_gmem.shape[2])
        carry = (
            full(shape[:1], EMPTY, by_row),
            full(shape, 0, by_element),
            full(shape[:1], 0, by_row),
        )
        rounds = lax.div(last - first + (ROUND - 1), jnp.int32(ROUND))
        top, acc, total = lax.fori_loop(0, rounds, add_round, carry)
        some = total > 0
        safe = jnp.where(some, total, 1.0)
        merged_gmem[kv_head, in_all] = acc / lax.broadcast_in_dim(safe, acc.shape, [0])
        merged_lse = jnp.where(some, top + jnp.log(safe), -jnp.inf)
        store(merged_lse_gmem.at[kv_head, in_all], merged_lse)


def merge_partials(
    partials: tuple[Float32[Array, "slots 64 head_dim"], Float32[Array, "slots 64"]],
    indptr: Int32[Array, " tiles*num_kv_heads+1"],
    merged: tuple[Array, Array],
) -> tuple[Float32[Array, "num_kv_heads rows head_dim"], Float32[Array, "num_kv_heads rows"]]:
    """Output and natural log-sum-exp of every packed row; (0, -inf) for a tile without slots.

    Args:
      partials: out and lse of every slot, see `partial_attention`.
      indptr: slots of (tile, KV head) number p = tile * num_kv_heads + kv_head are
        [indptr[p], indptr[p + 1]).
      merged: out `[num_kv_heads, rows, head_dim]` and lse `[num_kv_heads, rows]`, float32, with the
        final rows of the tiles that have one slot; updated in place.
    """
    num_kv_heads, rows, _ = merged[0].shape
    kernel = plgpu.kernel(
        _kernel,
        out_type=(),
        # The last axis may be the longest: the others stop at 65,535.
        grid=(num_kv_heads, rows // BLOCK_ROWS),
        grid_names=("kv_head", "block"),
        # No thread reads what it or another writes, so no barrier need follow a load.
        compiler_params=plgpu.CompilerParams(approx_math=False, unsafe_no_auto_barriers=True),
    )
    refs = [jax.new_ref(array) for array in merged]
    kernel(*partials, indptr, *refs)
    out, lse = (jax.freeze(ref) for ref in refs)
    return out, lse
