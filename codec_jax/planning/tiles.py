"""Tiles: the requests' query rows packed, 64 rows each, so that few nodes straddle a border."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

from codec_jax.planning.scans import inclusive_sum, iota
from codec_jax.planning.spec import TILE_ROWS, PlanSpec


class Tiles(NamedTuple):
    """Where each unit (a request's rows, or one row of a large group) is packed.

    Attributes:
      unit_tile: tile of each unit, in depth-first order.
      unit_row: packed row of each unit's first row.
      first_unit: first unit of each tile, and past the last tile's last one.
      num_tiles: tiles in use.
    """

    unit_tile: Int32[Array, " units"]
    unit_row: Int32[Array, " units"]
    first_unit: Int32[Array, " tiles+1"]
    num_tiles: Int32[Array, ""]


def form_tiles(
    node_lo: Int32[Array, " nodes"],
    node_hi: Int32[Array, " nodes"],
    node_pages: Int32[Array, " nodes"],
    num_units: Int32[Array, ""],
    *,
    spec: PlanSpec,
    shape: tuple[int, int],
) -> Tiles:
    """Tiles along the depth-first order, each border at the cheapest place of a window.

    Args:
      node_lo, node_hi: run of units that share each node (empty in padding).
      node_pages: pages of each node: what it costs to read it once more.
      num_units: live units.
      spec: rows and units of a tile.
      shape: capacities (units, tiles).

    A border's price is the pages of the nodes it cuts, by a difference array over the nodes. From a
    start s the next border lies in [s + min_units_per_tile, s + units_per_tile], at the lowest
    price, the furthest of equals; all starts follow by pointer doubling, without a sequential loop.
    """
    max_units, max_tiles = shape
    price = _border_prices(node_lo, node_hi, node_pages, size=max_units + 1)
    following = _next_border(price, num_units, spec)
    first_unit = _follow(following, count=max_tiles + 1)
    starts = first_unit[:-1]
    units = iota(max_units)
    unit_tile = jnp.searchsorted(starts, units, side="right").astype(jnp.int32) - 1
    unit_row = unit_tile * TILE_ROWS + (units - starts[unit_tile]) * spec.rows_per_unit
    return Tiles(unit_tile, unit_row, first_unit, _count_tiles(following, num_units))


def _border_prices(node_lo, node_hi, node_pages, *, size: int):
    """Pages of the nodes that a border before each unit would cut (lo < border < hi)."""
    cuttable = node_hi - node_lo > 1
    pages = jnp.where(cuttable, node_pages, 0)
    change = jnp.zeros(size + 1, jnp.int32)
    change = change.at[node_lo + 1].add(pages, mode="drop")
    change = change.at[node_hi].add(-pages, mode="drop")
    return inclusive_sum(change)[:size]


def _next_border(price, num_units, spec: PlanSpec):
    """For each possible start, the border that ends its tile; `num_units` ends the last one."""
    starts = iota(price.shape[0])
    reach = spec.units_per_tile - iota(spec.units_per_tile - spec.min_units_per_tile + 1)
    candidates = (
        starts[:, None] + reach[None, :]
    )  # furthest first: argmin takes the first of equals
    prices = price[jnp.minimum(candidates, price.shape[0] - 1)]
    best = jnp.argmin(prices, axis=1).astype(jnp.int32)
    border = starts + spec.units_per_tile - best
    return jnp.where(starts + spec.units_per_tile >= num_units, num_units, border)


def _count_tiles(following, num_units):
    """Tiles that all units need, whatever the capacity: those that do not fit are reported."""
    jumps = [following]  # jumps[i]: 2**i tiles further
    while 2 ** len(jumps) < following.shape[0]:
        jumps.append(jumps[-1][jumps[-1]])
    place, count = jnp.int32(0), (num_units > 0).astype(jnp.int32)
    for power in reversed(range(len(jumps))):
        beyond = jumps[power][place]
        is_inside = beyond < num_units
        place = jnp.where(is_inside, beyond, place)
        count += is_inside.astype(jnp.int32) << power
    return count


def _follow(following, *, count: int):
    """0, following[0], following[following[0]], ...: `count` entries by pointer doubling."""
    ordinal = iota(count)
    place = jnp.zeros(count, jnp.int32)
    for bit in range(max(count - 1, 1).bit_length()):
        place = jnp.where((ordinal >> bit) & 1 == 1, following[place], place)
        following = following[following]
    return place
