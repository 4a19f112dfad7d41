"""Sizes of a run: powers of two, never too small, and padding that `export_arrays` would make."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestCapacity, export_arrays
from codec_jax.generate_sizes import RunSizes, at_least, common_capacity, pad_forest

MIB = 2**20


def run_sizes(*, nodes=3, requests=2, page_entries=4, num_pages=5, new_tokens=7, page_bytes=MIB):
    needed = ForestCapacity(nodes=nodes, requests=requests, page_entries=page_entries)
    return RunSizes.for_run(
        needed, num_pages=num_pages, max_new_tokens=new_tokens, page_bytes=page_bytes
    )


@given(st.integers(1, 2**12), st.integers(0, 2**50))
def test_at_least_is_the_smallest_power_of_two_above(floor_exponent, size):
    floor = 2 ** (floor_exponent % 12)
    chosen = at_least(floor, size)
    assert chosen >= max(floor, size)
    assert chosen & (chosen - 1) == 0
    assert chosen == floor or chosen // 2 < size


def test_small_runs_have_the_smallest_sizes():
    sizes = run_sizes(page_bytes=1024)
    assert (sizes.batch, sizes.pages, sizes.new_tokens) == (16, 256, 64)
    assert sizes.forest == ForestCapacity(nodes=64, requests=16, page_entries=128)


def test_sizes_follow_what_is_needed():
    sizes = run_sizes(nodes=65, requests=9, page_entries=1000, new_tokens=65)
    assert (sizes.batch, sizes.new_tokens) == (16, 128)
    assert sizes.forest == ForestCapacity(nodes=128, requests=16, page_entries=1024)


@pytest.mark.parametrize(
    ("num_pages", "page_bytes", "pages"),
    [
        (1, 1024, 256),
        (256, 1024, 256),
        (257, 1024, 512),
        (5, MIB, 64),
        (65, MIB, 128),
        (5, 64 * MIB, 5),
        (5, 1000 * MIB, 5),
        (5, 32 * MIB, 6),
    ],
)
def test_a_pool_is_rounded_up_by_at_most_64_mib(num_pages, page_bytes, pages):
    assert run_sizes(num_pages=num_pages, page_bytes=page_bytes).pages == pages


def test_an_empty_run_has_sizes():
    sizes = run_sizes(nodes=0, requests=0, page_entries=0, num_pages=0, new_tokens=1)
    assert sizes.batch == 16
    assert sizes.pages >= 1


TOKEN_LISTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=9)


@given(TOKEN_LISTS, st.integers(0, 5), st.integers(1, 4))
def test_a_padded_forest_is_what_export_pads(token_lists, max_new_tokens, page_size):
    forest = Forest.from_token_lists(
        token_lists, page_size=page_size, max_new_tokens=max_new_tokens
    )
    capacity = ForestCapacity(nodes=64, requests=16, page_entries=128)
    padded = pad_forest(export_arrays(forest), capacity)
    expected = export_arrays(forest, capacity)
    for name in padded._fields:
        got, want = getattr(padded, name), getattr(expected, name)
        assert got.dtype == want.dtype, name
        np.testing.assert_array_equal(got, want, err_msg=name)


def test_common_capacity_holds_every_forest():
    small = export_arrays(Forest.from_token_lists([[1]], page_size=1))
    wide = export_arrays(Forest.from_token_lists([[i] for i in range(70)], page_size=1))
    long = export_arrays(Forest.from_token_lists([[1] * 300], page_size=1))
    capacity = common_capacity([small, wide, long], requests=80)
    assert capacity == ForestCapacity(nodes=128, requests=80, page_entries=512)
    assert common_capacity([small], requests=8) == ForestCapacity(
        nodes=64, requests=8, page_entries=128
    )
    assert common_capacity([], requests=8).requests == 8
