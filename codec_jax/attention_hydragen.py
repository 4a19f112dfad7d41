"""Hydragen's two-level attention on plain tensors: a shared prefix, a suffix for each request."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from codec_jax.attention import default_num_workers
from codec_jax.attention_dense import attend_two_levels, choose_dense_implementation
from codec_jax.partial import Partial, merge, softmax_with_lse


def hydragen_attention(
    q: Float[Array, "batch num_q_heads head_dim"],
    shared_k: Float[Array, "prefix_len num_kv_heads head_dim"],
    shared_v: Float[Array, "prefix_len num_kv_heads head_dim"],
    suffix_k: Float[Array, "batch max_suffix_len num_kv_heads head_dim"],
    suffix_v: Float[Array, "batch max_suffix_len num_kv_heads head_dim"],
    suffix_len: Int32[Array, " batch"],
    *,
    implementation: str | None = None,
) -> Partial:
    """Attention of each query over the shared prefix and its own suffix.

    The queries of all requests are stacked against the prefix, whose keys and values are read once;
    each suffix is attended to on its own; the two are merged by log-sum-exp (Hydragen, arXiv
    2402.05099, sections 3.1 and 3.2, equations 4 and 5). Scores are scaled by head_dim**-0.5. On a
    Hopper GPU the kernels read the tensors where they lie, without a copy: lengths that are
    multiples of 8, a head_dim that is one of 64; others are left to XLA.

    Args:
      q: one query token for each request; query heads of one KV head follow each other.
      shared_k, shared_v: keys and values of the prefix; it may be empty.
      suffix_k, suffix_v: keys and values of each request's suffix, padded at the end.
      suffix_len: live tokens of each suffix; what lies past them is never used, NaN included.
      implementation: "mosaic_gpu" or "xla"; by default the first that supports the case. Only "xla"
        has gradients.

    Returns:
      Partial: out `[batch, num_q_heads, head_dim]` in q's dtype, lse float32
      `[batch, num_q_heads]`; (0, -inf) for a request without keys.

    Raises:
      ValueError: shapes that do not fit each other, or an unknown implementation.
      NotImplementedError: the implementation cannot do this case, with its reason.
    """
    _check_shapes(q, (shared_k, shared_v), (suffix_k, suffix_v), suffix_len)
    chosen = choose_dense_implementation(
        q.shape, (shared_k, suffix_k), implementation=implementation
    )
    arrays = (q, shared_k, shared_v, suffix_k, suffix_v, suffix_len)
    if chosen == "xla":
        return _attend_on_xla(*arrays)
    return attend_two_levels(*arrays, num_workers=default_num_workers())


@jax.jit
def _attend_on_xla(q, shared_k, shared_v, suffix_k, suffix_v, suffix_len) -> Partial:
    batch, num_q_heads, head_dim = q.shape
    num_kv_heads = shared_k.shape[1]
    grouped = q.astype(jnp.float32) * head_dim**-0.5
    grouped = grouped.reshape(batch, num_kv_heads, -1, head_dim)

    # The stacked queries of all requests meet the shared keys in one product.
    prefix = _attend(grouped, (shared_k, shared_v), jnp.ones((1, shared_k.shape[0]), bool), "chd")
    column = jnp.arange(suffix_k.shape[1], dtype=jnp.int32)
    live = column[None, :] < suffix_len[:, None]
    # Dead slots may hold NaN, and 0 * NaN is NaN: select zeros before any product.
    suffix = tuple(jnp.where(live[:, :, None, None], x, 0) for x in (suffix_k, suffix_v))
    suffix = _attend(grouped, suffix, live, "bchd")

    merged = merge(prefix, suffix)
    return Partial(
        merged.out.reshape(q.shape).astype(q.dtype), merged.lse.reshape(batch, num_q_heads)
    )


def _attend(q, kv, live, key_dims: str) -> Partial:
    """Grouped queries [b, h, g, d] over keys and values whose dimensions `key_dims` names."""
    k, v = (x.astype(jnp.float32) for x in kv)
    exact = lax.Precision.HIGHEST
    score = jnp.einsum(f"bhgd,{key_dims}->bhgc", q, k, precision=exact)
    weight, lse = softmax_with_lse(jnp.where(live[:, None, None, :], score, -jnp.inf))
    return Partial(jnp.einsum(f"bhgc,{key_dims}->bhgd", weight, v, precision=exact), lse)


def _check_shapes(q, shared, suffix, suffix_len) -> None:
    if not jnp.issubdtype(q.dtype, jnp.floating):
        raise ValueError(f"`q` must hold floating-point numbers; got {q.dtype}.")
    if q.ndim != 3:
        raise ValueError(f"`q` must be [batch, num_q_heads, head_dim]; got shape {q.shape}.")
    batch, num_q_heads, head_dim = q.shape
    _check_pair("shared_k", "shared_v", shared, "[prefix_len, num_kv_heads, head_dim]", ndim=3)
    rule = "[batch, max_suffix_len, num_kv_heads, head_dim]"
    _check_pair("suffix_k", "suffix_v", suffix, rule, ndim=4)
    heads = shared[0].shape[1:]
    if heads[1] != head_dim or num_q_heads % heads[0]:
        raise ValueError(
            f"`shared_k` must have head_dim {head_dim} and a number of KV heads that divides the"
            f" {num_q_heads} query heads; got shape {shared[0].shape}."
        )
    if suffix[0].shape[0] != batch or suffix[0].shape[2:] != heads:
        raise ValueError(
            f"`suffix_k` must be [{batch}, max_suffix_len, {heads[0]}, {heads[1]}]; got shape"
            f" {suffix[0].shape}."
        )
    if np.shape(suffix_len) != (batch,):
        raise ValueError(
            f"`suffix_len` must hold one length for each of the {batch} requests; got shape"
            f" {np.shape(suffix_len)}."
        )


def _check_pair(k_name: str, v_name: str, pair, rule: str, *, ndim: int) -> None:
    k, v = pair
    if k.ndim != ndim or k.shape != v.shape:
        raise ValueError(
            f"`{k_name}` and `{v_name}` must both be {rule}; got {k.shape} and {v.shape}."
        )
