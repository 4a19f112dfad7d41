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
COARSE = 2.0**27
"""Scores in base 2 from here on are 8 and more apart in float32, and rounded by as much."""
_FACTORS = 1e-6, 1e6
"""Within these, MASKED and START can be products of queries and keys too."""


class Scale(NamedTuple):
    """From products of queries and keys to scores in base 2, in two parts.

    The second part costs nothing: it is fused with the subtraction of the maximum.
    """

    first: float
    second: float

    @classmethod
    def of(cls, logits_scale: float) -> "Scale":
        """All in the second part, where that is possible."""
        factor, (least, most) = logits_scale / LN_2, _FACTORS
        return cls(1.0, factor) if least <= factor <= most else cls(factor, 1.0)

    def of_rows(self, top):
        """The second part for each row, and the row's maximum times it.

        The rounded product of a maximum is no score: fused, the weight of the maximum itself is
        2**(its rounding error), harmless up to 2**8. Beyond, float32 scores are so far apart that
        the power of two below the scale, which rounds nothing, serves.
        """
        scaled = top * self.second
        if self.second == 1:
            return jnp.ones_like(top), scaled
        power = 2.0 ** math.floor(math.log2(self.second))
        is_coarse = (scaled >= COARSE) | (scaled <= -COARSE)
        factor = jnp.where(is_coarse, jnp.full_like(top, power), jnp.full_like(top, self.second))
        return factor, jnp.where(is_coarse, top * power, scaled)


class State(NamedTuple):
    """Sum over keys of 2**(score - maximum) * value, and of 2**(score - maximum)."""

    acc: Any  # [64, head_dim]
    top: Any  # [64], the maximum before the second part of the scale
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

    def with_scores(self, scores, scale: Scale) -> tuple["State", Any]:
        """The state whose sums await the values of more keys, and the weights of these.

        Args:
          scores: [64, keys], the first part of `scale` applied.
        """
        top = jnp.maximum(self.top, scores.max(axis=1))
        factor, scaled_top = scale.of_rows(top)
        # Exactly 1 where the maximum stays: what comes with every block would add up.
        decay = jnp.exp2((self.top - top) * factor)
        acc = scale_rows(self.acc, decay)
        weights = jnp.exp2(scale_rows(scores, factor) - _over_columns(scaled_top, scores.shape))
        total = self.total * decay + weights.sum(axis=1)
        return State(acc, top, total), weights

    def merged(self, other: "State", scale: Scale) -> "State":
        """Both states' keys together."""
        top = jnp.maximum(self.top, other.top)
        factor, _ = scale.of_rows(top)
        mine, others = (jnp.exp2((state.top - top) * factor) for state in (self, other))
        acc = scale_rows(self.acc, mine) + scale_rows(other.acc, others)
        return State(acc, top, self.total * mine + other.total * others)

    def normalised(self, scale: Scale) -> tuple[Any, Any]:
        """Output and natural log-sum-exp; (0, -inf) for a row without keys.

        A total that is NaN is not 0: what overflowed must not look like a row without keys.
        """
        some = self.total != 0
        safe = jnp.where(some, self.total, 1.0)
        return scale_rows(self.acc, 1 / safe), jnp.where(
            some, self.top * scale.second * LN_2 + jnp.log(safe), -jnp.inf
        )


def scale_rows(values, factor):
    """Each row times its factor."""
    return values * _over_columns(factor, values.shape)


def _over_columns(by_row, shape):
    return lax.broadcast_in_dim(by_row, shape, [0])
