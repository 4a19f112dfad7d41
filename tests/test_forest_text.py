"""Clipped and padded text has the width that a terminal shows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec_jax.forest_text import clip, display_width, escape, pad


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain text", "plain text"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x1b[31m", r"\x1b[31m"),
        ("zero\u200bwidth \u202e", r"zero\u200bwidth \u202e"),
        ("\ud800", r"\ud800"),
        ("日本 😀", "日本 😀"),
    ],
)
def test_escape_leaves_only_what_prints(text, escaped):
    assert escape(text) == escaped


@pytest.mark.parametrize(
    ("text", "width"), [("abc", 3), ("日本", 4), ("e\u0301", 1), ("😀", 2), ("é", 1), ("", 0)]
)
def test_display_width_counts_columns(text, width):
    assert display_width(text) == width


@pytest.mark.parametrize(
    ("width", "clipped"), [(5, "日本x"), (4, "日…"), (3, "日…"), (2, "…"), (1, "…"), (0, "")]
)
def test_clip_never_cuts_a_wide_character_in_half(width, clipped):
    assert clip("日本x", width) == clipped


@given(st.text(), st.integers(0, 20))
def test_pad_fills_exactly_the_width(text, width):
    padded = pad(escape(text), width)
    assert display_width(padded) == width
    assert padded.isprintable()
