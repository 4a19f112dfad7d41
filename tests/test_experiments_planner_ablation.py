"""The ablation of policies: its cases, rows, summary and command line."""

import dataclasses
import json
import math

import numpy as np
import pytest

from experiments import ablation_bucket, ablation_cases, planner_ablation
from experiments.ablation_bucket import make_bucket, measure_bucket, prepare_bucket
from experiments.ablation_cases import GROUPS, RANDOM, auto_grid, buckets, cases_of
from experiments.ablation_summary import (
    losses_of_auto,
    mean_speed_ups,
    speed_ups,
    summary,
)
from experiments.attention_step import MeasureConfig
from experiments.json_lines import read_json_lines
from experiments.planner_ablation import POLICY_NAMES, AblationConfig
from experiments.plot_ablation import timed
from experiments.workloads import Workload

POLICIES = ("flash_decoding", "auto")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    output = tmp_path_factory.mktemp("ablation") / "rows.jsonl"
    config = AblationConfig(smoke=True, policies=POLICIES, output=str(output))
    rows = planner_ablation.run(config)
    assert read_json_lines(output) == rows
    return rows


def test_each_case_has_a_row_for_each_policy(rows):
    assert [(row["case"], row["policy"]) for row in rows] == [
        (case, policy) for case in ("smoke-star", "smoke-random") for policy in POLICIES
    ]


def test_a_row_has_the_fields_of_the_roofline_and_the_prediction(rows):
    for row in rows:
        assert (row["num_q_heads"], row["num_kv_heads"], row["head_dim"]) == (32, 2, 64)
        assert row["implementation"] == "xla" and row["time_us"] is None
        assert row["max_rel_err"] < 6e-3 and row["max_lse_err"] < 1e-4
        assert row["predicted_ticks"] >= row["lower_bound_ticks"] > 0
        assert row["cost"] == "closed form" and row["predicted_us"] is None
        assert row["slots"] >= row["segments"] > 0 and row["plan_us"] > 0
        assert {"floor_us", "kv_bytes", "device", "commit", "date", "batch_size"} <= set(row)
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows


def test_processes_give_the_same_rows(rows, monkeypatch):
    """A third case of another batch size makes a second bucket, and so a second process."""
    third = Workload("four", (1, 4), (70, 9), num_q_heads=32, num_kv_heads=2, head_dim=64)
    monkeypatch.setattr(ablation_cases, "SMOKE", (*ablation_cases.SMOKE, third))
    config = AblationConfig(smoke=True, policies=POLICIES, num_processes=2)
    found = planner_ablation.run(config)
    assert [(row["case"], row["policy"]) for row in found[4:]] == [
        ("four", policy) for policy in POLICIES
    ]
    same = {"plan_us": 0}
    assert [row | same for row in found[:4]] == [row | same for row in rows]


def test_the_groups_hold_what_they_name():
    sizes = {group: len(cases_of(group)) for group in GROUPS}
    assert sizes == {
        "codec": 25,
        "sweep120k": 5,
        "fasttree": 45,
        "unshared": 2,
        "random": 6,
        "o27": 126,
    }
    assert len(cases_of("main")) == 83
    names = [case.name for case in [*cases_of("main"), *cases_of("o27")]]
    assert len(set(names)) == len(names)
    heads = {(case.num_q_heads, case.num_kv_heads) for case in cases_of("fasttree")}
    assert heads == {(16, 1), (32, 8), (32, 32)}


def test_the_papers_points_have_the_known_mean_of_ideal_read_reduction():
    """Sharers per token, geometric mean 2.66 over the 25 points, computed from their levels."""
    ratios = [
        case.batch_size * sum(case.tokens_per_node) / case.unique_tokens
        for case in cases_of("codec")
    ]
    assert np.exp(np.mean(np.log(ratios))) == pytest.approx(2.66, abs=0.005)


def test_a_bucket_has_one_batch_size_and_one_set_of_heads():
    found = buckets(cases_of("main"))
    assert sum(map(len, found)) == 83
    for bucket in found:
        assert len({(c.batch_size, c.num_q_heads, c.num_kv_heads) for c in bucket}) == 1


@pytest.mark.parametrize("case", RANDOM, ids=lambda case: case.name)
def test_a_random_forest_counts_its_work_as_its_arrays_do(case):
    arrays = case.forest(page_size=64)
    assert int(arrays.num_requests) == case.batch_size
    assert case.kv_bytes() == 2 * arrays.kv_len.sum() * 8 * 128 * 2
    path = (arrays.position + arrays.kv_len)[arrays.request_node]
    assert case.num_flops() == 4 * path.sum() * 32 * 128
    used = arrays.page_list[: int(arrays.num_page_entries)]
    assert sorted(used.tolist()) == list(range(used.size))


