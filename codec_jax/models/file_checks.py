"""Whether a path is a file at all, before anything is read from it."""

import os
import stat
from pathlib import Path


def find_file(path: Path) -> os.stat_result | None:
    """What the file system says of a regular file, or None where there is nothing.

    A pipe or a device would block or never end.

    Raises `ValueError` for anything else, and where the file system does not say.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"`{path}` must be a file; got a folder, a pipe or a device.")
    return found


def unreadable(path: Path, error: Exception) -> ValueError:
    """The refusal of a file that the operating system does not let be read."""
    reason = getattr(error, "strerror", None) or error
    return ValueError(f"`{path}` must be a file that can be read; got: {reason}.")
