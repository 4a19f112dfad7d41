"""The cost profile's command: end to end with a stand-in timer, refusals, lowering for CUDA."""

import dataclasses
import json

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from codec_jax.planning.estimate import count_work
from codec_jax.planning.profiles import CostProfile, load_profiles
from experiments import profile_cost
from experiments.json_lines import read_json_lines, write_json_lines
from experiments.profile_cost_config import ProfileConfig, Signature
from experiments.profile_cost_fit import predicted_us
from experiments.profile_cost_points import Bench, samples_of
from experiments.timing import Timing
from experiments.uniform_plans import uniform_plan

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
SMALL = ProfileConfig(
    dtypes=("float32",), head_dims=(8,), page_sizes=(4,), group_sizes=(4, 1), smoke=True
)
(SIGNATURE,) = SMALL.signatures
TRUE = CostProfile(
    **dataclasses.asdict(SIGNATURE),
    num_workers=4,
    step_us=0.5,
    wide_step_us=1.5,
    segment_us=2.0,
    slot_us=0.5,
    launch_us=4.0,
    bytes_per_us=1e9,
    flops_per_us=1e9,
    cache_bytes=1e8,
    masked_us=0.25,
    partial_us=0.75,
    tile_us=0.25,
)


class StandIn:
    """A timer that runs every call and says what the true costs predict for it."""

    def __init__(self):
        bench = Bench(signature=SIGNATURE, num_workers=4, implementation="xla", smoke=True)
        self._points = iter(bench.points(SMALL.group_sizes))
        self.num_calls = 0

    def __call__(self, calls, *, num_runs):
        times = []
        for call in calls:
            assert jax.block_until_ready(call()).out.ndim == 3
            sizes, point = next(self._points)
            made = uniform_plan(point.work, sizes)
            us = predicted_us(count_work(made.plan, kv_len=made.kv_len), TRUE)
            times.append(Timing(us, us - 1e-3, us + 1e-3, ()))
            self.num_calls += 1
        assert num_runs == SMALL.num_runs
        return times


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder, timer and rows of a run with a stand-in timer."""
    folder, timer = tmp_path_factory.mktemp("profile"), StandIn()
    config = dataclasses.replace(
        SMALL,
        output=str(folder / "cpu.json"),
        points_output=str(folder / "points.jsonl"),
        commit="abc",
    )
    return folder, timer, profile_cost.run(config, timer=timer)


def test_the_profile_has_costs_errors_and_where_it_is_from(finished):
    folder, timer, (row,) = finished
    (profile,) = load_profiles(folder / "cpu.json")
    for name in ("step_us", "wide_step_us", "segment_us", "slot_us", "masked_us", "partial_us"):
        assert getattr(profile, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name
    assert profile == CostProfile.from_row(row)
    assert row["held_out"]["points"] > 10 and row["held_out"]["max_rel_err"] < 0.02
    assert (row["device"], row["jax"], row["commit"]) == ("cpu", jax.__version__, "abc")
    assert len(row["tree_hash"]) == 64 and len(row["date"]) == 10
    assert timer.num_calls > 40


def test_every_point_is_written_with_its_time(finished):
    folder, timer, _ = finished
    rows = read_json_lines(folder / "points.jsonl")
    assert len(rows) == timer.num_calls
    assert {row["group_size"] for row in rows} == {4, 1}
    assert {row["axis"] for row in rows if row["group_size"] == 1} == {"rows"}
    for sample in samples_of(rows, SIGNATURE):
        assert sample.time_us == pytest.approx(predicted_us(sample.work, TRUE))
        assert sample.row["p10_us"] < sample.time_us < sample.row["p90_us"]


def test_points_are_fitted_again_without_a_gpu(finished, tmp_path):
    folder, _, rows = finished
    again = ["--points", str(folder / "points.jsonl"), "--output", str(tmp_path / "again.json")]
    assert profile_cost.main(["profile_cost", *again]) == 0
    assert json.loads((tmp_path / "again.json").read_text())["profiles"] == rows


def test_other_profiles_of_the_device_are_kept(finished, tmp_path):
    folder, _, (row,) = finished
    path = tmp_path / "cpu.json"
    other = row | {"head_dim": 64}
    stale = row | {"step_us": 99.0}
    path.write_text(json.dumps({"profiles": [stale, other]}), encoding="utf-8")
    config = ProfileConfig(points=str(folder / "points.jsonl"), output=str(path))
    profile_cost.run(config)
    assert json.loads(path.read_text())["profiles"] == [row, other]


def test_what_was_measured_is_there_after_an_interruption(tmp_path):
    points = tmp_path / "points.jsonl"
    two = dataclasses.replace(
        SMALL, page_sizes=(4, 8), output=str(tmp_path / "p.json"), points_output=str(points)
    )
    with pytest.raises(RuntimeError, match="StopIteration"):
        profile_cost.run(two, timer=StandIn())
    assert {row["page_size"] for row in read_json_lines(points)} == {4}
    assert len(load_profiles(tmp_path / "p.json")) == 1


def test_a_smoke_test_runs_every_point_without_times(tmp_path, capsys):
    path = tmp_path / "points.jsonl"
    small = ["--dtypes=float32", "--head_dims=8", "--page_sizes=4", "--group_sizes=4"]
    command = ["profile_cost", "--smoke", *small, f"--points_output={path}"]
    assert profile_cost.main(command) == 0
    rows = read_json_lines(path)
    assert len(rows) > 40 and all(row["time_us"] is None for row in rows)
    assert f"float32, head_dim 8, page 4: {len(rows)} points" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the kernels need an NVIDIA Hopper GPU; the device is a cpu."),
        (["--dtypes=int8"], "`dtypes` must be among bfloat16, float16, float32; got 'int8'."),
        (["--dtypes="], "`dtypes` must be one or more different values; got ()."),
        (["--head_dims=64,64"], "`head_dims` must be one or more different values; got (64, 64)."),
        (["--head_dims=80"], "`head_dims` must be as stored, multiples of 64; got 80."),
        (["--head_dims=x"], "`head_dims` must be integers; got 'x'."),
        (["--page_sizes=0"], "`page_sizes` must be positive; got 0."),
        (["--group_sizes=71"], "`group_sizes` must be at most a tile of 64; got 71."),
        (["--num_runs=0"], "`num_runs` must be positive; got 0."),
        (["--smoke", "--points=x"], "`points` must not be given with `smoke`"),
        (["--points=nowhere.jsonl"], "nowhere.jsonl: No such file or directory"),
        (["--smoke", "--points_output=no/where.jsonl"], "no/where.jsonl: No such file"),
        (["--smoke", "--bogus"], "Unknown command line flag 'bogus'"),
    ],
)
def test_wrong_use_is_one_line(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert profile_cost.main(["profile_cost", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert list(tmp_path.iterdir()) == []


def test_files_of_something_else_are_refused(finished, capsys, tmp_path):
    untimed, other = tmp_path / "untimed.jsonl", tmp_path / "other.jsonl"
    write_json_lines(untimed, [{"axis": "steps", "time_us": None}])
    write_json_lines(other, [{"case": "root16k", "time_us": 3.0}])
    for path in (untimed, other):
        assert profile_cost.main(["profile_cost", f"--points={path}"]) == 2
        assert f"`points` must be a file of timed points, see --points_output; got {path}." in (
            capsys.readouterr().err
        )
    points = finished[0] / "points.jsonl"
    broken = tmp_path / "broken.json"
    broken.write_text("{}", encoding="utf-8")
    assert profile_cost.main(["profile_cost", f"--points={points}", f"--output={broken}"]) == 2
    assert "`path` must be a file that experiments.profile_cost wrote" in capsys.readouterr().err
    assert broken.read_text(encoding="utf-8") == "{}"


@pytest.mark.parametrize("signature", ProfileConfig().signatures, ids=str)
def test_the_measured_program_lowers_for_cuda(signature: Signature):
    bench = Bench(signature=signature, num_workers=132, implementation="mosaic_gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        traced = jax.jit(bench.attention).trace(*bench.shapes())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2


def test_all_points_have_the_shapes_that_were_compiled():
    bench = Bench(signature=Signature(dtype="bfloat16", head_dim=64, page_size=64),
                  num_workers=6, implementation="mosaic_gpu", smoke=True)  # fmt: skip
    *_, shapes = bench.shapes()
    wanted = jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
    for sizes, point in bench.points((4, 1))[::5]:
        resolved = bench.resolve(uniform_plan(point.work, sizes))
        assert jax.tree.map(lambda x: (x.shape, x.dtype), resolved) == wanted
