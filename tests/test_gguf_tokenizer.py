"""Tokenizers and chat templates that GGUF files carry."""

from pathlib import Path

import pytest
from gguf_files import ALPHABET, tokenizer_fields

from codec_jax.models import Tokenizer
from codec_jax.models.gguf_file import GGUFFile
from codec_jax.models.gguf_tokenizer import gguf_chat_template, gguf_tokenizer

PATH = Path("tiny.gguf")
TOKENS = tokenizer_fields()["tokenizer.ggml.tokens"]


def file_of(**changes):
    return GGUFFile(PATH, tokenizer_fields(**changes), {})


def tokenizer_of(**changes):
    return gguf_tokenizer(file_of(**changes))


def ids_of(*tokens):
    return [TOKENS.index(token) for token in tokens]


def refusal(**changes):
    with pytest.raises(ValueError, match="`") as error:
        tokenizer_of(**changes)
    return str(error.value)


def test_encode_and_decode():
    tokenizer = tokenizer_of()
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.encode("abc ab") == ids_of("abc", "Ġ", "ab")
    assert tokenizer.decode(tokenizer.encode(" né 🙂\n")) == " né 🙂\n"
    assert tokenizer.vocab_size == len(TOKENS)
    assert (tokenizer.bos_id, tokenizer.stop_ids) == (*ids_of("<s>"), tuple(ids_of("</s>")))


def test_control_tokens_are_tokens_without_text_and_the_users_have_text():
    tokenizer = tokenizer_of()
    ids = tokenizer.encode("a<u>b</u>")
    assert ids == ids_of("a", "<u>", "b", "</u>")
    assert tokenizer.decode(ids) == "ab</u>"


@pytest.mark.parametrize(
    ("pre", "add_bos_token", "starts"),
    [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
    ],
)
def test_a_text_starts_with_bos_where_the_file_says_so(pre, add_bos_token, starts):
    tokenizer = tokenizer_of(pre=pre, add_bos_token=add_bos_token)
    assert tokenizer.encode("ab") == ids_of(*["<s>"] * starts, "ab")
    assert tokenizer.encode("ab", bos=False) == ids_of("ab")


# Merges make longer tokens of what stands together; what a pre-tokenizer splits stays apart.
@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "12345 a", ["123", "4", "5", "Ġa"]),
        ("smollm", "12345 a", ["1", "2", "3", "4", "5", "Ġa"]),
        ("smollm", "1 23", ["1", "Ġ", "2", "3"]),
        ("gpt-2", "1 23", ["1", "Ġ2", "3"]),
        ("qwen2", "12345 a", ["1", "2", "3", "4", "5", "Ġa"]),
        ("llama-bpe", "12345 a", ["123", "4", "5", "Ġa"]),
        ("llama-bpe", "4123", ["4", "12", "3"]),
        ("gpt-2", "4123", ["4", "123"]),
        ("gpt-2", ".a", [".", "a"]),
        ("qwen2", ".a", [".a"]),
        ("llama-bpe", ".a", [".a"]),
    ],
)
def test_pre_tokenizers(pre, text, expected):
    pieces = ["Ġa", "12", "123", "Ġ2", ".a"]
    tokens = [*ALPHABET, *pieces]
    merges = ["Ġ a", "1 2", "12 3", "Ġ 2", ". a"]
    tokenizer = tokenizer_of(
        pre=pre,
        tokens=tokens,
        token_type=None,
        merges=merges,
        bos_token_id=None,
        eos_token_id=None,
        add_bos_token=False,
    )
    assert [tokens[index] for index in tokenizer.encode(text)] == expected


def test_qwen2_composes_characters():
    apart = "e\u0301"
    composed = tokenizer_of(pre="qwen2")
    assert composed.decode(composed.encode(apart)) == "é"
    kept = tokenizer_of(pre="smollm")
    assert kept.decode(kept.encode(apart)) == apart


def test_several_tokens_may_end_a_text():
    ends = tokenizer_of(eot_token_id=3, eom_token_id=5)
    assert ends.stop_ids == (*ids_of("</s>"), 3, 5)
    assert tokenizer_of(eos_token_id=None).stop_ids == ()


def test_chat_template():
    template = gguf_chat_template(file_of())
    assert template is not None
    assert template.render("hi") == "<s><u>hi</u>"
    fields = tokenizer_fields()
    assert (
        gguf_chat_template(GGUFFile(PATH, fields | {"tokenizer.chat_template": None}, {})) is None
    )
    with pytest.raises(
        ValueError, match=r"^`tokenizer\.chat_template` in tiny\.gguf must be a text"
    ):
        gguf_chat_template(GGUFFile(PATH, fields | {"tokenizer.chat_template": [1]}, {}))
    with pytest.raises(
        ValueError, match=r"^`tokenizer\.chat_template` in tiny\.gguf must be a Jin"
    ):
        gguf_chat_template(GGUFFile(PATH, fields | {"tokenizer.chat_template": "{% x"}, {}))


REFUSED = {
    "model": (
        {"model": "llama"},
        "`tokenizer.ggml.model` in tiny.gguf must be one of gpt2; got 'llama'.",
    ),
    "pre": (
        {"pre": "tekken"},
        "`tokenizer.ggml.pre` in tiny.gguf must be one of gpt-2, smollm, qwen2, llama-bpe; got"
        " 'tekken'.",
    ),
    "no tokens": (
        {"tokens": None},
        "`tokenizer.ggml.tokens` in tiny.gguf must be a list of texts; got none.",
    ),
    "twice": (
        {"tokens": [*TOKENS, "ab"]},
        "`tokenizer.ggml.tokens` in tiny.gguf must differ; got a token twice.",
    ),
    "types": (
        {"token_type": [1, 1]},
        "`tokenizer.ggml.token_type` in tiny.gguf must have one number for each of 263 tokens; got"
        " 2.",
    ),
    "eos": (
        {"eos_token_id": 263},
        "`tokenizer.ggml.eos_token_id` in tiny.gguf must be in [0, 263); got 263.",
    ),
    "bos that is true": (
        {"bos_token_id": True},
        "`tokenizer.ggml.bos_token_id` in tiny.gguf must be in [0, 263); got True.",
    ),
    "no bos to add": (
        {"bos_token_id": None, "add_bos_token": True},
        "`tokenizer.ggml.bos_token_id` in tiny.gguf must be given: a text starts with it; got"
        " none.",
    ),
    "a text for a truth": (
        {"add_bos_token": "no"},
        "`tokenizer.ggml.add_bos_token` in tiny.gguf must be true or false; got 'no'.",
    ),
    "unknown type": (
        {"token_type": [1] * 262 + [7]},
        "`tokenizer.ggml.token_type` in tiny.gguf must hold numbers from 1 to 6; got 7.",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    changes, message = REFUSED[name]
    assert refusal(**changes) == message


@pytest.mark.parametrize("merge", ["ab", "ab zz", ""])
def test_merges_that_are_none_are_refused(merge):
    message = refusal(merges=["a b", merge])
    assert message.startswith("`tokenizer.ggml.merges` in tiny.gguf must be merges; ")
