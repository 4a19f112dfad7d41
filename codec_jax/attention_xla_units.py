"""The XLA path's units of work: a plan's segments cut into (step, block of rows) pieces, gathered.

All KV heads alike, a chunk at a time: memory is O(chunk), and time follows the live units, not the
plan's capacity.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from codec_jax.attention_rows import Rows
from codec_jax.kv_cache import KVPool
from codec_jax.planning.plan import Segments
from codec_jax.planning.resolve import ResolvedSteps
from codec_jax.planning.scans import inclusive_sum, iota, owner_of
from codec_jax.planning.spec import TILE_ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkConfig:
    """Sizes of the XLA path.

    Attributes:
      row_block: query rows of a unit; divides 64. Fewer waste less work on leaves with few rows.
      chunk_units: units computed together.
    """

    row_block: int = 16
    chunk_units: int = 64

    def __post_init__(self) -> None:
        if self.row_block < 1 or TILE_ROWS % self.row_block:
            raise ValueError(f"`row_block` must divide {TILE_ROWS}; got {self.row_block}.")
        if self.chunk_units < 1:
            raise ValueError(f"`chunk_units` must be positive; got {self.chunk_units}.")

    @classmethod
    def for_pages(cls, page_size: int, head_dim: int, *, row_block: int = 16) -> "ChunkConfig":
        """A chunk whose gathered keys fit a processor's cache (about a MiB in float32)."""
        units = 2**18 // (page_size * head_dim)
        return cls(row_block=row_block, chunk_units=min(max(units, 16), 256))


class Work(NamedTuple):
    """What attention over a plan reads.

    Attributes:
      rows: packed queries, scaled.
      pool, layer: keys and values, and the layer's offset on the page ids.
      segments, steps: who reads which pages for whom.
      config: chunk sizes.
    """

    rows: Rows
    pool: KVPool
    layer: Int32[Array, ""]
    segments: Segments
    steps: ResolvedSteps
    config: ChunkConfig


class Units(NamedTuple):
    """Gathered operands of a chunk of units; `live` masks rows x columns.

    Attributes:
      block: row block, counted over all KV heads.
      page, kv_head: where key and value came from.
      query, key, value: operands; dead keys and values are 0.
      live: what each row may attend to.
    """

    block: Int32[Array, " units"]
    page: Int32[Array, " units"]
    kv_head: Int32[Array, " units"]
    query: Float32[Array, "units row_block head_dim"]
    key: Float32[Array, "units page_size head_dim"]
    value: Float32[Array, "units page_size head_dim"]
    live: Bool[Array, "units row_block page_size"]


class _Chunk(NamedTuple):
    """(segment, step) pairs, with the first row block and how many blocks each has (as ends)."""

    kv_head: Int32[Array, " chunk"]
    step: Int32[Array, " chunk"]
    block_lo: Int32[Array, " chunk"]
    block_ends: Int32[Array, " chunk"]
    row_lo: Int32[Array, " chunk"]
    row_hi: Int32[Array, " chunk"]


def over_units[Carry](
    work: Work, accumulate: Callable[[Carry, Units], Carry], carry: Carry
) -> Carry:
    """`accumulate` over all units of a plan's segments, a chunk at a time."""
    size = work.config.chunk_units
    ends = inclusive_sum(work.segments.num_steps)

    def run_chunk(i, carry):
        chunk = _read_chunk(i, work, ends)

        def run_units(j, carry):
            return accumulate(carry, _gather(j, work, chunk))

        return lax.fori_loop(0, (chunk.block_ends[-1] + size - 1) // size, run_units, carry)

    return lax.fori_loop(0, (ends[-1] + size - 1) // size, run_chunk, carry)


def _read_chunk(i, work: Work, ends) -> _Chunk:
    segments, steps, config = work.segments, work.steps, work.config
    place = i * config.chunk_units + iota(config.chunk_units)
    segment = jnp.minimum(owner_of(place, ends), ends.shape[0] - 1)
    step = segments.step_lo[segment] + place - (ends - segments.num_steps)[segment]
    first_row = segments.tile[segment] * TILE_ROWS
    row_lo = jnp.maximum(steps.row_lo[step], first_row)
    row_hi = jnp.minimum(steps.row_hi[step], first_row + segments.num_tiles[segment] * TILE_ROWS)
    live = (place < ends[-1]) & (row_lo < row_hi) & (steps.col_lo[step] < steps.col_hi[step])
    block_lo = row_lo // config.row_block
    blocks = jnp.where(live, (row_hi - 1) // config.row_block - block_lo + 1, 0)
    kv_head = segments.kv_head[segment]
    return _Chunk(kv_head, step, block_lo, inclusive_sum(blocks), row_lo, row_hi)


def _gather(j, work: Work, chunk: _Chunk) -> Units:
    rows, pool, steps, config = work.rows, work.pool, work.steps, work.config
    unit = j * config.chunk_units + iota(config.chunk_units)
    owner = jnp.minimum(owner_of(unit, chunk.block_ends), chunk.step.shape[0] - 1)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), chunk.block_ends])[owner]
    kv_head, step = chunk.kv_head[owner], chunk.step[owner]
    used = unit < chunk.block_ends[-1]
    row_block = jnp.where(used, chunk.block_lo[owner] + unit - before, 0)

    page = steps.page[step] + work.layer * pool.num_pages
    column = iota(pool.page_size)[None, :]
    in_page = (column >= steps.col_lo[step][:, None]) & (column < steps.col_hi[step][:, None])
    row = row_block[:, None] * config.row_block + iota(config.row_block)[None, :]
    mine = (row >= chunk.row_lo[owner][:, None]) & (row < chunk.row_hi[owner][:, None])
    live = (mine & used[:, None])[:, :, None] & in_page[:, None, :]
    if steps.position is not None and rows.position is not None:
        key_position = steps.position[step][:, None] + column
        live &= key_position[:, None, :] <= rows.position[row][:, :, None]

    def read(pages):
        # Dead rows may hold NaN, and 0 * NaN is NaN: select zeros before any product.
        return jnp.where(in_page[:, :, None], pages[page, kv_head].astype(jnp.float32), 0.0)

    num_heads, num_rows, head_dim = rows.q.shape
    q_blocks = rows.q.reshape(num_heads, num_rows // config.row_block, config.row_block, head_dim)
    query = q_blocks[kv_head, row_block].astype(jnp.float32)
    block = kv_head * q_blocks.shape[1] + row_block
    return Units(block, page, kv_head, query, read(pool.k_pages), read(pool.v_pages), live)
