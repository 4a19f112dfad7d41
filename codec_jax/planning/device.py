"""The device's name in files: measured costs, tuned kernels and results are kept under it."""

import re

import jax


def device_slug() -> str:
    """The default device's name as files and rows write it, such as "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")
