"""Files of a checkpoint folder in the Hugging Face layout: JSON, text and safetensors.

Nothing else is read: no pickle, and no code from the folder is ever run.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from codec_jax.models.file_checks import find_file, unreadable

CONFIG = "config.json"
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load_text(path: Path) -> str | None:
    """The text of a file, or None where there is none.

    Raises `ValueError` if it is not UTF-8, no file or not to be read.
    """
    if find_file(path) is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"`{path}` must be UTF-8; got other bytes at {error.start}.") from error
    except OSError as error:
        raise unreadable(path, error) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The object of a JSON file, or None where there is no file.

    Raises `ValueError` if it is not one JSON object, or gives a name two values.
    """
    text = load_text(path)
    if text is None:
        return None
    try:
        value = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"`{path}` must hold JSON; got {error}. Copy the file again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"`{path}` must hold a JSON object; got {type(value).__name__}.")
    return value


def tensor_files(folder: Path) -> dict[Path, frozenset[str] | None]:
    """The safetensors files of a checkpoint, each with the tensors that count; None: all of them.

    An index names its shards; any other file in the folder is left alone.

    Raises:
      ValueError: there is neither an index nor `model.safetensors`, or the index is not one.
    """
    index = read_json(folder / _INDEX)
    if index is not None:
        return _shards(folder, index)
    if (folder / _SINGLE).is_file():
        return {folder / _SINGLE: None}
    others = sorted(
        path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".pth")
    )
    hint = f" {others[0]} is a pickle, which is never read: convert it." if others else ""
    raise ValueError(f"`{folder}` must hold {_SINGLE} or {_INDEX}; got neither.{hint}")


@contextlib.contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """A safetensors file whose header is whole and covers the file.

    Tensors are read by `get_tensor`, one at a time and not through a memory map, whose pages would
    count as this process's memory.

    Raises `ValueError` if the file is missing, truncated or of another format.
    """
    if find_file(path) is None:
        raise ValueError(f"`{path}` must exist: the checkpoint names it; got no file.")
    try:
        with safe_open(path, framework="numpy", backend="pread") as tensors:
            yield tensors
    except OSError as error:
        raise unreadable(path, error) from error
    except SafetensorError as error:
        raise ValueError(
            f"`{path}` must be a whole safetensors file; got: {error}. Copy the file again."
        ) from error


def read_tensor(tensors: Any, name: str, path: Path) -> np.ndarray:
    """One tensor of an open file, in float32, float16 or bfloat16, bit for bit.

    Raises `ValueError` for any other dtype: the tensor would need a scale that nobody gives.
    """
    dtype = tensors.get_slice(name).get_dtype()
    if dtype not in ("F32", "F16", "BF16"):
        raise ValueError(f"`{name}` in {path} must be F32, F16 or BF16; got {dtype}.")
    return tensors.get_tensor(name)


def _shards(folder: Path, index: dict[str, Any]) -> dict[Path, frozenset[str] | None]:
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"`weight_map` in {folder / _INDEX} must name tensors; got none.")
    names: dict[str, set[str]] = {}
    for tensor, file in weight_map.items():
        if not _is_plain_name(file):
            raise ValueError(
                f"`weight_map` in {folder / _INDEX} must name files in its own folder; got"
                f" {file!r} for {tensor}."
            )
        names.setdefault(file, set()).add(tensor)
    return {folder / file: frozenset(tensors) for file, tensors in sorted(names.items())}


def _is_plain_name(file: Any) -> bool:
    """Whether a path that ends in it lies in the folder before it, on every system."""
    is_name = isinstance(file, str) and file.isprintable() and not set(file) & set("/\\:")
    return is_name and file not in ("", ".", "..")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, item in pairs:
        if value.setdefault(name, item) != item:
            raise ValueError(f"two values of {name!r}")
    return value
