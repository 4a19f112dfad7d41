"""A picture of plans: what each worker does when, the predicted makespan and its lower bound.

    python -m experiments.plot_plan --case=deep-binary --policy=auto --output=plan.png
    python -m experiments.plot_plan --case=fasttree-6 --policy=flash_decoding,balanced,auto ...

Policies stand beside each other on one scale of time. Drawn from the plan and its costs alone: no
device is needed. Needs matplotlib, which is in the extras `viz` and `dev`.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from codec_jax import ForestArrays, Plan, PlanSpec, build_plan
from codec_jax.planning.cost import CostModel
from codec_jax.planning.policies import policy_named
from codec_jax.planning.prediction import Prediction, predict
from codec_jax.planning.profiles import TICKS_PER_US, cost_for, find_profile
from experiments.ablation_cases import cases_of
from experiments.attention_step import spec_of
from experiments.cli import OK, UsageError, exit_status, parse_flags, set_up_process, usage_errors
from experiments.json_lines import check_writable
from experiments.plan_timeline import OVERHEAD, Bars, timeline
from experiments.workloads import AnyWorkload, load_workloads

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
"""Of the costliest nodes; told apart by colour-blind readers too (Okabe and Ito, 2008)."""
OTHERS = ("#C3CCD6", "#9AA7B5")
"""Of all other nodes, in turn."""
OWN_COST = "#F3EDE2"
MAX_POLICIES = 4


class Drawn(NamedTuple):
    """One policy's plan of a case."""

    policy: str
    plan: Plan
    prediction: Prediction
    bars: Bars


def draw_plan(
    name: str,
    forest: ForestArrays,
    policies: Sequence[str],
    *,
    spec: PlanSpec,
    cost: CostModel,
    in_us: bool = False,
) -> Figure:
    """A row for each worker, a panel for each policy; a node has the same colour in all of them.

    `in_us` says that the costs were measured, so that ticks are a known time.

    Raises:
      ValueError: an unknown policy, none, or more than `MAX_POLICIES`.
    """
    if not 0 < len(policies) <= MAX_POLICIES:
        raise ValueError(f"`policy` must be 1 to {MAX_POLICIES} names; got {len(policies)}.")
    for policy in policies:
        policy_named(policy)
    drawn = [_plan(forest, policy, spec=spec, cost=cost) for policy in policies]
    nodes = costliest_nodes(drawn[-1].bars)
    longest = max(int(one.prediction.makespan_ticks) for one in drawn)
    figure = Figure(figsize=(3.6 + 4.2 * len(drawn), 6.4), dpi=150)
    figure.set_layout_engine("constrained")
    panels = figure.subplots(1, len(drawn), sharey=True, squeeze=False)[0]
    for axes, one in zip(panels, drawn, strict=True):
        _draw_panel(axes, one, nodes, ticks_per_unit=TICKS_PER_US if in_us else 1)
        axes.set_xlim(0, 1.04 * longest / (TICKS_PER_US if in_us else 1))
    panels[0].set_ylabel("worker")
    unit = "µs, from measured costs" if in_us else "ticks of the closed-form costs"
    figure.supxlabel(f"predicted time of a worker ({unit})", fontsize=10)
    _add_legend(figure, forest, nodes, name)
    return figure


def costliest_nodes(bars: Bars) -> list[int]:
    """The nodes with most ticks, as many as there are colours for."""
    ticks = np.zeros(int(bars.node.max(initial=0)) + 1, np.int64)
    is_node = bars.node != OVERHEAD
    np.add.at(ticks, bars.node[is_node], (bars.end - bars.start)[is_node])
    order = np.argsort(-ticks, kind="stable")[: len(COLOURS)]
    return order[ticks[order] > 0].tolist()


def colour_of(node: int, nodes: Sequence[int]) -> str:
    """A colour of its own for the costliest nodes, greys in turn for the others."""
    if node == OVERHEAD:
        return OWN_COST
    return COLOURS[nodes.index(node)] if node in nodes else OTHERS[node % 2]


def _plan(forest: ForestArrays, policy: str, *, spec: PlanSpec, cost: CostModel) -> Drawn:
    plan = build_plan(forest, spec, policy=policy, cost=cost)
    prediction = jax.device_get(predict(plan, spec=spec, cost=cost))
    return Drawn(policy, jax.device_get(plan), prediction, timeline(plan, cost=cost))


