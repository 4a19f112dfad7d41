"""Byte-pair tokenizer in the file format of github.com/karpathy/llama2.c (`tok*.bin`)."""

import heapq
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

_BOS_ID, _EOS_ID = 1, 2
_FIRST_BYTE_ID = 3  # Ids 3 to 258 stand for the bytes 0 to 255.
_NUM_RESERVED_IDS = _FIRST_BYTE_ID + 256
_BYTE_PIECE = re.compile(rb"<0x([0-9A-F]{2})>")
_END = -1


@runtime_checkable
class Tokenizer(Protocol):
    """What the decode loop needs of a tokenizer."""

    @property
    def bos_id(self) -> int | None:
        """Id that starts a sequence, if there is one."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end a sequence."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        ...

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids."""
        ...


class Llama2cTokenizer:
    """Tokenizer that merges the best-scored adjacent pair first.

    A text starts with one dummy space, characters outside the vocabulary become their UTF-8 bytes,
    then the adjacent pair whose concatenation has the best score is merged (the leftmost of equal
    ones) until no concatenation is in the vocabulary. Id 1 both starts a text and ends one: the
    training stream separates its texts by it. Id 2 is the conventional end of a text.
    """

    bos_id = _BOS_ID
    stop_ids = (_BOS_ID, _EOS_ID)

    def __init__(self, pieces: list[bytes], scores: list[float]):
        """Raises `ValueError` unless ids 3 to 258 are the byte tokens `<0x00>` to `<0xFF>`."""
        expected = [b"<0x%02X>" % byte for byte in range(256)]
        if pieces[_FIRST_BYTE_ID:_NUM_RESERVED_IDS] != expected:
            raise ValueError(
                f"`pieces` must hold the byte tokens <0x00> to <0xFF> at ids {_FIRST_BYTE_ID} to "
                f"{_NUM_RESERVED_IDS - 1}; got {len(pieces)} pieces without them. Is it a "
                f"llama2.c tokenizer?"
            )
        self._pieces = pieces
        self._scores = scores
        self._text = [_piece_bytes(piece) for piece in pieces]
        self._ids = {piece: index for index, piece in reversed(list(enumerate(pieces)))}

    @classmethod
    def from_file(cls, path: str | Path) -> "Llama2cTokenizer":
        """The tokenizer of a `tok*.bin` file.

        Raises `ValueError` if the file is truncated or not of this format.
        """
        path = Path(path)
        pieces, scores = [], []
        for score, piece in _read_entries(path, path.read_bytes()):
            pieces.append(piece)
            scores.append(score)
        return cls(pieces, scores)

    @property
    def vocab_size(self) -> int:
        """Number of ids."""
        return len(self._pieces)

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Token ids of `text`, after the BOS id if `bos`; an empty text has no dummy space.

        Raises `ValueError` for a text with lone surrogates, which UTF-8 cannot hold.
        """
        prefix = [self.bos_id] if bos else []
        return prefix + self._merge_pairs(self._split(" " + text)) if text else prefix

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`, without the control tokens and the dummy space that follows a BOS.

        Bytes are joined before they are read as UTF-8, so a character may be spread over tokens;
        invalid bytes become U+FFFD. Raises `ValueError` for an id outside the vocabulary.
        """
        parts = []
        after_bos = False
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"`ids` must be in [0, {self.vocab_size}); got {token_id}.")
            if token_id not in self.stop_ids:
                part = self._text[token_id]
                parts.append(part.removeprefix(b" ") if after_bos else part)
            after_bos = token_id == self.bos_id
        return b"".join(parts).decode("utf-8", errors="replace")

    def _split(self, text: str) -> list[int]:
        """Ids of the characters of `text`, of their bytes where the vocabulary lacks them."""
        ids = []
        for character in text:
            try:
                encoded = character.encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"`text` must be valid Unicode; got the lone surrogate {character!r}. Replace "
                    f"it first."
                ) from error
            token_id = self._ids.get(encoded)
            ids += [byte + _FIRST_BYTE_ID for byte in encoded] if token_id is None else [token_id]
        return ids

    def _merge_pairs(self, ids: list[int]) -> list[int]:
        """`ids` after all merges, in O(n log n): a heap of candidates over a doubly linked list."""
        following = [*range(1, len(ids)), _END]
        preceding = list(range(-1, len(ids) - 1))
        heap = [
            candidate
            for left in range(len(ids) - 1)
            if (candidate := self._candidate(ids, left, left + 1)) is not None
        ]
        heapq.heapify(heap)
        while heap:
            _, left, right, pair, merged = heapq.heappop(heap)
            # A merge changes both ids, so an unchanged pair is still a pair of neighbours.
            if (ids[left], ids[right]) != pair:
                continue
            ids[left], ids[right] = merged, _END
            following[left] = following[right]
            if following[left] != _END:
                preceding[following[left]] = left
            for first, second in ((preceding[left], left), (left, following[left])):
                candidate = self._candidate(ids, first, second)
                if candidate is not None:
                    heapq.heappush(heap, candidate)
        return [token_id for token_id in ids if token_id != _END]

    def _candidate(
        self, ids: list[int], left: int, right: int
    ) -> tuple[float, int, int, tuple[int, int], int] | None:
        """Heap entry of a pair of places, ordered by best score, then leftmost."""
        if _END in (left, right):
            return None
        merged = self._ids.get(self._pieces[ids[left]] + self._pieces[ids[right]])
        if merged is None:
            return None
        return -self._scores[merged], left, right, (ids[left], ids[right]), merged


def _piece_bytes(piece: bytes) -> bytes:
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes.fromhex(match[1].decode()) if match else piece


def _read_entries(path: Path, content: bytes) -> Iterator[tuple[float, bytes]]:
    """Score and piece of every entry after the int32 that says the longest piece's length."""
    entry = struct.Struct("<fi")
    offset = 4
    while offset < len(content):
        start = offset + entry.size
        whole_entry = start <= len(content)
        score, num_bytes = entry.unpack_from(content, offset) if whole_entry else (0.0, -1)
        offset = start + num_bytes
        if num_bytes < 0 or offset > len(content):
            raise ValueError(
                f"`path` must be a whole llama2.c tokenizer file; got {len(content)} bytes in "
                f"{path}, which end inside an entry. Copy the file again."
            )
        yield score, content[start:offset]
