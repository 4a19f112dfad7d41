"""The one door to Pallas's Mosaic GPU backend, whose names and types change between releases."""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as _mosaic_gpu

plgpu: Any = _mosaic_gpu
"""The module, untyped: its annotations are not meant for other packages yet."""
