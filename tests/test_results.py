"""The committed results of the kernels: one source, nothing skipped, every bound kept."""

import itertools
import json
from pathlib import Path

import pytest

from codec_jax.planning.policies import DEFAULT_POLICY, POLICIES
from experiments.ablation_cases import cases_of
from experiments.append_time import BATCHES
from experiments.json_lines import read_json_lines
from experiments.kernel_roofline import SPEED_TABLE

RESULTS = Path(__file__).resolve().parent.parent / "experiments" / "results" / "nvidia-h200"
GPU_TESTS = json.loads((RESULTS / "gpu_tests.json").read_text(encoding="utf-8"))


def test_the_contract_passed_whole():
    assert GPU_TESTS["passed"] > 0
    assert (GPU_TESTS["failed"], GPU_TESTS["skipped"]) == (0, 0)


@pytest.mark.parametrize("name", ["kernel_roofline", "append_time"])
def test_rows_are_of_the_sources_that_passed(name):
    rows = read_json_lines(RESULTS / f"{name}.jsonl")
    assert rows
    for field in ("device", "jax", "commit", "tree_hash"):
        assert {row[field] for row in rows} == {GPU_TESTS[field]}


def test_logits_through_the_kernels_are_within_their_bounds():
    rows = read_json_lines(RESULTS / "generate.jsonl")
    assert len({(row["commit"], row["tree_hash"]) for row in rows}) == 1
    assert [row["model"] for row in rows] == ["stories260k", "random-4l-128"]
    for row in rows:
        assert row["implementations_in_hlo"] == ["mosaic_gpu", "xla"]
        assert (row["generated_by_in_hlo"], row["dtype"]) == ("mosaic_gpu", "bfloat16")
        assert row["is_within_bound"] and row["num_compared"] > 1000
        assert row["max_difference"] <= row["max_bound"]
        assert row["rms_difference"] <= row["rms_bound"]


def test_every_case_of_the_speed_table_is_measured_and_right():
    rows = read_json_lines(RESULTS / "kernel_roofline.jsonl")
    for policy in ("balanced", DEFAULT_POLICY):
        assert {row["case"] for row in rows if row["policy"] == policy} == set(SPEED_TABLE)
    check_measured(rows)


def test_every_policy_is_measured_on_every_case_and_right():
    rows = read_json_lines(RESULTS / "planner_ablation.jsonl")
    assert all("skipped" not in row for row in rows)
    expected = itertools.product((case.name for case in cases_of("main")), POLICIES)
    assert sorted((row["case"], row["policy"]) for row in rows) == sorted(expected)
    check_measured(rows)
    for row in rows:
        assert row["predicted_us"] >= row["lower_bound_us"] > 0 and row["segments"] > 0


def test_the_grid_of_the_default_policy_is_whole_and_right():
    rows = read_json_lines(RESULTS / "planner_o27.jsonl")
    policies = ("flash_decoding", "hydragen", "balanced", "auto")
    expected = itertools.product((case.name for case in cases_of("o27")), policies)
    assert sorted((row["case"], row["policy"]) for row in rows) == sorted(expected)
    check_measured(rows)


def check_measured(rows):
    for row in rows:
        assert row["policy"] in POLICIES and row["implementation"] == "mosaic_gpu"
        assert row["p10_us"] <= row["time_us"] <= row["p90_us"]
        assert row["floor_share"] == pytest.approx(row["floor_us"] / row["time_us"], abs=1e-3)
        assert row["max_rel_err"] < 5e-3 and row["max_lse_err"] < 1e-4


def test_writing_is_timed_both_ways_for_every_batch():
    rows = read_json_lines(RESULTS / "append_time.jsonl")
    found = [(row["batch_size"], row["implementation"]) for row in rows]
    assert found == list(itertools.product(BATCHES, ("xla", "mosaic_gpu")))
    for row in rows:
        assert 0 < row["p10_us"] <= row["time_us"] <= row["p90_us"]
