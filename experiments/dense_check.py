"""How far a result is from dense attention over each request's own keys, on the device."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int64

from codec_jax import ForestArrays, KVCache, Partial


class DenseReference(NamedTuple):
    """Dense attention of some requests, in float32 products.

    Attributes:
      requests: their batch rows.
      out, lse: of each.
    """

    requests: Int64[np.ndarray, " requests"]
    out: Float32[np.ndarray, "requests num_q_heads head_dim"]
    lse: Float32[np.ndarray, "requests num_q_heads"]


def dense_reference(
    q: Float[Array, "batch num_q_heads head_dim"],
    kv: KVCache,
    forest: ForestArrays,
    *,
    logits_scale: float,
    max_requests: int = 64,
) -> DenseReference:
    """Of `max_requests` requests evenly spread over the batch, of all if there are fewer."""
    batch = q.shape[0]
    requests = np.unique(np.linspace(0, batch - 1, min(batch, max_requests)).astype(np.int64))
    paths = [path_pages(forest, kv.pool.page_size, request) for request in requests.tolist()]
    # A power of two: one program serves paths of many lengths.
    longest = 1 << (max(pages.size for pages, _, _ in paths) - 1).bit_length()
    found = []
    for request, path in zip(requests.tolist(), paths, strict=True):
        padded = [np.pad(column, (0, longest - column.size)) for column in path]
        found.append(_dense(q, np.int32(request), kv, *padded, logits_scale=logits_scale))
    outs, lses = zip(*jax.device_get(found), strict=True)
    return DenseReference(requests, np.stack(outs), np.stack(lses))


def largest_errors(result: Partial, reference: DenseReference) -> tuple[float, float]:
    """Largest |out - ref|2 / |ref|2 over rows, and largest |lse - ref|.

    NaN in any of their rows makes the result NaN, which no bound holds for.
    """
    requests = jnp.asarray(reference.requests, jnp.int32)
    out, lse = _largest(result.out, result.lse, requests, reference.out, reference.lse)
    return float(out), float(lse)


def max_relative_error(
    result: Partial,
    q: Float[Array, "batch num_q_heads head_dim"],
    kv: KVCache,
    forest: ForestArrays,
    *,
    logits_scale: float,
    max_requests: int = 64,
) -> tuple[float, float]:
    """`largest_errors` against the `dense_reference` of the same arguments."""
    reference = dense_reference(q, kv, forest, logits_scale=logits_scale, max_requests=max_requests)
    return largest_errors(result, reference)


def path_pages(
    forest: ForestArrays, page_size: int, request: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pages on the path of a batch row, and the live rows [lo, hi) of each."""
    node = int(forest.request_node[forest.request_row == request][0])
    pages, los, his = [], [], []
    while node >= 0:
        lo, size = int(forest.first_row[node]), int(forest.kv_len[node])
        count = -(-(lo + size) // page_size) if size else 0
        first = np.arange(count) * page_size
        pages.append(forest.page_list[forest.page_lo[node] : forest.page_lo[node] + count])
        los.append(np.clip(lo - first, 0, page_size))
        his.append(np.clip(lo + size - first, 0, page_size))
        node = int(forest.parent[node])
    return np.concatenate(pages), np.concatenate(los), np.concatenate(his)


@functools.partial(jax.jit, static_argnames="logits_scale")
def _dense(q, request, kv: KVCache, pages, lo, hi, *, logits_scale: float):
    """One request's attention over gathered pages."""
    _, num_q_heads, head_dim = q.shape
    num_kv_heads, page_size, _ = kv.pool.page_shape
    column = jnp.arange(page_size, dtype=jnp.int32)[None, :]
    live = ((column >= lo[:, None]) & (column < hi[:, None])).reshape(-1)

    def read(stored):
        read = jnp.moveaxis(stored[pages], 1, 0).reshape(num_kv_heads, -1, stored.shape[3])
        read = read[..., :head_dim].astype(jnp.float32)
        return jnp.where(live[None, :, None], read, 0.0)

    row = q[request].astype(jnp.float32)
    grouped = row.reshape(num_kv_heads, -1, head_dim) * logits_scale
    exact = lax.Precision.HIGHEST
    score = jnp.einsum("hgd,htd->hgt", grouped, read(kv.pool.k_pages), precision=exact)
    score = jnp.where(live[None, None, :], score, -jnp.inf)
    lse = jax.nn.logsumexp(score, axis=-1)
    weight = jnp.exp(score - lse[:, :, None])
    out = jnp.einsum("hgt,htd->hgd", weight, read(kv.pool.v_pages), precision=exact)
    return out.reshape(num_q_heads, head_dim), lse.reshape(num_q_heads)


@jax.jit
def _largest(out, lse, requests, reference_out, reference_lse):
    gap = jnp.linalg.norm(out[requests].astype(jnp.float32) - reference_out, axis=-1)
    scale = jnp.linalg.norm(reference_out, axis=-1)
    return jnp.max(gap / scale), jnp.max(jnp.abs(lse[requests] - reference_lse))
