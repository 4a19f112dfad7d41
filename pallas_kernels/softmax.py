"""The online softmax of a tile of 64 query rows, in registers."""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import plgpu
from pallas_kernels.config import BLOCK_Q

MASKED = -1e30
"""A masked score: finite, since exp(-inf - -inf) is NaN."""
START = -1e29
"""The running maximum before any key: above MASKED, so that exp2(MASKED - START) is 0."""
LN_2 = math.log(2)


class State(NamedTuple):
    """Scores in base 2: sum over keys of 2**(score - top) * value, and of 2**(score - top)."""

    acc: Any  # [64, head_dim]
    top: Any  # [64]
    total: Any  # [64]

    @classmethod
    def empty(cls, head_dim: int) -> "State":
        """No key yet."""
        by_row = plgpu.Layout.WGMMA.reduce(1)
        return cls(
            plgpu.layout_cast(jnp.zeros((BLOCK_Q, head_dim), jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(jnp.full((BLOCK_Q,), START, jnp.float32), by_row),
            plgpu.layout_cast(jnp.zeros((BLOCK_Q,), jnp.float32), by_row),
        )

    def with_scores(self, scores) -> tuple["State", Any]:
        """The state whose sums await the values of more keys, and the weights of these.

        Scores are `[64, keys]`, scaled. To scale them in the exponent, fused with the subtraction,
        would cost less; but the rounded maximum is then no score, and the weights of scores beyond
        2**31 overflow or vanish.
        """
        top = jnp.maximum(self.top, scores.max(axis=1))
        decay = jnp.exp2(self.top - top)
        weights = jnp.exp2(scores - lax.broadcast_in_dim(top, scores.shape, [0]))
        total = self.total * decay + weights.sum(axis=1)
        return State(scale_rows(self.acc, decay), top, total), weights

    def merged(self, other: "State") -> "State":
        """Both states' keys together."""
        top = jnp.maximum(self.top, other.top)
        mine, others = jnp.exp2(self.top - top), jnp.exp2(other.top - top)
        acc = scale_rows(self.acc, mine) + scale_rows(other.acc, others)
        return State(acc, top, self.total * mine + other.total * others)

    def normalised(self) -> tuple[Any, Any]:
        """Output and natural log-sum-exp; (0, -inf) for a row without keys.

        A total that is NaN is not 0: what overflowed must not look like a row without keys.
        """
        some = self.total != 0
        safe = jnp.where(some, self.total, 1.0)
        return scale_rows(self.acc, 1 / safe), jnp.where(
            some, self.top * LN_2 + jnp.log(safe), -jnp.inf
        )


def scale_rows(values, factor):
    """Each row times its factor."""
    return values * lax.broadcast_in_dim(factor, values.shape, [0])
