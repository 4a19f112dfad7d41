"""The rows of planning time, and the forests that they are of."""

import json
import time
from pathlib import Path

import pytest

from experiments import planning_time
from experiments.json_lines import read_json_lines
from experiments.planning_time import DEVICE_FOREST, HOST_FOREST, wall_times

RESULTS = Path(__file__).resolve().parent.parent / "experiments" / "results"
FIELDS = {"what", "policy", "nodes", "requests", "clock", "time_us", "p10_us", "p90_us", "cores"}
FIELDS |= {"num_runs", "load_average", "device", "jax", "commit", "tree_hash", "date", "forest"}


def test_a_smoke_run_writes_two_rows_for_each_policy(tmp_path):
    output = tmp_path / "rows.jsonl"
    flags = ["--smoke", "--policies=balanced,auto", "--num_runs=3", f"--output={output}"]
    assert planning_time.main(["planning_time", *flags]) == 0
    rows = read_json_lines(output)
    assert [(row["what"], row["policy"]) for row in rows] == [
        ("plan_forest", "balanced"),
        ("plan_forest", "auto"),
        ("build_plan", "balanced"),
        ("build_plan", "auto"),
    ]
    for row in rows:
        assert set(row) >= FIELDS and row["nodes"] == 24 and row["clock"] == "wall"
        assert 0 < row["p10_us"] <= row["time_us"] <= row["p90_us"]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_the_forests_have_the_stated_sizes():
    arrays = DEVICE_FOREST.forest(page_size=64)
    assert (int(arrays.num_nodes), int(arrays.num_requests)) == (1024, 512)
    assert (HOST_FOREST.num_nodes, HOST_FOREST.batch_size) == (20_000, 10_000)


def test_wall_time_is_that_of_the_calls_after_the_first():
    calls = []

    def call():
        calls.append(None)
        time.sleep(0.2 if len(calls) == 1 else 0.002)

    times = wall_times(call, num_runs=4)
    assert len(calls) == 5
    assert 2000 <= times["p10_us"] <= times["time_us"] <= times["p90_us"] < 200_000


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/planning_time.jsonl")), ids=str)
def test_committed_rows_are_of_every_forest_and_policy(path):
    rows = read_json_lines(path)
    assert all(set(row) >= FIELDS for row in rows)
    keys = [(row["what"], row["policy"]) for row in rows]
    assert len(set(keys)) == len(keys) == 12
    assert {row["nodes"] for row in rows} == {1024, 20_000}


def test_an_unknown_policy_is_refused_in_one_line(capsys):
    assert planning_time.main(["planning_time", "--policies=best"]) == 2
    assert capsys.readouterr().err.startswith("error: `policy` must be one of")
