"""What weights take on the device, and what the device has; known before anything is allocated."""

import os
from typing import Any

import jax

from codec_jax.models.config import ModelConfig, num_params


def weights_bytes(config: ModelConfig) -> int:
    """Bytes of a decoder's parameters in `config.dtype`."""
    return num_params(config) * config.array_dtype.itemsize


def check_fits(config: ModelConfig, name: str) -> None:
    """Raises `ValueError` when the default device says that it has less than the weights take."""
    needed, available = weights_bytes(config), available_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"`{name}` needs {as_gib(needed)} for its weights in {config.dtype}; the device has"
            f" {as_gib(available)}. Take a smaller model, or `dtype` bfloat16."
        )


def as_gib(num_bytes: int) -> str:
    """Bytes for people: "1.50 GiB", or MiB below a GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def available_bytes(device: Any = None) -> int | None:
    """Memory that the default device has for JAX, weights included; None when it does not say."""
    device = jax.devices()[0] if device is None else device
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    if device.platform == "cpu" and all(name in os.sysconf_names for name in names):
        return os.sysconf(names[0]) * os.sysconf(names[1])
    return None
