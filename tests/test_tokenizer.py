"""Tokenizer: golden prompts, a slow reference of the merge rule, bytes, and refused files."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.models import Llama2cTokenizer, Tokenizer, load_model

GOLDEN = json.loads(
    (Path(__file__).parent / "data" / "golden" / "stories260K_greedy.json").read_text()
)["cases"]
TOKENIZER_FILE = (
    Path(__file__).parents[1] / "codec_jax" / "models" / "data" / "stories260k" / "tok512.bin"
)
TOKENIZER = Llama2cTokenizer.from_file(TOKENIZER_FILE)


def encode_slowly(text: str) -> list[int]:
    """The merge rule, literally: scan all pairs, merge the best, start again."""
    pieces = {piece: index for index, piece in enumerate(TOKENIZER._pieces)}
    ids = []
    for character in " " + text if text else "":
        encoded = character.encode()
        ids += [pieces[encoded]] if encoded in pieces else [byte + 3 for byte in encoded]
    while True:
        merges = []
        for place in range(len(ids) - 1):
            joined = TOKENIZER._pieces[ids[place]] + TOKENIZER._pieces[ids[place + 1]]
            if joined in pieces:
                merges.append((-TOKENIZER._scores[pieces[joined]], place, pieces[joined]))
        if not merges:
            return ids
        _, place, merged = min(merges)
        ids[place : place + 2] = [merged]


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["prompt"][-12:])
def test_golden_prompts_and_texts(case):
    assert TOKENIZER.encode(case["prompt"]) == case["prompt_ids"]
    assert TOKENIZER.decode(case["ids"]) == case["text"]


def test_golden_stop_ids():
    stopped = [case for case in GOLDEN if case["ids"][-1] in TOKENIZER.stop_ids]
    assert [case["ids"][-1] for case in stopped] == [TOKENIZER.bos_id]
    for case in GOLDEN:
        assert not set(case["ids"][1:-1]) & set(TOKENIZER.stop_ids)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("abehdlotw sn.TL\n\té€<>0x")) | st.text(max_size=20))
def test_encode_agrees_with_the_literal_rule_and_round_trips(text):
    ids = TOKENIZER.encode(text, bos=False)
    assert ids == encode_slowly(text)
    assert TOKENIZER.encode(text) == [1, *ids]
    assert TOKENIZER.decode([1, *ids]) == text
    assert TOKENIZER.decode(ids) == (" " + text if text else "")


def test_equal_scores_merge_leftmost():
    pieces = [b"<unk>", b"\n<s>\n", b"\n</s>\n", *(b"<0x%02X>" % byte for byte in range(256))]
    tokenizer = Llama2cTokenizer([*pieces, b" ", b"a", b"aa", b" a"], [0.0] * 259 + [-1.0] * 4)
    assert tokenizer.encode("aaa", bos=False) == [262, 261]


def test_characters_spread_over_tokens_and_broken_bytes():
    euro = [byte + 3 for byte in "€".encode()]
    assert TOKENIZER.decode(euro) == "€"
    assert TOKENIZER.decode(euro[:2]) == "\ufffd"
    assert TOKENIZER.encode("\x00\n", bos=False)[-2:] == [3, 13]


def test_dummy_space_is_dropped_only_after_bos():
    space, two_stories = TOKENIZER.encode(" ", bos=False), [1, *TOKENIZER.encode("One")] * 2
    assert TOKENIZER.decode([1, *space]) == " "
    assert TOKENIZER.decode([1, 13]) == "\n"
    assert TOKENIZER.decode(two_stories) == "OneOne"
    assert TOKENIZER.decode([2, *TOKENIZER.encode("One", bos=False)]) == " One"


def test_long_text_takes_seconds():
    text = "Once upon a time, Lily went to the park with her mom. " * 2000
    start = time.monotonic()
    ids = TOKENIZER.encode(text)
    assert time.monotonic() - start < 10
    assert TOKENIZER.decode(ids) == text


def test_refused_input():
    with pytest.raises(ValueError, match=r"`ids` must be in \[0, 512\); got 512"):
        TOKENIZER.decode([1, 512])
    with pytest.raises(ValueError, match=r"`ids` must be in \[0, 512\); got -1"):
        TOKENIZER.decode([-1])
    with pytest.raises(ValueError, match="`text` must be valid Unicode"):
        TOKENIZER.encode("a\ud800")


@pytest.mark.parametrize("num_bytes", [6226, 6218, 6212])
def test_truncated_file_is_refused(tmp_path, num_bytes):
    path = tmp_path / "tok.bin"
    path.write_bytes(TOKENIZER_FILE.read_bytes()[:num_bytes])
    with pytest.raises(ValueError, match=rf"got {num_bytes} bytes in .*tok\.bin"):
        Llama2cTokenizer.from_file(path)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "tok.bin"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="byte tokens"):
        Llama2cTokenizer.from_file(path)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="got 64 bytes"):
        Llama2cTokenizer.from_file(path)


def test_registry_gives_the_same_tokenizer():
    tokenizer = load_model("stories260k").tokenizer
    assert isinstance(tokenizer, Tokenizer)
    assert (tokenizer.bos_id, tokenizer.stop_ids, tokenizer.vocab_size) == (1, (1, 2), 512)
    assert tokenizer.encode("Zoo") == TOKENIZER.encode("Zoo")
