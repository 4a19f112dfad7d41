"""Writing a step's new keys and values into the pool: one launch on a Hopper GPU.

A thread block owns some KV heads of one token: it loads their keys and values, 16 bytes a thread
where there are that many, and stores them at the token's row of its page, straight from registers.

Memory traffic: each new key and value once read and once written. The time is latency: the loads
are in flight together, the stores wait for them alone.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.compat import plgpu, rows_layout, store

BLOCK_ELEMENTS = 1024
"""Of a tile of registers: 16 bytes of a 16-bit type for each of 128 threads."""


def _kernel(
    # inputs
    k_gmem,  # [tokens, num_kv_heads, head_dim]
    v_gmem,  # [tokens, num_kv_heads, head_dim]
    page_gmem,  # [tokens]
    row_gmem,  # [tokens]
    page_offset_gmem,  # [1]
    # inputs and outputs
    k_pages_gmem,  # [pages of all layers, num_kv_heads, page_size, head_dim]
    v_pages_gmem,  # [pages of all layers, num_kv_heads, page_size, head_dim]
    *,
    num_pages: int,
    block_heads: int,
):
    _, num_kv_heads, page_size, head_dim = k_pages_gmem.shape
    num_parts = jnp.int32(num_kv_heads // block_heads)
    block = lax.axis_index("block")
    token, part = lax.div(block, num_parts), lax.rem(block, num_parts)
    heads = pl.ds(part * block_heads, block_heads)
    layout = rows_layout(block_heads, _columns(head_dim))
    # Before the slot is known: all loads are in flight together.
    k, v = (
        plgpu.load(ref.at[token, heads], layout=layout, optimized=False) for ref in (k_gmem, v_gmem)
    )
    page, row, page_offset = page_gmem[token], row_gmem[token], page_offset_gmem[0]

    @pl.when((page >= 0) & (page < num_pages) & (row >= 0) & (row < page_size))
    def _():
        # Never a flat index: the pool has more elements than 32 bits count.
        where = page_offset + page, heads, row
        store(k_pages_gmem.at[where], k)
        store(v_pages_gmem.at[where], v)


def append_rows(
    pages: tuple[Array, Array],
    values: tuple[
        Float[Array, "tokens num_kv_heads head_dim"], Float[Array, "tokens num_kv_heads head_dim"]
    ],
    page: Int32[Array, " tokens"],
    row: Int32[Array, " tokens"],
    page_offset: Int32[Array, " 1"],
    *,
    num_pages: int,
) -> tuple[
    Float[Array, "pages num_kv_heads page_size head_dim"],
    Float[Array, "pages num_kv_heads page_size head_dim"],
]:
    """K and V pages of all layers with the tokens' keys and values written, in place.

    The pages must go whole from call to call (donated, the carry of a loop). As a slice of a larger
    array, such as the `xs` and `ys` of a `scan`, XLA would let the kernel write into a slice of the
    results, and forget that it updates its operands in place.

    Args:
      pages: K and V, `[pages of all layers, num_kv_heads, page_size, head_dim]`, bfloat16 or
        float16, head_dim a multiple of 64.
      values: of the tokens, K and V, the pages' dtype. A narrower head_dim is padded with zeros.
      page: within a layer; one outside [0, num_pages) drops the token.
      row: within the page; one outside it drops the token. No two tokens that are written may have
        the same page and row.
      page_offset: added to every page: layer * num_pages.
      num_pages: pages of a layer.
    """
    _, num_kv_heads, _, head_dim = pages[0].shape
    padding = ((0, 0), (0, 0), (0, head_dim - values[0].shape[2]))
    k, v = (jnp.pad(array, padding) for array in values)
    block_heads = math.gcd(num_kv_heads, BLOCK_ELEMENTS // _columns(head_dim))
    kernel = plgpu.kernel(
        functools.partial(_kernel, num_pages=num_pages, block_heads=block_heads),
        out_type=(),
        grid=(k.shape[0] * (num_kv_heads // block_heads),),
        grid_names=("block",),
        # No thread reads what it or another writes.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
    )
    refs = [jax.new_ref(array) for array in pages]
    kernel(k, v, page, row, page_offset, *refs)
    k_pages, v_pages = (jax.freeze(ref) for ref in refs)
    return k_pages, v_pages


def _columns(head_dim: int) -> int:
    """The largest power of two that divides it."""
    return head_dim & -head_dim
