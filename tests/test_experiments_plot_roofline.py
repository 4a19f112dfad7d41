"""The picture of measured times: bars, floors and texts are the rows' numbers; refusals."""

import itertools
import json
from pathlib import Path

import matplotlib.image
import pytest
from matplotlib.collections import LineCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from experiments import plot_roofline
from experiments.json_lines import read_json_lines, write_json_lines
from experiments.plot_roofline import COLOURS, ROWS_HASH, draw_roofline
from experiments.roofline_rows import NAMES, NUMBERS, rows_hash

RESULTS = Path(__file__).resolve().parent.parent / "experiments" / "results" / "nvidia-h200"


def made_up_row(case: int, policy: str) -> dict:
    time = 10.0 * (case + 1) + len(policy)
    row = dict.fromkeys(NAMES, "same") | {"case": f"case-{case}", "policy": policy}
    row |= {"time_us": time, "p10_us": time - 1.5, "p90_us": time + 2.5}
    return row | {"floor_us": 7.0 + case, "floor_share": (7 + case) / time}


@pytest.fixture
def rows():
    """Two policies, one of them without the last case."""
    rows = [made_up_row(case, policy) for case in range(3) for policy in ("one", "another")]
    return rows[:-1]


def axes_of(figure: Figure):
    (axes,) = figure.axes
    return axes


def whiskers_and_floors(axes) -> tuple[list, list]:
    """Ends (x) of the horizontal lines and places (x) of the vertical ones, in drawing order."""
    found = [lines for lines in axes.collections if isinstance(lines, LineCollection)]
    lines = [line for collection in found for line in collection.get_segments()]
    whiskers = [sorted(line[:, 0].tolist()) for line in lines if line[0, 1] == line[1, 1]]
    floors = [line[0, 0].item() for line in lines if line[0, 0] == line[1, 0]]
    return whiskers, floors


def test_bars_whiskers_floors_and_texts_are_the_rows_numbers(rows):
    axes = axes_of(draw_roofline(rows))
    assert [bar.get_width() for bar in axes.patches] == [row["time_us"] for row in rows]
    assert all(bar.get_x() == 0 for bar in axes.patches)
    whiskers, floors = whiskers_and_floors(axes)
    assert whiskers == [[row["p10_us"], row["p90_us"]] for row in rows]
    assert floors == [row["floor_us"] for row in rows]
    texts = [text.get_text() for text in axes.texts]
    assert texts == [f"{row['time_us']:.1f} µs  {row['floor_share']:.0%}" for row in rows]
    right = axes.get_xlim()[1]
    assert axes.get_xlim()[0] == 0 and right > max(row["p90_us"] for row in rows)


def test_a_bar_is_at_its_case_in_the_colour_of_its_policy(rows):
    figure = draw_roofline(rows)
    axes = axes_of(figure)
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["case-0", "case-1", "case-2"]
    for bar, row in zip(axes.patches, rows, strict=True):
        middle = bar.get_y() + bar.get_height() / 2
        assert labels[round(middle)] == row["case"] and abs(middle - round(middle)) < 0.4
        place = ["one", "another"].index(row["policy"])
        assert to_hex(bar.get_facecolor()).upper() == COLOURS[place]
    edges = sorted((bar.get_y(), bar.get_y() + bar.get_height()) for bar in axes.patches)
    assert all(above[1] < below[0] for above, below in itertools.pairwise(edges))
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts[:2] == ["policy one", "policy another"] and "floor" in texts[2]


def test_a_bar_shorter_than_its_floor_keeps_its_text_outside(rows):
    rows[0]["floor_us"] = 60.0
    axes = axes_of(draw_roofline(rows))
    assert axes.texts[0].xy[0] == 60 and axes.texts[1].xy[0] == rows[1]["p90_us"]
    assert axes.get_xlim()[1] > 60


def test_the_caption_names_device_commit_and_date(rows):
    rows = [row | {"device": "nvidia-x", "commit": "0123456789abcdef"} for row in rows]
    rows[-1]["date"] = "2026-12-01"
    caption = draw_roofline(rows).get_supxlabel()
    assert all(text in caption for text in ("nvidia-x", "commit 0123456789ab", "same, 2026-12-01"))


