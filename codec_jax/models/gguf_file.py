"""GGUF files: metadata, and tensors dequantised one at a time, by the package `gguf`.

The format: github.com/ggml-org/ggml, docs/gguf.md.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from codec_jax.models.config import DTypeName
from codec_jax.models.file_checks import find_file, unreadable

KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0")
_UNQUANTISED: dict[str, DTypeName] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_UNREADABLE = (ValueError, LookupError, ArithmeticError, TypeError, RecursionError)
_CHUNK_ELEMENTS = 2**20


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
    found = find_file(path)
    if found is None:
        raise ValueError(f"`{path}` must exist; got no file.")
    return _parse(path, found.st_size, found.st_mtime_ns)


def check_kinds(file: GGUFFile, names: Iterable[str]) -> None:
    """Raises `ValueError` that names a tensor whose kind is not among `KINDS`."""
    for name in names:
        kind = file.tensors[name].kind
        if kind not in KINDS:
            raise ValueError(
                f"`{name}` in {file.path} must be one of {', '.join(KINDS)}; got {kind}."
            )


def dequantise(file: GGUFFile, name: str, dtype: DTypeLike = np.float32) -> np.ndarray:
    """A tensor of the file, rounded once to `dtype`; exact in float32 for F32, F16 and BF16.

    Beside the tensor, the host holds some of its rows as they are stored and in float32.

    Raises `ValueError` for a kind that is not among `KINDS`.
    """
    check_kinds(file, [name])
    gguf = _import_gguf(file.path)
    tensor = file.tensors[name]
    kind = gguf.GGMLQuantizationType[tensor.kind]
    result = np.empty((math.prod(tensor.shape[:-1]), tensor.shape[-1]), dtype)
    row_bytes = tensor.num_bytes // len(result)
    num_rows = max(1, _CHUNK_ELEMENTS // tensor.shape[-1])
    for start in range(0, len(result), num_rows):
        rows = result[start : start + num_rows]
        # Not through a memory map, whose pages would count as this process's memory.
        offset, size = tensor.offset + start * row_bytes, len(rows) * row_bytes
        stored = np.fromfile(file.path, np.uint8, size, offset=offset)
        rows[:] = gguf.dequantize(stored.reshape(len(rows), -1), kind)
    return result.reshape(tensor.shape)


def stored_dtype(file: GGUFFile) -> DTypeName:
    """The dtype that all matrices are stored in; bfloat16 where they are quantised or differ."""
    kinds = {tensor.kind for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return _UNQUANTISED.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


@functools.lru_cache(maxsize=1)
def _parse(path: Path, size: int, modified_ns: int) -> GGUFFile:
    del size, modified_ns  # they tell a changed file from the one that is kept
    try:
        with np.errstate(all="raise"):  # the package computes with NumPy's integers
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
        _check_places(tensors, reader)
    except OSError as error:
        raise unreadable(path, error) from error
    except _UNREADABLE as error:
        raise ValueError(
            f"`{path}` must be a whole GGUF file; got: {error}. Copy the file again."
        ) from error
    return GGUFFile(path, fields, tensors)


def _check_places(tensors: Mapping[str, StoredTensor], reader: Any) -> None:
    """Refuses tensors that overlap, and offsets and sizes that overflowed in the reader."""
    end = reader.data_offset
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        if not tensor.shape or 0 in tensor.shape:
            raise ValueError(f"shape {list(tensor.shape)} for {name}")
        if tensor.offset % reader.alignment or tensor.offset < end:
            raise ValueError(
                f"{name} at byte {tensor.offset}, where a multiple of {reader.alignment} from"
                f" {end} on belongs"
            )
        end = tensor.offset + tensor.num_bytes
    sizes = {tensor.name: int(tensor.n_elements) for tensor in reader.tensors}
    wrong = [name for name, tensor in tensors.items() if math.prod(tensor.shape) != sizes[name]]
    if wrong:
        raise ValueError(f"shape {list(tensors[wrong[0]].shape)} for {wrong[0]}")


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
