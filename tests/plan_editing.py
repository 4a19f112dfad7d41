"""Edits of a plan's segments that keep its slots, offsets and counts consistent (NumPy).

The plans that come out are ones that no policy makes; their arrays say what is to be computed.
"""

import dataclasses
import itertools

import numpy as np
from plan_reads import used_segments


@dataclasses.dataclass
class Piece:
    """A segment with the pair (item * num_kv_heads + KV head) and the worker it belongs to."""

    pair: int
    worker: int
    kv_head: int
    tile: int
    num_tiles: int
    step_lo: int
    num_steps: int

    @property
    def rows(self) -> range:
        """Packed rows of its tiles."""
        return range(self.tile * 64, (self.tile + self.num_tiles) * 64)


def pieces_of(plan) -> list[Piece]:
    """The plan's segments in line order: by pair, and by steps within a pair."""
    segments = plan.segments
    pieces = []
    for i in used_segments(plan):
        slot = segments.slot[i]
        pieces.append(
            Piece(
                pair=int(np.searchsorted(plan.slot_indptr, slot, side="right")) - 1,
                worker=int(np.searchsorted(plan.worker_indptr, i, side="right")) - 1,
                kv_head=int(segments.kv_head[i]),
                tile=int(segments.tile[i]),
                num_tiles=int(segments.num_tiles[i]),
                step_lo=int(segments.step_lo[i]),
                num_steps=int(segments.num_steps[i]),
            )
        )
    return sorted(pieces, key=lambda piece: (piece.pair, piece.step_lo))


def with_pieces(plan, pieces: list[Piece], *, padding: int = 0):
    """The plan with these segments instead: slots in line order, segments by worker.

    Unused segments are filled with `padding` (a plan says that nobody reads them).
    """
    pieces = sorted(pieces, key=lambda piece: piece.pair)
    ends = np.cumsum([piece.num_tiles for piece in pieces], dtype=np.int32)
    slots = {id(piece): int(end) - piece.num_tiles for piece, end in zip(pieces, ends, strict=True)}
    per_pair = np.zeros(plan.slot_indptr.size, np.int32)
    for piece in pieces:
        per_pair[piece.pair + 1] += piece.num_tiles
    by_worker = sorted(pieces, key=lambda piece: piece.worker)
    num_workers = plan.worker_indptr.size - 1
    loads = np.bincount([piece.worker for piece in pieces], minlength=num_workers)

    def column(values):
        filled = np.full(plan.segments.slot.size, padding, np.int32)
        filled[: len(pieces)] = values
        return filled

    names = ("kv_head", "tile", "num_tiles", "step_lo", "num_steps")
    columns = {name: column([getattr(piece, name) for piece in by_worker]) for name in names}
    segments = dataclasses.replace(
        plan.segments, slot=column([slots[id(piece)] for piece in by_worker]), **columns
    )
    counts = dataclasses.replace(
        plan.counts, segments=np.int32(len(pieces)), slots=np.int32(ends[-1] if pieces else 0)
    )
    return dataclasses.replace(
        plan,
        segments=segments,
        worker_indptr=np.concatenate([[0], np.cumsum(loads)]).astype(np.int32),
        slot_indptr=np.cumsum(per_pair, dtype=np.int32),
        counts=counts,
    )


def without(pieces: list[Piece], dropped: int) -> list[Piece]:
    """All but one segment."""
    return pieces[:dropped] + pieces[dropped + 1 :]


def cut(piece: Piece, *places: int) -> list[Piece]:
    """A segment cut after these numbers of steps; each part keeps the worker."""
    borders = [0, *places, piece.num_steps]
    return [
        dataclasses.replace(piece, step_lo=piece.step_lo + lo, num_steps=hi - lo)
        for lo, hi in itertools.pairwise(borders)
    ]


def move_steps(first: Piece, second: Piece, count: int) -> list[Piece]:
    """Two neighbours of one pair, with `count` steps moved from the first to the second."""
    return [
        dataclasses.replace(first, num_steps=first.num_steps - count),
        dataclasses.replace(
            second, step_lo=second.step_lo - count, num_steps=second.num_steps + count
        ),
    ]
