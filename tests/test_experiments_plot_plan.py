"""The picture of a plan: bars against the prediction and against the arrays; the command."""

import jax
import matplotlib.image
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from codec_jax import build_plan
from codec_jax.planning.cost import CostModel
from codec_jax.planning.policies import POLICIES
from codec_jax.planning.prediction import predict
from experiments import plot_plan
from experiments.ablation_cases import SMOKE
from experiments.attention_step import spec_of
from experiments.plan_timeline import OVERHEAD, timeline
from experiments.plot_plan import COLOURS, OTHERS, OWN_COST, colour_of, costliest_nodes, draw_plan

STAR, RANDOM = SMOKE
SPEC = spec_of(STAR, page_size=64, num_workers=7)
COST = CostModel(step_ticks=10, wide_step_ticks=15, segment_ticks=20)


def planned(case, policy):
    forest = case.forest(page_size=64)
    plan = build_plan(forest, SPEC, policy=policy, cost=COST)
    return forest, jax.device_get(plan), jax.device_get(predict(plan, spec=SPEC, cost=COST))


def bars_by_hand(plan, worker):
    """(start, end, node) of each segment's own cost and of each step, one after the other."""
    time, bars = 0, []
    for i in range(plan.worker_indptr[worker], plan.worker_indptr[worker + 1]):
        bars.append((time, time + 20, OVERHEAD))
        time += 20
        ticks = 15 if plan.segments.num_tiles[i] == 2 else 10
        lo = plan.segments.step_lo[i]
        for step in range(lo, lo + plan.segments.num_steps[i]):
            bars.append((time, time + ticks, int(plan.steps.node[step])))
            time += ticks
    return bars


def merged(bars):
    """Neighbours of one node as one."""
    found = []
    for start, end, node in bars:
        if found and found[-1][2] == node != OVERHEAD:
            found[-1] = (found[-1][0], end, node)
        else:
            found.append((start, end, node))
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", SMOKE, ids=lambda case: case.name)
def test_bars_are_the_segments_and_steps_of_each_worker(case, policy):
    _, plan, prediction = planned(case, policy)
    bars = timeline(plan, cost=COST)
    for worker in range(7):
        mine = bars.worker == worker
        columns = (bars.start[mine], bars.end[mine], bars.node[mine])
        found = list(zip(*(column.tolist() for column in columns), strict=True))
        assert found == merged(bars_by_hand(plan, worker))
        assert bars.end[mine].max(initial=0) == prediction.worker_ticks[worker]
    assert bars.end.max() == prediction.makespan_ticks


def rectangles(axes):
    (collection,) = [c for c in axes.collections if isinstance(c, PolyCollection)]
    corners = np.array([path.vertices[:4] for path in collection.get_paths()])
    return corners, [to_hex(colour).upper() for colour in collection.get_facecolors()]


@pytest.mark.parametrize("in_us", [False, True])
def test_panels_show_the_bars_the_makespan_and_the_bound(in_us):
    forest, plan, prediction = planned(RANDOM, "balanced")
    names, unit = ["hydragen", "balanced"], 64 if in_us else 1
    figure = draw_plan("a name", forest, names, spec=SPEC, cost=COST, in_us=in_us)
    axes = figure.axes[1]
    assert [panel.get_title(loc="left").split("\n")[0] for panel in figure.axes] == names
    bars, (corners, colours) = timeline(plan, cost=COST), rectangles(axes)
    np.testing.assert_allclose(corners[:, :, 0].min(axis=1), bars.start / unit)
    np.testing.assert_allclose(corners[:, :, 0].max(axis=1), bars.end / unit)
    np.testing.assert_allclose(corners[:, :, 1].mean(axis=1), bars.worker)
    nodes = costliest_nodes(bars)
    assert colours == [colour_of(node, nodes) for node in bars.node.tolist()]
    lines = sorted(line.get_xdata()[0] for line in axes.lines)
    ticks = sorted([int(prediction.lower_bound_ticks), int(prediction.makespan_ticks)])
    np.testing.assert_allclose(lines, np.array(ticks) / unit)
    title = axes.get_title(loc="left")
    assert f"{int(plan.counts.segments):,} segments" in title and ("µs" in title) == in_us
    assert len({panel.get_xlim() for panel in figure.axes}) == 1
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[0] == f"node {nodes[0]}: {forest.kv_len[nodes[0]]:,} tokens for " + str(
        forest.request_hi[nodes[0]] - forest.request_lo[nodes[0]]
    )
    assert legend.get_title().get_text().startswith("a name: 8 requests, 12 nodes")


def test_the_costliest_nodes_have_colours_of_their_own():
    _, plan, _ = planned(RANDOM, "balanced")
    bars = timeline(plan, cost=COST)
    ticks = dict.fromkeys(range(12), 0)
    for node, length in zip(bars.node.tolist(), (bars.end - bars.start).tolist(), strict=True):
        ticks[node] = ticks.get(node, 0) + length
    ticks.pop(OVERHEAD)
    nodes = costliest_nodes(bars)
    wanted = sorted(ticks.values(), reverse=True)[: len(COLOURS)]
    assert [ticks[node] for node in nodes] == wanted and len(nodes) == len(COLOURS)
    assert len({colour_of(node, nodes) for node in nodes}) == len(COLOURS)
    assert colour_of(OVERHEAD, nodes) == OWN_COST
    assert {colour_of(node, nodes) for node in range(12) if node not in nodes} <= set(OTHERS)


def main(*arguments):
    return plot_plan.main(["plot_plan", *arguments])


def test_the_command_writes_a_picture(tmp_path):
    output = tmp_path / "plan.png"
    flags = ["--case=smoke-star", "--num_workers=7", "--policy=balanced", f"--output={output}"]
    assert main(*flags) == 0
    pixels = matplotlib.image.imread(output)
    assert pixels.shape[0] == 960 and pixels[..., :3].min() < 0.1 < pixels[..., :3].max()


REFUSED = {
    "no output": ([], "`output` must be given"),
    "an unknown case": (["--case=none", "--output=p.png"], "`case` must be a case of"),
    "an unknown policy": (["--policy=best", "--output=p.png"], "`policy` must be one of"),
    "too many": (["--policy=auto,auto,auto,auto,auto", "--output=p.png"], "1 to 4 names; got 5"),
    "no folder": (["--output=no/p.png"], "no/p.png"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_line(case, capsys, monkeypatch, tmp_path):
    arguments, reason = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    assert main(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and reason in captured.err
    assert captured.err.count("\n") == 1
