"""Token ids from callers are checked, copied and compared as runs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec_jax.forest_tokens import as_token_run, common_prefix_len

RUNS = st.lists(st.integers(0, 1), max_size=8)


@given(RUNS, RUNS)
def test_common_prefix_len_counts_equal_leading_tokens(left, right):
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix_len(as_token_run(left), as_token_run(right)) == expected


@pytest.mark.parametrize("tokens", [[], (3, 4), range(3), np.array([5], np.uint16), [2**31 - 1]])
def test_token_runs_are_int32(tokens):
    run = as_token_run(tokens)
    assert run.dtype == np.int32
    assert run.tolist() == list(tokens)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1.0, 2.0], r"`tokens` must be integers; got float64. Tokenize"),
        ("text", r"`tokens` must be one flat list of token ids; got an array of 0 dimensions"),
        (["a"], r"`tokens` must be integers; got <U1"),
        ([True], r"`tokens` must be integers; got bool"),
        ([[1, 2]], r"`tokens` must be one flat list of token ids; got an array of 2 dim"),
        ([[1], [2, 3]], r"`tokens` must be one flat list of token ids; got nested lists"),
        ([4, -1], r"`tokens` must be >= 0 and < 2\*\*31; got -1 at index 1"),
        ([2**31], r"`tokens` must be >= 0 and < 2\*\*31; got 2147483648 at index 0"),
        ([2**70], r"`tokens` must be integers; got object"),
    ],
)
def test_bad_tokens_are_refused(tokens, message):
    with pytest.raises(ValueError, match=message):
        as_token_run(tokens)
