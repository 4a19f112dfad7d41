"""Partial attention results and their merge by log-sum-exp."""

import dataclasses
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """Attention of some queries over a subset of their keys.

    Attributes:
      out: softmax-weighted mean of the values over that subset (normalised).
      lse: natural logarithm of the sum of exp(scaled scores) over that subset, float32; -inf when
        the subset is empty, whatever `out` then holds.

    The empty partial (0, -inf) is the neutral element of `merge`.
    """

    out: Float[Array, "*rows head_dim"]
    lse: Float32[Array, "*rows"]

    @classmethod
    def empty(cls, rows: tuple[int, ...], head_dim: int) -> Self:
        """Attention over no keys: out 0, lse -inf."""
        return cls(jnp.zeros((*rows, head_dim), jnp.float32), jnp.full(rows, -jnp.inf, jnp.float32))


def merge(first: Partial, second: Partial) -> Partial:
    """Attention over the union of two disjoint subsets of keys.

    `lse = log(exp(lse1) + exp(lse2))`, `out = exp(lse1 - lse) out1 + exp(lse2 - lse) out2`
    (Hydragen, arXiv 2402.05099, equation 5; CoDec's parallel reduction, arXiv 2505.17694).
    Associative and commutative up to rounding; merging with an empty partial changes no bit.
    """
    stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), first, second)
    return merge_stacked(stacked)


def merge_stacked(partials: Partial) -> Partial:
    """Attention over the union of the disjoint subsets stacked on the leading axis (may be none).

    All weights are taken from the log-sum-exps first; an empty partial's `out` is never multiplied
    (it may be garbage, and 0 * NaN is NaN). The result keeps the dtype of `out`.
    """
    lse = partials.lse
    top = jnp.max(lse, axis=0, initial=-jnp.inf)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    live = lse != -jnp.inf  # NaN is no empty side: it has to come out
    weight = jnp.where(live, jnp.exp(lse - shift[None]), 0.0)
    total = jnp.sum(weight, axis=0)
    some = total != 0
    safe = jnp.where(some, total, 1.0)
    out = jnp.where(live[..., None], partials.out.astype(jnp.float32) * weight[..., None], 0.0)
    out = jnp.where(some[..., None], jnp.sum(out, axis=0) / safe[..., None], 0.0)
    merged_lse = jnp.where(some, shift + jnp.log(safe), -jnp.inf)
    return _take_only_live(partials, live, Partial(out.astype(partials.out.dtype), merged_lse))


def _take_only_live(partials: Partial, live: Bool[Array, "n *rows"], merged: Partial) -> Partial:
    """`merged`, but bit for bit the one live side where there is only one: -0.0 keeps its sign."""
    if not live.shape[0]:
        return merged
    first = jnp.argmax(live, axis=0)[None]
    out = jnp.take_along_axis(partials.out, first[..., None], axis=0)[0]
    lse = jnp.take_along_axis(partials.lse, first, axis=0)[0]
    is_only = jnp.sum(live, axis=0) == 1
    return Partial(
        jnp.where(is_only[..., None], out, merged.out), jnp.where(is_only, lse, merged.lse)
    )


def softmax_with_lse(
    score: Float32[Array, "*rows keys"],
) -> tuple[Float32[Array, "*rows keys"], Float32[Array, "*rows"]]:
    """Softmax over the last axis and the log-sum-exp; masked scores are -inf.

    A row without a key has weights 0 and log-sum-exp -inf; NaN and overflow come out as NaN.
    """
    top = jnp.max(score, axis=-1, initial=-jnp.inf)
    shift = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp(score - shift[..., None])
    total = jnp.sum(weight, axis=-1)
    some = total != 0  # NaN included: only a row without a key is empty
    safe = jnp.where(some, total, 1.0)
    return weight / safe[..., None], jnp.where(some, shift + jnp.log(safe), -jnp.inf)