def _draw_panel(axes: Axes, one: Drawn, nodes: Sequence[int], *, ticks_per_unit: int) -> None:
    bars = one.bars
    top, bottom = bars.worker - 0.5, bars.worker + 0.5
    start, end = bars.start / ticks_per_unit, bars.end / ticks_per_unit
    corners = [(start, top), (end, top), (end, bottom), (start, bottom)]
    shapes = np.stack([np.stack(corner, axis=-1) for corner in corners], axis=1)
    colours = [to_rgb(colour_of(node, nodes)) for node in bars.node.tolist()]
    axes.add_collection(PolyCollection(list(shapes), facecolors=colours, antialiased=False))
    makespan = int(one.prediction.makespan_ticks) / ticks_per_unit
    bound = int(one.prediction.lower_bound_ticks) / ticks_per_unit
    axes.axvline(bound, color="black", linewidth=1.3, linestyle=(0, (4, 2)))
    axes.axvline(makespan, color="black", linewidth=1.3)
    num_workers, counts = one.prediction.worker_ticks.size, one.plan.counts
    axes.set_ylim(num_workers - 0.4, -0.6)
    axes.set_title(
        f"{one.policy}\n{_time(makespan, ticks_per_unit)}, lower bound"
        f" {_time(bound, ticks_per_unit)} ({bound / max(makespan, 1e-9):.0%})"
        f"\n{int(counts.segments):,} segments, {int(counts.slots):,} slots",
        loc="left",
        fontsize=9.5,
    )
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _time(value: float, ticks_per_unit: int) -> str:
    return f"{value:,.0f} ticks" if ticks_per_unit == 1 else f"{value:.1f} µs"


def _add_legend(figure: Figure, forest: ForestArrays, nodes: Sequence[int], name: str) -> None:
    sharers = forest.request_hi - forest.request_lo
    handles: list[Patch | Line2D] = [
        Patch(
            color=colour_of(node, nodes),
            label=f"node {node}: {forest.kv_len[node]:,} tokens for {sharers[node]:,}",
        )
        for node in nodes
    ]
    if int(forest.num_nodes) > len(nodes):
        others = f"{int(forest.num_nodes) - len(nodes):,} other nodes, in turn"
        handles.append(Patch(facecolor=OTHERS[0], edgecolor=OTHERS[1], linewidth=3, label=others))
    own = "a segment's own cost"
    handles += [
        Patch(facecolor=OWN_COST, edgecolor="0.8", label=own),
        Line2D([], [], color="black", label="predicted makespan"),
        Line2D([], [], color="black", linestyle=(0, (4, 2)), label="lower bound"),
    ]
    figure.legend(
        handles=handles,
        title=(
            f"{name}: {int(forest.num_requests):,} requests, {int(forest.num_nodes):,} nodes"
            " (tokens for how many requests)"
        ),
        title_fontproperties={"weight": "bold", "size": 12},
        alignment="left",
        loc="outside upper left",
        ncols=3 if len(figure.axes) > 1 else 2,
        frameon=False,
        fontsize=8.5,
    )


def _case_named(name: str) -> AnyWorkload:
    known = {case.name: case for case in [*load_workloads().values(), *cases_of("main")]}
    known |= {case.name: case for case in [*cases_of("o27"), *cases_of("smoke")]}
    if name not in known:
        raise ValueError(f"`case` must be a case of planner_ablation; got {name!r}.")
    return known[name]


def _figure(given: dict[str, Any]) -> Figure:
    """The picture that the flags ask for."""
    case, page_size = _case_named(given["case"]), given["page_size"]
    spec = spec_of(case, page_size=page_size, num_workers=given["num_workers"])
    profile = find_profile(
        given["device"], dtype="bfloat16", head_dim=case.head_dim, page_size=page_size
    )
    return draw_plan(
        case.name,
        case.forest(page_size=page_size),
        given["policy"],
        spec=spec,
        cost=cost_for(spec, profile),
        in_us=profile is not None,
    )


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    values = flags.FlagValues()
    flags.DEFINE_string("case", "deep-binary", "case of planner_ablation", flag_values=values)
    flags.DEFINE_list("policy", ["auto"], "what to share; one panel each", flag_values=values)
    flags.DEFINE_integer("page_size", 64, "tokens of a page", flag_values=values)
    flags.DEFINE_integer("num_workers", 132, "workers", flag_values=values)
    flags.DEFINE_string("device", "nvidia-h200", "whose measured costs", flag_values=values)
    flags.DEFINE_string("output", None, "PNG file", flag_values=values)

    def command() -> int:
        parse_flags(argv, values)
        given: dict[str, Any] = {name: values[name].value for name in values}
        if not given["output"]:
            raise UsageError("`output` must be given: --output=FILE.")
        with usage_errors():
            check_writable(given["output"])
            figure = _figure(given)
        figure.savefig(given["output"], format="png", metadata={"Software": None})
        return OK

    return exit_status(command)


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
