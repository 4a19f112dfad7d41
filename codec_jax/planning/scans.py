"""Running sums and searches in int32, whatever JAX's default integer is."""

import jax.numpy as jnp
from jaxtyping import Array, Int32


def iota(size: int) -> Int32[Array, " size"]:
    """0, 1, ..., size - 1."""
    return jnp.arange(size, dtype=jnp.int32)


def inclusive_sum(values: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Sum of the entries up to and with each entry."""
    return jnp.cumsum(values, dtype=jnp.int32)


def exclusive_sum(values: Int32[Array, " n"]) -> Int32[Array, " n"]:
    """Sum of the entries before each entry."""
    return inclusive_sum(values) - values


def indptr(counts: Int32[Array, " n"]) -> Int32[Array, " n+1"]:
    """Offsets of runs of those lengths: n + 1 entries, the last one their sum."""
    return jnp.concatenate([jnp.zeros(1, jnp.int32), inclusive_sum(counts)])


def owner_of(position: Int32[Array, " m"], ends: Int32[Array, " n"]) -> Int32[Array, " m"]:
    """First run whose end lies past each position (empty runs own nothing); n past the last end."""
    return jnp.searchsorted(ends, position, side="right").astype(jnp.int32)


def ceil_div(numerator: Int32[Array, "..."], denominator: Int32[Array, "..."] | int):
    """The quotient rounded up, without the sum of both, which can pass 2**31 - 1."""
    return numerator // denominator + (numerator % denominator != 0).astype(jnp.int32)