def missing(name):
    return lambda rows: rows[1].pop(name)


def changed(name, value):
    return lambda rows: rows[1].update({name: value})


BAD = {
    **{f"no {name}": (missing(name), f"row 2 must have `{name}`") for name in (*NAMES, *NUMBERS)},
    "an untimed row": (changed("time_us", None), "row 2: `time_us` must be a positive .* None"),
    "a truth": (changed("floor_us", True), "row 2: `floor_us` must be a positive number; got True"),
    "a time of no length": (changed("p10_us", 0), "row 2: `p10_us` must be a positive number"),
    "no number": (changed("floor_share", float("nan")), "`floor_share` must be .*; got nan"),
    "a number for a text": (changed("commit", 3), "row 2: `commit` must be a text; got 3"),
    "an order": (changed("p90_us", 2.0), "`time_us` must be between `p10_us` and `p90_us`"),
    "a case twice": (changed("policy", "one"), r"once; got \('case-0', 'one'\) twice"),
    "none": (lambda rows: rows.clear(), "at least one measured case; got none"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_refused(case, rows):
    spoil, message = BAD[case]
    spoil(rows)
    with pytest.raises(ValueError, match=message):
        draw_roofline(rows)


def test_more_policies_than_colours_are_refused():
    rows = [made_up_row(0, "p" * size) for size in range(1, len(COLOURS) + 2)]
    assert draw_roofline(rows[:-1])
    with pytest.raises(ValueError, match="at most 4 policies; got"):
        draw_roofline(rows)


def main(*arguments: str) -> int:
    return plot_roofline.main(["plot_roofline", *arguments])


def test_the_command_writes_a_picture_of_its_rows(rows, tmp_path):
    source, output = tmp_path / "rows.jsonl", tmp_path / "picture.png"
    write_json_lines(source, rows)
    assert main(f"--input={source}", f"--output={output}") == 0
    assert hash_in(output) == rows_hash(rows)
    pixels = matplotlib.image.imread(output)
    assert pixels.shape[1] == 1350 and pixels[..., :3].min() < 0.1 < pixels[..., :3].max()


def test_the_committed_picture_is_of_the_committed_rows():
    rows = read_json_lines(RESULTS / "kernel_roofline.jsonl")
    again = "draw it again with `python -m experiments.plot_roofline`"
    assert hash_in(RESULTS / "kernel_roofline.png") == rows_hash(rows), again


def hash_in(path: Path) -> str:
    with Image.open(path) as image:
        return image.info[ROWS_HASH]


REFUSED = {
    "no input": (["--output=p.png"], "`input` must be given"),
    "no output": (["--input=rows.jsonl"], "`output` must be given"),
    "a missing file": (["--input=missing.jsonl", "--output=p.png"], "missing.jsonl: No such file"),
    "an output in no folder": (["--input=rows.jsonl", "--output=no/p.png"], "no/p.png"),
    "no JSON": (["--input=text.jsonl", "--output=p.png"], "text.jsonl, line 2: not JSON"),
    "no object": (["--input=list.jsonl", "--output=p.png"], "line 1: a line must hold an object"),
    "no text": (["--input=bytes.jsonl", "--output=p.png"], "bytes.jsonl: not UTF-8"),
    "a row without a field": (["--input=rows.jsonl", "--output=p.png"], "row 1 must have `case`"),
    "an argument": (["rows.jsonl"], "'rows.jsonl'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_line(case, capsys, monkeypatch, tmp_path):
    arguments, reason = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text(json.dumps({"time_us": 1}) + "\n", encoding="utf-8")
    Path("text.jsonl").write_text('{"case": "a"}\nwords\n', encoding="utf-8")
    Path("list.jsonl").write_text("[1]\n", encoding="utf-8")
    Path("bytes.jsonl").write_bytes(b"\xff\n")
    assert main(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and reason in captured.err
    assert not Path("p.png").exists()
