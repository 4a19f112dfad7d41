"""Random prefix forests of the sizes that a GPU serves, for checks of what was fitted elsewhere."""

import dataclasses

import numpy as np

from codec_jax import Forest, ForestArrays, export_arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class ForestSizes:
    """From which sizes a forest is drawn, ends included.

    Attributes:
      requests: one for each leaf; drawn evenly in the logarithm.
      tokens: of all nodes together; drawn evenly in the logarithm.
      levels: of nodes, all of whose leaves are on the last.
      max_path_tokens: of all requests' paths together: what plain decoding reads. Forests with
        more are drawn again.
    """

    requests: tuple[int, int] = (64, 512)
    tokens: tuple[int, int] = (1_000, 200_000)
    levels: tuple[int, int] = (2, 5)
    max_path_tokens: int = 2**24


def random_forest(seed: int, *, page_size: int, sizes: ForestSizes | None = None) -> ForestArrays:
    """The arrays of a forest, its pages scattered over the smallest pool.

    Up to four roots; each inner node has one child at least and the other nodes of the next level
    fall to them at random; a level's share of the tokens is random, and within a level lengths are
    log-normal.
    """
    rng = np.random.default_rng(seed)
    sizes = ForestSizes() if sizes is None else sizes
    while True:
        levels = _draw_levels(rng, sizes)
        if _path_tokens(levels) <= sizes.max_path_tokens:
            break
    arrays = export_arrays(_grow(levels, page_size=page_size))
    order = rng.permutation(arrays.page_list.size).astype(np.int32)
    return arrays._replace(page_list=order[arrays.page_list])


def _draw_levels(
    rng: np.random.Generator, sizes: ForestSizes
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Parents (places in the level above) and lengths of each level's nodes."""
    num_requests, num_tokens = (
        _log_uniform(rng, *bounds) for bounds in (sizes.requests, sizes.tokens)
    )
    num_levels = int(rng.integers(sizes.levels[0], sizes.levels[1] + 1))
    num_roots = int(rng.integers(1, min(4, num_requests) + 1))
    inner = np.sort(np.exp(rng.uniform(np.log(num_roots), np.log(num_requests), num_levels - 2)))
    counts = [num_roots, *inner.round().astype(int).tolist(), num_requests]
    shares = rng.dirichlet(np.ones(num_levels))
    levels, above = [], 0
    for count, share in zip(counts, shares, strict=True):
        extra = rng.integers(0, above, count - above) if above else np.full(count, -1)
        weights = rng.lognormal(0, 1, count)
        lengths = np.maximum(num_tokens * share * weights / weights.sum(), 1).astype(int)
        levels.append((np.sort(np.concatenate([np.arange(above), extra])), lengths))
        above = count
    return levels


def _path_tokens(levels: list[tuple[np.ndarray, np.ndarray]]) -> int:
    """Tokens on the paths of all leaves together."""
    depth = np.zeros(1, int)
    for parent, lengths in levels:
        depth = depth[np.maximum(parent, 0)] + lengths
    return int(depth.sum())


def _grow(levels: list[tuple[np.ndarray, np.ndarray]], *, page_size: int) -> Forest:
    forest, above = Forest(page_size=page_size), [None]
    for parents, lengths in levels:
        above = [
            forest.insert(np.full(length, place), parent=None if parent < 0 else above[parent])
            for place, (parent, length) in enumerate(zip(parents, lengths, strict=True))
        ]
    for leaf in above:
        forest.add_request([], parent=leaf)
    return forest


def _log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return round(float(np.exp(rng.uniform(np.log(low), np.log(high)))))
