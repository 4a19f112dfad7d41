"""Which cases the kernels can do, asked first; no exception is ever caught to choose a path."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why the kernels cannot do a case: one sentence that ends in a full stop."""

    reason: str


def supports(
    *, platform: str, dtype: np.dtype, head_dim: int, page_size: int, group_size: int
) -> Refusal | None:
    """None when the kernels can do the case, else why not.

    Args:
      platform: JAX's name of the default backend, such as "cpu" or "gpu".
      dtype: of keys and values.
      head_dim: width of a head.
      page_size: tokens of a page.
      group_size: query heads of a KV head.
    """
    if platform != "gpu":
        return Refusal(f"the kernels need an NVIDIA Hopper GPU; the default backend is {platform}.")
    case = f"{np.dtype(dtype).name}, head_dim {head_dim}, page_size {page_size}, group {group_size}"
    return Refusal(f"this version has no GPU kernel for {case}.")
