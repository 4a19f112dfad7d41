"""The picture of the ablation: dots are the rows' speed-ups, texts their means; refusals."""

import itertools

import pytest
from matplotlib.colors import to_hex
from PIL import Image

from experiments import plot_ablation
from experiments.json_lines import write_json_lines
from experiments.plot_ablation import STYLES, draw_ablation
from experiments.plot_roofline import ROWS_HASH
from experiments.roofline_rows import NAMES, rows_hash

CASES = ("codec-vary-batch-4", "codec-vary-depth-2", "fasttree-0")
POLICIES = ("flash_decoding", "hydragen", "auto")


def made_up_row(case, policy, time):
    row = dict.fromkeys(NAMES, "same") | {"case": case, "policy": policy, "device": "nvidia-x"}
    return (
        row
        | {"time_us": time, "p10_us": time, "p90_us": time}
        | dict.fromkeys(("floor_us", "floor_share"), 0.5)
    )


@pytest.fixture
def rows():
    """Times 12, 8, 3; 24, 16, 6; 36, 24, 9: hydragen is 1.5 times, auto 4 times as fast."""
    return [
        made_up_row(case, policy, time * (place + 1))
        for place, case in enumerate(CASES)
        for policy, time in zip(POLICIES, (12.0, 8.0, 3.0), strict=True)
    ]


def dots(axes):
    """(place, speed-up, colour) of every marker."""
    lines = [line for line in axes.lines if line.get_marker() not in ("None", None, "")]
    points = [(line.get_ydata()[0], line.get_xdata()[0], line.get_color()) for line in lines]
    return [(place, factor, to_hex(colour).upper()) for place, factor, colour in points]


def test_dots_are_the_speed_ups(rows):
    rows[2]["time_us"] = rows[2]["p10_us"] = rows[2]["p90_us"] = 2.4
    (axes,) = draw_ablation(rows).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(CASES)
    expected = [
        (place, pytest.approx(factor), STYLES[policy][0])
        for place, policy in itertools.product(range(3), POLICIES[1:])
        for factor in [5.0 if (place, policy) == (0, "auto") else {"auto": 4.0}.get(policy, 1.5)]
    ]
    assert dots(axes) == expected
    low, high = axes.get_xlim()
    assert low < 1 and high > 5


def test_texts_name_the_means_and_the_source(rows):
    figure = draw_ablation(rows)
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["flash_decoding: 1, nothing is shared", "hydragen: 1.50x", "auto: 4.00x"]
    assert "geometric means over 2 of CoDec's 25 points" in legend.get_title().get_text()
    assert "nvidia-x" in figure.get_supxlabel()


def test_rows_of_plans_that_were_left_out_are_not_drawn(rows):
    skipped = {"case": "fasttree-1", "policy": "flash_decoding", "skipped": "too large"}
    (axes,) = draw_ablation([*rows, skipped]).axes
    assert len(dots(axes)) == 6


BAD = {
    "no baseline": (
        lambda rows: [row for row in rows if "flash" not in row["policy"]],
        "a case with flash_decoding",
    ),
    "an unknown policy": (lambda rows: [row | {"policy": "best"} for row in rows[:1]], "'best'"),
    "no rows": (lambda rows: [], "at least one measured case"),
    "an untimed row": (lambda rows: [rows[0] | {"time_us": None}], "`time_us` must be a positive"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_rows_are_refused(case, rows):
    change, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        draw_ablation(change(rows))


def test_the_command_writes_a_picture_of_its_rows(rows, tmp_path):
    source, output = tmp_path / "rows.jsonl", tmp_path / "picture.png"
    write_json_lines(source, rows)
    assert plot_ablation.main(["plot", f"--input={source}", f"--output={output}"]) == 0
    with Image.open(output) as image:
        assert image.info[ROWS_HASH] == rows_hash(rows) and image.width == 1350


@pytest.mark.parametrize("missing", ["input", "output"])
def test_both_files_must_be_given(missing, capsys, tmp_path):
    given = {"input": tmp_path / "rows.jsonl", "output": tmp_path / "p.png"}
    given.pop(missing)
    assert plot_ablation.main(["plot", *(f"--{k}={v}" for k, v in given.items())]) == 2
    assert f"`{missing}` must be given" in capsys.readouterr().err
