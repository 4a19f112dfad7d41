"""Pallas GPU kernels (Mosaic GPU, Hopper) for attention over a plan's arrays.

Knows nothing of codec_jax: takes arrays, never a plan. `supports` is asked before anything is built
and says why a case is refused. The kernels themselves are in `append`, `partial_attention` and
`merge`, which load Pallas; a machine without a GPU never does.
"""

from pallas_kernels.config import KernelConfig as KernelConfig
from pallas_kernels.support import Refusal as Refusal
from pallas_kernels.support import padded_head_dim as padded_head_dim
from pallas_kernels.support import supports as supports
from pallas_kernels.tables import Tables as Tables
from pallas_kernels.tables import pack_table as pack_table
from pallas_kernels.tables import pack_tables as pack_tables
