"""Prompts from a file: a prompt a line, or JSON with settings of its own a line."""

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from codec_jax import Sampling

STDIN = "-"
_BOM = b"\xef\xbb\xbf"
_INTEGERS = {"num_samples", "max_new_tokens", "top_k", "seed"}
_SETTINGS = {field.name for field in dataclasses.fields(Sampling)}


class PromptRequest(NamedTuple):
    """A prompt and how its completions are drawn."""

    prompt: str
    sampling: Sampling


class _Line(NamedTuple):
    text: str
    place: str  # for messages: file and line


def read_prompts(path: str, sampling: Sampling) -> list[PromptRequest]:
    """The prompts of a file, in its order.

    In `*.jsonl` a line holds a JSON string, or an object with "prompt" and any settings of
    `Sampling`. In any other file, and in standard input ("-"), a line is a prompt as it stands: an
    empty line is an empty prompt. UTF-8 with or without a byte order mark; lines end in LF or CRLF,
    the last one with or without.

    Args:
      path: file name, or "-".
      sampling: settings that a line does not give.

    Raises:
      OSError: the file cannot be read.
      ValueError: bad UTF-8, bad JSON or a bad setting; the message names file and line.
    """
    content = sys.stdin.buffer.read() if path == STDIN else Path(path).read_bytes()
    lines = _decode_lines(content, "standard input" if path == STDIN else path)
    if path.endswith(".jsonl"):
        return [_parse_json(line, sampling) for line in lines]
    return [PromptRequest(line.text, sampling) for line in lines]


def check_unicode(prompt: str, place: str) -> None:
    """Raises `ValueError` if `prompt` holds a lone surrogate, for which UTF-8 has no bytes."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place}: a prompt must be valid Unicode; got a lone surrogate at character"
            f" {error.start}."
        ) from error


def _decode_lines(content: bytes, name: str) -> Iterator[_Line]:
    mark_bytes = len(_BOM) if content.startswith(_BOM) else 0
    # Split at LF alone: a prompt may hold U+2028 or a form feed.
    pieces = content[mark_bytes:].split(b"\n")
    if not pieces[-1]:
        pieces.pop()
    for number, piece in enumerate(pieces, start=1):
        place = f"{name}, line {number}"
        try:
            yield _Line(piece.removesuffix(b"\r").decode(), place)
        except UnicodeDecodeError as error:
            offset = error.start + (mark_bytes if number == 1 else 0)
            raise ValueError(
                f"{place}: a prompt must be UTF-8; got byte 0x{piece[error.start]:02x} at byte"
                f" offset {offset} of the line."
            ) from error


def _parse_json(line: _Line, sampling: Sampling) -> PromptRequest:
    try:
        value = json.loads(line.text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{line.place}: a line must hold one JSON value; {error}.") from error
    fields = {"prompt": value} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
        raise ValueError(
            f'{line.place}: a line must hold a string, or an object whose "prompt" is a string.'
        )
    settings = {name: fields[name] for name in fields if name != "prompt"}
    check_unicode(fields["prompt"], line.place)
    return PromptRequest(fields["prompt"], _replace_settings(sampling, settings, line.place))


def _replace_settings(sampling: Sampling, settings: dict[str, Any], place: str) -> Sampling:
    for name, value in settings.items():
        if name not in _SETTINGS:
            known = ", ".join(["prompt", *sorted(_SETTINGS)])
            raise ValueError(f"{place}: a setting must be one of {known}; got {name!r}.")
        kinds = int if name in _INTEGERS else int | float
        if isinstance(value, bool) or not isinstance(value, kinds):
            kind = "an integer" if name in _INTEGERS else "a number"
            raise ValueError(f"{place}: `{name}` must be {kind}; got {value!r}.")
    try:
        return dataclasses.replace(sampling, **settings)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
