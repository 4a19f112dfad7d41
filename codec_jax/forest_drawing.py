"""A prefix forest drawn for a terminal: who shares what, and how many KV reads that saves."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestArrays, export_arrays
from codec_jax.forest_node import Node
from codec_jax.forest_text import ELLIPSIS, clip, display_width, escape, pad

MIN_WIDTH = 48
MIN_LINES = 6
_HEADER = ("tokens", "sharers", "reads saved")
_GAP = "  "


class _Entry(NamedTuple):
    """One line of the tree: a node of the forest, or a remark in its place."""

    depth: int
    bars: str  # the lines of the ancestors, 3 columns each
    is_last: bool
    node: int | None  # place in preorder
    remark: str


def draw_forest(
    forest: Forest,
    *,
    decode: Callable[[list[int]], str] | None = None,
    width: int = 80,
    max_lines: int = 40,
) -> str:
    """A tree of the forest's nodes, each with its tokens, its sharers and the KV reads it saves.

    A node that s requests share saves `tokens * (s - 1)` KV token reads per decode step. The
    private leaves of a node are one line. Where lines are short, every node shows its first
    children only, as many as fit, and the number of the others.

    Args:
      forest: what to draw.
      decode: text of a list of token ids; without it the ids are shown.
      width: display columns that no line exceeds; at least `MIN_WIDTH`.
      max_lines: lines in all; at least `MIN_LINES`.
    """
    if width < MIN_WIDTH:
        raise ValueError(f"`width` must be >= {MIN_WIDTH} columns; got {width}.")
    if max_lines < MIN_LINES:
        raise ValueError(f"`max_lines` must be >= {MIN_LINES}; got {max_lines}.")
    arrays = export_arrays(forest)
    nodes = [forest.node(node_id) for node_id in forest.preorder()]
    cells = _Cells(nodes, arrays, decode=decode, width=width)
    footer = _footer(forest, arrays)
    max_bars = cells.label_width // 6
    entries = _fitting_entries(
        _children(nodes, arrays), max_bars=max_bars, max_entries=max_lines - 1 - len(footer)
    )
    lines = [cells.header(), *(cells.line(entry) for entry in entries), *footer]
    return "\n".join(clip(line, width).rstrip() for line in lines)


class _Cells:
    """The columns of the drawing: label on the left, numbers aligned on the right."""

    def __init__(
        self,
        nodes: list[Node],
        arrays: ForestArrays,
        *,
        decode: Callable[[list[int]], str] | None,
        width: int,
    ):
        num_sharers = (arrays.request_hi - arrays.request_lo).astype(np.int64)
        num_saved = arrays.kv_len * np.maximum(num_sharers - 1, 0)
        columns = (arrays.kv_len, num_sharers, num_saved)
        self._nodes = nodes
        self._decode = decode
        self._width = width
        self._numbers = [
            tuple(f"{number:,}" for number in row)
            for row in zip(*(column.tolist() for column in columns), strict=True)
        ]
        self._column_widths = [
            max(map(len, column)) for column in zip(_HEADER, *self._numbers, strict=True)
        ]
        numbers_width = sum(self._column_widths) + len(_GAP) * len(_HEADER)
        self.label_width = max(width - numbers_width, MIN_WIDTH // 4)

    def header(self) -> str:
        return self._row("", _HEADER)

    def line(self, entry: _Entry) -> str:
        prefix = _prefix(entry)
        if entry.node is None:
            return prefix + entry.remark
        room = self.label_width - display_width(prefix)
        return self._row(prefix + self._label(entry.node, room), self._numbers[entry.node])

    def _row(self, label: str, numbers: tuple[str, ...]) -> str:
        aligned = (
            text.rjust(size) for text, size in zip(numbers, self._column_widths, strict=True)
        )
        return _GAP.join([pad(label, self.label_width), *aligned])

    def _label(self, node: int, room: int) -> str:
        """The first words of a node in at most `room` columns."""
        run = self._nodes[node].tokens
        tokens = run[: self._width].tolist()
        mark = ELLIPSIS if len(tokens) < run.size else ""
        if self._decode is None:
            return clip(" ".join(map(str, tokens)) + mark, room)
        text = escape(self._decode(tokens)) + mark
        return f'"{clip(text, max(room - 2, 1))}"'


def _children(nodes: list[Node], arrays: ForestArrays) -> dict[int, list[int | str]]:
    """What to draw below each node (-1: the roots): its private leaves as one remark, children."""
    leaves: dict[int, list[Node]] = {}
    children: dict[int, list[int | str]] = {}
    for i, (node, parent) in enumerate(zip(nodes, arrays.parent.tolist(), strict=True)):
        if node.is_private_leaf:
            leaves.setdefault(parent, []).append(node)
        else:
            children.setdefault(parent, []).append(i)
    for parent, samples in leaves.items():
        children.setdefault(parent, []).insert(0, _samples(samples))
    return children


def _samples(leaves: list[Node]) -> str:
    """One line about the private leaves of a node."""
    capacities = {leaf.max_kv_len for leaf in leaves}
    num_tokens = sum(leaf.kv_len for leaf in leaves)
    each = " each" if len(leaves) > 1 and len(capacities) == 1 else ""
    so_far = f", {num_tokens:,} so far" if num_tokens else ""
    return (
        f"{_count(len(leaves), 'sample')}, up to {_count(max(capacities), 'new token')}"
        f"{each}{so_far}"
    )


def _fitting_entries(
    children: dict[int, list[int | str]], *, max_bars: int, max_entries: int
) -> list[_Entry]:
    """The entries with as many siblings as fit; cut at the end where depth alone is too much."""
    for max_siblings in range(max_entries, 0, -1):
        walk = _walk(children, max_siblings=max_siblings, max_bars=max_bars)
        entries = list(itertools.islice(walk, max_entries + 1))
        if len(entries) <= max_entries:
            return entries
    walk = _walk(children, max_siblings=1, max_bars=max_bars)
    entries = list(itertools.islice(walk, max_entries - 1))
    num_hidden = sum(1 for _ in walk)
    return [*entries, _Entry(0, "", True, None, f"... {num_hidden:,} more")]


def _walk(
    children: dict[int, list[int | str]], *, max_siblings: int, max_bars: int
) -> Iterator[_Entry]:
    """Lines of the tree from top to bottom, at most `max_siblings` (and a remark) per node."""
    stack = _siblings(children.get(-1, []), depth=0, bars="", max_siblings=max_siblings)
    while stack:
        entry = stack.pop()
        yield entry
        if entry.node is None:
            continue
        bars = entry.bars
        if 0 < entry.depth < max_bars:
            bars += "   " if entry.is_last else "│  "
        below = children.get(entry.node, [])
        stack += _siblings(below, depth=entry.depth + 1, bars=bars, max_siblings=max_siblings)


def _siblings(
    members: list[int | str], *, depth: int, bars: str, max_siblings: int
) -> list[_Entry]:
    """Entries of one node's children, the last one first (a stack)."""
    shown = members
    if len(members) > max_siblings + 1:
        shown = [*members[:max_siblings], f"... {len(members) - max_siblings:,} more"]
    entries = [
        _Entry(depth, bars, False, None, member)
        if isinstance(member, str)
        else _Entry(depth, bars, False, member, "")
        for member in shown
    ]
    if entries:
        entries[-1] = entries[-1]._replace(is_last=True)
    return entries[::-1]


def _prefix(entry: _Entry) -> str:
    """The lines on the left; below the deepest indentation the depth is written out instead."""
    if entry.depth == 0:
        return ""
    branch = "└─ " if entry.is_last else "├─ "
    is_capped = len(entry.bars) < 3 * (entry.depth - 1)
    return entry.bars + branch + (f"(depth {entry.depth}) " if is_capped else "")


def _footer(forest: Forest, arrays: ForestArrays) -> list[str]:
    num_pages = np.unique(arrays.page_list[arrays.page_list >= 0]).size
    unique, total = forest.unique_tokens, forest.total_tokens
    ratio = f" ({total / unique:.1f}x)" if unique else ""
    return [
        f"{_count(forest.num_requests, 'request')}: {unique:,} unique of {total:,} total KV "
        f"tokens{ratio}",
        f"{_count(num_pages, 'page')} used, {_count(forest.page_size, 'token')} each",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
