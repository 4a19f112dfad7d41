"""Tokenizers of the Hugging Face `tokenizers` library behind this library's interface."""

import reprlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from codec_jax.models.chat import ChatTemplate
from codec_jax.models.hf_files import CONFIG, load_text, read_json
from codec_jax.models.number_checks import is_integer

_FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_GENERATION = "generation_config.json"
_TEMPLATE = "chat_template"


class HFTokenizer:
    """A `tokenizers.Tokenizer` with the ids that start and end a text.

    Args:
      tokenizer: its truncation and padding are turned off.
      bos_id: id that starts a text, if there is one.
      stop_ids: ids that end one.
      add_bos: whether a text starts with it; None leaves it to the tokenizer.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        stop_ids: tuple[int, ...],
        add_bos: bool | None = None,
    ):
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._add_bos = add_bos
        self.bos_id = bos_id
        self.stop_ids = stop_ids

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included; a model may have more rows than that."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Token ids of `text`, with the special tokens of a text's start if `bos`.

        Raises `ValueError` for a text with lone surrogates, which UTF-8 cannot hold, and for one
        that the tokenizer has no tokens for.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"`text` must be valid Unicode; got a lone surrogate at character {error.start}."
            ) from error
        add_special = bos and self._add_bos is not False
        try:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special).ids
        except Exception as error:  # the library raises nothing more precise
            raise ValueError(f"`text` must have tokens; got: {error}.") from error
        if bos and self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids` without special tokens; ids that have no text give none.

        Raises `ValueError` for a negative id.
        """
        ids = [int(token) for token in ids]
        if ids and min(ids) < 0:
            raise ValueError(f"`ids` must be at least 0; got {min(ids)}.")
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def load_tokenizer(folder: Path, config: Mapping[str, Any]) -> HFTokenizer:
    """The tokenizer of a checkpoint folder.

    Args:
      folder: holds tokenizer.json; tokenizer_config.json and generation_config.json may add to it.
      config: the object of config.json.

    A text is ended by any id that one of the files calls the end of a text.

    Raises `ValueError` if tokenizer.json is missing or is not one, and for a special token that no
    text or vocabulary can have.
    """
    tokenizer = _read_tokenizer(folder / _FILE)
    settings_path, generation_path = folder / _SETTINGS, folder / _GENERATION
    settings = read_json(settings_path) or {}
    tokens = special_tokens(settings, settings_path)
    num_ids = config.get("vocab_size", tokenizer.get_vocab_size())
    stop_ids = [
        *_stop_ids(read_json(generation_path) or {}, num_ids, generation_path),
        *_stop_ids(config, num_ids, folder / CONFIG),
    ]
    if (eos_id := tokenizer.token_to_id(tokens.get("eos_token", ""))) is not None:
        stop_ids.append(eos_id)
    bos_id = tokenizer.token_to_id(tokens.get("bos_token", ""))
    add_bos = settings.get("add_bos_token")
    if add_bos is not None and not isinstance(add_bos, bool):
        raise ValueError(
            f"`add_bos_token` in {settings_path} must be true or false; got {add_bos!r}."
        )
    if add_bos and bos_id is None:
        raise ValueError(
            f"`bos_token` in {settings_path} must be a token of {_FILE}: the file says"
            f" `add_bos_token`; got {tokens.get('bos_token')!r}."
        )
    return HFTokenizer(
        tokenizer, bos_id=bos_id, stop_ids=tuple(dict.fromkeys(stop_ids)), add_bos=add_bos
    )


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a checkpoint folder, if it has one.

    From chat_template.jinja, chat_template.json or tokenizer_config.json; of several, the one
    called "default".
    """
    settings = read_json(folder / _SETTINGS) or {}
    place = folder / f"{_TEMPLATE}.jinja"
    source = load_text(place)
    where = f"`{place}`" if source is not None else None
    if source is None:
        place = folder / f"{_TEMPLATE}.json"
        source = (read_json(place) or {}).get(_TEMPLATE)
    if source is None:
        place = folder / _SETTINGS
        source = settings.get(_TEMPLATE)
    if isinstance(source, list):
        source = _named_templates(source, place).get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"`{_TEMPLATE}` in {place} must be a text; got {type(source).__name__}.")
    where = where or f"`{_TEMPLATE}` in {place}"
    return ChatTemplate(source, special_tokens(settings, folder / _SETTINGS), where)


def special_tokens(settings: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The texts of `bos_token`, `eos_token` and so on, given as strings or as objects.

    Raises `ValueError` for one that is neither; `path` is that of the settings.
    """
    tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            tokens[name] = content
        elif value is not None:
            raise ValueError(
                f"`{name}` in {path} must be a text, or an object with the text `content`; got"
                f" {value!r}."
            )
    return tokens


def _named_templates(source: list[Any], place: Path) -> dict[str, str]:
    named = {}
    for item in source:
        name, template = (
            (item.get("name"), item.get("template")) if isinstance(item, Mapping) else (None, None)
        )
        if not isinstance(name, str) or not isinstance(template, str):
            raise ValueError(
                f"`{_TEMPLATE}` in {place} must be a text, or objects with the texts `name` and"
                f" `template`; got {reprlib.repr(item)}."
            )
        named[name] = template
    return named


def _read_tokenizer(path: Path) -> tokenizers.Tokenizer:
    text = load_text(path)
    if text is None:
        raise ValueError(
            f"`{path}` must exist: prompts are tokenized by it; got no file. Other formats"
            " (tokenizer.model) are not read."
        )
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"`{path}` must be a tokenizer; got: {error}. Copy it again.") from error


def _stop_ids(fields: Mapping[str, Any], num_ids: int, path: Path) -> list[int]:
    """What a file calls the end of a text: an id, a list of them, or nothing."""
    value = fields.get("eos_token_id")
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(is_integer(item) and 0 <= item < num_ids for item in ids):
        raise ValueError(
            f"`eos_token_id` in {path} must hold ids in [0, {num_ids}); got {value!r}."
        )
    return ids
