"""Merging partial results by log-sum-exp: one launch on a Hopper GPU.

A thread block owns one 64-row tile of one KV head and `BLOCK_D` of its columns. It goes through the
tile's slots in a fixed order, a round at a time: all the round's weights from the log-sum-exps
first, then the outputs. The same bits every time. A slot that no segment wrote is never named; an
empty one (lse -inf) is selected away, never multiplied. A tile with a single slot has its final
result already, and a tile with none gets (0, -inf).

Memory traffic: each named slot once, 64 * (head_dim + head_dim / BLOCK_D) * 4 bytes; the result
once. The time is latency: slot ids, log-sum-exps, outputs follow from each other, so a round has
all its loads in flight.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from pallas_kernels.compat import plgpu
from pallas_kernels.config import BLOCK_Q

BLOCK_D = 16
"""Columns of a thread block: 8 numbers a thread, and whole memory sectors."""
ROUND = 24
"""Slots of a round: one more than an eighth of 132 workers leaves a tile of 8 KV heads."""
BATCH = 8
"""Slots of a round whose outputs are loaded together: 64 numbers a thread."""
EMPTY = -1e30
"""A finite stand-in for the log-sum-exp of an empty slot: exp(-inf - -inf) is NaN."""


def _kernel(
    # inputs
    out_gmem,  # [slots, 64, head_dim] float32
    lse_gmem,  # [slots, 64] float32
    indptr_gmem,  # [tiles * num_kv_heads + 1]
    slots_gmem,  # [slots]
    # inputs and outputs
    merged_gmem,  # [num_kv_heads, rows, head_dim] float32
    merged_lse_gmem,  # [num_kv_heads, rows] float32
    *,
    num_kv_heads: int,
):
    tile, kv_head = lax.axis_index("tile"), lax.axis_index("kv_head")
    column = pl.multiple_of(lax.axis_index("column") * BLOCK_D, BLOCK_D)
    first = indptr_gmem[tile * num_kv_heads + kv_head]
    last = indptr_gmem[tile * num_kv_heads + kv_head + 1]
    by_row, by_element = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def load_lse(place):
        """The slot and its log-sum-exp; EMPTY past the end, where the last slot is read again."""
        slot = slots_gmem[jnp.minimum(place, last - 1)]
        lse = plgpu.load(lse_gmem.at[slot], layout=by_row, optimized=False)
        return slot, jnp.where((lse > EMPTY) & (place < last), lse, EMPTY)

    def add_batch(batch, top, sums):
        acc, total = sums
        parts = [
            plgpu.load(
                out_gmem.at[slot, :, pl.ds(column, BLOCK_D)], layout=by_element, optimized=False
            )
            for slot, _ in batch
        ]
        for (_, lse), part in zip(batch, parts, strict=True):
            weight = jnp.where(lse > EMPTY, jnp.exp(lse - top), 0.0)
            total += weight
            weight = lax.broadcast_in_dim(weight, part.shape, [0])
            acc += jnp.where(weight > 0, weight * part, 0.0)
        return acc, total

    def add_round(i, carry):
        top, (acc, total) = carry
        start = first + i * ROUND
        loaded = [load_lse(start + j) for j in range(ROUND)]
        new_top = functools.reduce(jnp.maximum, [lse for _, lse in loaded], top)
        decay = jnp.exp(top - new_top)
        sums = acc * lax.broadcast_in_dim(decay, acc.shape, [0]), total * decay
        for j in range(0, ROUND, BATCH):
            add = functools.partial(add_batch, loaded[j : j + BATCH], new_top)
            sums = lax.cond(start + j < last, add, lambda sums: sums, sums)
        return new_top, sums

    @pl.when(last - first != 1)
    def _merge():
        rounds = lax.div(last - first + (ROUND - 1), jnp.int32(ROUND))
        zero = full((BLOCK_Q, BLOCK_D), 0, by_element), full((BLOCK_Q,), 0, by_row)
        top, (acc, total) = lax.fori_loop(
            0, rounds, add_round, (full((BLOCK_Q,), EMPTY, by_row), zero)
        )
        some = total > 0
        safe = jnp.where(some, total, 1.0)
        rows = pl.ds(pl.multiple_of(tile * BLOCK_Q, BLOCK_Q), BLOCK_Q)
        merged_gmem[kv_head, rows, pl.ds(column, BLOCK_D)] = acc / lax.broadcast_in_dim(
            safe, acc.shape, [0]
        )

        @pl.when(column == 0)
        def _():
            merged_lse_gmem[kv_head, rows] = jnp.where(some, top + jnp.log(safe), -jnp.inf)


def merge_partials(
    partials: tuple[Float32[Array, "slots 64 head_dim"], Float32[Array, "slots 64"]],
    order: tuple[Int32[Array, " tiles*num_kv_heads+1"], Int32[Array, " slots"]],
    merged: tuple[Array, Array],
) -> tuple[Float32[Array, "num_kv_heads rows head_dim"], Float32[Array, "num_kv_heads rows"]]:
    """Output and natural log-sum-exp of every packed row; (0, -inf) for a tile without slots.

    Args:
      partials: out and lse of every slot, see `partial_attention`.
      order: indptr and slots: those of (tile, KV head) number p = tile * num_kv_heads + kv_head are
        slots[indptr[p] : indptr[p + 1]].
      merged: out `[num_kv_heads, rows, head_dim]` and lse `[num_kv_heads, rows]`, float32, with the
        final rows of the tiles that have one slot; updated in place.
    """
    num_kv_heads, rows, head_dim = merged[0].shape
    kernel = plgpu.kernel(
        functools.partial(_kernel, num_kv_heads=num_kv_heads),
        out_type=(),
        grid=(rows // BLOCK_Q, num_kv_heads, head_dim // BLOCK_D),
        grid_names=("tile", "kv_head", "column"),
        compiler_params=plgpu.CompilerParams(approx_math=False),
    )
    refs = [jax.new_ref(array) for array in merged]
    kernel(*partials, *order, *refs)
    out, lse = (jax.freeze(ref) for ref in refs)
    return out, lse
