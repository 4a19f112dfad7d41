"""Rotary position embedding (RoFormer, arXiv 2104.09864, section 3.4)."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from codec_jax.models.config import RopePairing


def rope_angles(
    positions: Int32[Array, " tokens"], *, head_dim: int, theta: float
) -> tuple[Float32[Array, "tokens half_dim"], Float32[Array, "tokens half_dim"]]:
    """Cosine and sine of `position * theta ** (-2i / head_dim)` for i in [0, head_dim / 2)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(
    x: Float[Array, "tokens heads head_dim"],
    cos: Float32[Array, "tokens half_dim"],
    sin: Float32[Array, "tokens half_dim"],
    *,
    pairing: RopePairing,
) -> Float[Array, "tokens heads head_dim"]:
    """`x` with each pair of elements of each head rotated; float32 inside, the dtype of `x` out."""
    num_tokens, num_heads, head_dim = x.shape
    interleaved = pairing == "interleaved"
    split_shape = (head_dim // 2, 2) if interleaved else (2, head_dim // 2)
    pair_axis = -1 if interleaved else -2
    pairs = x.astype(jnp.float32).reshape(num_tokens, num_heads, *split_shape)
    first, second = jnp.unstack(pairs, axis=pair_axis)
    cos, sin = cos[:, None, :], sin[:, None, :]
    rotated = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=pair_axis)
    return rotated.reshape(x.shape).astype(x.dtype)
