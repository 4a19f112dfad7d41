"""Runs of token ids: checking what callers give, and comparing."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from jaxtyping import Int32

TokenIds = Sequence[int] | npt.ArrayLike
"""One flat list of token ids, integers >= 0 and < 2**31."""


def as_token_run(tokens: TokenIds) -> Int32[np.ndarray, " num_tokens"]:
    """A read-only copy of `tokens`; raises ValueError unless they are one list of token ids."""
    try:
        array = np.asarray(tokens)
    except ValueError as error:
        raise ValueError(
            "`tokens` must be one flat list of token ids; got nested lists."
        ) from error
    if array.ndim != 1:
        raise ValueError(
            f"`tokens` must be one flat list of token ids; got an array of {array.ndim} dimensions."
        )
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"`tokens` must be integers; got {array.dtype}. Tokenize the text first.")
    outside = (array < 0) | (array >= 2**31)
    if outside.any():
        raise ValueError(
            f"`tokens` must be >= 0 and < 2**31; got {array[outside][0]} at index "
            f"{np.argmax(outside)}. Strip padding before."
        )
    run = array.astype(np.int32)
    run.setflags(write=False)
    return run


def common_prefix_len(
    left: Int32[np.ndarray, " left_len"], right: Int32[np.ndarray, " right_len"]
) -> int:
    """Number of leading tokens that two runs have in common."""
    num_compared = min(left.size, right.size)
    differs = left[:num_compared] != right[:num_compared]
    first = int(differs.argmax()) if num_compared else 0
    return first if num_compared and differs[first] else num_compared