def test_patterns_keep_a_part_of_a_group():
    names = [case.name for case in cases_of("o27", ["o27-b1-*", "o27-b256-p0-s16"])]
    assert len(names) == 19 and names[-1] == "o27-b256-p0-s16"
    assert [case.name for case in auto_grid()][:1] == ["o27-b1-p0-s16"]


def test_plans_that_are_too_large_are_left_out_with_a_reason(monkeypatch):
    """8 leaves of a page each below a root of 4 pages: 40 steps request by request."""
    case, config = cases_of("smoke")[0], MeasureConfig(smoke=True)
    monkeypatch.setattr(ablation_bucket, "MAX_STEPS", 39)
    bucket = make_bucket([case], POLICIES, config)
    assert bucket.jobs == (("smoke-star", "auto"),)
    assert bucket.skipped == {("smoke-star", "flash_decoding"): 40}
    monkeypatch.setattr(ablation_bucket, "MAX_STEPS", 1)
    ready = prepare_bucket([case], policies=POLICIES, config=config)
    rows = measure_bucket(ready, config=config)
    assert [(row["case"], row["policy"]) for row in rows] == [
        ("smoke-star", policy) for policy in POLICIES
    ]
    assert rows[0]["skipped"] == "the plan would have 40 steps, more than 1"
    assert losses_of_auto(rows) == [] and timed(rows) == []


def made_up(case, **times):
    return [{"case": case, "policy": policy, "time_us": time} for policy, time in times.items()]


MADE_UP = [
    *made_up("codec-vary-batch-4", flash_decoding=40.0, hydragen=30.0, balanced=10.0, auto=10.4),
    *made_up("codec-vary-batch-8", flash_decoding=90.0, hydragen=30.0, balanced=90.0, auto=31.0),
    *made_up("codec-vary-batch-120k-4", flash_decoding=100.0, balanced=1.0),
    *made_up("fasttree-0", balanced=1.0, auto=None),
]


def test_means_are_geometric_and_over_the_papers_points_only():
    means = mean_speed_ups(MADE_UP)
    assert means["balanced"] == (pytest.approx(2.0), 2)
    assert means["hydragen"] == (pytest.approx(2.0), 2)
    assert means["auto"] == (pytest.approx(math.sqrt(40 / 10.4 * 90 / 31)), 2)
    assert set(speed_ups(MADE_UP)) == {row["case"] for row in MADE_UP} - {"fasttree-0"}


def test_losses_of_auto_are_against_the_best_fixed_policy():
    worst, other = losses_of_auto(MADE_UP)
    assert (worst.case, worst.best_policy, worst.is_within) == (
        "codec-vary-batch-4",
        "balanced",
        True,  # 0.4 us
    )
    assert (other.case, other.best_policy, other.is_within) == (
        "codec-vary-batch-8",
        "hydragen",
        False,  # 1 us and 3.3%
    )
    text = "\n".join(summary(MADE_UP))
    assert "balanced: 2.00 times as fast as flash_decoding, geometric mean over 2 of the" in text
    assert "at worst 1.040 (codec-vary-batch-4, 10.4 us to 10.0 us of balanced)" in text
    assert "in 1 of 2 cases" in text and "not within: codec-vary-batch-8 31.00 us" in text


def test_rows_without_times_have_no_summary(rows):
    assert summary(rows) == []


REFUSED = {
    "an unknown group": (["--group=papers"], "`group` must be one of main, codec"),
    "an unknown case": (["--group=codec", "--cases=fasttree-0"], "`cases` must name cases of"),
    "an unknown policy": (["--policies=best"], "`policy` must be one of"),
    "a policy twice": (["--policies=auto,auto"], "`policies` must be different names"),
    "no folder": (["--smoke", "--output=no/rows.jsonl"], "no/rows.jsonl"),
    "an argument": (["rows.jsonl"], "'rows.jsonl'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_line(case, capsys, monkeypatch, tmp_path):
    arguments, reason = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    assert planner_ablation.main(["planner_ablation", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and reason in captured.err


def test_every_policy_is_measured_by_default():
    assert AblationConfig(smoke=True).policies == POLICY_NAMES
    assert dataclasses.replace(AblationConfig(), group="o27").workloads == auto_grid()
