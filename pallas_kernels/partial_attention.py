"""Partial attention over a plan's segments: one persistent launch on a Hopper GPU.

Every thread block walks one worker's segments. A memory warpgroup runs ahead of a compute warpgroup
through rings of shared memory, across segment borders: query tiles into one ring, KV blocks of 64
tokens into another. The compute warpgroup keeps one tile of 64 rows with an online softmax:
S = Q K^T from shared memory, P from registers, O += P V. A segment's partial result goes from
registers straight to its slot in global memory, float32.

Memory traffic: each live page of a segment once, 2 * page_size * head_dim elements; each segment's
queries once, 64 * head_dim; its partial result once, 64 * (head_dim + 1) * 4 bytes.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.blocks import Block, Place, any_of, next_live
from pallas_kernels.blocks import num_blocks as num_blocks_of
from pallas_kernels.blocks import read_block as read_block_of
from pallas_kernels.compat import plgpu
from pallas_kernels.config import BLOCK_KV, BLOCK_Q, KernelConfig
from pallas_kernels.tables import SegmentTable

MASKED = -1e30
"""A masked score: finite, since exp(-inf - -inf) is NaN."""
START = -1e29
"""The running maximum before any key: above MASKED, so that exp2(MASKED - START) is 0."""
LN_2 = math.log(2)


def _kernel(
    # inputs
    q_gmem,  # [num_kv_heads, rows, head_dim]
    k_gmem,  # [pages of all layers, num_kv_heads, page_size, head_dim]
    v_gmem,  # [pages of all layers, num_kv_heads, page_size, head_dim]
    segments_gmem,  # [segments, 8]
    steps_gmem,  # [steps, 8]
    worker_indptr_gmem,  # [workers + 1]
    page_offset_gmem,  # [1]
    # outputs
    out_gmem,  # [slots, 64, head_dim] float32
    lse_gmem,  # [slots, 64] float32
    merged_gmem,  # [num_kv_heads, rows, head_dim] float32
    merged_lse_gmem,  # [num_kv_heads, rows] float32
    # shared memory
    q_smem,  # [num_query_buffers, 64, head_dim]
    k_smem,  # [num_stages, 64, head_dim]
    v_smem,  # [num_stages, 64, head_dim]
    # barriers: filled by the memory warpgroup, freed by the compute warpgroup
    q_full,
    k_full,
    v_full,
    q_free,
    k_free,
    v_free,
    *,
    page_size: int,
    logits_scale: float,
    config: KernelConfig,
):
    # The merge may be launched now: it waits for this kernel's end before it reads anything of it.
    plgpu.griddepcontrol_launch_dependents()
    worker = lax.axis_index("worker")
    warpgroup = lax.axis_index("warpgroup")
    segment_lo, segment_hi = worker_indptr_gmem[worker], worker_indptr_gmem[worker + 1]
    stages, buffers = jnp.int32(config.num_stages), jnp.int32(config.num_query_buffers)
    head_dim = q_smem.shape[2]

    def over_tiles(segment, run_tile, carry):
        """Runs the tiles of a segment one after the other; each walks all its steps."""
        column = SegmentTable
        first = segments_gmem[segment, column.TILE]
        step_lo = segments_gmem[segment, column.STEP_LO]
        num_steps = segments_gmem[segment, column.NUM_STEPS]

        def run(t, carry):
            read_block = functools.partial(
                read_block_of, steps_gmem, step_lo, num_steps, tile=first + t, page_size=page_size
            )
            is_final = (segments_gmem[segment, column.FINAL] >> t) & 1 == 1
            where = Place(
                segments_gmem[segment, column.KV_HEAD],
                first + t,
                segments_gmem[segment, column.SLOT + t],
                is_final,
            )
            return run_tile(where, read_block, num_steps, carry)

        return lax.fori_loop(0, segments_gmem[segment, column.NUM_TILES], run, carry)

    @pl.when(warpgroup == 0)
    def _compute():
        plgpu.set_max_registers(240, action="increase")
        tile_rows = plgpu.broadcasted_iota(
            jnp.int32, (BLOCK_Q,), 0, layout=plgpu.Layout.WGMMA.reduce(1)
        )

        def score(q_slot, stage, block: Block):
            """Scaled scores in base 2, masked, [64 query rows, 64 tokens]."""

            def product(acc):
                plgpu.wgmma(acc, q_smem.at[q_slot], k_smem.at[stage].transpose((1, 0)))
                return acc[...]

            s = pl.run_scoped(product, plgpu.ACC((BLOCK_Q, BLOCK_KV), jnp.float32))
            s = s * (logits_scale / LN_2)

            def mask_rows(s):
                mine = (tile_rows >= block.row_lo[0]) & (tile_rows < block.row_hi[0])
                bias = jnp.where(mine, jnp.float32(0), MASKED)
                return s + lax.broadcast_in_dim(bias, s.shape, [0])

            def mask_all(s):
                # Dead rows of K may hold NaN: select, do not add.
                row, column = (
                    plgpu.broadcasted_iota(jnp.int32, s.shape, axis, layout=plgpu.Layout.WGMMA)
                    for axis in (0, 1)
                )
                live = any_of(
                    (column >= lo) & (column < hi) & (row >= row_lo) & (row < row_hi)
                    for lo, hi, row_lo, row_hi in zip(*block[1:5], strict=True)
                )
                return jnp.where(live, s, MASKED)

            return lax.cond(block.is_plain(page_size), mask_rows, mask_all, s)

        def drop_dead_values(stage, block: Block):
            """Zeroes the dead rows of V: their weights are 0, but 0 * NaN is NaN."""

            @pl.when(~block.is_full(page_size))
            def _():
                row = plgpu.broadcasted_iota(
                    jnp.int32, (BLOCK_KV, head_dim), 0, layout=plgpu.Layout.WGMMA
                )
                spans = zip(block.col_lo, block.col_hi, strict=True)
                live = any_of((row >= lo) & (row < hi) for lo, hi in spans)
                values = plgpu.load(v_smem.at[stage], layout=plgpu.Layout.WGMMA, optimized=False)
                v_smem[stage] = jnp.where(live, values, jnp.zeros_like(values))
                plgpu.commit_smem()

        def run_tile(where, read_block, num_steps, carry):
            ring, num_queries = carry
            q_slot = lax.rem(num_queries, buffers)
            plgpu.barrier_wait(q_full.at[q_slot])
            top = plgpu.layout_cast(
                jnp.full((BLOCK_Q,), START, jnp.float32), plgpu.Layout.WGMMA.reduce(1)
            )
            total = plgpu.layout_cast(
                jnp.zeros((BLOCK_Q,), jnp.float32), plgpu.Layout.WGMMA.reduce(1)
            )
            acc = plgpu.layout_cast(jnp.zeros((BLOCK_Q, head_dim), jnp.float32), plgpu.Layout.WGMMA)

            num_blocks = num_blocks_of(num_steps, page_size)

            def run_block(carry):
                b, ring, (acc, top, total) = carry
                block = read_block(b)
                stage = lax.rem(ring, stages)
                plgpu.barrier_wait(k_full.at[stage])
                s = score(q_slot, stage, block)
                plgpu.barrier_arrive(k_free.at[stage])
                new_top = jnp.maximum(top, s.max(axis=1))
                decay = jnp.exp2(top - new_top)
                p = jnp.exp2(s - lax.broadcast_in_dim(new_top, s.shape, [0]))
                acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
                total = total * decay + p.sum(axis=1)
                weights = p.astype(v_smem.dtype)
                plgpu.barrier_wait(v_full.at[stage])
                drop_dead_values(stage, block)

                def product(acc_ref):
                    plgpu.wgmma(acc_ref, weights, v_smem.at[stage])

                acc = pl.run_state(product)(plgpu.ACC.init(acc))
                plgpu.barrier_arrive(v_free.at[stage])
                return next_live(read_block, b + 1, num_blocks), ring + 1, (acc, new_top, total)

            first = next_live(read_block, jnp.int32(0), num_blocks)
            _, ring, (acc, top, total) = lax.while_loop(
                lambda carry: carry[0] < num_blocks, run_block, (first, ring, (acc, top, total))
            )
            plgpu.barrier_arrive(q_free.at[q_slot])
            some = total > 0
            safe = jnp.where(some, total, 1.0)
            acc = acc / lax.broadcast_in_dim(safe, acc.shape, [0])
            lse = jnp.where(some, top * LN_2 + jnp.log(safe), -jnp.inf)

            @pl.when(where.is_final)
            def _():
                merged_gmem[where.kv_head, where.rows()] = acc
                merged_lse_gmem[where.kv_head, where.rows()] = lse

            @pl.when(~where.is_final)
            def _():
                out_gmem[where.slot] = acc
                lse_gmem[where.slot] = lse

            return ring, num_queries + 1

        def run_segment(segment, carry):
            return over_tiles(segment, run_tile, carry)

        lax.fori_loop(segment_lo, segment_hi, run_segment, (jnp.int32(0), jnp.int32(0)))

    @pl.when(warpgroup == 1)
    def _memory():
        plgpu.set_max_registers(40, action="decrease")
        offset = page_offset_gmem[0]
        pages_per_block = max(1, BLOCK_KV // page_size)
        rows = min(page_size, BLOCK_KV)

        def load_block(pages_gmem, smem, full, stage, block: Block, kv_head):
            for j in range(pages_per_block):
                source = pages_gmem.at[block.pages[j] + offset, kv_head]
                if page_size > BLOCK_KV:
                    start = pl.multiple_of(block.part * BLOCK_KV, BLOCK_KV)
                    source = source.at[pl.ds(start, BLOCK_KV)]
                target = smem.at[stage]
                if pages_per_block > 1:
                    target = target.at[pl.ds(j * rows, rows)]
                plgpu.copy_gmem_to_smem(source, target, full.at[stage])

        def run_tile(where, read_block, num_steps, carry):
            ring, num_queries = carry
            q_slot = lax.rem(num_queries, buffers)

            @pl.when(num_queries >= buffers)
            def _():
                plgpu.barrier_wait(q_free.at[q_slot])

            plgpu.copy_gmem_to_smem(
                q_gmem.at[where.kv_head, where.rows()], q_smem.at[q_slot], q_full.at[q_slot]
            )

            num_blocks = num_blocks_of(num_steps, page_size)

            def run_block(carry):
                b, ring = carry
                block = read_block(b)
                stage = lax.rem(ring, stages)

                @pl.when(ring >= stages)
                def _():
                    plgpu.barrier_wait(k_free.at[stage])

                load_block(k_gmem, k_smem, k_full, stage, block, where.kv_head)

                @pl.when(ring >= stages)
                def _():
                    plgpu.barrier_wait(v_free.at[stage])

                load_block(v_gmem, v_smem, v_full, stage, block, where.kv_head)
                return next_live(read_block, b + 1, num_blocks), ring + 1

            first = next_live(read_block, jnp.int32(0), num_blocks)
            _, ring = lax.while_loop(lambda carry: carry[0] < num_blocks, run_block, (first, ring))
            return ring, num_queries + 1

        def run_segment(segment, carry):
            return over_tiles(segment, run_tile, carry)

        lax.fori_loop(segment_lo, segment_hi, run_segment, (jnp.int32(0), jnp.int32(0)))


def partial_attention(
    q: Float[Array, "num_kv_heads rows head_dim"],
    pages: tuple[Array, Array],
    tables: tuple[Int32[Array, "segments 8"], Int32[Array, "steps 8"]],
    worker_indptr: Int32[Array, " workers+1"],
    page_offset: Int32[Array, " 1"],
    *,
    logits_scale: float,
    config: KernelConfig | None = None,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Normalised output and natural log-sum-exp of every segment's tiles, at their slots.

    Args:
      q: packed queries, unscaled, bfloat16 or float16.
      pages: K and V, `[pages of all layers, num_kv_heads, page_size, head_dim]`, q's dtype.
      tables: segments and steps, see `tables`.
      worker_indptr: worker w runs segments [worker_indptr[w], worker_indptr[w + 1]).
      page_offset: added to every page: layer * pages of a layer.
      logits_scale: multiplies the scores.
      config: pipeline depths; by default what fits.

    Returns:
      The partial results, out `[slots, 64, head_dim]` and lse `[slots, 64]`, and the final ones of
      tiles marked FINAL, out `[num_kv_heads, rows, head_dim]` and lse `[num_kv_heads, rows]`;
      float32. A tile without keys is (0, -inf). What no segment names is left unwritten.
    """
    head_dim, page_size = q.shape[2], pages[0].shape[2]
    config = KernelConfig.heuristic(head_dim, q.dtype) if config is None else config
    num_slots = 2 * tables[0].shape[0]
    pages_per_block = max(1, BLOCK_KV // page_size)
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    buffers = config.buffers(head_dim, q.dtype)
    scratch = [
        plgpu.SMEM(buffers[name].shape, buffers[name].dtype, transforms=transforms)
        for name in ("q", "k", "v")
    ]
    full = [plgpu.Barrier(num_barriers=config.num_query_buffers)]
    full += [plgpu.Barrier(num_arrivals=pages_per_block, num_barriers=config.num_stages)] * 2
    free = [plgpu.Barrier(num_barriers=config.num_query_buffers)]
    free += [plgpu.Barrier(num_barriers=config.num_stages)] * 2
    body = functools.partial(_kernel, page_size=page_size, logits_scale=logits_scale, config=config)
    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((num_slots, BLOCK_Q, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((num_slots, BLOCK_Q), jnp.float32),
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
            jax.ShapeDtypeStruct(q.shape[:2], jnp.float32),
        ],
        grid=(worker_indptr.shape[0] - 1,),
        grid_names=("worker",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=[*scratch, *full, *free],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    out, lse, merged, merged_lse = kernel(q, *pages, *tables, worker_indptr, page_offset)
    return (out, lse), (merged, merged_lse)
