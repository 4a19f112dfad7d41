"""Where a result comes from: sources, versions, device, day."""

import datetime
import hashlib
import subprocess
from pathlib import Path

import jax

from codec_jax.planning.device import device_slug

_REPOSITORY = Path(__file__).resolve().parent.parent
_SOURCES = ("pallas_kernels", "codec_jax")


def source_hash(paths: tuple[str, ...] = _SOURCES) -> str:
    """SHA-256 over names and contents of the files below these paths that decide what runs.

    Python, and JSON: tuned configurations and measured costs.
    """
    digest = hashlib.sha256()
    for path in paths:
        found = (_REPOSITORY / path).rglob("*")
        for file in sorted(file for file in found if file.suffix in (".py", ".json")):
            digest.update(str(file.relative_to(_REPOSITORY)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def commit() -> str:
    """The checked-out commit; "unknown" outside a repository."""
    command = ["git", "-C", str(_REPOSITORY), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def implementation_in(hlo: str) -> str:
    """What a compiled program runs: "mosaic_gpu" if it calls a Mosaic kernel, else "xla"."""
    return "mosaic_gpu" if "mosaic_gpu" in hlo else "xla"


def provenance(known_commit: str | None = None) -> dict[str, str]:
    """Fields of a result row: device, jax, commit, tree_hash, date.

    `known_commit` is for a copy of the tree that travels without its repository.
    """
    return {
        "device": device_slug(),
        "jax": jax.__version__,
        "commit": known_commit or commit(),
        "tree_hash": source_hash(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
