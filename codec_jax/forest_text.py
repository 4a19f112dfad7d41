"""Text that keeps its place on a terminal: escaping, display columns, clipping."""

import unicodedata

ELLIPSIS = "…"


def escape(text: str) -> str:
    """`text` on one line, with every character that does not print as an escape sequence."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def display_width(text: str) -> int:
    """Columns that escaped text takes at most: 2 for a wide character, 0 for a combining one."""
    return sum(_char_width(char) for char in text)


def clip(text: str, width: int) -> str:
    """`text`, cut to `width` display columns; an ellipsis marks the cut."""
    if display_width(text) <= width:
        return text
    end, columns = 0, display_width(ELLIPSIS)
    while end < len(text) and columns + _char_width(text[end]) <= width:
        columns += _char_width(text[end])
        end += 1
    return text[:end] + ELLIPSIS if width > 0 else ""


def pad(text: str, width: int) -> str:
    """`text`, clipped or filled with spaces to exactly `width` display columns."""
    clipped = clip(text, width)
    return clipped + " " * (width - display_width(clipped))


def _char_width(char: str) -> int:
    # Emoji presentation (U+FE0F) makes the character before it wide on some terminals.
    if char == "\N{VARIATION SELECTOR-16}":
        return 1
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1
