"""Tuned configurations: what was fastest on a device, by shape.

`python -m experiments.tune_kernels` measures and writes `data/<device>.json`; without a file, or
for a shape that it does not hold, `KernelConfig.heuristic` decides.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pallas_kernels.config import MAX_SHARED_BYTES, KernelConfig

FOLDER = Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a configuration is tuned for."""

    dtype: str
    head_dim: int
    page_size: int


def best_config(device: str, dtype: Any, *, head_dim: int, page_size: int) -> KernelConfig:
    """The tuned configuration for such keys on a device, or the heuristic one.

    Args:
      device: its name in files, such as "nvidia-h200".
      dtype, head_dim, page_size: of keys and values; head_dim as stored.
    """
    shape = Shape(jnp.dtype(dtype).name, head_dim, page_size)
    return _configs_of(device).get(shape) or KernelConfig.heuristic(head_dim, dtype)


def load_configs(path: Path) -> dict[Shape, KernelConfig]:
    """The configurations of a device's file.

    Raises:
      ValueError: it is not what `experiments.tune_kernels` writes, or a configuration does not fit
        in shared memory; names the file.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))["configs"]
        return dict(map(_read_row, rows))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"`path` must be a file that experiments.tune_kernels wrote; {path}: {error!r}."
        ) from error


def _read_row(row: dict[str, Any]) -> tuple[Shape, KernelConfig]:
    shape, config = Shape(**row["shape"]), KernelConfig(**row["config"])
    num_bytes = config.shared_bytes(shape.head_dim, shape.dtype)
    if num_bytes > MAX_SHARED_BYTES:
        raise ValueError(
            f"`config` must fit in {MAX_SHARED_BYTES} bytes of shared memory; {config} for {shape}"
            f" needs {num_bytes}"
        )
    return shape, config


@functools.cache
def _configs_of(device: str) -> dict[Shape, KernelConfig]:
    path = FOLDER / f"{device}.json"
    return load_configs(path) if path.is_file() else {}
