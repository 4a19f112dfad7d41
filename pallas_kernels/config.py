"""Sizes of the partial attention kernel, validated, with their shared memory."""

import dataclasses
import math
from typing import Any, Self

import jax
import jax.numpy as jnp

BLOCK_KV = 64
"""Tokens of one step of the kernel: small pages are gathered into it, large ones cut."""
BLOCK_Q = 64
"""Query rows of one tile: the M of a warpgroup's matrix product."""
MAX_SHARED_BYTES = 232_448
"""Shared memory that one thread block can have on Hopper (227 KiB)."""
BARRIER_BYTES = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """How deep the kernel loads ahead.

    Attributes:
      num_stages: KV blocks in flight, each of K and V.
      num_query_buffers: query tiles in flight; 2 lets the loads run into the next segment.
    """

    num_stages: int = 4
    num_query_buffers: int = 2

    def __post_init__(self) -> None:
        for name, most in (("num_stages", 8), ("num_query_buffers", 2)):
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ValueError(f"`{name}` must be between 1 and {most}; got {value}.")

    @classmethod
    def heuristic(cls, head_dim: int, dtype: Any) -> Self:
        """The deepest pipeline of at most 4 stages that fits in shared memory."""
        for config in (
            cls(),
            cls(num_stages=3),
            cls(num_stages=2),
            cls(num_stages=2, num_query_buffers=1),
        ):
            if config.shared_bytes(head_dim, dtype) <= MAX_SHARED_BYTES:
                return config
        raise ValueError(f"`head_dim` must be small enough for shared memory; got {head_dim}.")

    def buffers(self, head_dim: int, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of the shared-memory buffers: queries, keys and values."""
        return {
            "q": jax.ShapeDtypeStruct((self.num_query_buffers, BLOCK_Q, head_dim), dtype),
            "k": jax.ShapeDtypeStruct((self.num_stages, BLOCK_KV, head_dim), dtype),
            "v": jax.ShapeDtypeStruct((self.num_stages, BLOCK_KV, head_dim), dtype),
        }

    def shared_bytes(self, head_dim: int, dtype: Any) -> int:
        """Shared memory of the buffers and the barriers that guard them."""
        buffers = self.buffers(head_dim, dtype).values()
        elements = sum(math.prod(buffer.shape) for buffer in buffers)
        num_barriers = 2 * self.num_query_buffers + 4 * self.num_stages
        return elements * jnp.dtype(dtype).itemsize + num_barriers * BARRIER_BYTES
