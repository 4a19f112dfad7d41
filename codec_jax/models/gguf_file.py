"""GGUF files: metadata, and tensors dequantised one at a time, by the package `gguf`.

The format: github.com/ggml-org/ggml, docs/gguf.md.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from codec_jax.models.config import DTypeName

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
_UNQUANTISED: dict[str, DTypeName] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_UNREADABLE = (ValueError, LookupError, ArithmeticError, TypeError, RecursionError)


class StoredTensor(NamedTuple):
    """A tensor of a file: kind ("Q4_0"), shape as NumPy has it, and where its bytes lie."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class GGUFFile(NamedTuple):
    """What a file says: metadata and tensors, by name."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_gguf(path: Path) -> GGUFFile:
    """The metadata of a file and where its tensors lie; no tensor is read.

    Parsing a vocabulary takes seconds, so the last file is kept until it changes.

    Raises:
      ValueError: the file is truncated or no GGUF file of this byte order, or the package `gguf`
        is not installed.
    """
    _import_gguf(path)
    try:
        stat = path.stat()
    except OSError as error:
        raise ValueError(f"`{path}` must be a file that can be read; got: {error}.") from error
    return _parse(path, stat.st_size, stat.st_mtime_ns)


def dequantise(file: GGUFFile, name: str) -> np.ndarray:
    """A tensor of the file in float32; exact for F32, F16 and BF16.

    Raises `ValueError` for a kind that is not among `KINDS`.
    """
    tensor = file.tensors[name]
    if tensor.kind not in KINDS:
        raise ValueError(
            f"`{name}` in {file.path} must be one of {', '.join(KINDS)}; got {tensor.kind}."
        )
    # Not through a memory map, whose pages would count as this process's memory.
    stored = np.fromfile(file.path, np.uint8, tensor.num_bytes, offset=tensor.offset)
    gguf = _import_gguf(file.path)
    rows = stored.reshape(*tensor.shape[:-1], -1)
    return gguf.dequantize(rows, gguf.GGMLQuantizationType[tensor.kind])


def stored_dtype(file: GGUFFile) -> DTypeName:
    """The dtype that all matrices are stored in; bfloat16 where they are quantised or differ."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return _UNQUANTISED.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


@functools.lru_cache(maxsize=1)
def _parse(path: Path, size: int, modified_ns: int) -> GGUFFile:
    del size, modified_ns  # they tell a changed file from the one that is kept
    try:
        reader = _open_whole(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {
            tensor.name: StoredTensor(
                tensor.tensor_type.name,
                tuple(reversed(tensor.shape.tolist())),
                tensor.data_offset,
                tensor.n_bytes,
            )
            for tensor in reader.tensors
        }
    except _UNREADABLE as error:
        raise ValueError(
            f"`{path}` must be a whole GGUF file; got: {error}. Copy the file again."
        ) from error
    return GGUFFile(path, fields, tensors)


def _open_whole(path: Path) -> Any:
    """A reader that refuses what lies behind the file's end, where the package's reads nothing."""
    gguf = _import_gguf(path)

    class WholeReader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            needed = int(offset) + np.dtype(dtype).itemsize * int(count)
            if needed > len(self.data):
                raise ValueError(f"{len(self.data)} bytes where at least {needed} belong")
            return super()._get(offset, dtype, count, override_order)

    reader = WholeReader(path)
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise ValueError("big-endian numbers")
    return reader


def _import_gguf(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            f"`{path}` needs the package gguf, which is not installed. Install it: pip install gguf"
            " (or this package with its extra `gguf`)."
        ) from error
    return gguf
