"""Tokenizer and chat template that a GGUF file carries: byte-level BPE, as GPT-2 has it."""

from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from codec_jax.models.chat import ChatTemplate
from codec_jax.models.gguf_file import GGUFFile
from codec_jax.models.hf_tokenizer import HFTokenizer
from codec_jax.models.number_checks import is_integer

_KINDS = (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE) = range(1, 7)
_PREFIX = "tokenizer.ggml"
_TEMPLATE = "tokenizer.chat_template"
_STOP_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Words of Llama 3 and Qwen2, which differ in how many digits stand together.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Pre(NamedTuple):
    """What the name of a pre-tokenizer stands for, besides GPT-2's own."""

    digits_alone: bool = False
    words: str | None = None
    is_nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False


_PRES = {
    "gpt-2": _Pre(),
    "smollm": _Pre(digits_alone=True),
    "qwen2": _Pre(words=_WORDS % r"\p{N}", is_nfc=True),
    "llama-bpe": _Pre(words=_WORDS % r"\p{N}{1,3}", ignore_merges=True, add_bos=True),
}


def gguf_tokenizer(file: GGUFFile) -> HFTokenizer:
    """The tokenizer of a file; a text ends with its EOS, EOT or EOM token.

    Raises `ValueError` for a kind of tokenizer or pre-tokenizer that is not known here, and for a
    vocabulary that is none.
    """
    _choose(file, "model", ("gpt2",))
    pre = _PRES[_choose(file, "pre", tuple(_PRES))]
    tokens = _texts(file, "tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _texts(file, "merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"`{_PREFIX}.tokens` in {file.path} must differ; got a token twice.")
    try:
        model = models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges)  # pyright: ignore[reportArgumentType]
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"`{_PREFIX}.merges` in {file.path} must be merges; {error}.") from error
    tokenizer = tokenizers.Tokenizer(model)
    _add_stages(tokenizer, pre)
    _add_tokens(tokenizer, tokens, file)
    ids = [_token_id(file, key, len(tokens)) for key in ("bos_token_id", *_STOP_KEYS)]
    add_bos = file.fields.get(f"{_PREFIX}.add_bos_token", pre.add_bos)
    if not isinstance(add_bos, bool):
        raise ValueError(
            f"`{_PREFIX}.add_bos_token` in {file.path} must be true or false; got {add_bos!r}."
        )
    if add_bos and ids[0] is None:
        raise ValueError(
            f"`{_PREFIX}.bos_token_id` in {file.path} must be given: a text starts with it; got"
            " none."
        )
    return HFTokenizer(
        tokenizer,
        bos_id=ids[0],
        stop_ids=tuple(dict.fromkeys(index for index in ids[1:] if index is not None)),
        add_bos=add_bos,
    )


def gguf_chat_template(file: GGUFFile) -> ChatTemplate | None:
    """The chat template of a file, if it has one."""
    source = file.fields.get(_TEMPLATE)
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(
            f"`{_TEMPLATE}` in {file.path} must be a text; got {type(source).__name__}."
        )
    tokens = _texts(file, "tokens")
    special = {}
    for name in ("bos", "eos", "unknown", "padding"):
        index = _token_id(file, f"{name}_token_id", len(tokens))
        if index is not None:
            short = {"unknown": "unk", "padding": "pad"}.get(name, name)
            special[f"{short}_token"] = tokens[index]
    return ChatTemplate(source, special, f"`{_TEMPLATE}` in {file.path}")


def _choose(file: GGUFFile, key: str, choices: tuple[str, ...]) -> str:
    value = file.fields.get(f"{_PREFIX}.{key}")
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"`{_PREFIX}.{key}` in {file.path} must be one of {', '.join(choices)}; got {value!r}."
        )
    return value


def _texts(file: GGUFFile, key: str) -> list[str]:
    value: Any = file.fields.get(f"{_PREFIX}.{key}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"`{_PREFIX}.{key}` in {file.path} must be a list of texts; got none.")
    return value


def _token_id(file: GGUFFile, key: str, num_tokens: int) -> int | None:
    value = file.fields.get(f"{_PREFIX}.{key}")
    if value is not None and not (is_integer(value) and 0 <= value < num_tokens):
        raise ValueError(
            f"`{_PREFIX}.{key}` in {file.path} must be in [0, {num_tokens}); got {value!r}."
        )
    return value


def _add_stages(tokenizer: tokenizers.Tokenizer, pre: _Pre) -> None:
    stages: list[pre_tokenizers.PreTokenizer] = []
    if pre.digits_alone:
        stages.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.words is not None:
        stages.append(pre_tokenizers.Split(tokenizers.Regex(pre.words), behavior="isolated"))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.words is None)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*stages, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if pre.is_nfc:
        tokenizer.normalizer = normalizers.NFC()


def _add_tokens(tokenizer: tokenizers.Tokenizer, tokens: list[str], file: GGUFFile) -> None:
    """Tokens that a text spells out as a whole; control tokens have no text of their own."""
    kinds: Any = file.fields.get(f"{_PREFIX}.token_type", [_NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ValueError(
            f"`{_PREFIX}.token_type` in {file.path} must have one number for each of"
            f" {len(tokens)} tokens; got {len(kinds) if isinstance(kinds, list) else kinds!r}."
        )
    unknown = [kind for kind in kinds if kind not in _KINDS]
    if unknown:
        raise ValueError(
            f"`{_PREFIX}.token_type` in {file.path} must hold numbers from 1 to {len(_KINDS)}; got"
            f" {unknown[0]!r}."
        )
    special, plain = (
        [
            tokenizers.AddedToken(token, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in wanted
        ]
        for wanted in ((_UNKNOWN, _CONTROL), (_USER_DEFINED,))
    )
    tokenizer.add_special_tokens(special)  # pyright: ignore[reportArgumentType]
    tokenizer.add_tokens(plain)  # pyright: ignore[reportArgumentType]
