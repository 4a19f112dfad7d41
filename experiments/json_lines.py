"""Result files: one JSON object a line, complete or not there at all."""

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


def write_json_lines(path: str | Path, rows: Iterable[dict[str, Any]]) -> None:
    """Writes one object a line in UTF-8, and replaces `path` when all of them are on the disk.

    A reader sees the old file or the new one. After any failure the old file is as it was, and
    nothing else is left in the folder.
    """
    target = Path(path).resolve()
    temporary = _temporary(target)
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
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
