"""Cuts, depth and batch size change the kernels' answers by no more than rounding.

Measured on float32 outputs: a batch's error is the largest |out - oracle|2 / |oracle|2 over all its
rows (request, query head). Cutting may make it 1.2 times as large, a difference that two draws of
one batch show as well; below FLOOR it is float32's own noise.
"""

import dataclasses
import functools

import numpy as np
import pytest
from gpu_batches import COMMON, Run, Runs, assert_right, make_batch, row_errors
from plan_editing import cut, pieces_of, with_pieces

# In one process: the tests share what they compile.
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("splits")]

NUM_TOKENS = 4093
GROWTH = 1.2
FLOOR = 2.0**-20
NUM_REQUESTS = {"narrow": 12, "wide": 40}
"""48 rows, one tile; and 160 rows, whose shared nodes are cut into blocks of two tiles."""


def chain(depth, num_requests):
    """`depth` runs of NUM_TOKENS tokens in all, then a run of one request each."""
    borders = np.linspace(0, NUM_TOKENS, depth + 1).astype(int)
    shared = [Run(i - 1, int(size)) for i, size in enumerate(np.diff(borders))]
    own = [Run(depth - 1, 1 + 5 * i % 70) for i in range(num_requests)]
    return Runs((*shared, *own), tuple(range(depth, depth + num_requests)))


@functools.cache
def batch_of(width, depth=1):
    return make_batch(COMMON, chain(depth, NUM_REQUESTS[width]))


@functools.cache
def expected(width):
    """One answer for all depths: the same keys and values in the same order."""
    return batch_of(width).expected()


@functools.cache
def unsplit_error(width):
    batch = batch_of(width)
    result = batch.attend(batch.plan("one_task_per_node"))
    assert_right(result, expected(width))
    return row_errors(result[0], expected(width)[0]).max()


def assert_no_worse(result, width):
    assert_right(result, expected(width))
    error = row_errors(result[0], expected(width)[0]).max()
    assert error <= GROWTH * unsplit_error(width) + FLOOR


def split(plan, num_splits, num_workers):
    """Every segment in `num_splits` parts, or one for each step, dealt to the first workers."""
    parts = []
    for piece in pieces_of(plan):
        borders = np.linspace(0, piece.num_steps, min(num_splits, piece.num_steps) + 1)
        parts += cut(piece, *borders[1:-1].astype(int).tolist())
    dealt = [
        dataclasses.replace(part, worker=place % num_workers) for place, part in enumerate(parts)
    ]
    return with_pieces(plan, dealt)


@pytest.mark.parametrize("num_workers", [1, 132])
@pytest.mark.parametrize("num_splits", [1, 2, 3, 4, 7, 16, 33, 64])
@pytest.mark.parametrize("width", NUM_REQUESTS)
def test_splits_cost_no_accuracy(width, num_splits, num_workers):
    batch = batch_of(width)
    plan = split(batch.plan("one_task_per_node"), num_splits, num_workers)
    assert int(plan.counts.segments) >= 2 * num_splits
    assert_no_worse(batch.attend(plan), width)


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 8, 13, 16])
@pytest.mark.parametrize("width", NUM_REQUESTS)
def test_a_chain_of_nodes_is_as_accurate_as_one_node(width, depth):
    batch = batch_of(width, depth)
    assert int(batch.arrays().num_nodes) == depth + NUM_REQUESTS[width]
    for policy in ("balanced", "one_task_per_node"):
        assert_no_worse(batch.attend(batch.plan(policy)), width)


@pytest.mark.parametrize("num_requests", [1, 2, 63, 64, 65, 512])
def test_batches_of_one_to_five_hundred_requests(num_requests):
    own = [Run(0, 1 + i % 40) for i in range(num_requests)]
    runs = Runs((Run(-1, 1000), *own), tuple(range(1, num_requests + 1)))
    batch = make_batch(COMMON, runs, seed=num_requests)
    assert_right(batch.attend(batch.plan()), batch.expected())
