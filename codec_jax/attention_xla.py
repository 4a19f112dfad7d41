"""Attention over a plan in plain XLA: any device, head_dim, group and page size.

The plan's work is flattened to (segment, step, block of rows) units, which are gathered and
computed a chunk at a time, all KV heads alike, with an online softmax. Memory is the packed result
plus O(chunk); time follows the live units, not the plan's capacity.

Memory traffic: each unit reads its page once, so a shared page is read once for every `row_block`
stacked query rows.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from codec_jax.attention_rows import Rows
from codec_jax.kv_cache import KVPool
from codec_jax.partial import Partial
from codec_jax.planning.plan import Segments
from codec_jax.planning.resolve import ResolvedSteps
from codec_jax.planning.scans import inclusive_sum, iota, owner_of
from codec_jax.planning.spec import TILE_ROWS

MASKED = -1e30
"""A masked score: finite, since exp(-inf - -inf) is NaN."""
START = -1e29
"""The running maximum before any key: above MASKED, so that exp(MASKED - START) is 0."""


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


class _Work(NamedTuple):
    """(segment, step) pairs of a chunk, with the first row block and how many blocks each has."""

    kv_head: Int32[Array, " chunk"]
    step: Int32[Array, " chunk"]
    block_lo: Int32[Array, " chunk"]
    block_ends: Int32[Array, " chunk"]
    row_lo: Int32[Array, " chunk"]
    row_hi: Int32[Array, " chunk"]


class _Units(NamedTuple):
    """Gathered operands of a chunk of units; `live` masks rows x columns."""

    block: Int32[Array, " units"]
    query: Float32[Array, "units row_block head_dim"]
    key: Float32[Array, "units page_size head_dim"]
    value: Float32[Array, "units page_size head_dim"]
    live: Bool[Array, "units row_block page_size"]


class _Running(NamedTuple):
    """Online softmax of every row block: maximum, sum of weights, weighted sum of values."""

    top: Float32[Array, "blocks row_block"]
    total: Float32[Array, "blocks row_block"]
    out: Float32[Array, "blocks row_block head_dim"]


def attend_rows(
    rows: Rows,
    pool: KVPool,
    segments: Segments,
    steps: ResolvedSteps,
    layer: Int32[Array, ""],
    *,
    config: ChunkConfig,
) -> Partial:
    """Attention of packed rows over all segments of a plan, merged: float32 out and natural lse.

    Args:
      rows: packed queries, already scaled by the logits scale.
      pool: keys and values.
      segments: who reads which steps for which tiles; empty ones do nothing.
      steps: resolved steps; with `position`, key columns later than a row's position are masked.
      layer: offset on the page ids.
      config: chunk sizes.
    """
    num_heads, num_rows, head_dim = rows.q.shape
    blocks = num_heads * num_rows // config.row_block
    empty = _Running(
        jnp.full((blocks, config.row_block), START, jnp.float32),
        jnp.zeros((blocks, config.row_block), jnp.float32),
        jnp.zeros((blocks, config.row_block, head_dim), jnp.float32),
    )
    ends = inclusive_sum(segments.num_steps)

    def run_chunk(i, running: _Running) -> _Running:
        work = _chunk_of_work(i, segments, steps, ends, config)
        num_units = work.block_ends[-1]
        num_inner = (num_units + config.chunk_units - 1) // config.chunk_units

        def run_units(j, running: _Running) -> _Running:
            units = _gather(j, work, rows, pool, steps, layer, config)
            return _accumulate(running, units)

        return lax.fori_loop(0, num_inner, run_units, running)

    num_chunks = (ends[-1] + config.chunk_units - 1) // config.chunk_units
    running = lax.fori_loop(0, num_chunks, run_chunk, empty)
    return _finish(running, rows.q.shape)


def _chunk_of_work(i, segments: Segments, steps: ResolvedSteps, ends, config) -> _Work:
    place = i * config.chunk_units + iota(config.chunk_units)
    segment = jnp.minimum(owner_of(place, ends), ends.shape[0] - 1)
    step = segments.step_lo[segment] + place - (ends - segments.num_steps)[segment]
    first_row = segments.tile[segment] * TILE_ROWS
    row_lo = jnp.maximum(steps.row_lo[step], first_row)
    row_hi = jnp.minimum(steps.row_hi[step], first_row + segments.num_tiles[segment] * TILE_ROWS)
    live = (place < ends[-1]) & (row_lo < row_hi) & (steps.col_lo[step] < steps.col_hi[step])
    block_lo = row_lo // config.row_block
    blocks = jnp.where(live, (row_hi - 1) // config.row_block - block_lo + 1, 0)
    return _Work(segments.kv_head[segment], step, block_lo, inclusive_sum(blocks), row_lo, row_hi)


def _gather(j, work: _Work, rows: Rows, pool: KVPool, steps, layer, config) -> _Units:
    unit = j * config.chunk_units + iota(config.chunk_units)
    owner = jnp.minimum(owner_of(unit, work.block_ends), work.step.shape[0] - 1)
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), work.block_ends])[owner]
    kv_head, step = work.kv_head[owner], work.step[owner]
    used = unit < work.block_ends[-1]
    row_block = jnp.where(used, work.block_lo[owner] + unit - before, 0)

    page = steps.page[step] + layer * pool.num_pages
    column = iota(pool.page_size)[None, :]
    in_page = (column >= steps.col_lo[step][:, None]) & (column < steps.col_hi[step][:, None])
    row = row_block[:, None] * config.row_block + iota(config.row_block)[None, :]
    mine = (row >= work.row_lo[owner][:, None]) & (row < work.row_hi[owner][:, None])
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
    return _Units(block, query, read(pool.k_pages), read(pool.v_pages), live)


def _accumulate(running: _Running, units: _Units) -> _Running:
    """One step of the online softmax; several units of a chunk may belong to one row block."""
    score = jnp.einsum("urd,ucd->urc", units.query, units.key, precision=lax.Precision.HIGHEST)
    score = jnp.where(units.live, score, MASKED)
    top = running.top.at[units.block].max(jnp.max(score, axis=-1))
    weight = jnp.exp(score - top[units.block][:, :, None])
    decay = jnp.exp(running.top - top)
    value = jnp.einsum("urc,ucd->urd", weight, units.value, precision=lax.Precision.HIGHEST)

    # A block's sum decays once, however many of the chunk's units it owns.
    order = iota(units.block.shape[0])
    first = jnp.full(top.shape[0], order.shape[0], jnp.int32).at[units.block].min(order)
    factor = jnp.where((first[units.block] == order)[:, None], decay[units.block], 1.0)
    out = running.out.at[units.block].multiply(factor[:, :, None]).at[units.block].add(value)
    total = (running.total * decay).at[units.block].add(jnp.sum(weight, axis=-1))
    return _Running(top, total, out)


def _finish(running: _Running, shape: tuple[int, ...]) -> Partial:
    some = running.total > 0
    total = jnp.where(some, running.total, 1.0)
    out = jnp.where(some[:, :, None], running.out / total[:, :, None], 0.0)
    lse = jnp.where(some, running.top + jnp.log(total), -jnp.inf)
    return Partial(out.reshape(shape), lse.reshape(shape[:2]))
