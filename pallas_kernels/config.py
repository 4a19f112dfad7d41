"""Sizes of the partial attention kernel, validated, with their shared memory."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp

from pallas_kernels.tables import LABEL, ROW, STEP_CHUNK

BLOCK_KV = 64
"""Tokens of one step of the kernel: small pages are gathered into it, large ones cut."""
BLOCK_Q = 64
"""Query rows of one tile: the M of a warpgroup's matrix product."""
BOXES = (16, 32, 64)
"""Tokens that one copy brings: of a page whose end is dead, as few as hold what is live."""
DENSE_ROWS = 8
"""A block of dense keys starts at a multiple of this: the rows of a tile of shared memory."""
HALF = BLOCK_KV // 2
"""Two pages with no live token from here on share a block."""
NUM_CHUNKS = 3
"""Chunks of the step table in shared memory: read, read by the slowest thread, and loaded."""
MAX_SHARED_BYTES = 232_448
"""Shared memory that one thread block can have on Hopper (227 KiB)."""
BARRIER_BYTES = 8
MAX_HEAD_DIM_IN_REGISTERS = 128
MIN_STAGES_AHEAD = 3

_LIMITS = {"num_stages": (2, 8), "num_query_buffers": (1, 4), "num_compute_warpgroups": (1, 2)}


def pages_of_a_label(page_size: int) -> int:
    """Pages that a block can have tokens of: small pages fill it, or the starts of two others."""
    return max(2, BLOCK_KV // page_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """How a thread block is divided, and how deep it loads ahead.

    Attributes:
      num_stages: KV blocks in flight, each of K and V; a warpgroup waits for the next block before
        it lets go of this one.
      num_query_buffers: query tiles in shared memory, at least one for each compute warpgroup; one
        more lets the loads run into the next segment.
      num_compute_warpgroups: 2 give a segment of two tiles one each, and share the blocks of a
        segment of one; 1 walks tile by tile.
      queries_in_registers: in a segment of two tiles, a tile's queries are read from shared memory
        once instead of with every block: faster steps, slower segments.
      products_ahead: in a segment of two tiles, the next block's products of queries and keys run
        beside this block's softmax. It is then waited for earlier: needs 3 stages.
      interpretable: a slower body that the Mosaic interpreter can run: all operands of products
        are in shared memory, and nothing is said to the next launch.
    """

    num_stages: int = 4
    num_query_buffers: int = 3
    num_compute_warpgroups: int = 2
    queries_in_registers: bool = False
    products_ahead: bool = False
    interpretable: bool = False

    def __post_init__(self) -> None:
        for name, (least, most) in _LIMITS.items():
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"`{name}` must be between {least} and {most}; got {value}.")
        if self.num_query_buffers < self.num_compute_warpgroups:
            raise ValueError(
                "`num_query_buffers` must be at least `num_compute_warpgroups`"
                f" ({self.num_compute_warpgroups}); got {self.num_query_buffers}."
            )

        if self.products_ahead and self.num_stages < MIN_STAGES_AHEAD:
            raise ValueError(
                f"`num_stages` must be at least {MIN_STAGES_AHEAD} with `products_ahead`; got"
                f" {self.num_stages}."
            )

    @classmethod
    def heuristic(cls, head_dim: int, dtype: Any) -> Self:
        """The deepest pipeline of at most 4 stages that fits, two compute warpgroups if they do."""
        # Wider heads leave no registers for the queries.
        registers = head_dim <= MAX_HEAD_DIM_IN_REGISTERS
        for config in (
            cls(queries_in_registers=registers, products_ahead=registers),
            cls(num_stages=3, queries_in_registers=registers, products_ahead=registers),
            cls(num_stages=2),
            cls(num_stages=2, num_query_buffers=2),
            cls(num_stages=2, num_query_buffers=2, num_compute_warpgroups=1),
            cls(num_stages=2, num_query_buffers=1, num_compute_warpgroups=1),
        ):
            if config.shared_bytes(head_dim, dtype) <= MAX_SHARED_BYTES:
                return config
        raise ValueError(f"`head_dim` must be small enough for shared memory; got {head_dim}.")

    def buffers(self, head_dim: int, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the shared-memory buffers.

        `q`, `k`, `v` and `steps` are loaded, `labels` written beside `k` and `v`. With two compute
        warpgroups, one hands its state over through `acc`, `top` and `total`. `weights` are of the
        interpretable body.
        """
        wgs, struct = self.num_compute_warpgroups, jax.ShapeDtypeStruct
        buffers = {
            "q": struct((self.num_query_buffers, BLOCK_Q, head_dim), dtype),
            "k": struct((self.num_stages, BLOCK_KV, head_dim), dtype),
            "v": struct((self.num_stages, BLOCK_KV, head_dim), dtype),
            "steps": struct((NUM_CHUNKS, STEP_CHUNK, ROW), jnp.int32),
            "labels": struct((self.num_stages, LABEL), jnp.int32),
        }
        if wgs > 1:
            buffers["acc"] = struct((BLOCK_Q, head_dim), jnp.float32)
            buffers["top"] = buffers["total"] = struct((BLOCK_Q,), jnp.float32)
        if self.interpretable:
            buffers["weights"] = struct((wgs, BLOCK_Q, BLOCK_KV), dtype)
        return buffers

    def barriers(self, pages: int = 2) -> dict[str, tuple[int, int]]:
        """Barriers as (arrivals, how many), for blocks of so many pages.

        `*_full`: filled by the memory warpgroup; `*_free`: let go by every compute warpgroup.
        `v_clean`: the first of two has zeroed dead values that both read. `state_*`: the state of
        one on its way to the other.
        """
        wgs = self.num_compute_warpgroups
        barriers = {
            "q_full": (1, self.num_query_buffers),
            "q_free": (wgs, self.num_query_buffers),
            "steps_full": (1, NUM_CHUNKS),
            "kv_full": (2 * pages, self.num_stages),
            "kv_free": (wgs, self.num_stages),
        }
        if self.num_compute_warpgroups > 1:
            barriers["v_clean"] = (1, self.num_stages)
            barriers["state_full"] = barriers["state_free"] = (1, 1)
        return barriers

    def shared_bytes(self, head_dim: int, dtype: Any) -> int:
        """Shared memory of the buffers and the barriers that guard them."""
        buffers = self.buffers(head_dim, dtype).values()
        num_bytes = sum(math.prod(b.shape) * jnp.dtype(b.dtype).itemsize for b in buffers)
        num_barriers = sum(count for _, count in self.barriers().values())
        return num_bytes + num_barriers * BARRIER_BYTES
