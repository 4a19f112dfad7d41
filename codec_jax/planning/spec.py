"""What a plan is made for: head counts, page size, workers, and the fixed sizes of its arrays."""

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np

from codec_jax.forest_arrays import ForestArrays

TILE_ROWS = 64
"""Rows of one tile: the smallest M of a Hopper matrix product (wgmma)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSpec:
    """The static facts that a plan depends on.

    Attributes:
      num_kv_heads: KV heads on this device.
      group_size: query heads of each KV head (GQA); any positive number.
      page_size: tokens of a KV page.
      num_workers: equal ranges that the work is cut into (streaming multiprocessors on a GPU).
    """

    num_kv_heads: int
    group_size: int
    page_size: int
    num_workers: int = 132

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_positive(field.name, getattr(self, field.name))

    @property
    def units_per_request(self) -> int:
        """Pieces of a request that no tile border cuts: 1, or its rows if more than a tile's."""
        return 1 if self.group_size <= TILE_ROWS else self.group_size

    @property
    def rows_per_unit(self) -> int:
        """Rows of such a piece: the whole group, or one row when the group exceeds a tile."""
        return self.group_size if self.group_size <= TILE_ROWS else 1

    @property
    def units_per_tile(self) -> int:
        """Most units that one tile holds."""
        return TILE_ROWS // self.rows_per_unit

    @property
    def min_units_per_tile(self) -> int:
        """Fewest units of a tile that is not the last: bounds the number of tiles."""
        return (self.units_per_tile + 1) // 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCapacity:
    """Fixed sizes of a plan's arrays; one compiled planner serves every forest that fits.

    Attributes:
      virtual_nodes: nodes after unshared ones are repeated for each sharer.
      tiles: 64-row tiles of the packed queries.
      steps: pages that the items walk.
      items: tile streams and blocks of wide nodes.
      segments: pieces of (item, KV head) pairs.
      slots: 64-row partial results.
    """

    virtual_nodes: int
    tiles: int
    steps: int
    items: int
    segments: int
    slots: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_positive(field.name, getattr(self, field.name))

    @classmethod
    def for_forest(
        cls,
        forest: ForestArrays,
        spec: PlanSpec,
        *,
        share: np.ndarray,
        num_new_tokens: int = 0,
    ) -> Self:
        """Sizes that no plan of this forest exceeds, rounded up to powers of two.

        Args:
          forest: the forest's arrays (NumPy).
          spec: head counts, page size, workers.
          share: bool per node, whether its sharers read it once (a policy's mask).
          num_new_tokens: tokens that each private leaf may gain before the next plan.

        A node that n units share touches at most ceil(n / min_units_per_tile) + 1 tiles, in items
        of two; a tile has at most one stream; W workers cut the line of pairs in at most W - 1
        places.
        """
        work = Workload.of_forest(forest, spec, share=share, num_new_tokens=num_new_tokens)
        # Sizes follow the capacity of the forest arrays, so that batches that fit it share them.
        all_units = forest.request_row.shape[0] * spec.units_per_request
        tiles = 2 * -(-all_units // spec.units_per_tile) + 1
        items = tiles + _power_of_two(int(work.blocks.sum()), at_least=max(tiles, 8))
        segments = items * spec.num_kv_heads + spec.num_workers - 1
        nodes, entries = forest.parent.shape[0], forest.page_list.shape[0]
        virtual_nodes = _power_of_two(int(work.copies.sum()))
        return cls(
            virtual_nodes=nodes if share.all() else max(nodes, virtual_nodes),
            tiles=tiles,
            steps=max(entries, _power_of_two(int((work.pages * work.copies).sum()))),
            items=items,
            segments=segments,
            slots=2 * segments,
        )

    @classmethod
    def largest(cls, capacities: Iterable[Self]) -> Self:
        """Room for any of the plans that these capacities are for."""
        rows = [dataclasses.astuple(capacity) for capacity in capacities]
        if not rows:
            raise ValueError("`capacities` must hold at least one capacity; got none.")
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**dict(zip(names, map(max, *rows, rows[0]), strict=True)))


class Workload(NamedTuple):
    """Upper bounds on what each node of a forest makes a plan do (NumPy, host).

    Attributes:
      pages: pages that the node's tokens can reach.
      copies: virtual nodes it becomes: 1 when shared, one for each sharer when not.
      blocks: items of two tiles that its copies can become; 0 where none can straddle a tile.
    """

    pages: np.ndarray
    copies: np.ndarray
    blocks: np.ndarray

    @classmethod
    def of_forest(
        cls, forest: ForestArrays, spec: PlanSpec, *, share: np.ndarray, num_new_tokens: int
    ) -> Self:
        """The bounds for a forest's arrays; zero in padding."""
        live = np.arange(forest.parent.shape[0]) < int(forest.num_nodes)
        sharers = np.where(live, forest.request_hi - forest.request_lo, 0).astype(np.int64)
        reach = np.minimum(forest.kv_len + num_new_tokens, forest.max_kv_len).astype(np.int64)
        pages = np.where(reach > 0, -(-(forest.first_row + reach) // spec.page_size), 0)
        copies = np.where(share, np.minimum(sharers, 1), sharers)
        units = np.where(share, sharers, 1) * spec.units_per_request
        touched = np.where(units > 1, -(-units // spec.min_units_per_tile) + 1, 1)
        return cls(pages, copies, np.where(touched > 1, copies * ((touched + 1) // 2), 0))

    def most_steps(self) -> int:
        """Upper bound on the steps that all items walk together, for one KV head."""
        return int((self.pages * np.maximum(self.copies, self.blocks)).sum())


def _power_of_two(value: int, *, at_least: int = 1) -> int:
    return max(at_least, 1 << math.ceil(math.log2(max(value, 1))))


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer; got {value}.")
