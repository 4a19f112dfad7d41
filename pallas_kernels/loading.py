"""The memory warpgroup: runs ahead of the others, through rings of shared memory.

Query tiles go into one ring, KV blocks of 64 tokens into another, chunks of the step table into a
third. It never waits for a segment to end, only for a buffer to be free.
"""

import functools

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import Block, Contents, Cursor, Held, Walk
from pallas_kernels.compat import plgpu
from pallas_kernels.config import (
    BLOCK_KV,
    BLOCK_Q,
    BOXES,
    DENSE_ROWS,
    HALF,
    pages_of_a_label,
)
from pallas_kernels.labels import write_label
from pallas_kernels.launch import Launch, Segment, over_segments, read_work
from pallas_kernels.tables import STEP_CHUNK


def load_segments(launch: Launch) -> None:
    """Loads what the compute warpgroups need, in their order."""
    inputs, page_size = launch.inputs, launch.page_size
    offset = inputs.page_offset[0]

    def wait_until_free(name, count):
        @pl.when(count >= launch.num_buffers(name))
        def _():
            plgpu.barrier_wait(launch.barrier(f"{name}_free", count))

    def load_chunk(count, step_lo):
        # Over the chunk before the last one. Its readers, this warpgroup's threads, are past it:
        # each of them took part in the load of the last one.
        plgpu.copy_gmem_to_smem(
            inputs.steps.at[pl.ds(step_lo, STEP_CHUNK)],
            launch.smem["steps"].at[launch.place("steps", count)],
            launch.barrier("steps_full", count),
        )

    def load_queries(segment: Segment, count):
        for t in range(launch.config.num_compute_warpgroups):

            @pl.when(t < segment.num_tiles)
            def _(t=t):
                wait_until_free("q", count + t)
                row = pl.multiple_of((segment.tile + t) * BLOCK_Q, BLOCK_Q)
                plgpu.copy_gmem_to_smem(
                    inputs.q.at[segment.kv_head, pl.ds(row, BLOCK_Q)],
                    launch.smem["q"].at[launch.place("q", count + t)],
                    launch.barrier("q_full", count + t),
                )

    def fill(contents: Contents, kv_head, ring, *, is_last):
        """Loads a stage and labels it; every page that a label has arrives, loaded or not."""
        block, other, is_shared = contents
        num_pages, is_live = pages_of_a_label(page_size), block.live.is_live()

        def label():
            labels, stage = launch.smem["labels"], launch.place("kv", ring)
            write_label(labels, stage, contents, is_last=is_last, page_size=page_size)

        def load(block: Block, j, row, box):
            load_page(block, j, kv_head, ring, pl.ds(row, box))

        @pl.when(is_live & ~is_shared)
        def _():
            if other is None:
                label()
            for j in range(len(block.pages)):
                row = j * page_size
                by_box(block.live.col_hi[j] - row, functools.partial(load, block, j, row))
            if other is not None:
                # Behind the loads, which nothing should delay, and guarded by these arrivals.
                label()
                arrive(ring, num_pages - len(block.pages))

        @pl.when(~is_live)
        def _():
            label()
            arrive(ring, num_pages)

        if other is not None:

            @pl.when(is_shared)
            def _():
                label()
                load(block, 0, 0, HALF)
                load(other, 0, HALF, HALF)

    def arrive(ring, num_pages):
        for _ in range(2 * num_pages):
            plgpu.barrier_arrive(launch.barrier("kv_full", ring))

    def load_page(block: Block, j, kv_head, ring, rows):
        """Loads the start of the block's j-th page to these rows of the stage."""
        for s, source in enumerate(inputs.kv):

            def load(source=source):
                for name, cache in zip("kv", source, strict=True):
                    plgpu.copy_gmem_to_smem(
                        rows_of(cache, block.pages[j], block.part, kv_head, rows.size),
                        launch.smem[name].at[launch.place("kv", ring), rows],
                        launch.barrier("kv_full", ring),
                    )

            if len(inputs.kv) == 1:
                load()
            else:
                pl.when(block.sources[j] == s)(load)

    def by_box(last, load_box):
        """Loads the smallest box with the last live token; what is dead beyond it stays behind.

        A dead page of a live block too: its arrival is waited for.
        """
        boxes = [box for box in BOXES if box <= min(page_size, BLOCK_KV)]
        for smaller, box in zip([None, *boxes], boxes, strict=False):
            fits = last <= box if smaller is None else (last > smaller) & (last <= box)
            pl.when(fits)(functools.partial(load_box, box))

    def rows_of(source, page, part, kv_head, box):
        if len(source.shape) == 3:
            start = pl.multiple_of(page + part * BLOCK_KV, DENSE_ROWS)
            return source.at[pl.ds(start, box), kv_head]
        start = pl.multiple_of(part * BLOCK_KV, BLOCK_KV) if page_size > BLOCK_KV else 0
        return source.at[page + offset, kv_head, pl.ds(start, box)]

    def run_segment(segment: Segment, step_after, carry):
        cursor, num_queries = carry

        def enter(chunk):
            plgpu.barrier_wait(launch.barrier("steps_full", chunk))

        def load_next_chunk(cursor: Cursor):
            # Of this segment or of the next one, while this one is walked.
            done = (cursor.chunk - first_chunk + 1) * STEP_CHUNK
            following = jnp.where(done < segment.num_steps, segment.step_lo + done, step_after())

            @pl.when(following >= 0)
            def _():
                load_chunk(cursor.chunk + 1, following)

        first_chunk = cursor.chunk + 1
        walk = Walk(launch.smem["steps"], segment.num_steps, page_size, len(inputs.kv), enter)

        load_queries(segment, num_queries)

        def run_block(carry):
            cursor, held = carry
            passing = walk.pass_on(cursor, held, may_hold=segment.num_tiles == 1)

            @pl.when(passing.is_any)
            def _():
                wait_until_free("kv", cursor.ring)
                fill(passing.contents, segment.kv_head, cursor.ring, is_last=passing.is_last)

            # After the block's own loads.
            @pl.when(walk.is_first_of_chunk(cursor) & walk.is_inside(cursor))
            def _():
                load_next_chunk(cursor)

            return walk.skip(cursor, is_passed_on=passing.is_any), passing.held

        def is_left(carry):
            cursor, held = carry
            return walk.is_inside(cursor) | (held.number == 1)

        carry = walk.begin(cursor), Held.none()
        cursor, _ = lax.while_loop(is_left, run_block, carry)
        return cursor, num_queries + segment.num_tiles

    # By ordinary loads, beside those of the worker's row: one trip to memory instead of two.
    first_steps, work = inputs.first_steps[lax.axis_index("worker")], read_work(launch)
    launch.smem["steps"][0] = first_steps
    plgpu.barrier_arrive(launch.barriers["steps_full"].at[0])
    start = (Cursor.start(), jnp.int32(0))
    cursor, num_queries = over_segments(launch, work, run_segment, start)
    counts = {"q": num_queries, "kv": cursor.ring}
    for name, count in counts.items():
        _drain(launch, name, count)


def _drain(launch: Launch, name: str, count) -> None:
    """Waits for the last use of every buffer, so that each arrival was waited for."""
    for back in range(launch.num_buffers(name)):

        @pl.when(count > back)
        def _(back=back):
            plgpu.barrier_wait(launch.barrier(f"{name}_free", count - 1 - back))
