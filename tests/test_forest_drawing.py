"""Golden drawings of small forests, and the limits that any drawing keeps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.forest import Forest
from codec_jax.forest_drawing import MIN_LINES, MIN_WIDTH, draw_forest
from codec_jax.forest_text import display_width
from codec_jax.pages import PagePool


def encode(text: str) -> list[int]:
    return [ord(char) for char in text]


def decode(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


def test_chain():
    forest = Forest.from_token_lists([[1], [1, 2], [1, 2, 3, 4]], page_size=4)
    assert draw_forest(forest, width=52).splitlines() == [
        "                        tokens  sharers  reads saved",
        "1                            1        3            2",
        "└─ 2                         1        2            1",
        "   └─ 3 4                    2        1            0",
        "3 requests: 4 unique of 7 total KV tokens (1.8x)",
        "3 pages used, 4 tokens each",
    ]


def test_star():
    questions = ["Be brief. Why?", "Be brief. How?", "Be brief. And?"]
    forest = Forest(page_size=16)
    forest.add_requests(map(encode, questions), max_new_tokens=64)
    assert draw_forest(forest, decode=decode, width=56).splitlines() == [
        "                            tokens  sharers  reads saved",
        '"Be brief. "                    10        3           20',
        '├─ "Why?"                        4        1            0',
        "│  └─ 1 sample, up to 64 new tokens",
        '├─ "How?"                        4        1            0',
        "│  └─ 1 sample, up to 64 new tokens",
        '└─ "And?"                        4        1            0',
        "   └─ 1 sample, up to 64 new tokens",
        "3 requests: 22 unique of 42 total KV tokens (1.9x)",
        "3 pages used, 16 tokens each",
    ]


def test_two_roots():
    forest = Forest.from_token_lists(map(encode, ["ab", "ac", "x\ny"]), page_size=1)
    assert draw_forest(forest, decode=decode, width=52).splitlines() == [
        "                        tokens  sharers  reads saved",
        '"a"                          1        2            1',
        '├─ "b"                       1        1            0',
        '└─ "c"                       1        1            0',
        r'"x\ny"                       3        1            0',
        "3 requests: 6 unique of 7 total KV tokens (1.2x)",
        "6 pages used, 1 token each",
    ]


def test_duplicates_and_their_samples():
    forest = Forest(page_size=4, pages=PagePool(9))
    forest.add_requests([[5, 6, 7]] * 4, max_new_tokens=64)
    forest.add_request([5, 6, 7])
    forest.add_request([8], max_new_tokens=1)
    forest.add_request([8], max_new_tokens=1000)
    forest.pages.lend()
    forest.set_leaf_progress(6, kv_len=3, page_ids=forest.pages.settle(6))
    assert draw_forest(forest, width=52).splitlines() == [
        "                        tokens  sharers  reads saved",
        "5 6 7                        3        5           12",
        "└─ 4 samples, up to 64 new tokens each",
        "8                            1        2            1",
        "└─ 2 samples, up to 1,000 new tokens, 3 so far",
        "7 requests: 7 unique of 20 total KV tokens (2.9x)",
        "3 pages used, 4 tokens each",
    ]


def test_empty_forest():
    assert draw_forest(Forest(), width=48).splitlines() == [
        "                    tokens  sharers  reads saved",
        "0 requests: 0 unique of 0 total KV tokens",
        "0 pages used, 64 tokens each",
    ]


def test_more_siblings_than_lines():
    forest = Forest.from_token_lists([[1, token] for token in range(1_200)] + [[2]])
    assert draw_forest(forest, width=52, max_lines=9).splitlines() == [
        "                        tokens  sharers  reads saved",
        "1                            1    1,200        1,199",
        "├─ 0                         1        1            0",
        "├─ 1                         1        1            0",
        "├─ 2                         1        1            0",
        "└─ ... 1,197 more",
        "2                            1        1            0",
        "1,201 requests: 1,202 unique of 2,401 total KV toke…",
        "1,201 pages used, 64 tokens each",
    ]


def test_deep_chains_stay_on_the_screen():
    forest = Forest()
    node_id = None
    for token in range(2_000):
        node_id = forest.insert([token], parent=node_id)
        forest.add_request([], parent=node_id)
    assert draw_forest(forest, width=56, max_lines=12).splitlines() == [
        "                            tokens  sharers  reads saved",
        "0                                1    2,000        1,999",
        "└─ 1                             1    1,999        1,998",
        "   └─ 2                          1    1,998        1,997",
        "      └─ 3                       1    1,997        1,996",
        "         └─ 4                    1    1,996        1,995",
        "         └─ (depth 5) 5          1    1,995        1,994",
        "         └─ (depth 6) 6          1    1,994        1,993",
        "         └─ (depth 7) 7          1    1,993        1,992",
        "... 1,992 more",
        "2,000 requests: 2,000 unique of 2,001,000 total KV toke…",
        "2,000 pages used, 64 tokens each",
    ]


def test_long_and_wide_text_is_cut_in_its_column():
    forest = Forest.from_token_lists([encode("日本語のとても長い質問です。" * 20)])
    first = draw_forest(forest, decode=decode, width=52).splitlines()[1]
    assert first == '"日本語のとても長い…"      280        1            0'


WORDS = st.text(st.sampled_from("ab日\n\u0301😀\u200b"), min_size=1, max_size=30)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.tuples(WORDS, st.integers(0, 3)), max_size=25),
    st.integers(MIN_WIDTH, 90),
    st.integers(MIN_LINES, 30),
    st.booleans(),
)
def test_every_drawing_fits(prompts, width, max_lines, is_text):
    forest = Forest(page_size=4)
    for text, max_new_tokens in prompts:
        forest.add_request(encode(text), max_new_tokens=max_new_tokens)
    drawing = draw_forest(
        forest, decode=decode if is_text else None, width=width, max_lines=max_lines
    )
    lines = drawing.splitlines()
    assert len(lines) <= max_lines
    assert all(display_width(line) <= width and line.isprintable() for line in lines)
    assert "requests: " in lines[-2] or "1 request: " in lines[-2]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"width": 47}, r"`width` must be >= 48 columns; got 47"),
        ({"max_lines": 5}, r"`max_lines` must be >= 6; got 5"),
    ],
)
def test_limits_too_small_for_any_drawing_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        draw_forest(Forest(), **limits)
