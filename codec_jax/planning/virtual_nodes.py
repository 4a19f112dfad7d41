"""Virtual nodes: what is read on its own. A shared node once, another once for each of its readers.

A unit is a request's rows, or one row where a group of query heads exceeds a tile.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from codec_jax.forest_arrays import ForestArrays
from codec_jax.planning.cost import CostModel
from codec_jax.planning.policies import MAX_STREAM_PAGES, Policy
from codec_jax.planning.scans import inclusive_sum, iota, owner_of
from codec_jax.planning.spec import SHORT_TOKENS, PlanSpec
from codec_jax.planning.tiles import Tiles


class NodeUnits(NamedTuple):
    """What each node of the forest is read for.

    Attributes:
      unit_lo, unit_hi: run of units; empty in padding.
      num_pages: pages to read; 0 in padding.
    """

    unit_lo: Int32[Array, " nodes"]
    unit_hi: Int32[Array, " nodes"]
    num_pages: Int32[Array, " nodes"]


class Copies(NamedTuple):
    """How often each node is read.

    Attributes:
      by_tile: once for each tile that it touches.
      by_request: once for each request.
      number: how often.
    """

    by_tile: Bool[Array, " nodes"]
    by_request: Bool[Array, " nodes"]
    number: Int32[Array, " nodes"]


class VirtualNodes(NamedTuple):
    """Nodes as the policy reads them, in order of their first unit.

    Attributes:
      node: the forest's node.
      unit_lo, unit_hi: run of units it is read for; empty in padding.
      num_pages: pages to read; 0 in padding.
      total: how many there are.
    """

    node: Int32[Array, " virtual_nodes"]
    unit_lo: Int32[Array, " virtual_nodes"]
    unit_hi: Int32[Array, " virtual_nodes"]
    num_pages: Int32[Array, " virtual_nodes"]
    total: Int32[Array, ""]


def reach_of(forest: ForestArrays, num_new_tokens: Int32[Array, ""]) -> Int32[Array, " nodes"]:
    """Tokens that each node can have within `num_new_tokens` more."""
    return jnp.minimum(forest.kv_len + num_new_tokens, forest.max_kv_len)


def node_units(
    forest: ForestArrays, num_new_tokens: Int32[Array, ""], *, spec: PlanSpec
) -> NodeUnits:
    """Each node's units, and the pages that it can reach within `num_new_tokens` more tokens."""
    reach = reach_of(forest, num_new_tokens)
    pages = (forest.first_row + reach + spec.page_size - 1) // spec.page_size
    live = (reach > 0) & (forest.request_hi > forest.request_lo)
    return NodeUnits(
        forest.request_lo * spec.units_per_request,
        forest.request_hi * spec.units_per_request,
        jnp.where(live, pages, 0),
    )


def is_short_page(end_row: Int32[Array, " pages"], *, page_size: int) -> Bool[Array, " pages"]:
    """Whether two pages whose last live rows are before these share a step of the GPU kernels."""
    return (end_row <= SHORT_TOKENS) & (page_size >= 2 * SHORT_TOKENS)


def num_short_pages(
    forest: ForestArrays, nodes: NodeUnits, num_new_tokens: Int32[Array, ""], *, page_size: int
) -> Int32[Array, " nodes"]:
    """How many pages of each node, the last one or none, are short ones in a stream."""
    end_row = forest.first_row + reach_of(forest, num_new_tokens)
    in_last = end_row - (nodes.num_pages - 1) * page_size
    is_short = is_short_page(in_last, page_size=page_size)
    return ((nodes.num_pages > 0) & is_short).astype(jnp.int32)


