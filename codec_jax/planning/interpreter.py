"""Executes a plan in NumPy, worker by worker, exactly as its arrays say (float64).

Slow and plain on purpose: it is the meaning of a plan. A slot that is read before it was written is
an error here, where a kernel would read garbage.
"""

import jax
import jax.numpy as jnp
import numpy as np

from codec_jax.planning.plan import Plan
from codec_jax.planning.resolve import resolve
from codec_jax.planning.spec import TILE_ROWS


def interpret(
    plan: Plan,
    q: np.ndarray,
    pages: tuple[np.ndarray, np.ndarray],
    page_list: np.ndarray,
    kv_len: np.ndarray,
    *,
    logits_scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of each query over its request's path: output and natural log-sum-exp.

    Args:
      plan: the plan.
      q: `[batch, num_q_heads, head_dim]`.
      pages: K and V of one layer, each `[num_pages, num_kv_heads, page_size, head_dim]`.
      page_list: physical page of each page entry.
      kv_len: live tokens of each node.
      logits_scale: multiplies the scores; default head_dim**-0.5.

    Returns:
      out `[batch, num_q_heads, head_dim]` and lse `[batch, num_q_heads]`, float64; (0, -inf) for
      rows without keys.

    Raises:
      ValueError: the merge reads a slot that no segment wrote, or two segments write one slot.
    """
    plan = jax.tree.map(np.asarray, plan)
    scale = q.shape[-1] ** -0.5 if logits_scale is None else logits_scale
    q_rows = _pack(plan, q.astype(np.float64) * scale)
    page_size = pages[0].shape[2]
    steps = resolve(plan, jnp.asarray(page_list), jnp.asarray(kv_len), page_size=page_size)
    steps = jax.tree.map(np.asarray, steps)
    slots: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for worker in range(plan.worker_indptr.shape[0] - 1):
        for segment in range(plan.worker_indptr[worker], plan.worker_indptr[worker + 1]):
            _run_segment(plan, steps, q_rows, pages, segment, slots)
    return _unpack(plan, *_merge_tiles(plan, q_rows.shape, slots))


def _pack(plan: Plan, q: np.ndarray) -> np.ndarray:
    batch, group = plan.packed_row.shape
    rows = np.zeros((plan.num_kv_heads, plan.num_tiles * TILE_ROWS, q.shape[-1]))
    for row in range(q.shape[0]):
        for g in range(group):
            if row < batch and plan.packed_row[row, g] < rows.shape[1]:
                rows[:, plan.packed_row[row, g]] = q[row, g::group]
    return rows


def _run_segment(plan, steps, q_rows, pages, segment, slots) -> None:
    kv_head = plan.segments.kv_head[segment]
    for t in range(plan.segments.num_tiles[segment]):
        row0 = (plan.segments.tile[segment] + t) * TILE_ROWS
        query = q_rows[kv_head, row0 : row0 + TILE_ROWS]
        scores, values = [], []
        first = plan.segments.step_lo[segment]
        for step in range(first, first + plan.segments.num_steps[segment]):
            columns = slice(steps.col_lo[step], steps.col_hi[step])
            key = pages[0][steps.page[step], kv_head, columns].astype(np.float64)
            row = np.arange(row0, row0 + TILE_ROWS)
            mine = (row >= steps.row_lo[step]) & (row < steps.row_hi[step])
            scores.append(np.where(mine[:, None], query @ key.T, -np.inf))
            values.append(pages[1][steps.page[step], kv_head, columns].astype(np.float64))
        slot = int(plan.segments.slot[segment]) + t
        if slot in slots:
            raise ValueError(
                f"`plan.segments.slot` must be written once; slot {slot} is written twice."
            )
        slots[slot] = _softmax(np.concatenate(scores, axis=1), np.concatenate(values))


def _softmax(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if scores.shape[1] == 0:
        return np.zeros((scores.shape[0], values.shape[1])), np.full(scores.shape[0], -np.inf)
    top = scores.max(axis=1)
    shift = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(scores - shift[:, None])
    total = weights.sum(axis=1)
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, shift + np.log(total), -np.inf)
    return weights @ values / np.where(total > 0, total, 1.0)[:, None], lse


def _merge_tiles(plan, shape, slots) -> tuple[np.ndarray, np.ndarray]:
    out, lse = np.zeros(shape), np.full(shape[:2], -np.inf)
    for tile in range(plan.num_tiles):
        rows = slice(tile * TILE_ROWS, (tile + 1) * TILE_ROWS)
        for kv_head in range(plan.num_kv_heads):
            parts = [_slot(slots, slot) for slot in _slots_of(plan, tile, kv_head)]
            if parts:
                out[kv_head, rows], lse[kv_head, rows] = _merge(parts)
    return out, lse


def _slots_of(plan, tile: int, kv_head: int):
    for item in plan.tile_items[plan.tile_indptr[tile] : plan.tile_indptr[tile + 1]]:
        pair = item * plan.num_kv_heads + kv_head
        first = plan.slot_indptr[pair] + tile - plan.items.tile[item]
        yield from range(first, plan.slot_indptr[pair + 1], plan.items.num_tiles[item])


def _slot(slots, slot: int):
    if slot not in slots:
        raise ValueError(
            f"`plan.slot_indptr` must name written slots; no segment writes slot {slot}."
        )
    return slots[slot]


def _merge(parts) -> tuple[np.ndarray, np.ndarray]:
    lses = np.stack([lse for _, lse in parts])
    top = lses.max(axis=0)
    shift = np.where(np.isfinite(top), top, 0.0)
    weights = np.exp(lses - shift)
    total = weights.sum(axis=0)
    out = sum(weight[:, None] * part for weight, (part, _) in zip(weights, parts, strict=True))
    with np.errstate(divide="ignore"):
        lse = np.where(total > 0, shift + np.log(total), -np.inf)
    return out / np.where(total > 0, total, 1.0)[:, None], lse


def _unpack(plan: Plan, out: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    batch, group = plan.packed_row.shape
    num_q_heads = group * plan.num_kv_heads
    q_out, q_lse = (
        np.zeros((batch, num_q_heads, out.shape[-1])),
        np.full((batch, num_q_heads), -np.inf),
    )
    for row in range(batch):
        for g in range(group):
            packed = plan.packed_row[row, g]
            if packed < out.shape[1]:
                q_out[row, g::group], q_lse[row, g::group] = out[:, packed], lse[:, packed]
    return q_out, q_lse
