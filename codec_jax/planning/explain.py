"""A plan in words and numbers, on one screen: what is shared, how it is cut, who is busy."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from codec_jax.forest_arrays import ForestArrays
from codec_jax.planning.cost import CostModel, StepTicks
from codec_jax.planning.estimate import estimate
from codec_jax.planning.plan import Plan
from codec_jax.planning.prediction import Prediction, predict
from codec_jax.planning.profiles import CostProfile, cost_for
from codec_jax.planning.spec import TILE_ROWS, PlanSpec

MAX_LINES = 24
MAX_COLUMNS = 100
_BARS = " ▁▂▃▄▅▆▇█"
_NUM_BARS = 32
_MAX_NODES = 12


class NodeReads(NamedTuple):
    """What a plan does with each node of its forest, for one KV head but for `segments`.

    Attributes:
      tokens, sharers: of the node.
      times: how often its pages are read.
      in_blocks: whether blocks of two tiles read it, not streams.
      ticks: of all its steps, all KV heads together.
    """

    tokens: np.ndarray
    sharers: np.ndarray
    times: np.ndarray
    in_blocks: np.ndarray
    ticks: np.ndarray


def explain_plan(
    plan: Plan,
    forest: ForestArrays,
    *,
    spec: PlanSpec,
    cost: CostModel | None = None,
    profile: CostProfile | None = None,
) -> str:
    """A description of at most 24 lines of 100 columns (host).

    Args:
      plan: the plan.
      forest: what it was made for.
      spec: what it was made for.
      cost: what it was made with; by default the profile's, or the closed form.
      profile: of a device; adds the predicted time and what bounds it.

    Raises:
      ValueError: the plan is of another forest or specification.
    """
    _check_same(plan, forest, spec)
    cost = cost or cost_for(spec, profile)
    prediction = jax.device_get(predict(plan, spec=spec, cost=cost))
    plan = jax.device_get(plan)
    forest = ForestArrays(*(np.asarray(field) for field in forest))
    nodes = node_reads(plan, forest, cost=cost)
    lines = [
        _title(forest, spec),
        _nodes_line(nodes),
        *_work_lines(plan, prediction, spec, cost),
        *_worker_lines(prediction),
    ]
    if profile is not None:
        lines += _time_lines(plan, spec, profile)
    lines += ["", *_table(plan, nodes, prediction, max_lines=MAX_LINES - len(lines) - 1)]
    return "\n".join(line[:MAX_COLUMNS].rstrip() for line in lines)


def node_reads(plan: Plan, forest: ForestArrays, *, cost: CostModel) -> NodeReads:
    """How often and by what each node is read, and what its steps cost (NumPy)."""
    steps = jax.tree.map(np.asarray, plan.steps)
    size = steps.node.size + 1
    starts, items = np.zeros((2, size), np.int64), plan.items
    is_block = (items.num_tiles > 1).astype(int)
    used_items = (items.num_steps > 0).astype(int)
    np.add.at(starts, (is_block, items.step_lo), used_items)
    np.add.at(starts, (is_block, items.step_lo + items.num_steps), -used_items)
    narrow, wide = np.cumsum(starts, axis=1)[:, :-1]
    ticks = narrow * np.diff(StepTicks.of(plan.steps, cost).before) + wide * cost.wide_step_ticks
    used = steps.row_hi > steps.row_lo
    is_wide = used & (steps.row_lo // TILE_ROWS != (steps.row_hi - 1) // TILE_ROWS)

    def per_node(values: np.ndarray) -> np.ndarray:
        sums = np.zeros(plan.num_nodes, np.int64)
        np.add.at(sums, steps.node[used], values[used])
        return sums

    pages = np.unique(np.stack([steps.node[used], steps.page_entry[used]]), axis=1)[0]
    num_pages = np.bincount(pages, minlength=plan.num_nodes)
    return NodeReads(
        tokens=forest.kv_len,
        sharers=forest.request_hi - forest.request_lo,
        times=per_node(narrow + wide) // np.maximum(num_pages, 1),
        in_blocks=per_node(is_wide.astype(np.int64)) > 0,
        ticks=per_node(ticks) * plan.num_kv_heads,
    )


def segments_of_node(plan: Plan, node: int) -> int:
    """Segments that walk any step of a node, all KV heads together (NumPy)."""
    steps, segments = plan.steps, plan.segments
    is_its = (steps.node == node) & (steps.row_hi > steps.row_lo)
    before = np.concatenate([[0], np.cumsum(is_its)])
    walked = before[segments.step_lo + segments.num_steps] - before[segments.step_lo]
    return int(np.count_nonzero(walked))


def _title(forest: ForestArrays, spec: PlanSpec) -> str:
    return (
        f"plan      {_count(int(forest.num_requests), 'request')}, {spec.group_size} query heads"
        f" to each of {_count(spec.num_kv_heads, 'KV head')}; pages of {spec.page_size} tokens"
    )


def _nodes_line(nodes: NodeReads) -> str:
    is_live = (nodes.sharers > 0) & (nodes.tokens > 0)
    num_shared = int(np.count_nonzero(is_live & (nodes.sharers > 1)))
    read = int(np.sum(nodes.tokens * nodes.times, dtype=np.int64))
    alone = int(np.sum(nodes.tokens * nodes.sharers, dtype=np.int64))
    ratio = f", {alone / read:.1f}x fewer than unshared" if read else ""
    return (
        f"nodes     {int(np.count_nonzero(is_live)):,}, {num_shared:,} of them shared;"
        f" {read:,} KV tokens read for each KV head{ratio}"
    )


def _work_lines(plan: Plan, prediction: Prediction, spec: PlanSpec, cost: CostModel) -> list[str]:
    counts, items = plan.counts, plan.items
    num_rows = int(np.count_nonzero(plan.packed_row < plan.num_tiles * TILE_ROWS))
    first = np.minimum(items.step_lo, plan.steps.node.size - 1)
    rows = plan.steps.row_lo[first] // TILE_ROWS != (plan.steps.row_hi[first] - 1) // TILE_ROWS
    num_blocks = int(np.count_nonzero(rows & (items.num_steps > 0)))
    num_pairs = int(counts.items) * spec.num_kv_heads
    own = int(counts.segments) * cost.segment_ticks
    total = max(1, int(prediction.worker_ticks.sum(dtype=np.int64)))
    return [
        f"tiles     {int(counts.tiles):,} of {TILE_ROWS} rows,"
        f" {num_rows / max(1, int(counts.tiles) * TILE_ROWS):.0%} of them used",
        f"items     {int(counts.items):,}: {_count(int(counts.items) - num_blocks, 'stream')},"
        f" {_count(num_blocks, 'block')}; {_count(int(counts.steps), 'step')} of a page",
        f"segments  {int(counts.segments):,} of {_count(num_pairs, '(item, KV head) pair')},"
        f" {_count(int(counts.segments) - num_pairs, 'cut')}; {own / total:.0%} of all ticks are"
        f" their own; {_count(int(counts.slots), 'slot')}",
    ]


def _worker_lines(prediction: Prediction) -> list[str]:
    ticks = prediction.worker_ticks
    low, high = int(ticks.min()), int(ticks.max())
    bound = int(prediction.lower_bound_ticks)
    share = f", {bound / high:.0%} of it" if high else ""
    counts = np.histogram(ticks, bins=_NUM_BARS, range=(low, max(high, low + 1)))[0]
    heights = np.ceil(counts / counts.max() * (len(_BARS) - 1)).astype(int)
    return [
        f"workers   {ticks.size:,}; ticks of each: least {low:,}, median {int(np.median(ticks)):,},"
        f" most {high:,}; lower bound {bound:,}{share}",
        f"load      {low:,} |{''.join(_BARS[height] for height in heights)}| {high:,}",
    ]


def _time_lines(plan: Plan, spec: PlanSpec, profile: CostProfile) -> list[str]:
    time = estimate(plan, spec=spec, profile=profile)
    parts = {"work": time.work_us, "memory": time.memory_us, "compute": time.compute_us}
    bound = max(parts, key=parts.__getitem__)
    listed = ", ".join(f"{name} {us:.1f}" for name, us in parts.items())
    return [
        f"time      predicted {time.predicted_us:.1f} us, bound by {bound}: {listed};"
        f" fixed {time.fixed_us:.1f}",
        f"floor     {time.lower_bound_us:.1f} us,"
        f" {time.lower_bound_us / time.predicted_us:.0%} of the predicted time",
    ]


def _table(plan: Plan, nodes: NodeReads, prediction: Prediction, *, max_lines: int) -> list[str]:
    """The costliest nodes, and what is left of the ticks."""
    order = np.argsort(-nodes.ticks, kind="stable")
    order = order[nodes.ticks[order] > 0]
    total = max(1, int(prediction.worker_ticks.sum(dtype=np.int64)))
    room = min(_MAX_NODES, max_lines - 1)
    shown = order if order.size <= room else order[: room - 1]
    lines = [f"{'node':>8} {'tokens':>10} {'sharers':>8}  {'read':26} {'segments':>9} {'share':>7}"]
    for node in shown.tolist():
        lines.append(
            f"{f'#{node}':>8} {nodes.tokens[node]:>10,} {nodes.sharers[node]:>8,} "
            f" {_how(nodes, node):26} {segments_of_node(plan, node):>9,}"
            f" {nodes.ticks[node] / total:>7.1%}"
        )
    if order.size > shown.size:
        rest = nodes.ticks[order[shown.size :]].sum(dtype=np.int64) / total
        more = f"... {order.size - shown.size:,} more"
        lines.append(f"{more:>65} {rest:>7.1%}")
    return lines


def _how(nodes: NodeReads, node: int) -> str:
    times = int(nodes.times[node])
    if nodes.in_blocks[node]:
        return f"by {_count(times, 'block')}"
    return "once, in a stream" if times == 1 else f"{times:,} times, in streams"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _check_same(plan: Plan, forest: ForestArrays, spec: PlanSpec) -> None:
    if plan.num_nodes != forest.parent.shape[0]:
        raise ValueError(
            f"`forest` must be the plan's, with room for {plan.num_nodes} nodes; it has"
            f" {forest.parent.shape[0]}."
        )
    made_for = {
        "num_kv_heads": plan.num_kv_heads,
        "group_size": plan.packed_row.shape[1],
        "page_size": plan.page_size,
        "num_workers": plan.worker_indptr.shape[0] - 1,
    }
    given = dataclasses.asdict(spec)
    wrong = [name for name, value in made_for.items() if given[name] != value]
    if wrong:
        name = wrong[0]
        raise ValueError(
            f"`spec` must be the plan's, with {name} {made_for[name]}; got {given[name]}."
        )
