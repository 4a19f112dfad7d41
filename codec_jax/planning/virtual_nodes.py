"""Virtual nodes: what is read on its own. A shared node once, an unshared one for each sharer."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from codec_jax.forest_arrays import ForestArrays
from codec_jax.planning.policies import Policy
from codec_jax.planning.scans import exclusive_sum, inclusive_sum, iota, owner_of


class VirtualNodes(NamedTuple):
    """Nodes as the policy reads them, in depth-first order of their first request.

    Attributes:
      node: the forest's node.
      request_lo, request_hi: run of depth-first requests it is read for; empty in padding.
      num_pages: pages to read; 0 in padding.
      total: how many there are.
    """

    node: Int32[Array, " virtual_nodes"]
    request_lo: Int32[Array, " virtual_nodes"]
    request_hi: Int32[Array, " virtual_nodes"]
    num_pages: Int32[Array, " virtual_nodes"]
    total: Int32[Array, ""]


def planned_pages(
    forest: ForestArrays, num_new_tokens: Int32[Array, ""], *, page_size: int
) -> Int32[Array, " nodes"]:
    """Pages of each node that its live tokens can reach within `num_new_tokens` more tokens."""
    reach = jnp.minimum(forest.kv_len + num_new_tokens, forest.max_kv_len)
    pages = (forest.first_row + reach + page_size - 1) // page_size
    live = (reach > 0) & (forest.request_hi > forest.request_lo)
    return jnp.where(live, pages, 0)


def virtual_nodes(
    forest: ForestArrays, num_pages: Int32[Array, " nodes"], *, policy: Policy, capacity: int
) -> VirtualNodes:
    """The forest's nodes, those that the policy does not share repeated for each sharer.

    Narrow nodes of one tile must follow each other. In preorder the first request never falls, so
    shared nodes are in order as they come; copies of unshared ones are sorted (stably) by request.
    """
    if policy.shares_all and capacity == forest.parent.shape[0]:
        return VirtualNodes(
            iota(capacity), forest.request_lo, forest.request_hi, num_pages, forest.num_nodes
        )
    sharers = forest.request_hi - forest.request_lo
    copies = jnp.where(policy.share(forest.parent), jnp.minimum(sharers, 1), sharers)
    first = exclusive_sum(copies)
    total = jnp.sum(copies, dtype=jnp.int32)

    place = iota(capacity)
    node = jnp.minimum(owner_of(place, inclusive_sum(copies)), copies.shape[0] - 1)
    one_each = copies[node] == sharers[node]
    lo = forest.request_lo[node] + jnp.where(one_each, place - first[node], 0)
    hi = jnp.where(one_each, lo + 1, forest.request_hi[node])
    live = place < total
    order = jnp.argsort(jnp.where(live, lo, jnp.iinfo(jnp.int32).max), stable=True)
    pages = jnp.where(live, num_pages[node], 0)
    lo, hi = jnp.where(live, lo, 0), jnp.where(live, hi, 0)
    return VirtualNodes(node[order], lo[order], hi[order], pages[order], total)
