"""Merging partial results by log-sum-exp: one launch on a Hopper GPU.

A thread block owns 8 rows by 64 or 128 columns of one KV head. The slots of a tile are one run, and
the block goes through them in that order, some at a time: their weights from their log-sum-exps
first, then their outputs, whose loads are in flight together. The same bits every time. What was
not written is selected away, never multiplied. A tile with a single slot has its final result
already; one with none gets a log-sum-exp of -inf, and its output is left as it is. The launch
overlaps the end of the kernel before it (programmatic dependent launch).

Memory traffic: each slot once, 64 * (head_dim + 1) * 4 bytes; the result once. The time is latency:
the loads of a round of slots follow those of the round before.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32

from pallas_kernels.compat import plgpu, rows_of_8_layout, store
from pallas_kernels.config import BLOCK_Q

BLOCK_ROWS = 8
"""Of a thread block: loads are long, and there are blocks for all processors."""
FEW_BLOCKS = 1024
EMPTY = -1e30
"""A finite stand-in for the log-sum-exp of an empty slot: exp(-inf - -inf) is NaN."""


class Share(NamedTuple):
    """What a thread block does.

    Attributes:
      columns: of its 8 rows.
      rounds: slots whose loads are in flight together, of a tile with many slots and of the last
        few. A round takes about 0.8 us on an H200, however many slots it has; too many waste loads.
    """

    columns: int
    rounds: tuple[int, int]

    @classmethod
    def of(cls, num_rows: int, head_dim: int) -> "Share":
        """The shortest way where all blocks run at once; else fewer blocks with fewer registers."""
        if num_rows // BLOCK_ROWS * (head_dim // 64) <= FEW_BLOCKS:
            return cls(64, (18, 6))
        return cls(math.gcd(head_dim, 128), (6, 6))


def _kernel(
    # inputs
    out_gmem,  # [slots, 64, head_dim] float32
    lse_gmem,  # [slots, 64] float32
    indptr_gmem,  # [tiles * num_kv_heads + 1]
    # inputs and outputs
    merged_gmem,  # [num_kv_heads, rows, head_dim] float32
    merged_lse_gmem,  # [num_kv_heads, rows] float32
    *,
    share: Share,
    interpretable: bool,
):
    num_kv_heads, _, head_dim = merged_gmem.shape
    rest, part = _divide(lax.axis_index("block"), head_dim // share.columns)
    block, kv_head = _divide(rest, num_kv_heads)
    tile, in_tile = _divide(block, BLOCK_Q // BLOCK_ROWS)
    pair = tile * num_kv_heads + kv_head
    # The bounds were there before the kernel that is still at work: it takes them as an input.
    first, last = indptr_gmem[pair], indptr_gmem[pair + 1]
    if not interpretable:
        plgpu.griddepcontrol_wait()
    in_slot, in_all = _range(in_tile, BLOCK_ROWS), _range(block, BLOCK_ROWS)
    columns = _range(part, share.columns)
    by_element = rows_of_8_layout()
    by_row = by_element.reduce(1)

    def full(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def load(place):
        """A slot's log-sum-exp and output; past the end the last slot's, and EMPTY."""
        slot = jnp.minimum(place, last - 1)
        lse = plgpu.load(lse_gmem.at[slot, in_slot], layout=by_row, optimized=False)
        out = plgpu.load(out_gmem.at[slot, in_slot, columns], layout=by_element, optimized=False)
        return jnp.where((lse == -jnp.inf) | (place >= last), EMPTY, lse), out

    def add_round(place, size, carry):
        top, acc, total = carry
        loaded = [load(place + j) for j in range(size)]
        new_top = functools.reduce(jnp.maximum, [lse for lse, _ in loaded], top)
        decay = jnp.exp(top - new_top)
        acc, total = acc * lax.broadcast_in_dim(decay, acc.shape, [0]), total * decay
        for lse, out in loaded:
            # Not `lse > EMPTY`: a NaN must not look like an empty slot.
            weight = jnp.where(lse != EMPTY, jnp.exp(lse - new_top), 0.0)
            total += weight
            weight = lax.broadcast_in_dim(weight, out.shape, [0])
            acc += jnp.where(weight != 0, weight * out, 0.0)
        return new_top, acc, total

    @pl.when((first == last) & (part == 0))
    def _empty():
        store(merged_lse_gmem.at[kv_head, in_all], full((BLOCK_ROWS,), -jnp.inf, by_row))

    @pl.when(last - first > 1)
    def _merge():
        shape = (BLOCK_ROWS, share.columns)
        carry = (
            full(shape[:1], EMPTY, by_row),
            full(shape, 0, by_element),
            full(shape[:1], 0, by_row),
        )
        long, short = share.rounds
        num_long = lax.div(jnp.maximum(last - first - short, 0) + (long - 1), jnp.int32(long))
        rest = first + num_long * long
        carry = lax.fori_loop(
            0, num_long, lambda i, carry: add_round(first + i * long, long, carry), carry
        )
        top, acc, total = lax.cond(
            rest < last, lambda carry: add_round(rest, short, carry), lambda carry: carry, carry
        )
        some = total != 0
        safe = jnp.where(some, total, 1.0)
        merged_gmem[kv_head, in_all, columns] = acc * lax.broadcast_in_dim(1 / safe, acc.shape, [0])
        merged_lse = jnp.where(some, top + jnp.log(safe), -jnp.inf)

        @pl.when(part == 0)
        def _():
            store(merged_lse_gmem.at[kv_head, in_all], merged_lse)


def _divide(value, divisor: int):
    """Quotient and remainder."""
    return lax.div(value, jnp.int32(divisor)), lax.rem(value, jnp.int32(divisor))


def _range(place, size: int):
    return pl.ds(pl.multiple_of(place * size, size), size)


def merge_partials(
    partials: tuple[Float32[Array, "slots 64 head_dim"], Float32[Array, "slots 64"]],
    indptr: Int32[Array, " tiles*num_kv_heads+1"],
    merged: tuple[Array, Array],
    *,
    interpretable: bool = False,
) -> tuple[Float32[Array, "num_kv_heads rows head_dim"], Float32[Array, "num_kv_heads rows"]]:
    """Output and natural log-sum-exp of every packed row.

    A tile without slots has -inf, and any output: the tiles of a plan's capacity that no request
    needs, often half of all, cost no write of their outputs.

    Args:
      partials: out and lse of every slot, see `partial_attention`.
      indptr: slots of (tile, KV head) number p = tile * num_kv_heads + kv_head are
        [indptr[p], indptr[p + 1]).
      merged: out `[num_kv_heads, rows, head_dim]` and lse `[num_kv_heads, rows]`, float32, with the
        final rows of the tiles that have one slot; updated in place.
      interpretable: for the Mosaic interpreter, which knows no launch but this one.
    """
    num_kv_heads, rows, head_dim = merged[0].shape
    share = Share.of(num_kv_heads * rows, head_dim)
    # One long axis, tile by tile: those without slots come last.
    num_blocks = num_kv_heads * (rows // BLOCK_ROWS) * (head_dim // share.columns)
    kernel = plgpu.kernel(
        functools.partial(_kernel, share=share, interpretable=interpretable),
        out_type=(),
        grid=(num_blocks,),
        grid_names=("block",),
        # No thread reads what it or another writes, so no barrier need follow a load.
        compiler_params=plgpu.CompilerParams(approx_math=False, unsafe_no_auto_barriers=True),
    )
    refs = [jax.new_ref(array) for array in merged]
    kernel(*partials, indptr, *refs)
    out, lse = (jax.freeze(ref) for ref in refs)
    return out, lse
