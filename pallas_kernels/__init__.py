"""Pallas GPU kernels (Mosaic GPU, Hopper) for attention over a plan's arrays.

Knows nothing of codec_jax: takes arrays, never a plan. `supports` is asked before anything is built
and says why a case is refused.
"""

from pallas_kernels.support import Refusal as Refusal
from pallas_kernels.support import supports as supports
