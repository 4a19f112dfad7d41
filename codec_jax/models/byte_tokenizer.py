"""Bytes as tokens, for models with random weights: their texts mean nothing anyway."""

from collections.abc import Iterable

_BOS_ID = 0
_FIRST_BYTE_ID = 1


class ByteTokenizer:
    """Id 0 starts a text, ids 1 to 256 are the bytes 0 to 255; others have no text; none ends one.

    Args:
      vocab_size: of the model; at least 257.
    """

    bos_id = _BOS_ID
    stop_ids = ()

    def __init__(self, vocab_size: int):
        if vocab_size < _FIRST_BYTE_ID + 256:
            raise ValueError(f"`vocab_size` must be at least 257, for all bytes; got {vocab_size}.")
        self.vocab_size = vocab_size

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of the UTF-8 bytes of `text`, after the BOS id if `bos`.

        Raises `ValueError` for a text with lone surrogates, which UTF-8 cannot hold.
        """
        start = [_BOS_ID] if bos else []
        return start + [byte + _FIRST_BYTE_ID for byte in text.encode()]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of the ids that are bytes; "·" for each id beyond them, so that lengths show.

        Raises `ValueError` for an id outside the vocabulary.
        """
        parts = []
        for token_id in ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"`ids` must be in [0, {self.vocab_size}); got {token_id}.")
            is_byte = _FIRST_BYTE_ID <= token_id < _FIRST_BYTE_ID + 256
            beyond = b"" if token_id == _BOS_ID else "·".encode()
            parts.append(bytes([token_id - _FIRST_BYTE_ID]) if is_byte else beyond)
        return b"".join(parts).decode("utf-8", errors="replace")
