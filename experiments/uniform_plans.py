"""Plans in which every worker does the same, made by hand: what a step, a segment, a slot costs.

Straight from NumPy through the public `Plan`: no forest, no policy and no cost model has a part in
them. One KV head, since the kernels never look across heads.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
from jaxtyping import Int32

from codec_jax.planning.plan import Items, Plan, PlanCounts, Segments, Steps
from codec_jax.planning.spec import SHORT_TOKENS, TILE_ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformSizes:
    """Fixed sizes of the plans' arrays: one compiled program serves all work that fits.

    Attributes:
      num_workers: workers, all of them busy.
      num_tiles: tiles of packed rows, full or empty.
      num_steps: entries of the step table.
      num_segments: of all workers.
      num_pages: pages of the pool.
      page_size: tokens of a page.
      group_size: rows of a request.
    """

    num_workers: int
    num_tiles: int
    num_steps: int
    num_segments: int
    num_pages: int
    page_size: int
    group_size: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class UniformWork:
    """What every worker does.

    Attributes:
      num_steps: of each segment.
      num_segments: of each worker.
      rows: live query rows of a node. Up to 64: a stream of one tile; above: blocks of two tiles
        that read the same pages.
      slots_per_tile: segments that share an item, and so partial results of a tile (the last item
        may have fewer).
      num_pages: different pages that are read: few stay in cache; as many as steps are read once.
      dead_tokens: at the end of every page.
    """

    num_steps: int
    num_segments: int = 1
    rows: int = TILE_ROWS
    slots_per_tile: int = 1
    num_pages: int
    dead_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_segments", "rows", "slots_per_tile", "num_pages"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be positive; got {getattr(self, name)}.")
        if self.tiles_per_node > 1 and self.tiles_per_node % 2:
            raise ValueError(f"`rows` must fill one tile or pairs of tiles; got {self.rows}.")

    @property
    def tiles_per_node(self) -> int:
        """Tiles that a node's rows touch."""
        return -(-self.rows // TILE_ROWS)

    @property
    def num_tiles(self) -> int:
        """Tiles of an item: 1 or 2."""
        return min(self.tiles_per_node, 2)

    @property
    def items_per_node(self) -> int:
        """Items that read the same pages."""
        return self.tiles_per_node // self.num_tiles

    def is_short(self, page_size: int) -> bool:
        """Whether two of the pages share a step of the kernels, see `Steps.is_short`."""
        live = page_size - self.dead_tokens
        return self.num_tiles == 1 and page_size >= 2 * SHORT_TOKENS and live <= SHORT_TOKENS

    @property
    def steps_per_node(self) -> int:
        """Pages of a node."""
        return self.num_steps * self.slots_per_tile


@dataclasses.dataclass(frozen=True)
class UniformPlan:
    """A plan with what it is resolved with.

    Attributes:
      plan: the plan.
      page_list: physical page of each page entry, scattered over the pool.
      kv_len: live tokens of every page: to `resolve`, all pages are the first of one node.
    """

    plan: Plan
    page_list: Int32[np.ndarray, " page_entries"]
    kv_len: Int32[np.ndarray, " nodes"]


def uniform_plan(work: UniformWork, sizes: UniformSizes) -> UniformPlan:
    """The plan of that work.

    Segment i of W * S, in the workers' order, is part i % k of item i // k, with k slots for a
    tile; a part is `num_steps` of the node's steps. Part r of all nodes' parts starts at page
    r * num_pages / parts of those that are read and goes on around them, so that the workers are
    spread over the pages.

    Raises:
      ValueError: the work does not fit the sizes; names the array.
    """
    shape = _Shape(work, sizes)
    _check_fits(work, sizes, shape)
    segment = np.arange(shape.num_segments)
    item, part = np.divmod(segment, work.slots_per_tile)
    node, block = np.divmod(item, work.items_per_node)
    tile = node * work.tiles_per_node + 2 * block
    columns = (
        np.zeros_like(segment),
        tile,
        np.full_like(segment, work.num_tiles),
        node * work.steps_per_node + part * work.num_steps,
        np.full_like(segment, work.num_steps),
        segment * work.num_tiles,
    )
    padded = functools.partial(_padded, size=sizes.num_segments)
    plan = Plan(
        steps=_steps(work, sizes, shape),
        items=_items(work, sizes, shape),
        segments=Segments(*map(padded, columns)),
        worker_indptr=_int32(np.arange(sizes.num_workers + 1) * work.num_segments),
        slot_indptr=_slot_indptr(work, sizes, shape),
        tile_indptr=_int32(np.minimum(np.arange(sizes.num_tiles + 1), shape.num_tiles)),
        tile_items=_padded(np.arange(shape.num_tiles) // work.num_tiles, 2 * sizes.num_segments),
        packed_row=_packed_row(work, sizes, shape),
        counts=_counts(work, shape),
        page_size=sizes.page_size,
        num_nodes=1,
        num_page_entries=sizes.num_pages,
    )
    page_list = _int32(np.random.default_rng(0).permutation(sizes.num_pages))
    return UniformPlan(plan, page_list, np.full(1, sizes.page_size - work.dead_tokens, np.int32))


class _Shape:
    """How many of everything the work needs."""

    def __init__(self, work: UniformWork, sizes: UniformSizes):
        self.num_segments = sizes.num_workers * work.num_segments
        self.num_items = -(-self.num_segments // work.slots_per_tile)
        self.num_nodes = -(-self.num_items // work.items_per_node)
        self.num_tiles = self.num_items * work.num_tiles
        # The last node may have fewer parts; its first item has the most of them.
        whole = (self.num_nodes - 1) * work.slots_per_tile
        rest = self.num_segments - whole * work.items_per_node
        self.num_parts = whole + min(rest, work.slots_per_tile)
        self.num_steps = self.num_parts * work.num_steps


def _check_fits(work: UniformWork, sizes: UniformSizes, shape: _Shape) -> None:
    needs = {
        "num_segments": shape.num_segments,
        "num_tiles": shape.num_nodes * work.tiles_per_node,
        "num_steps": shape.num_steps,
        "num_pages": work.num_pages,
    }
    for name, need in needs.items():
        if need > getattr(sizes, name):
            raise ValueError(
                f"`sizes` must have room for the work: {name} {need} > {getattr(sizes, name)}."
            )
    if not 0 <= work.dead_tokens < sizes.page_size:
        raise ValueError(
            f"`dead_tokens` must be less than a page of {sizes.page_size}; got {work.dead_tokens}."
        )
    if work.rows % sizes.group_size:
        raise ValueError(f"`rows` must be whole groups of {sizes.group_size}; got {work.rows}.")


def _steps(work: UniformWork, sizes: UniformSizes, shape: _Shape) -> Steps:
    step = np.arange(shape.num_steps)
    part, in_part = np.divmod(step, work.num_steps)
    first_row = step // work.steps_per_node * work.tiles_per_node * TILE_ROWS
    columns = (
        (part * work.num_pages // shape.num_parts + in_part) % work.num_pages,
        np.zeros_like(step),
        first_row,
        first_row + work.rows,
        np.zeros_like(step),
        np.full_like(step, work.is_short(sizes.page_size)),
    )
    return Steps(*(_padded(column, sizes.num_steps) for column in columns))


def _items(work: UniformWork, sizes: UniformSizes, shape: _Shape) -> Items:
    item = np.arange(shape.num_items)
    node, block = np.divmod(item, work.items_per_node)
    num_parts = np.minimum(shape.num_segments - item * work.slots_per_tile, work.slots_per_tile)
    columns = (
        node * work.tiles_per_node + 2 * block,
        np.full(shape.num_items, work.num_tiles),
        node * work.steps_per_node,
        num_parts * work.num_steps,
    )
    return Items(*(_padded(column, sizes.num_segments) for column in columns))


def _slot_indptr(work: UniformWork, sizes: UniformSizes, shape: _Shape) -> Any:
    ends = np.arange(sizes.num_segments + 1) * work.slots_per_tile
    return _int32(np.minimum(ends, shape.num_segments) * work.num_tiles)


def _packed_row(work: UniformWork, sizes: UniformSizes, shape: _Shape) -> Any:
    """Requests node by node, as many as the node's rows hold, int32 `[batch, group]`."""
    group, inert = sizes.group_size, sizes.num_tiles * TILE_ROWS
    first = TILE_ROWS * work.tiles_per_node * np.arange(shape.num_nodes)
    rows = (first[:, None] + np.arange(work.rows)).reshape(-1, group)
    packed = np.full((inert // group, group), inert, np.int32)
    packed[: len(rows)] = rows
    return packed


def _counts(work: UniformWork, shape: _Shape) -> PlanCounts:
    numbers = (
        shape.num_nodes,
        shape.num_nodes * work.tiles_per_node,
        shape.num_steps,
        shape.num_items,
        shape.num_segments,
        shape.num_segments * work.num_tiles,
    )
    return PlanCounts(*map(_int32, numbers))


def _padded(values: np.ndarray, size: int) -> Any:
    padded = np.zeros(size, np.int32)
    padded[: values.size] = values
    return padded


def _int32(values: Any) -> Any:
    return np.asarray(values, np.int32)
