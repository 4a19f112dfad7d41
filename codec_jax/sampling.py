"""Drawing the next token of every row, each by its own settings and its own random numbers."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32, Key, UInt32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the completions of one prompt are drawn.

    Attributes:
      num_samples: completions of the prompt.
      max_new_tokens: most tokens of a completion, a stop token included.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: keeps the k most likely tokens; 0 keeps all, more than the vocabulary too.
      top_p: keeps the fewest most likely tokens whose probabilities sum to p; 1 keeps all.
      seed: a draw depends on this, the prompt's index, the sample's number, the step and the
        logits, and on nothing else.

    Temperature comes first, then top_k, then top_p. Of equal logits the lower id is first.
    """

    num_samples: int = 1
    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_samples", "max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
            _check(name, value, is_integer, "be an integer")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            _check(name, value, isinstance(value, int | float | np.number), "be a number")
        _check("num_samples", self.num_samples, self.num_samples >= 1, "be at least 1")
        _check("max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "be at least 1")
        is_finite = 0 <= self.temperature <= float(np.finfo(np.float32).max)
        rule = "be 0 (greedy) or positive and finite in float32"
        _check("temperature", self.temperature, is_finite, rule)
        _check("top_k", self.top_k, self.top_k >= 0, "be 0 (off) or positive")
        _check("top_p", self.top_p, 0 <= self.top_p <= 1, "be between 0 and 1")
        _check("seed", self.seed, 0 <= self.seed < 2**32, "be at least 0 and below 2**32")


class RowSampling(NamedTuple):
    """`Sampling` of every batch row, as arrays, and the row's place in the user's list."""

    temperature: Float32[Array, " batch"]
    top_k: Int32[Array, " batch"]
    top_p: Float32[Array, " batch"]
    seed: UInt32[Array, " batch"]
    prompt_index: Int32[Array, " batch"]
    sample_index: Int32[Array, " batch"]


def draw_keys(rows: RowSampling, step: Int32[Array, " batch"]) -> Key[Array, " batch"]:
    """Each row's random key, from its seed, its place in the user's list and its step alone."""

    def draw_key(seed, *places):
        key = jax.random.key(seed)
        for place in places:
            key = jax.random.fold_in(key, place)
        return key

    return jax.vmap(draw_key)(rows.seed, rows.prompt_index, rows.sample_index, step)


def sample(
    logits: Float32[Array, "batch vocab"], rows: RowSampling, step: Int32[Array, " batch"]
) -> Int32[Array, " batch"]:
    """The next token of each row; `step` counts the tokens that the row has drawn before."""
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def draw(logits):
        drawn = _draw(logits, rows, draw_keys(rows, step))
        return jnp.where(rows.temperature > 0, drawn, greedy)

    return lax.cond(jnp.any(rows.temperature > 0), draw, lambda _: greedy, logits)


def _draw(logits, rows: RowSampling, key) -> Int32[Array, " batch"]:
    """A draw from the filtered softmax, by adding Gumbel noise and taking the largest."""
    vocab = logits.shape[-1]
    heat = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    # Below the maximum, so that a tiny temperature overflows to -inf and not to inf; and a huge one
    # must not turn -inf into NaN.
    above = jnp.max(logits, axis=-1, keepdims=True)
    scaled = jnp.where(logits == -jnp.inf, -jnp.inf, (logits - above) / heat[:, None])
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(vocab, dtype=jnp.int32)[None, :]
    top_k = jnp.where(rows.top_k > 0, rows.top_k, vocab)
    ranked = jnp.where(rank < top_k[:, None], ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    more_likely = jnp.cumsum(probability, axis=-1) - probability
    # Rounding can bring the sum to 1 before the end: with top_p = 1 nothing is cut.
    in_top_p = (more_likely < rows.top_p[:, None]) | (rows.top_p[:, None] >= 1) | (rank == 0)
    ranked = jnp.where(in_top_p, ranked, -jnp.inf)
    noise = jax.vmap(lambda k: jax.random.gumbel(k, (vocab,), jnp.float32))(key)
    noise = jnp.take_along_axis(noise, order, axis=-1)
    best = jnp.argmax(ranked + noise, axis=-1)
    return jnp.take_along_axis(order, best[:, None], axis=-1)[:, 0].astype(jnp.int32)


def _check(name: str, value: object, holds: bool, rule: str) -> None:
    if not holds:
        raise ValueError(f"`{name}` must {rule}; got {value!r}.")
