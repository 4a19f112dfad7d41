"""The integer tables that the kernels read, in rows of whole memory sectors."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32

STEP_CHUNK = 32
"""Steps that are copied to shared memory at a time; a multiple of the pages in any block."""
ROW = 8
"""Integers of a sector: 32 bytes."""
MAX_PAGES = 4
"""Pages that a block of 64 tokens can be gathered from: the smallest page has 16."""
LABEL = 3 + 4 * MAX_PAGES
"""Integers of a block's label, see `labels`."""


class StepTable(NamedTuple):
    """Columns of a step: page, live columns, packed rows, and which source the page lies in.

    PAGE is the physical page of a paged source, the first row of a dense one.
    """

    PAGE, COL_LO, COL_HI, ROW_LO, ROW_HI, SOURCE = range(6)


class SegmentTable(NamedTuple):
    """Columns of a segment.

    SLOT and SECOND_SLOT: partial results of its first and second tile; a tile's slots are one run.
    FINAL: a bit for each of its tiles that has no other slot.
    """

    KV_HEAD, TILE, NUM_TILES, STEP_LO, NUM_STEPS, SLOT, SECOND_SLOT, FINAL = range(8)


class WorkerTable(NamedTuple):
    """Columns of a worker: a copy of its first segment, then its run of segments.

    A worker starts with one trip to memory, not with one for its run and one for its first segment.
    """

    SEGMENT_LO, SEGMENT_HI = ROW, ROW + 1


class Tables(NamedTuple):
    """What the kernels are told to do.

    Attributes:
      workers: see `WorkerTable`.
      segments: see `SegmentTable`, those of a worker in a run.
      steps: see `StepTable`; at least STEP_CHUNK more rows than segments name.
      first_steps: the steps of each worker's first segment, as many as a chunk has: a worker finds
        them without knowing its segment.
      slot_indptr: slots of (tile, KV head) number p = tile * num_kv_heads + kv_head are
        [slot_indptr[p], slot_indptr[p + 1]).
    """

    workers: Int32[Array, "workers 16"]
    segments: Int32[Array, "segments 8"]
    steps: Int32[Array, "steps 8"]
    first_steps: Int32[Array, "workers chunk 8"]
    slot_indptr: Int32[Array, " pairs+1"]

    def with_steps(self, *columns: Int32[Array, " steps"]) -> "Tables":
        """The tables with these columns of the step table; those left out are zero."""
        # A chunk may start at any of the rows.
        steps = jnp.pad(pack_table(*columns), ((0, STEP_CHUNK), (0, 0)))
        rows = jnp.arange(STEP_CHUNK, dtype=jnp.int32)[None, :]
        first_steps = steps[self.workers[:, SegmentTable.STEP_LO, None] + rows]
        return self._replace(steps=steps, first_steps=first_steps)


def pack_table(*columns: Int32[Array, " rows"]) -> Int32[Array, "rows 8"]:
    """The columns side by side, padded with zeros to a row of 32 bytes."""
    zeros = jnp.zeros_like(columns[0])
    return jnp.stack([*columns, *[zeros] * (ROW - len(columns))], axis=1)


def pack_tables(
    segments: Int32[Array, "segments 8"],
    worker_indptr: Int32[Array, " workers+1"],
    slot_indptr: Int32[Array, " pairs+1"],
) -> Tables:
    """The tables without steps; worker w runs segments [worker_indptr[w], worker_indptr[w + 1])."""
    lo, hi = worker_indptr[:-1], worker_indptr[1:]
    first = segments[jnp.minimum(lo, segments.shape[0] - 1)]
    workers = jnp.concatenate([first, pack_table(lo, hi)], axis=1)
    no_steps = jnp.zeros((0, ROW), jnp.int32)
    no_first_steps = jnp.zeros((workers.shape[0], 0, ROW), jnp.int32)
    return Tables(workers, segments, no_steps, no_first_steps, slot_indptr)
