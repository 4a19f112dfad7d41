"""Result files: one JSON object a line, complete or not there at all."""

import functools
import json
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def check_writable(path: str | Path) -> None:
    """Raises unless `write_json_lines` can write to `path`; leaves a file there as it is.

    Raises:
      OSError: the folder does not exist or takes no new file.
      ValueError: `path` names something that is no regular file.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        raise ValueError(f"`output` must be a regular file or a new name; got {str(path)!r}.")
    probe = _temporary(target)
    try:
        probe.touch(exist_ok=False)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    probe.unlink()


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object a line; empty lines are passed over.

    Raises:
      OSError: the file cannot be read.
      ValueError: a line is no JSON object, or the file is no UTF-8.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error}") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{place}: not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{place}: a line must hold an object; got {type(row).__name__}.")
        rows.append(row)
    return rows


def write_json_lines(path: str | Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one object a line in UTF-8, whole or not at all, see `write_text`."""
    dump = functools.partial(json.dumps, ensure_ascii=False, allow_nan=False)
    write_text(path, (dump(row) + "\n" for row in rows))


def write_text(path: str | Path, parts: Iterable[str]) -> None:
    """Writes the parts in UTF-8, and replaces `path` when all of them are on the disk.

    A reader sees the old file or the new one. After any failure the old file is as it was, and
    nothing else is left in the folder.
    """
    target = Path(path).resolve()
    temporary = _temporary(target)
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(target: Path) -> Path:
    """A new name in the same folder: a file is only moved as a whole within one file system."""
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
