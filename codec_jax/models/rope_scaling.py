"""Ways to stretch RoPE to longer contexts, as dataclasses that give the frequencies.

Each has `frequencies(head_dim, theta)`, float64 `[head_dim / 2]` in radians per token, and
`attention_factor`, by which the cosines and sines are multiplied.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from codec_jax.models.number_checks import check_positive, check_positive_integer, is_number


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """`theta ** (-2i / head_dim)` for i in [0, head_dim / 2): RoFormer, arXiv 2104.09864."""
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


@dataclass(frozen=True, kw_only=True)
class LinearRope:
    """Position interpolation (arXiv 2306.15595): all positions divided by `factor`."""

    factor: float
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)

    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Radians per token of each pair of elements."""
        return rope_frequencies(head_dim, theta) / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Rope:
    """The scaling of Llama 3.1: slow pairs are divided by `factor`, fast ones stay.

    A pair is slow when its wavelength exceeds `original_max_context / low_freq_factor` tokens, fast
    when it is below `original_max_context / high_freq_factor`; between them, a mixture that is
    linear in the number of turns over the original context.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_context: int
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_positive(name, getattr(self, name))
        check_positive_integer("original_max_context", self.original_max_context)
        if not self.high_freq_factor > self.low_freq_factor:
            raise ValueError(
                f"`high_freq_factor` must be above `low_freq_factor`; got {self.high_freq_factor!r}"
                f" and {self.low_freq_factor!r}."
            )

    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Radians per token of each pair of elements."""
        plain = rope_frequencies(head_dim, theta)
        turns = self.original_max_context * plain / (2 * math.pi)
        width = self.high_freq_factor - self.low_freq_factor
        kept = np.clip((turns - self.low_freq_factor) / width, 0, 1)
        return plain * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True, kw_only=True)
class YarnRope:
    """YaRN (arXiv 2309.00071, section 3): pairs that turn rarely are divided by `factor`.

    Pairs with more than `beta_fast` turns over the original context stay, those with fewer than
    `beta_slow` are interpolated; between them a ramp over the pair's index, whose ends are whole
    numbers if `truncate`. `attention_factor` defaults to `0.1 ln(factor) + 1`.
    """

    factor: float
    original_max_context: int
    attention_factor: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        check_positive("factor", self.factor)
        if self.attention_factor == 0:
            object.__setattr__(self, "attention_factor", yarn_attention_factor(self.factor))
        for name in ("attention_factor", "beta_fast", "beta_slow"):
            check_positive(name, getattr(self, name))
        check_positive_integer("original_max_context", self.original_max_context)
        if not self.beta_fast >= self.beta_slow:
            raise ValueError(
                f"`beta_fast` must be at least `beta_slow`; got {self.beta_fast!r} and"
                f" {self.beta_slow!r}."
            )

    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Radians per token of each pair of elements.

        Raises `ValueError` unless `theta` is above 1: the ramp's ends are logarithms to its base.
        """
        if not theta > 1:
            raise ValueError(f"`rope_theta` must be above 1 for YaRN; got {theta!r}.")
        plain = rope_frequencies(head_dim, theta)
        low, high = (
            head_dim
            * math.log(self.original_max_context / (turns * 2 * math.pi))
            / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        interpolated = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
        return plain * (1 - interpolated + interpolated / self.factor)


@dataclass(frozen=True, kw_only=True)
class FactorsRope:
    """A factor of its own for each pair of elements, by which its frequency is divided.

    GGUF files hold the scaling of Llama 3.1 like that.
    """

    factors: tuple[float, ...]
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if not all(is_number(factor) and factor > 0 for factor in self.factors):
            raise ValueError(f"`factors` must be positive numbers; got {self.factors!r}.")

    def frequencies(self, head_dim: int, theta: float) -> np.ndarray:
        """Radians per token of each pair of elements."""
        if 2 * len(self.factors) != head_dim:
            raise ValueError(
                f"`factors` must be {head_dim // 2}, one for each pair of elements of a head; got"
                f" {len(self.factors)}."
            )
        return rope_frequencies(head_dim, theta) / np.asarray(self.factors)


RopeScaling = LinearRope | Llama3Rope | YarnRope | FactorsRope


def yarn_attention_factor(
    factor: float, *, mscale: float = 1.0, mscale_all_dim: float = 0.0
) -> float:
    """`0.1 mscale ln(factor) + 1`, divided by the same of `mscale_all_dim`; at least 1 each."""
    log = math.log(factor) if factor > 1 else 0.0
    return (0.1 * mscale * log + 1) / (0.1 * mscale_all_dim * log + 1)
