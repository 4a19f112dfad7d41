"""A picture of the rows of `experiments.planner_ablation`: speed-ups over plain decoding.

    python -m experiments.plot_ablation --input planner_ablation.jsonl --output planner_ablation.png

A line for each case in the rows' order, with a dot for each policy at its speed-up over
`flash_decoding`. Drawn from the rows alone, whose hash the image carries (`ROWS_HASH`). Needs
matplotlib, which is in the extras `viz` and `dev`.
"""

import sys
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullFormatter

from experiments.ablation_summary import BASELINE, mean_speed_ups, speed_ups
from experiments.cli import set_up_process
from experiments.plot_roofline import caption, run_plot
from experiments.roofline_rows import check_rows, distinct

STYLES = {
    "hydragen": ("#E69F00", "s"),
    "one_task_per_node": ("#CC79A7", "v"),
    "codec": ("#009E73", "D"),
    "balanced": ("#56B4E9", "o"),
    "auto": ("#0072B2", "P"),
}
"""Colour (Okabe and Ito, 2008) and marker of each policy."""
_TICKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32)


def timed(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without those of plans that were too large to make."""
    return [row for row in rows if "skipped" not in row]


def draw_ablation(rows: Sequence[dict[str, Any]]) -> Figure:
    """Dots by case and policy on a logarithmic scale; the legend has the means over 25 points.

    Raises:
      ValueError: what `check_rows` refuses, an unknown policy, or no case with `flash_decoding`.
    """
    rows = timed(rows)
    check_rows(rows)
    policies = [name for name in distinct(rows, "policy") if name != BASELINE]
    unknown = [name for name in policies if name not in STYLES]
    if unknown:
        raise ValueError(f"`rows` must be of known policies; got {unknown[0]!r}.")
    factors = speed_ups(rows)
    if not factors:
        raise ValueError(f"`rows` must have a case with {BASELINE}, which all is compared with.")
    figure = Figure(figsize=(9, 2.2 + 0.21 * len(factors)), dpi=150)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    for place, by_policy in enumerate(factors.values()):
        _draw_case(axes, place, by_policy)
    axes.axvline(1, color="black", linewidth=1.2)
    axes.set_yticks(range(len(factors)), list(factors), fontsize=8)
    axes.set_ylim(len(factors) - 0.4, -0.6)
    _tidy(axes)
    axes.set_xlabel(f"times as fast as {BASELINE} (logarithmic scale)")
    _add_legend(figure, policies, mean_speed_ups(rows))
    figure.supxlabel(caption(rows), x=0.01, ha="left", fontsize=7.5, color="0.35")
    return figure


def _draw_case(axes: Axes, place: int, by_policy: dict[str, float]) -> None:
    others = {name: factor for name, factor in by_policy.items() if name != BASELINE}
    ends = [1.0, *others.values()]
    axes.hlines(place, min(ends), max(ends), color="0.85", linewidth=1.5, zorder=1)
    for name, factor in others.items():
        colour, marker = STYLES[name]
        axes.plot(factor, place, marker, color=colour, markersize=5.5, zorder=3, alpha=0.9)


def _tidy(axes: Axes) -> None:
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(_TICKS)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.set_xlim(min(low, 0.9), max(high, 2.2))
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", which="minor", length=0)
    axes.grid(axis="x", which="major", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)


def _add_legend(
    figure: Figure, policies: Sequence[str], means: dict[str, tuple[float, int]]
) -> None:
    handles = [
        Line2D([], [], color="black", linewidth=1.2, label=f"{BASELINE}: 1, nothing is shared")
    ]
    for name in policies:
        colour, marker = STYLES[name]
        mean = f": {means[name][0]:.2f}x" if name in means else ""
        handles.append(
            Line2D([], [], color=colour, marker=marker, linestyle="", label=f"{name}{mean}")
        )
    num_points = max((count for _, count in means.values()), default=0)
    over = f"; geometric means over {num_points} of CoDec's 25 points" if num_points else ""
    figure.legend(
        handles=handles,
        title=f"Speed-up over {BASELINE}, same kernel{over}",
        title_fontproperties={"weight": "bold", "size": 11},
        alignment="left",
        loc="outside upper left",
        ncols=3,
        frameon=False,
        fontsize=9,
    )


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    return run_plot(argv, draw_ablation, rows_of="planner_ablation")


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
