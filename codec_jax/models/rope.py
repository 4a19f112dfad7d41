"""Rotary position embedding (RoFormer, arXiv 2104.09864, section 3.4)."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from codec_jax.models.config import RopePairing
from codec_jax.models.rope_scaling import RopeScaling, rope_frequencies


def rope_angles(
    positions: Int32[Array, " tokens"],
    *,
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None = None,
) -> tuple[Float32[Array, "tokens half_dim"], Float32[Array, "tokens half_dim"]]:
    """Cosine and sine of `position * theta ** (-2i / head_dim)` for i in [0, head_dim / 2).

    `scaling` changes the frequencies, and multiplies both results by its `attention_factor`.
    """
    if scaling is None:
        frequencies, factor = rope_frequencies(head_dim, theta), 1.0
    else:
        frequencies, factor = scaling.frequencies(head_dim, theta), scaling.attention_factor
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
    return factor * jnp.cos(angles), factor * jnp.sin(angles)


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
