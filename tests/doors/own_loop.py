"""Texts that share prefixes, and what a loop of one's own sees of the pool at each position."""

import jax
import numpy as np

from codec_jax import Forest, export_arrays
from codec_jax.flax import StepView
from codec_jax.kv_cache import TokenSlots

PAGE_SIZE, NUM_PAGES, VOCAB = 16, 24, 512
RNG = np.random.default_rng(11)
TRUNK, BRANCH = RNG.integers(2, VOCAB, 19).tolist(), RNG.integers(2, VOCAB, 6).tolist()
LENGTH = 32
TEXTS = [
    [*start, *RNG.integers(2, VOCAB, LENGTH - len(start)).tolist()]
    for start in ([*TRUNK, *BRANCH], [*TRUNK, *BRANCH], TRUNK, [])
]


def forest_and_places():
    """The texts' forest, and the node of each text's token at each position, [row, position]."""
    forest = export_arrays(Forest.from_token_lists(TEXTS, page_size=PAGE_SIZE))
    node = np.zeros((len(TEXTS), LENGTH), np.int32)
    for row, end in zip(forest.request_row, forest.request_node, strict=True):
        while end >= 0:
            start = forest.position[end]
            node[row, start : start + forest.kv_len[end]] = end
            end = forest.parent[end]
    return forest, node


def view_at(position, forest, node):
    """Every text has `position` tokens in the pool and writes one more; sharers write the same."""
    here = node[:, position]
    place = forest.first_row[here] + position - forest.position[here]
    page = forest.page_list[forest.page_lo[here] + place // PAGE_SIZE]
    live = np.clip(position + 1 - forest.position, 0, forest.kv_len)
    slots = TokenSlots(page, (place % PAGE_SIZE).astype(np.int32))
    return jax.device_put(StepView(forest.page_list, live.astype(np.int32), slots))
