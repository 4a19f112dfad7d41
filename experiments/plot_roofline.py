"""A picture of the rows of `experiments.kernel_roofline`: measured times against their floors.

    python -m experiments.plot_roofline --input kernel_roofline.jsonl --output kernel_roofline.png

Drawn from the rows alone. The image carries a hash of them (`ROWS_HASH`), which tells a picture of
other rows. Needs matplotlib, which is in the extras `viz` and `dev`.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from experiments.cli import OK, UsageError, exit_status, parse_flags, set_up_process, usage_errors
from experiments.json_lines import check_writable, read_json_lines
from experiments.roofline_rows import check_rows, distinct, rows_hash

COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#CC79A7")
"""Told apart by colour-blind readers too (Okabe and Ito, 2008); black, the floor, fits to all."""
ROWS_HASH = "Rows"
"""The image's text field that holds the hash of its rows."""
_GROUP_HEIGHT = 0.8


def draw_roofline(rows: Sequence[dict[str, Any]]) -> Figure:
    """A horizontal bar for each row, grouped by case in the rows' order; a policy has its colour.

    A bar is as long as the median time. A whisker spans the 10th to the 90th percentile, a black
    mark is the floor, and the text is the time and the floor's share in it.

    Raises ValueError for what `check_rows` refuses, and for more policies than there are colours.
    """
    check_rows(rows)
    cases, policies = distinct(rows, "case"), distinct(rows, "policy")
    if len(policies) > len(COLOURS):
        raise ValueError(f"`rows` must be of at most {len(COLOURS)} policies; got {policies}.")
    figure = Figure(figsize=(9, 1.6 + 0.24 * len(cases) * (0.8 + len(policies))), dpi=150)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    height = _GROUP_HEIGHT / len(policies)
    for row in rows:
        place = policies.index(row["policy"])
        middle = cases.index(row["case"]) + (place + 0.5) * height - _GROUP_HEIGHT / 2
        _draw_row(axes, row, middle, height=height, colour=COLOURS[place])
    axes.set_yticks(range(len(cases)), cases)
    axes.set_ylim(len(cases) - 0.4, -0.6)
    axes.set_xlim(0, 1.2 * max(max(row["p90_us"], row["floor_us"]) for row in rows))
    axes.set_xlabel("time of one decode step's attention (µs), median of the calls")
    _tidy(axes)
    _add_legend(figure, policies)
    figure.supxlabel(caption(rows), x=0.01, ha="left", fontsize=7.5, color="0.35")
    return figure


def _draw_row(
    axes: Axes, row: dict[str, Any], middle: float, *, height: float, colour: str
) -> None:
    time = row["time_us"]
    axes.barh(middle, time, height=0.86 * height, color=colour)
    spread = [[time - row["p10_us"]], [row["p90_us"] - time]]
    axes.errorbar(time, middle, xerr=spread, color="0.25", capsize=2.5, elinewidth=1.2)
    half = 0.48 * height
    axes.vlines(row["floor_us"], middle - half, middle + half, color="black", linewidth=2.5)
    axes.annotate(
        f"{time:.1f} µs  {row['floor_share']:.0%}",
        (max(row["p90_us"], row["floor_us"]), middle),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
    )


def _tidy(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)


def _add_legend(figure: Figure, policies: Sequence[str]) -> None:
    bars = [
        Patch(color=colour, label=f"policy {policy}")
        for policy, colour in zip(policies, COLOURS, strict=False)
    ]
    mark = {"marker": "|", "markersize": 11, "markeredgewidth": 2.5, "linestyle": ""}
    floor = "floor: bytes or operations at the device's measured peak"
    marks = [
        Line2D([], [], color="black", label=floor, **mark),
        Line2D([], [], color="0.25", linewidth=1.2, label="10th to 90th percentile"),
        Line2D([], [], linestyle="", label="%: floor over measured time"),
    ]
    figure.legend(
        handles=[*bars, *marks],
        title="Measured time and its floor",
        title_fontproperties={"weight": "bold", "size": 12},
        alignment="left",
        loc="outside upper left",
        ncols=2,
        frameon=False,
        fontsize=9,
    )


def caption(rows: Sequence[dict[str, Any]]) -> str:
    """Where the rows come from; all values where they differ."""
    parts = [", ".join(distinct(rows, name)) for name in ("device", "implementation", "dtype")]
    commits = ", ".join(commit[:12] for commit in distinct(rows, "commit"))
    versions, dates = (", ".join(distinct(rows, name)) for name in ("jax", "date"))
    return "  ·  ".join([*parts, f"jax {versions}", f"commit {commits}", dates])


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    return run_plot(argv, draw_roofline, rows_of="kernel_roofline")


def run_plot(
    argv: Sequence[str], draw: Callable[[list[dict[str, Any]]], Figure], *, rows_of: str
) -> int:
    """The exit status of a command line that draws rows of `rows_of` from --input to --output."""
    values = flags.FlagValues()
    flags.DEFINE_string("input", None, f"rows of {rows_of}", flag_values=values)
    flags.DEFINE_string("output", None, "PNG file", flag_values=values)

    def command() -> int:
        parse_flags(argv, values)
        paths = {name: values[name].value for name in ("input", "output")}
        for name, path in paths.items():
            if not path:
                raise UsageError(f"`{name}` must be given: --{name}=FILE.")
        with usage_errors():
            check_writable(str(paths["output"]))
            rows = read_json_lines(str(paths["input"]))
            figure = draw(rows)
        metadata = {ROWS_HASH: rows_hash(rows), "Software": None}
        figure.savefig(str(paths["output"]), format="png", metadata=metadata)
        return OK

    command.__module__ = draw.__module__  # whose docstring `--help` prints
    return exit_status(command)


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
