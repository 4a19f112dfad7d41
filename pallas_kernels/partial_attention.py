"""Partial attention over a plan's segments: one persistent launch on a Hopper GPU.

Every thread block walks one worker's segments: a memory warpgroup (`loading`) runs ahead of one or
two compute warpgroups (`computing`). A tile's partial result goes from registers straight to its
slot in global memory, float32.

Memory traffic: each live page of a segment once, 2 * page_size * head_dim elements; each tile's
queries once, 64 * head_dim; its partial result once, 64 * (head_dim + 1) * 4 bytes.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.compat import plgpu
from pallas_kernels.computing import compute_segments
from pallas_kernels.config import BLOCK_KV, BLOCK_Q, KernelConfig, pages_of_a_label
from pallas_kernels.launch import Inputs, Launch, Outputs
from pallas_kernels.loading import load_segments
from pallas_kernels.tables import Tables

NUM_REGISTERS = {1: (240, 40), 2: (232, 40)}
"""Of each thread of a compute and of the memory warpgroup, by the number of compute warpgroups.

Together no more than the launch is given, else the increase waits for ever.
"""


def _kernel(*refs, page_size: int, logits_scale: float, config: KernelConfig):
    q, kv, *read, slot_indptr, out, lse, merged_out, merged_lse, smem, barriers = refs
    del slot_indptr
    launch = Launch(
        inputs=Inputs(q, kv, *read),
        outputs=Outputs(out, lse, merged_out, merged_lse),
        smem=smem,
        barriers=barriers,
        page_size=page_size,
        logits_scale=logits_scale,
        config=config,
    )
    if not config.interpretable:
        # The merge may be launched now: it waits for this kernel's end before it reads its results.
        plgpu.griddepcontrol_launch_dependents()
    warpgroup, num_compute = lax.axis_index("warpgroup"), config.num_compute_warpgroups
    compute_registers, memory_registers = NUM_REGISTERS[num_compute]

    @pl.when(warpgroup < num_compute)
    def _():
        plgpu.set_max_registers(compute_registers, action="increase")
        compute_segments(launch, warpgroup)

    @pl.when(warpgroup == num_compute)
    def _():
        plgpu.set_max_registers(memory_registers, action="decrease")
        load_segments(launch)


def partial_attention(
    q: Float[Array, "num_kv_heads rows head_dim"],
    kv: tuple[tuple[Array, Array], ...],
    tables: Tables,
    page_offset: Int32[Array, " 1"],
    *,
    logits_scale: float,
    config: KernelConfig | None = None,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Normalised output and natural log-sum-exp of every segment's tiles, at their slots.

    Args:
      q: packed queries, unscaled, bfloat16 or float16.
      kv: K and V of each source, q's dtype: paged, `[pages of all layers, num_kv_heads, page_size,
        head_dim]`, or dense, `[rows, num_kv_heads, head_dim]`. Dense sources alone have pages of 64
        tokens, which start at multiples of 8 rows; none may pass the end.
      tables: see `Tables`. The slots' bounds are not read here: the merge, which is launched
        early, may read them before this kernel's end only if they exist before its start.
      page_offset: added to every page: layer * pages of a layer.
      logits_scale: multiplies the scores.
      config: pipeline depths; by default what fits.

    Returns:
      The partial results, out `[slots, 64, head_dim]` and lse `[slots, 64]`, and the final ones of
      tiles marked FINAL, out `[num_kv_heads, rows, head_dim]` and lse `[num_kv_heads, rows]`;
      float32. A tile without keys is (0, -inf). What no segment names is left unwritten.
    """
    head_dim, page_size = q.shape[2], tokens_of_a_page(kv)
    config = KernelConfig.heuristic(head_dim, q.dtype) if config is None else config
    num_slots, f32 = 2 * tables.segments.shape[0], jnp.float32
    kernel = plgpu.kernel(
        functools.partial(_kernel, page_size=page_size, logits_scale=logits_scale, config=config),
        out_type=[
            jax.ShapeDtypeStruct((num_slots, BLOCK_Q, head_dim), f32),
            jax.ShapeDtypeStruct((num_slots, BLOCK_Q), f32),
            jax.ShapeDtypeStruct(q.shape, f32),
            jax.ShapeDtypeStruct(q.shape[:2], f32),
        ],
        grid=(tables.workers.shape[0],),
        grid_names=("worker",),
        num_threads=config.num_compute_warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[_smem(config, head_dim, q.dtype), _barriers(config, page_size)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    *read, slot_indptr = tables
    results = kernel(q, kv, *read, page_offset, slot_indptr)
    return tuple(results[:2]), tuple(results[2:])


def tokens_of_a_page(kv: tuple[tuple[Array, Array], ...]) -> int:
    """Tokens of a step: of a page where a source is paged, else of a block."""
    return next((k.shape[2] for k, _ in kv if k.ndim == 4), BLOCK_KV)


def _smem(config: KernelConfig, head_dim: int, dtype) -> dict:
    """Shared memory: matrices in the layout of the matrix unit, the rest as it is."""

    def transforms(buffer):
        if buffer.dtype == jnp.int32 or buffer.ndim == 1:
            return ()
        return (
            plgpu.TilingTransform((8, 128 // buffer.dtype.itemsize)),
            plgpu.SwizzleTransform(128),
        )

    return {
        name: plgpu.SMEM(buffer.shape, buffer.dtype, transforms=transforms(buffer))
        for name, buffer in config.buffers(head_dim, dtype).items()
    }


def _barriers(config: KernelConfig, page_size: int) -> dict:
    return {
        name: plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
        for name, (arrivals, count) in config.barriers(pages_of_a_label(page_size)).items()
    }
