"""Rules for numbers that files of others hold: kinds, ranges, and that float32 holds them."""

import re
from collections.abc import Mapping
from typing import Any

MAX_INT32 = 2**31 - 1
_MAX_FLOAT32 = 3.4e38


def is_integer(value: Any) -> bool:
    """Whether it is an integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether it is an integer or a float that float32 holds, so neither NaN nor infinite."""
    is_real = is_integer(value) or isinstance(value, float)
    return is_real and -_MAX_FLOAT32 <= value <= _MAX_FLOAT32


def check_positive_integer(
    name: str, value: Any, *, most: int = MAX_INT32, where: str = ""
) -> None:
    """Raises `ValueError` unless the value of the field `name` is an integer from 1 to `most`.

    `where` (" in config.json") follows the name in the message.
    """
    if not is_integer(value) or not 1 <= value <= most:
        raise ValueError(f"`{name}`{where} must be an integer from 1 to {most}; got {value!r}.")


def check_positive(name: str, value: Any, *, where: str = "") -> None:
    """Raises `ValueError` unless the value of the field `name` is positive and float32 holds it."""
    if not is_number(value) or value <= 0:
        raise ValueError(f"`{name}`{where} must be a positive number up to 3.4e38; got {value!r}.")


def in_words_of(words: Mapping[str, str], error: ValueError) -> str:
    """The error's message, with a file's names of fields (`words`' values) for this library's."""
    return re.sub("`(\\w+)`", lambda match: f"`{words.get(match[1], match[1])}`", str(error))