def copies_of(
    forest: ForestArrays,
    nodes: NodeUnits,
    tiles: Tiles,
    num_short: Int32[Array, " nodes"],
    *,
    policy: Policy,
    cost: CostModel,
) -> Copies:
    """How often the policy reads each node."""
    sharers = forest.request_hi - forest.request_lo
    by_request = ~policy.share(forest.parent)
    count = jnp.where(by_request, sharers, jnp.minimum(sharers, 1))
    if not policy.streams_short:
        return Copies(jnp.zeros_like(by_request), by_request, count)
    touched = _touched_tiles(nodes, tiles)[1]
    by_tile = ~by_request & _is_cheaper_by_tile(nodes, touched, num_short, cost=cost)
    return Copies(by_tile, by_request, jnp.where(by_tile, touched, count))


def virtual_nodes(
    nodes: NodeUnits, tiles: Tiles, copies: Copies, *, units_per_request: int, capacity: int
) -> VirtualNodes:
    """The nodes, each as often as it is read.

    Narrow nodes of one tile must follow each other. In preorder the first unit never falls, so
    nodes are in order as they come; copies are sorted (stably) by their first unit.
    """
    place, ends = iota(capacity), inclusive_sum(copies.number)
    node = jnp.minimum(owner_of(place, ends), ends.shape[0] - 1)
    copy = place - (ends - copies.number)[node]
    unit_lo, unit_hi = nodes.unit_lo[node], nodes.unit_hi[node]
    tile = jnp.minimum(_touched_tiles(nodes, tiles)[0][node] + copy, tiles.first_unit.size - 2)
    own = unit_lo + copy * units_per_request

    def choose(of_tile, of_request, whole):
        return jnp.where(
            copies.by_tile[node], of_tile, jnp.where(copies.by_request[node], of_request, whole)
        )

    lo = choose(jnp.maximum(unit_lo, tiles.first_unit[tile]), own, unit_lo)
    hi = choose(jnp.minimum(unit_hi, tiles.first_unit[tile + 1]), own + units_per_request, unit_hi)
    live = place < ends[-1]
    order = jnp.argsort(jnp.where(live, lo, jnp.iinfo(jnp.int32).max), stable=True)
    pages = jnp.where(live, nodes.num_pages[node], 0)
    lo, hi = jnp.where(live, lo, 0), jnp.where(live, hi, 0)
    return VirtualNodes(node[order], lo[order], hi[order], pages[order], ends[-1])


def _touched_tiles(
    nodes: NodeUnits, tiles: Tiles
) -> tuple[Int32[Array, " nodes"], Int32[Array, " nodes"]]:
    """First tile that each node's units lie in, and in how many they lie."""
    last = jnp.maximum(nodes.unit_hi - 1, nodes.unit_lo)
    tile_lo = tiles.unit_tile[nodes.unit_lo]
    return tile_lo, tiles.unit_tile[last] - tile_lo + 1


def _is_cheaper_by_tile(
    nodes: NodeUnits,
    touched: Int32[Array, " nodes"],
    num_short: Int32[Array, " nodes"],
    *,
    cost: CostModel,
) -> Bool[Array, " nodes"]:
    """Whether a wide node costs less in the streams of its tiles than as blocks of two tiles.

    In a stream it is `num_pages` steps more for each tile; its blocks are segments with partial
    results of their own, but walk the pages once for two tiles. Exact in ticks where every tile has
    a stream anyway.
    """
    pages, pairs, single = nodes.num_pages, touched // 2, touched % 2
    # What is too long is not repeated; it is cut here so that nothing overflows.
    few = jnp.minimum(pages, MAX_STREAM_PAGES)
    saved = num_short * (cost.step_ticks - (cost.short_step_ticks or cost.step_ticks))
    per_pair = cost.segment_ticks + 2 * cost.slot_ticks + few * cost.wide_step_ticks
    per_single = cost.segment_ticks + cost.slot_ticks + few * cost.step_ticks
    in_blocks = pairs * per_pair + single * per_single
    in_streams = touched * (few * cost.step_ticks - saved)
    is_candidate = (touched > 1) & (pages > 0) & (pages <= MAX_STREAM_PAGES)
    return is_candidate & (in_streams <= in_blocks)
