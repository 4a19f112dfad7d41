"""Which cases the kernels can do, asked first; no exception is ever caught to choose a path."""

import dataclasses
from typing import Any

import jax.numpy as jnp

PAGE_SIZES = (16, 32, 64, 128)
DTYPES = ("bfloat16", "float16")
MAX_HEAD_DIM = 256


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why the kernels cannot do a case: one sentence that ends in a full stop."""

    reason: str


def supports(
    device: Any, dtype: Any, *, head_dim: int, page_size: int, group_size: int
) -> Refusal | None:
    """None when the kernels can do the case, else why not.

    Args:
      device: the device that would run them.
      dtype: of keys and values.
      head_dim: width of a head; the pool holds `padded_head_dim` of it.
      page_size: tokens of a page.
      group_size: query heads of a KV head; any.
    """
    if device.platform != "gpu":
        return Refusal(f"the kernels need an NVIDIA Hopper GPU; the device is a {device.platform}.")
    capability = str(getattr(device, "compute_capability", "unknown"))
    if capability != "9.0":
        return Refusal(f"the kernels need compute capability 9.0 (Hopper); this is {capability}.")
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return Refusal(f"the kernels take {' and '.join(DTYPES)}; the keys are {name}.")
    if page_size not in PAGE_SIZES:
        return Refusal(f"the kernels take pages of {PAGE_SIZES} tokens; got {page_size}.")
    if head_dim > MAX_HEAD_DIM:
        return Refusal(f"the kernels take a head_dim of at most {MAX_HEAD_DIM}; got {head_dim}.")
    return None if group_size >= 1 else Refusal("the kernels need at least one query head.")


def padded_head_dim(head_dim: int) -> int:
    """The head_dim that the kernels compute with: the next multiple of 64 (128-byte swizzle)."""
    return -(-head_dim // 64) * 64
