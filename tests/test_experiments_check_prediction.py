"""Predictions against times: rows, common shapes, random forests, refusals."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from codec_jax.planning.build import build_plan
from codec_jax.planning.profiles import CostProfile
from experiments import check_prediction
from experiments.check_prediction import CheckConfig, describe
from experiments.json_lines import read_json_lines
from experiments.prediction_bench import PlanBench
from experiments.prediction_cases import Heads, make_batches, random_case, workload_case
from experiments.random_forests import ForestSizes, random_forest
from experiments.timing import Timing
from experiments.workloads import Workload

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
PROFILE = CostProfile(
    dtype="float32",
    head_dim=128,
    page_size=16,
    num_workers=4,
    step_us=0.5,
    wide_step_us=1.0,
    segment_us=2.0,
    slot_us=0.01,
    launch_us=6.0,
    bytes_per_us=4e6,
    flops_per_us=5e8,
    cache_bytes=4e7,
)
SMALL = ForestSizes(requests=(3, 20), tokens=(50, 400), levels=(2, 3))
POLICIES = ("balanced", "flash_decoding")


def write_profiles(path):
    rows = [dataclasses.asdict(dataclasses.replace(PROFILE, head_dim=d)) for d in (64, 128)]
    path.write_text(json.dumps({"profiles": rows}), encoding="utf-8")
    return str(path)


def smoke_config(folder, **settings):
    return CheckConfig(
        policies=POLICIES,
        num_forests=2,
        seed=3,
        dtype="float32",
        page_size=16,
        profile=write_profiles(folder / "profiles.json"),
        smoke=True,
        **settings,
    )


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of a smoke run whose timer takes each plan for 20 us."""
    folder = tmp_path_factory.mktemp("check")
    config = smoke_config(folder, output=str(folder / "rows.jsonl"))

    def timer(calls, *, num_runs):
        results = jax.block_until_ready([call() for call in calls])
        assert num_runs == 10 and all(np.isfinite(result.out).all() for result in results)
        return [Timing(20.0, 19.0, 21.0, ())] * len(calls)

    found = check_prediction.run(config, timer=timer)
    assert read_json_lines(folder / "rows.jsonl") == found
    return found


def test_processes_give_the_same_rows(rows, tmp_path):
    """Without a timer: no function of this module could be the other processes' clock."""
    config = smoke_config(tmp_path, num_processes=2)
    untimed = dict.fromkeys(("time_us", "p10_us", "p90_us", "rel_err"))
    found = check_prediction.run(config, timer=None)
    assert found == [row | untimed for row in rows]


def test_every_case_has_a_row_for_each_policy(rows):
    keys = [(row["case"], row["policy"]) for row in rows]
    names = ("smoke-star", "smoke-forest", "random-3000000", "random-3000001")
    assert sorted(keys) == sorted((name, policy) for name in names for policy in POLICIES)


def test_errors_are_those_of_the_predictions(rows):
    for row in rows:
        bounds = {name: row[f"{name}_us"] for name in ("work", "memory", "compute")}
        assert row["predicted_us"] == max(bounds.values()) + row["fixed_us"]
        assert bounds[row["bound_by"]] == max(bounds.values())
        assert row["rel_err"] == row["predicted_us"] / 20 - 1
        assert row["fixed_us"] >= 6 and row["work_us"] > 2
    errors = np.abs([row["rel_err"] for row in rows])
    worst = rows[int(errors.argmax())]
    line = describe(rows)
    assert f"median error {np.median(errors):.1%}" in line
    assert f"({worst['case']}, {worst['policy']})" in line


def test_untimed_rows_have_no_error(rows):
    untimed = [row | {"time_us": None, "rel_err": None} for row in rows]
    assert describe(untimed) == "no times"
    assert describe([*untimed, rows[0]]).startswith(f"median error {abs(rows[0]['rel_err']):.1%}")


def cases(page_size=16):
    named = [Workload(f"w{n}", (1, n), (40, 9), num_q_heads=4, num_kv_heads=2) for n in (3, 40)]
    random = [
        random_case(seed, page_size=page_size, sizes=SMALL, heads=Heads(2, 2, 128))
        for seed in range(3)
    ]
    return [workload_case(w, page_size=page_size) for w in named] + random


def test_cases_of_a_size_share_one_shape():
    batches = make_batches(cases(), policies=("balanced",), page_size=16, num_workers=4)
    assert sorted(len(batch.cases) for batch in batches) == sorted(_split(cases()))
    assert len(batches) > 1
    for batch in batches:
        assert len({str(jax.tree.map(np.shape, case.forest)) for case in batch.cases}) == 1
        for case in batch.cases:
            assert batch.spec.num_kv_heads == case.num_kv_heads
            assert case.forest.page_list.max() < batch.num_pages


