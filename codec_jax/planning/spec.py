"""What a plan is made for: head counts, page size, workers, and the fixed sizes of its arrays."""

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple, Self

import numpy as np

from codec_jax.forest_arrays import ForestArrays
from codec_jax.planning.policies import MAX_STREAM_PAGES, Policy

TILE_ROWS = 64
"""Rows of one tile: the smallest M of a Hopper matrix product (wgmma)."""
SHORT_TOKENS = 32
"""Two pages of a tile's stream with no live token from here on are one step of the GPU kernels."""


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
        policy: Policy,
        num_new_tokens: int = 0,
    ) -> Self:
        """Sizes that no plan of this forest exceeds, rounded up to powers of two.

        Args:
          forest: the forest's arrays (NumPy).
          spec: head counts, page size, workers.
          policy: what is shared and how work is divided.
          num_new_tokens: tokens that each private leaf may gain before the next plan.

        With U units (requests, or rows of large groups) to a tile and at least M:
          tiles <= 2 ceil(units / U) + 1;
          a node of n units touches at most ceil(n / M) + 1 tiles, in items of two;
          items <= those of nodes that may touch two tiles, and a stream for each tile;
          steps <= pages of all virtual nodes;
          segments <= kv_heads * items + `Policy.most_cuts`;
          slots <= 2 * segments.
        """
        work = Workload.of_forest(forest, spec, policy=policy, num_new_tokens=num_new_tokens)
        # Sizes follow the capacity of the forest arrays, so that batches that fit it share them.
        all_units = forest.request_row.shape[0] * spec.units_per_request
        tiles = 2 * -(-all_units // spec.units_per_tile) + 1
        items = tiles + _power_of_two(int(work.blocks.sum()), at_least=max(tiles, 8))
        segments = items * spec.num_kv_heads + policy.most_cuts(spec.num_workers)
        nodes, entries = forest.parent.shape[0], forest.page_list.shape[0]
        virtual_nodes = _power_of_two(int(work.copies.sum()))
        return cls(
            virtual_nodes=max(nodes, virtual_nodes) if policy.repeats else nodes,
            tiles=tiles,
            steps=max(entries, _power_of_two(int(work.steps.sum()))),
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
      copies: virtual nodes it can become: 1 when shared, one for each sharer when not, one for
        each tile that it may touch when the policy may repeat it for each tile.
      blocks: items of two tiles that its copies can become; 0 where none can straddle a tile.
      steps: pages of all its copies.
    """

    pages: np.ndarray
    copies: np.ndarray
    blocks: np.ndarray
    steps: np.ndarray

    @classmethod
    def of_forest(
        cls, forest: ForestArrays, spec: PlanSpec, *, policy: Policy, num_new_tokens: int
    ) -> Self:
        """The bounds for a forest's arrays; zero in padding."""
        share = np.asarray(policy.share(np.asarray(forest.parent)))
        live = np.arange(forest.parent.shape[0]) < int(forest.num_nodes)
        sharers = np.where(live, forest.request_hi - forest.request_lo, 0).astype(np.int64)

        def pages_of(reach):
            return np.where(reach > 0, -(-(forest.first_row + reach) // spec.page_size), 0)

        reach = np.minimum(forest.kv_len + num_new_tokens, forest.max_kv_len).astype(np.int64)
        pages = pages_of(reach)
        copies = np.where(share, np.minimum(sharers, 1), sharers)
        units = np.where(share, sharers, 1) * spec.units_per_request
        touched = np.where(units > 1, -(-units // spec.min_units_per_tile) + 1, 1)
        blocks = np.where(touched > 1, copies * ((touched + 1) // 2), 0)
        if not policy.streams_short:
            return cls(pages, copies, blocks, pages * copies)
        # A node that is short now may be repeated, and no more once it has grown.
        may_repeat = (touched > 1) & (pages > 0) & (pages_of(forest.kv_len) <= MAX_STREAM_PAGES)
        steps = np.maximum(pages * copies, np.minimum(pages, MAX_STREAM_PAGES) * touched)
        copies = np.where(may_repeat, touched, copies)
        return cls(pages, copies, blocks, np.where(may_repeat, steps, pages * copies))

    def most_steps(self) -> int:
        """Upper bound on the steps that all items walk together, for one KV head."""
        return int(np.maximum(self.steps, self.pages * self.blocks).sum())


def _power_of_two(value: int, *, at_least: int = 1) -> int:
    return max(at_least, 1 << math.ceil(math.log2(max(value, 1))))


def _check_positive(name: str, value: int) -> None:
    if not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer; got {value}.")
