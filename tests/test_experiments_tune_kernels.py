"""Tuning on a machine without a GPU: which candidates, which is best, what is written."""

import dataclasses
import json

import pytest

from experiments import tune_kernels
from experiments.tune_kernels import TuneConfig, best_of, candidates, main, run
from pallas_kernels.config import MAX_SHARED_BYTES, KernelConfig
from pallas_kernels.tuning import Shape, load_configs

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
    assert best_of({a: [10.0, 10.0], b: [10.0, 10.0]}) == a


def test_what_is_written_is_what_the_library_reads(tmp_path, monkeypatch):
    """The clock is made up: the third candidate is the fastest on each case."""
    monkeypatch.setattr(tune_kernels, "_inputs", lambda workload, shape: None)
    monkeypatch.setattr(tune_kernels, "_compile", lambda inputs, workload, c: c)
    third = candidates(SHAPE)[2]
    path = tmp_path / "some-gpu.json"
    config = TuneConfig(output=str(path), commit="abc", cases=("deep-binary", "root16k-b16"))
    run(config, time_call=lambda c: 7.0 if c == third else 9.0)
    assert load_configs(path) == {SHAPE: third}
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["commit"] == "abc"
    row = written["configs"][0]
    assert row["cases"] == ["deep-binary", "root16k-b16"]
    assert row["tried"][0] == {"config": dataclasses.asdict(third), "times_us": [7.0, 7.0]}
    assert len(row["tried"]) == len(candidates(SHAPE))


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
        ("--output=missing/x.json", "missing/x.json"),
    ],
)
def test_refuses_in_one_line(argument, reason, capsys):
    assert main(["tune", argument]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1