def _split(all_cases):
    """Numbers of cases by the power of two of their requests; all have the same heads."""
    rooms = [max(16, 1 << (int(c.forest.num_requests) - 1).bit_length()) for c in all_cases]
    return [rooms.count(room) for room in set(rooms)]


def test_padding_changes_no_plan():
    case = cases()[2]
    (batch,) = make_batches([case], policies=("balanced",), page_size=16, num_workers=4)
    padded = batch.cases[0].forest
    assert padded.request_row.size > case.forest.request_row.size
    plain, roomy = (
        jax.device_get(build_plan(forest, batch.spec, capacity=batch.capacity))
        for forest in (case.forest, padded)
    )
    for name in ("steps", "segments"):
        used = slice(int(getattr(plain.counts, name)))
        for a, b in zip(
            jax.tree.leaves(getattr(plain, name)),
            jax.tree.leaves(getattr(roomy, name)),
            strict=True,
        ):
            np.testing.assert_array_equal(a[used], b[used])
    np.testing.assert_array_equal(plain.worker_indptr, roomy.worker_indptr)


def test_the_checked_program_lowers_for_cuda():
    large = [random_case(0, page_size=64, sizes=ForestSizes())]
    (batch,) = make_batches(large, policies=("balanced",), page_size=64, num_workers=132)
    profile = dataclasses.replace(PROFILE, dtype="bfloat16", page_size=64, num_workers=132)
    bench = PlanBench(batch, profile, "mosaic_gpu", "balanced")
    shapes = bench.shapes
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        traced = jax.jit(bench.attention.__call__).trace(*shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2


@pytest.mark.parametrize("seed", range(8))
def test_random_forests_have_the_sizes_they_are_drawn_from(seed):
    sizes = ForestSizes()
    forest = random_forest(seed, page_size=64, sizes=sizes)
    num_requests = int(forest.num_requests)
    assert sizes.requests[0] <= num_requests <= sizes.requests[1]
    # Every node has a token at least, and lengths are rounded down.
    slack = int(forest.num_nodes)
    assert sizes.tokens[0] - slack <= forest.kv_len.sum() <= sizes.tokens[1] + slack
    depth = np.zeros(forest.parent.size, int)
    for node, parent in enumerate(forest.parent):
        depth[node] = 1 + (depth[parent] if parent >= 0 else 0)
    assert sizes.levels[0] <= depth.max() <= sizes.levels[1]
    assert (depth[forest.request_node] == depth.max()).all()
    assert set(range(forest.parent.size)) - set(forest.parent.tolist()) == set(
        forest.request_node.tolist()
    )
    assert sorted(forest.page_list.tolist()) == list(range(forest.page_list.size))
    end = forest.position[forest.request_node] + forest.kv_len[forest.request_node]
    assert end.sum() <= sizes.max_path_tokens


def test_random_forests_are_repeatable_and_different():
    first, again, other = (random_forest(seed, page_size=64) for seed in (1, 1, 2))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert first.kv_len.sum() != other.kv_len.sum()


def test_what_reads_too_much_without_sharing_is_drawn_again():
    bounds = ForestSizes(requests=(4, 60), tokens=(200, 2000), max_path_tokens=9000)
    for seed in range(20):
        forest = random_forest(seed, page_size=16, sizes=bounds)
        end = forest.position[forest.request_node] + forest.kv_len[forest.request_node]
        assert end.sum() <= 9000


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "cpu.json: No such file or directory"),
        (["--policies=best"], "`policy` must be one of balanced"),
        (["--num_forests=-1"], "`num_forests` must be at least 0; got -1."),
        (["--seed=-1"], "`seed` must be at least 0; got -1."),
        (["--num_processes=0"], "`num_processes` must be at least 1; got 0."),
        (["--num_runs=0"], "`num_runs` must be at least 1; got 0."),
        (["--profile=PROFILES", "--cases=nonesuch"], "`cases` must be names in workloads.json"),
        (["--profile=PROFILES"], "`profile` must have a profile for ('bfloat16', 128, 64)"),
        (["--smoke", "--bogus"], "Unknown command line flag 'bogus'"),
        (
            ["--profile=PROFILES", "--dtype=float32", "--page_size=16", "--output=no/where"],
            "no/where: No such file or directory",
        ),
    ],
)
def test_wrong_use_is_one_line(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_profiles(tmp_path / "profiles.json")
    arguments = [flag.replace("PROFILES", path) for flag in flags]
    assert check_prediction.main(["check_prediction", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
