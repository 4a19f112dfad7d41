"""NaN and infinity in live keys and values come out of the kernels, in the rows that see them.

A softmax with a NaN or an infinite score is NaN. Zero, or the (0, -inf) of a row without keys,
would hide a broken model; NaN in a row that sees none would break its neighbours in the batch.
A value that is NaN reaches the rows of the same tile, see `attend`.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from gpu_batches import (
    COMMON,
    LSE_TOLERANCE,
    TOLERANCE,
    Run,
    Runs,
    assert_right,
    make_batch,
    row_errors,
)
from plan_editing import cut, pieces_of, with_pieces

# In one process: the tests share what they compile.
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("values")]

HEAD = 1
"""KV head that holds what is not finite; the other one's rows see none of it."""
DIM = 5
KINDS = ("nan_key", "infinite_score", "nan_value")
DEAD_RUN = 0

# The dead run's request comes first: it shares a tile with rows that see NaN.
TREES = {
    "narrow": Runs(
        (Run(-1, 90), Run(-1, 300), Run(1, 200), Run(1, 70), Run(2, 30), Run(2, 9), Run(-1, 150)),
        (0, 4, 5, 2, 3, 6),
    ),
    "wide": Runs(
        (Run(-1, 90), Run(-1, 300), *(Run(1, 10 + 7 * i) for i in range(40)), Run(-1, 150)),
        (0, *range(2, 42), 42),
    ),
}
PLACES = {
    "narrow": ("narrow", 2, 77, 1),
    "wide": ("wide", 1, 130, 1),
    "several slots": ("wide", 1, 130, 8),
    "several slots, narrow": ("narrow", 2, 77, 8),
}
"""Tree, run and token that hold it, and parts of each segment."""


@functools.cache
def clean_batch(tree):
    """Even query heads have a positive element DIM, odd ones a negative one."""
    batch = make_batch(COMMON, TREES[tree], dead=(DEAD_RUN,))
    q = batch.q.copy()
    q[..., DIM] = np.abs(q[..., DIM]) + 0.5
    q[:, 1::2, DIM] *= -1
    q = q.astype(jnp.bfloat16).astype(q.dtype)  # as the kernels see it
    return dataclasses.replace(batch, q=q)


@functools.cache
def plan_of(tree, num_parts):
    batch = clean_batch(tree)
    plan = batch.plan("one_task_per_node")
    parts = []
    for piece in pieces_of(plan):
        places = range(1, min(num_parts, piece.num_steps))
        parts += cut(piece, *places)
    dealt = [dataclasses.replace(part, worker=i % 132) for i, part in enumerate(parts)]
    return with_pieces(plan, dealt)


def poisoned(kind, place):
    """The batch with one token of one KV head spoilt, and its plan."""
    tree, run, token, num_parts = PLACES[place]
    batch = clean_batch(tree)
    k, v = batch.k.copy(), batch.v.copy()
    token = int(batch.runs.tokens_of_run(run)[token])
    if kind == "nan_key":
        k[token, HEAD] = np.nan
    elif kind == "infinite_score":
        k[token, HEAD, DIM] = np.inf
    else:
        v[token, HEAD] = np.nan
    return dataclasses.replace(batch, k=k, v=v), plan_of(tree, num_parts), token


def seeing_rows(kind, batch, token):
    """Whether each row sees what is not finite: a score of -inf is a weight of 0."""
    request_sees = np.array([token in batch.tokens(i) for i in range(len(batch.q))])
    head = np.arange(COMMON.num_q_heads)
    head_sees = head // COMMON.group_size == HEAD
    if kind == "infinite_score":
        head_sees &= head % 2 == 0
    return request_sees[:, None] & head_sees[None, :]


def sharing_tiles(plan, seeing):
    """Rows in the tiles of those: a value that is NaN, times a weight of 0, is NaN there too."""
    tile = np.tile(plan.packed_row[: len(seeing)] // 64, (1, COMMON.num_kv_heads))
    shares = np.zeros_like(seeing)
    for t in np.unique(tile):
        heads = np.arange(COMMON.num_q_heads) // COMMON.group_size
        for head in range(COMMON.num_kv_heads):
            rows = (tile == t) & (heads == head)[None, :]
            shares |= rows & bool((seeing & rows).any())
    return shares


def expected(batch, seeing):
    """The oracle's answer for the rows that see only numbers; NaN for the others."""
    with np.errstate(invalid="ignore"):
        out, lse = batch.expected()
    assert np.isfinite(out[~seeing]).all()
    return np.where(seeing[..., None], np.nan, out), lse


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_reaches_every_row_that_sees_it(kind, place):
    batch, plan, token = poisoned(kind, place)
    seeing = seeing_rows(kind, batch, token)
    assert seeing.any()
    out, lse = batch.attend(plan)
    assert np.isnan(out[seeing]).all()
    if kind == "nan_value":
        np.testing.assert_allclose(lse[seeing], batch.expected()[1][seeing], rtol=0, atol=1e-4)
    else:
        assert not (np.isfinite(lse[seeing]) | np.isneginf(lse[seeing])).any()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_reaches_no_other_row(kind, place):
    batch, plan, token = poisoned(kind, place)
    seeing = seeing_rows(kind, batch, token)
    out, lse = batch.attend(plan)
    expected_out, expected_lse = expected(batch, seeing)
    others = ~seeing
    if kind == "nan_value":
        others &= ~sharing_tiles(plan, seeing)
    others[0] = False  # the dead request, below
    assert_right((out[others], lse[others]), (expected_out[others], expected_lse[others]))
    assert not out[0].any()
    assert np.isneginf(lse[0]).all()


@pytest.mark.parametrize("tree", TREES)
def test_clean_batches_are_right_and_a_row_whose_keys_are_all_dead_is_empty(tree):
    batch, plan = clean_batch(tree), plan_of(tree, 3)
    out, lse = batch.attend(plan)
    expected_out, expected_lse = batch.expected()
    assert_right((out[1:], lse[1:]), (expected_out[1:], expected_lse[1:]))
    assert not out[0].any()
    assert np.isneginf(lse[0]).all()


@pytest.mark.parametrize("factor", [-1.0, 0.0, 2.0**-30, 0.25, 16.0, 2.0**34])
@pytest.mark.parametrize("tree", TREES)
def test_any_scale_of_the_logits(tree, factor):
    batch = make_batch(COMMON, TREES[tree])
    # A power of two, or 0: the scaled queries are exact.
    expected = dataclasses.replace(batch, q=batch.q * np.float32(factor)).expected()
    scale = factor * COMMON.head_dim**-0.5
    out, lse = batch.attend(batch.plan(), logits_scale=scale)
    assert row_errors(out, expected[0]).max() < TOLERANCE
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6, atol=LSE_TOLERANCE)


@pytest.mark.parametrize("exponent", [10, 20, 24, 30, 60])
@pytest.mark.parametrize("tree", TREES)
def test_scores_of_any_size(tree, exponent):
    """Scores whose rounding alone would make a weight overflow, or a row look empty."""
    batch = make_batch(COMMON, TREES[tree])
    batch = dataclasses.replace(batch, q=batch.q * np.float32(2.0) ** exponent)
    out, lse = batch.attend(batch.plan())
    expected = batch.expected()
    assert row_errors(out, expected[0]).max() < TOLERANCE
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6, atol=LSE_TOLERANCE)
