"""The one door to Pallas's Mosaic GPU backend, whose names and types change between releases."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as _mosaic_gpu
from jax.experimental.mosaic.gpu import fragmented_array

plgpu: Any = _mosaic_gpu
"""The module, untyped: its annotations are not meant for other packages yet."""


def rows_of_8_layout() -> Any:
    """A register layout of [8, 64 * n]: a warp's load of two rows is 16 bytes a lane, contiguous.

    Each of the 4 warps holds two rows, each row 16 lanes of 4 numbers.
    """
    tiling = fragmented_array.Tiling(((8, 64), (2, 64), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def store(ref: Any, values: Any) -> None:
    """Writes registers to global memory, in pieces of less than a memory sector if need be.

    JAX 0.12 refuses such pieces unless asked; 0.11 writes them, and has no way to ask.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values
