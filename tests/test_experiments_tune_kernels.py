"""Tuning on a machine without a GPU: which candidates, which is best, what is written."""

import dataclasses
import functools
import json

import pytest

from experiments import tune_kernels
from experiments.processes import Stages
from experiments.tune_kernels import TuneConfig, best_of, candidates, main, make_jobs, run
from pallas_kernels.config import MAX_SHARED_BYTES, KernelConfig
from pallas_kernels.tuning import FOLDER, Shape, load_configs

SHAPE = Shape("bfloat16", 128, 64)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_candidates_fit_and_start_with_the_heuristic(head_dim):
    shape = dataclasses.replace(SHAPE, head_dim=head_dim)
    tried = candidates(shape)
    assert tried[0] == KernelConfig.heuristic(head_dim, "bfloat16")
    assert len(set(tried)) == len(tried) >= {64: 20, 128: 10, 192: 2, 256: 1}[head_dim]
    assert max(c.shared_bytes(head_dim, "bfloat16") for c in tried) <= MAX_SHARED_BYTES


def test_wide_heads_leave_no_registers_for_queries():
    def places(head_dim):
        shape = Shape("bfloat16", head_dim, 64)
        return {config.queries_in_registers for config in candidates(shape)}

    assert places(128) == {False, True}
    assert places(192) == places(256) == {False}


def test_the_best_has_the_smallest_geometric_mean():
    a, b, c = (KernelConfig(num_stages=stages) for stages in (2, 3, 4))
    assert best_of({a: [10.0, 10.0], b: [1.0, 90.0], c: [30.0, 4.0]}) == b
    # As good within the noise: the most stages.
    assert best_of({a: [10.0, 10.0], b: [10.0, 10.05], c: [10.0, 10.2]}) == b


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_the_committed_choice_follows_from_the_committed_times(path):
    rows = json.loads(path.read_text(encoding="utf-8"))["configs"]
    assert len(load_configs(path)) == len(rows) > 0
    for row in rows:
        tried = {KernelConfig(**each["config"]): each["times_us"] for each in row["tried"]}
        assert list(tried) and set(tried) == set(candidates(Shape(**row["shape"])))
        assert KernelConfig(**row["config"]) == best_of(tried)


@pytest.mark.parametrize("num_processes", [1, 2])
def test_what_is_written_is_what_the_library_reads(tmp_path, num_processes):
    """The clock is made up: the third candidate is the fastest on each case."""
    third = candidates(SHAPE)[2]
    path = tmp_path / "some-gpu.json"
    config = TuneConfig(
        output=str(path),
        commit="abc",
        cases=("deep-binary", "root16k-b16"),
        num_processes=num_processes,
    )
    run(config, stages=Stages(tried_of, functools.partial(made_up_times, best=third)))
    assert load_configs(path) == {SHAPE: third}
    written = json.loads(path.read_text(encoding="utf-8"))
    row = written["configs"][0]
    assert row["commit"] == "abc"
    assert row["cases"] == ["deep-binary", "root16k-b16"]
    assert row["tried"][0] == {"config": dataclasses.asdict(third), "times_us": [7.0, 7.0]}
    assert len(row["tried"]) == len(candidates(SHAPE))


def test_rows_of_other_shapes_are_kept(tmp_path):
    path = tmp_path / "some-gpu.json"
    best = {}
    for head_dim, index in ((64, 1), (128, 2), (64, 3)):
        shape = dataclasses.replace(SHAPE, head_dim=head_dim)
        best[shape] = candidates(shape)[index]
        config = TuneConfig(output=str(path), cases=("deep-binary",), head_dims=(head_dim,))
        run(config, stages=Stages(tried_of, functools.partial(made_up_times, best=best[shape])))
        assert load_configs(path) == best


def test_a_file_of_something_else_is_refused_before_any_work(tmp_path, capsys):
    path = tmp_path / "some-gpu.json"
    path.write_text('{"profiles": []}')
    assert main(["tune", f"--output={path}"]) == 2
    assert "must be a file that experiments.tune_kernels wrote" in capsys.readouterr().err
    assert path.read_text() == '{"profiles": []}'


def tried_of(job):
    return job.tried


def made_up_times(tried, *, best):
    return [7.0 if candidate == best else 9.0 for candidate in tried]


def test_every_configuration_meets_every_forest():
    jobs = make_jobs(TuneConfig(head_dims=(64, 128)))
    met = {(job.shape, job.workload.name, c) for job in jobs for c in job.tried}
    assert len(met) == sum(len(job.tried) for job in jobs)
    for shape in TuneConfig(head_dims=(64, 128)).shapes():
        for name in tune_kernels.CASES:
            assert {c for s, n, c in met if (s, n) == (shape, name)} == set(candidates(shape))
    assert all(job.workload.head_dim == job.shape.head_dim for job in jobs)


def test_a_dry_run_measures_nothing(capsys):
    assert main(["tune", "--dry_run", "--head_dims=64,128"]) == 0
    assert "head_dim=64" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("--cases=deep,root", "`cases` must be names in workloads.json; got 'deep'"),
        ("--cases=", "`cases` must be names in workloads.json; got ''"),
        ("--head_dims=wide", "`head_dims` must be positive integers; got 'wide'"),
        ("--page_sizes=0", "`page_sizes` must be positive integers; got '0'"),
        ("--head_dims=4096", "`head_dim` must be small enough for shared memory; got 4096"),
        ("--num_runs=0", "`num_runs` must be positive; got 0"),
        ("--num_processes=0", "`num_processes` must be positive; got 0"),
        ("--output=missing/x.json", "missing/x.json"),
    ],
)
def test_refuses_in_one_line(argument, reason, capsys):
    assert main(["tune", argument]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1
