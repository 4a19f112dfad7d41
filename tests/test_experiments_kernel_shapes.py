"""Other shapes of attention: which are measured, and that they are right on a CPU."""

import pytest

from experiments import kernel_shapes
from experiments.json_lines import read_json_lines
from experiments.kernel_shapes import ShapesConfig, make_jobs


def shape_of(row):
    return (
        f"{row['num_q_heads']}/{row['num_kv_heads']}",
        row["head_dim"],
        row["dtype"],
        row["page_size"],
    )


def test_smoke_rows_are_right_for_every_shape(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert kernel_shapes.main(["kernel_shapes", "--smoke", f"--output={path}"]) == 0
    rows = read_json_lines(path)
    assert [shape_of(row) for row in rows] == [
        ("32/32", 64, "bfloat16", 64),
        ("8/2", 64, "bfloat16", 64),
        ("8/2", 256, "bfloat16", 64),
        ("8/2", 64, "float16", 64),
        ("8/2", 64, "bfloat16", 16),
        ("8/2", 64, "bfloat16", 128),
        ("8/1", 64, "bfloat16", 64),
    ]
    for row in rows:
        assert row["case"] == "smoke-star" and row["time_us"] is None
        assert row["max_rel_err"] < 1e-2


def test_hydragens_forests_are_all_there():
    jobs = [job for job in make_jobs(ShapesConfig()) if job.workload.num_kv_heads == 1]
    assert len(jobs) == 20
    assert {job.workload.num_q_heads for job in jobs} == {8}
    assert {job.workload.batch_size for job in jobs} == {512, 1024, 2048, 4096}


def test_a_shape_changes_what_it_names_only():
    jobs = [job for job in make_jobs(ShapesConfig()) if job.workload.num_kv_heads != 1]
    plain = (32, 8, 128, "bfloat16", 64)
    for job in jobs:
        workload, config = job.workload, job.config
        heads = (workload.num_q_heads, workload.num_kv_heads, workload.head_dim)
        differing = [
            a
            for a, b in zip((*heads, config.dtype, config.page_size), plain, strict=True)
            if a != b
        ]
        assert len(differing) == 1
    assert len(jobs) == 12


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--policy=best", "`policy` must be one of balanced"),
        ("--num_processes=0", "`num_processes` must be positive; got 0."),
        ("--output=/nowhere/rows.jsonl", "/nowhere/rows.jsonl"),
    ],
)
def test_wrong_use_is_one_line(flag, reason, capsys):
    assert kernel_shapes.main(["kernel_shapes", flag]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1
