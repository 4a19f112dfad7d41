"""What the warpgroups of the partial attention kernel share: its refs, and the walk over segments.

The kernel reads tables only, so that every warpgroup takes the same path through them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_kernels.config import KernelConfig, pages_of_a_label
from pallas_kernels.softmax import Scale
from pallas_kernels.tables import WorkerTable


class Inputs(NamedTuple):
    """Global memory that is read."""

    q: Any  # [num_kv_heads, rows, head_dim]
    kv: tuple  # (K, V) of each source, [pages of all layers, num_kv_heads, page_size, head_dim]
    #            or, dense, [rows, num_kv_heads, head_dim]
    workers: Any  # [workers, 16]
    segments: Any  # [segments, 8]
    steps: Any  # [steps, 8]
    first_steps: Any  # [workers, 32, 8]
    page_offset: Any  # [1]


class Outputs(NamedTuple):
    """Global memory that is written."""

    out: Any  # [slots, 64, head_dim] float32
    lse: Any  # [slots, 64] float32
    merged_out: Any  # [num_kv_heads, rows, head_dim] float32
    merged_lse: Any  # [num_kv_heads, rows] float32


@dataclasses.dataclass(frozen=True)
class Launch:
    """One thread block's refs and the launch's constants.

    Attributes:
      smem, barriers: by the names of `KernelConfig.buffers` and `KernelConfig.barriers`.
    """

    inputs: Inputs
    outputs: Outputs
    smem: dict[str, Any]
    barriers: dict[str, Any]
    page_size: int
    logits_scale: float
    config: KernelConfig

    @property
    def scale(self) -> Scale:
        """From products of queries and keys to scores in base 2."""
        return Scale.of(self.logits_scale)

    @property
    def pages_of_a_label(self) -> int:
        """Pages that a block can have tokens of."""
        return pages_of_a_label(self.page_size)

    def num_buffers(self, name: str) -> int:
        """How many buffers a ring has: "q", "kv" or "steps"."""
        return self.smem["k" if name == "kv" else name].shape[0]

    def place(self, name: str, count):
        """The buffer that the count-th filling of a ring goes to."""
        return lax.rem(count, jnp.int32(self.num_buffers(name)))

    def barrier(self, name: str, count):
        """The barrier, `<ring>_full` or `<ring>_free`, that guards it."""
        return self.barriers[name].at[self.place(name.partition("_")[0], count)]


class Segment(NamedTuple):
    """A row of the segment table."""

    kv_head: Any
    tile: Any
    num_tiles: Any
    step_lo: Any
    num_steps: Any
    slot: Any
    second_slot: Any
    final: Any

    def tiles(self, t) -> "Segment":
        """The t-th of its tiles as a segment by itself."""
        return self._replace(
            tile=self.tile + t,
            num_tiles=jnp.int32(1),
            slot=jnp.where(t == 0, self.slot, self.second_slot),
            final=lax.shift_right_logical(self.final, t),
        )


RunSegment = Callable[[Segment, Callable[[], Any], Any], Any]
"""Maps (segment, what gives the first step of the next segment or -1, carry) to the carry."""


class Work(NamedTuple):
    """A thread block's run of segments, and the first of them."""

    segment_lo: Any
    segment_hi: Any
    first: Segment


def read_work(launch: Launch) -> Work:
    """What this thread block has to do."""
    workers, worker = launch.inputs.workers, lax.axis_index("worker")
    lo, hi = workers[worker, WorkerTable.SEGMENT_LO], workers[worker, WorkerTable.SEGMENT_HI]
    return Work(lo, hi, _read(workers, worker))


def over_segments(launch: Launch, work: Work, run_segment: RunSegment, carry):
    """Runs all segments of the work, one after the other.

    With one compute warpgroup, a segment of two tiles is run as two segments of one.
    """
    lo, hi, first = work

    def run(i, carry):
        segment, carry = carry
        # Read ahead: the trip to memory passes behind this segment's work, until the first use.
        following = _read(launch.inputs.segments, jnp.minimum(i + 1, hi - 1))

        def step_after():
            return jnp.where(i + 1 < hi, following.step_lo, -1)

        if launch.config.num_compute_warpgroups > 1:
            return following, run_segment(segment, step_after, carry)

        def run_tile(t, carry):
            def again():
                return jnp.where(t + 1 < segment.num_tiles, segment.step_lo, step_after())

            return run_segment(segment.tiles(t), again, carry)

        return following, lax.fori_loop(0, segment.num_tiles, run_tile, carry)

    return lax.fori_loop(lo, hi, run, (first, carry))[1]


def _read(table, row) -> Segment:
    return Segment(*(table[row, column] for column in range(len(Segment._fields))))
