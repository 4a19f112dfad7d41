"""What a result was made with: versions of the packages, device, implementation."""

import importlib.metadata

import jax

from codec_jax.attention import choose_implementation
from codec_jax.models import ModelConfig

_PACKAGES = ("codec_jax", "jax", "jaxlib", "flax")


def describe_versions(
    name: str, config: ModelConfig, *, page_size: int, implementation: str | None = None
) -> str:
    """A line for each package, the devices, and the implementation that would run a model.

    `name` and `config` are the model's; no weights are needed.

    Raises `NotImplementedError` if the implementation that was asked for cannot.
    """
    chosen, reason = choose_implementation(
        (config.num_kv_heads, page_size, config.head_dim),
        config.array_dtype,
        config.group_size,
        implementation=implementation,
    )
    devices = jax.devices()
    return "\n".join(
        [
            *(f"{package} {_version(package)}" for package in _PACKAGES),
            f"device: {len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
            f"implementation for {name}: {chosen} ({reason.rstrip('.')})",
        ]
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed, runs from its source"
