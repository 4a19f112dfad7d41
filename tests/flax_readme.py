"""The marked code blocks of codec_jax/flax/README.md."""

import re
from pathlib import Path
from typing import NamedTuple

README = Path(__file__).parents[1] / "codec_jax" / "flax" / "README.md"
MARKED = re.compile(r"<!-- doors: ([\w ]+) -->\n```(\w+)\n(.*?)```", re.DOTALL)


class Diff(NamedTuple):
    """A block of changed lines, as the two texts that it stands for."""

    before: str
    after: str
    num_added: int
    num_removed: int


def blocks() -> dict[str, tuple[str, str]]:
    """Language and text of each marked block, by its name."""
    text = README.read_text(encoding="utf-8")
    return {name: (language, block) for name, language, block in MARKED.findall(text)}


def diff_block(name: str) -> Diff:
    """The marked block of changed lines."""
    language, text = blocks()[name]
    assert language == "diff"
    lines = [(line[:1] or " ", line[1:]) for line in text.splitlines()]
    assert {sign for sign, _ in lines} <= set(" +-")

    def side(signs):
        return "\n".join(line for sign, line in lines if sign in signs)

    added, removed = (sum(sign == wanted and bool(line) for sign, line in lines) for wanted in "+-")
    return Diff(side(" -"), side(" +"), added, removed)
