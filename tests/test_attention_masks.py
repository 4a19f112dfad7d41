"""Slots that are not live and rows that see no key have no say (bug reports O03, O04, O07)."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import SMALL, Case, attend_arguments, grow_lists

from codec_jax.attention import attend, attend_resolved, prepare_plan, resolve_plan
from codec_jax.forest import Forest
from codec_jax.planning.interpreter import interpret
from codec_jax.planning.spec import PlanSpec

IMPLEMENTATIONS = ("xla", "reference")
TOLERANCE = {"rtol": 0, "atol": 1e-5}
RAGGED = [[1] * 50 + [2] * 40 + [3] * 20 + [4] * 7 + [5], [1] * 50 + [6], [9] * 3, [1] * 30]
"""Paths of 5 nodes and of 2, one that shares nothing, and one that ends at an inner node."""
DEEP = [*RAGGED, [1] * 50 + [2] * 40 + [3], [1] * 50 + [2] * 40 + [3] * 20 + [4]]


def assert_same_bits(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=10)
@given(batch=SMALL.batches())
def test_o04_what_dead_slots_hold_changes_no_bit(batch, implementation):
    q, _, plan = attend_arguments(batch, SMALL.plan(batch.arrays))
    assert not batch.live_slots().all()
    zeroed = attend(q, batch.cache(0.0), plan, implementation=implementation)
    for value in (np.nan, np.inf, -np.inf):
        filled = attend(q, batch.cache(value), plan, implementation=implementation)
        assert_same_bits(filled, zeroed)
    assert np.isfinite(zeroed.out).all()


def test_o04_the_interpreter_reads_no_dead_slot():
    batch = SMALL.batch(DEEP)
    plan = SMALL.plan(batch.arrays)
    page_list, kv_len = batch.arrays.page_list, batch.arrays.kv_len
    assert all(np.isnan(pages).any() for pages in batch.pages)
    out, lse = interpret(plan, batch.q, batch.pages, page_list, kv_len)
    assert np.isfinite(out).all()
    assert not np.isnan(lse).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_workers", [7, 132])
def test_o03_rows_are_as_in_a_batch_of_their_own(implementation, num_workers):
    """132 workers cut every node to pieces of two steps, which most rows have no part in."""
    case = Case(page_size=2, max_tail=120, max_kept=120, max_requests=8, num_workers=num_workers)
    together = case.batch(DEEP)
    partial = attend(
        *attend_arguments(together, case.plan(together.arrays)), implementation=implementation
    )
    for row, tokens in enumerate(DEEP):
        alone = case.batch([tokens])
        alone.q[0] = together.q[row]
        own = attend(
            *attend_arguments(alone, case.plan(alone.arrays)), implementation=implementation
        )
        np.testing.assert_allclose(partial.out[row], own.out[0], **TOLERANCE)
        np.testing.assert_allclose(partial.lse[row], own.lse[0], **TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
def test_o07_lengths_around_a_page(page_size, implementation):
    """Three rows of each length: identical rows, and one that differs in its first token."""
    case = Case(page_size=page_size, max_requests=16, max_tail=128, max_kept=0)
    lengths = sorted({n for n in (1, page_size - 1, page_size, page_size + 1, 2 * page_size) if n})
    lists = [[first] * n for n in lengths for first in (2 * n, 2 * n, 2 * n + 1)]
    batch = case.batch(lists)
    batch.q[1 : len(lists) : 3] = batch.q[0 : len(lists) : 3]
    partial = attend(
        *attend_arguments(batch, case.plan(batch.arrays)), implementation=implementation
    )
    out, lse = batch.expected()
    np.testing.assert_allclose(partial.out, out, **TOLERANCE)
    np.testing.assert_allclose(partial.lse, lse, **TOLERANCE)
    np.testing.assert_array_equal(partial.out[1 : len(lists) : 3], partial.out[: len(lists) : 3])
    assert (np.abs(partial.out[: len(lists)]) > 0).any(axis=(1, 2)).all()


@pytest.mark.parametrize("kv_len", [-1, 10, 1000])
def test_o07_lengths_outside_the_leaf_are_refused(kv_len):
    forest = Forest(page_size=4)
    request = forest.add_request([1, 2], max_new_tokens=9)
    with pytest.raises(ValueError, match="`kv_len` must be 0"):
        forest.set_leaf_progress(request, kv_len=kv_len, page_ids=[])


@pytest.mark.parametrize("page_size", [0, -4])
def test_o07_page_sizes_that_are_not_positive_are_refused(page_size):
    with pytest.raises(ValueError, match="`page_size` must be >= 1"):
        Forest(page_size=page_size)
    with pytest.raises(ValueError, match="`page_size` must be a positive integer"):
        PlanSpec(num_kv_heads=1, group_size=1, page_size=page_size)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shrinking_a_node_hides_its_last_tokens(implementation):
    """`resolve` follows the live lengths, downwards too, without a new plan."""
    long, short = (SMALL.batch([[1] * 20 + [2] * n, [1] * 20 + [3]]) for n in (24, 5))
    q, kv, plan = attend_arguments(long, SMALL.plan(long.arrays))
    partial = attend(
        q,
        dataclasses.replace(kv, kv_len=jnp.asarray(short.arrays.kv_len)),
        plan,
        implementation=implementation,
    )
    out, lse = dataclasses.replace(short, q=long.q).expected()
    np.testing.assert_allclose(partial.out, out, **TOLERANCE)
    np.testing.assert_allclose(partial.lse, lse, **TOLERANCE)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=10)
@given(batch=SMALL.batches(), seed=st.integers(0, 99))
def test_causal_masks_hide_the_keys_after_each_query(batch, implementation, seed):
    """As in prefill: a query at position p sees its path up to p, wherever the nodes end."""
    rng = np.random.default_rng(seed)
    positions = np.zeros(SMALL.max_requests, np.int32)
    for request, tokens in enumerate(batch.token_lists):
        positions[request] = rng.integers(len(tokens))
    partial = attend_causally(
        *attend_arguments(batch, SMALL.plan(batch.arrays)),
        (jnp.asarray(batch.arrays.position), jnp.asarray(positions)),
        implementation,
    )
    seen = [
        np.tile(np.arange(len(tokens)) <= positions[request], (SMALL.num_kv_heads, 1))
        for request, tokens in enumerate(batch.token_lists)
    ]
    out, lse = batch.expected(seen)
    np.testing.assert_allclose(partial.out, out, **TOLERANCE)
    np.testing.assert_allclose(partial.lse, lse, **TOLERANCE)


@functools.partial(jax.jit, static_argnums=4)
def attend_causally(q, kv, plan, causal, implementation):
    prepared = prepare_plan(plan, implementation=implementation)
    page_size = kv.pool.page_size
    resolved = resolve_plan(prepared, kv.page_list, kv.kv_len, page_size=page_size, causal=causal)
    return attend_resolved(
        q, kv.pool, resolved, jnp.int32(0), logits_scale=8**-0.5, implementation=implementation
    )


def test_drawn_forests_have_the_hard_cases():
    """One-token nodes, splits inside pages, inner ends, duplicates, several roots, depth."""
    seen = set()
    for seed in range(8):
        draws = np.random.default_rng(seed).integers(0, [40, 41, 25, 6], (40, 4))
        forest = Forest.from_token_lists(grow_lists(draws.tolist()), page_size=16)
        nodes = [forest.node(i) for i in forest.preorder()]
        ends = [forest.node(forest.end_node(request)) for request in range(40)]
        features = {
            "several roots": sum(node.parent < 0 for node in nodes) > 1,
            "one-token node": any(node.kv_len == 1 for node in nodes),
            "split inside a page": any(node.first_row for node in nodes),
            "ends at an inner node": any(end.children for end in ends),
            "duplicates": any(len(node.request_ids) > 1 for node in nodes),
            "more than four levels": any(forest.depth(i) > 4 for i in forest.preorder()),
        }
        seen |= {name for name, present in features.items() if present}
    assert seen == set(features)
