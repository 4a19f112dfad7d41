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


def rows_layout(rows: int, columns: int) -> Any:
    """A register layout of [rows, columns * n]: lane after lane along a row, row after row.

    A lane's piece is contiguous, rows * columns / 128 numbers, in each of the n tiles. Two threads
    hold the same number where a tile is only 64.

    Args:
      rows, columns: powers of two, rows * columns from 64 to 1024.
    """
    vector = max(1, rows * columns // 128)
    height = max(1, rows // 4)
    width = 32 * vector // height
    copies = 128 * vector // (rows * columns)
    layout = fragmented_array.TiledLayout(
        fragmented_array.Tiling(((rows, columns), (height, width), (vector,))),
        warp_dims=(*[fragmented_array.Replicated(copies)] * (copies > 1), -5, -4),
        lane_dims=(-3, -2),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()  # it has no dimensions of size 1
    return plgpu.Layout.TILED(
        layout.tiling,
        warp_dims=layout.warp_dims,
        lane_dims=layout.lane_dims,
        vector_dim=layout.vector_dim,
    )


def store(ref: Any, values: Any) -> None:
    """Writes registers to global memory, in pieces of less than a memory sector if need be.

    JAX 0.12 refuses such pieces unless asked; 0.11 writes them, and has no way to ask.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, values, optimized=False)
    else:
        ref[...] = values
