"""The roofline's command line on a CPU: rows without times, other sizes, refusals."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments import attention_step, kernel_roofline
from experiments.attention_step import MeasureConfig, profile_of
from experiments.json_lines import read_json_lines
from experiments.kernel_roofline import RooflineConfig
from experiments.workloads import load_workloads

REPOSITORY = Path(__file__).resolve().parent.parent
FIELDS = {
    *("case", "policy", "implementation", "dtype", "num_q_heads", "num_kv_heads", "head_dim"),
    *("page_size", "batch_size", "time_us", "p10_us", "p90_us", "floor_us", "floor_share"),
    *("plan_us", "kv_bytes", "max_rel_err", "device", "jax", "commit", "tree_hash", "date"),
}


def test_smoke_rows_have_every_field_and_right_answers(tmp_path):
    path = tmp_path / "rows.jsonl"
    arguments = ["--smoke", "--commit=abc", "--policies=balanced,auto", f"--output={path}"]
    assert kernel_roofline.main(["kernel_roofline", *arguments]) == 0
    rows = read_json_lines(path)
    assert [(row["case"], row["policy"]) for row in rows] == [
        (case.name, policy) for case in kernel_roofline.SMOKE for policy in ("balanced", "auto")
    ]
    for row in rows:
        assert set(row) >= FIELDS
        assert row["implementation"] == "xla" and row["time_us"] is None
        assert row["max_rel_err"] < 1e-2
        assert row["kv_bytes"] > 0 and row["floor_us"] > 0


def test_other_heads_and_widths_over_the_same_forests():
    config = RooflineConfig(smoke=True, heads="4/4", head_dim=32, dtype="float32")
    rows = kernel_roofline.run(config)
    assert [row["case"] for row in rows] == [case.name for case in kernel_roofline.SMOKE]
    for row, case in zip(rows, kernel_roofline.SMOKE, strict=True):
        assert (row["num_q_heads"], row["num_kv_heads"], row["head_dim"]) == (4, 4, 32)
        assert row["kv_bytes"] == 2 * case.unique_tokens * 4 * 32 * 4  # float32
        assert row["floor_us"] >= row["kv_bytes"] / 4.3e6
        assert row["max_rel_err"] < 1e-5


def test_plans_cost_what_was_measured_of_the_kernels_and_only_of_them(monkeypatch):
    monkeypatch.setattr(attention_step, "device_slug", lambda: "nvidia-h200")
    for implementation, is_measured in (("mosaic_gpu", True), ("xla", False)):
        monkeypatch.setattr(attention_step, "implementation_of", lambda *_, i=implementation: i)
        profile = profile_of(load_workloads()["deep-binary"], MeasureConfig())
        assert (profile is not None) is is_measured
        assert profile is None or (profile.dtype, profile.head_dim) == ("bfloat16", 128)


def test_processes_give_the_same_rows(tmp_path):
    """As a program of its own: what it gives to the other processes is of `__main__` there."""
    path = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "experiments.kernel_roofline", "--smoke", "--num_processes=2"]
    done = subprocess.run(
        [*command, "--commit=abc", f"--output={path}"], cwd=REPOSITORY, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    alone = kernel_roofline.run(RooflineConfig(smoke=True, commit="abc"))
    same = {"plan_us": 0}
    assert [row | same for row in read_json_lines(path)] == [row | same for row in alone]


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--heads=32", "as 32/8; got '32'."),
        ("--heads=9/2", "as 32/8; got '9/2'."),
        ("--heads=0/1", "as 32/8; got '0/1'."),
        ("--heads=8/x", "as 32/8; got '8/x'."),
        ("--head_dim=0", "`head_dim` must be positive; got 0."),
        ("--num_runs=0", "`num_runs` must be positive; got 0."),
        ("--num_processes=0", "`num_processes` must be positive; got 0."),
        ("--policies=balanced,best", "`policy` must be one of balanced"),
        ("--cases=nowhere", "`cases` must be names in workloads.json; got 'nowhere'."),
        ("--output=/nowhere/rows.jsonl", "/nowhere/rows.jsonl"),
    ],
)
def test_wrong_use_is_one_line(flag, reason, capsys):
    assert kernel_roofline.main(["kernel_roofline", flag]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1
