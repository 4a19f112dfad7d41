"""Fixed sizes of a run's arrays, in powers of two, so that like runs share their compilations."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Self

import numpy as np

from codec_jax.forest_arrays import ForestArrays, ForestCapacity

MIN_BATCH, MIN_NODES, MIN_ENTRIES, MIN_PAGES, MIN_NEW_TOKENS = 16, 64, 128, 256, 64
"""Smallest sizes: below them a smaller array saves nothing that a compilation would not cost."""
MIN_POOL_BYTES = 2**26
"""A pool is not rounded up to MIN_PAGES beyond this."""


@dataclasses.dataclass(frozen=True)
class RunSizes:
    """Sizes that the shapes of a run follow from.

    Attributes:
      batch: rows.
      forest: nodes, requests and page entries of the decode loop's forest.
      pages: pages of each layer's pool.
      new_tokens: columns of the token buffer.
    """

    batch: int
    forest: ForestCapacity
    pages: int
    new_tokens: int

    @classmethod
    def for_run(
        cls, needed: ForestCapacity, *, num_pages: int, max_new_tokens: int, page_bytes: int
    ) -> Self:
        """Sizes for such a forest and `num_pages` pages of `page_bytes` (all layers)."""
        batch = at_least(MIN_BATCH, needed.requests)
        forest = ForestCapacity(
            nodes=at_least(MIN_NODES, needed.nodes),
            requests=batch,
            page_entries=at_least(MIN_ENTRIES, needed.page_entries),
        )
        floor = max(1, min(MIN_PAGES, MIN_POOL_BYTES // page_bytes))
        pages = num_pages if num_pages > floor else floor
        pages = -(-pages // floor) * floor
        return cls(batch, forest, pages, at_least(MIN_NEW_TOKENS, max_new_tokens))


def at_least(floor: int, size: int) -> int:
    """The smallest power of two that is no smaller than either."""
    return max(floor, 1 << math.ceil(math.log2(max(size, 1))))


def common_capacity(forests: Iterable[ForestArrays], *, requests: int) -> ForestCapacity:
    """Capacity that all these forests fit in."""
    sizes = [(forest.parent.size, forest.page_list.size) for forest in forests]
    return ForestCapacity(
        nodes=at_least(MIN_NODES, max((nodes for nodes, _ in sizes), default=1)),
        requests=requests,
        page_entries=at_least(MIN_ENTRIES, max((entries for _, entries in sizes), default=1)),
    )


def pad_forest(forest: ForestArrays, capacity: ForestCapacity) -> ForestArrays:
    """The same forest with room for that much, padded as `export_arrays` pads."""
    fills = {"parent": -1, "page_list": -1, "request_row": -1, "request_node": -1}
    sizes = {"page_list": capacity.page_entries}
    sizes |= {"request_row": capacity.requests, "request_node": capacity.requests}

    def pad(name: str, values: np.ndarray) -> np.ndarray:
        if values.ndim == 0:
            return values
        padded = np.full(sizes.get(name, capacity.nodes), fills.get(name, 0), np.int32)
        padded[: values.size] = values
        return padded

    return ForestArrays(**{name: pad(name, getattr(forest, name)) for name in forest._fields})
