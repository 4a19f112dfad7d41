"""Profile files: what is read back, what is refused and how, and that the wheel carries them."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from codec_jax.planning import profiles
from codec_jax.planning.cost import CostModel
from codec_jax.planning.profiles import CostProfile, cost_for, find_profile, load_profiles
from codec_jax.planning.spec import PlanSpec

REPOSITORY = Path(__file__).resolve().parent.parent
PROFILE = CostProfile(
    dtype="bfloat16",
    head_dim=128,
    page_size=64,
    num_workers=132,
    step_us=0.5,
    wide_step_us=1.25,
    segment_us=2.0,
    slot_us=0.01,
    launch_us=8.0,
    bytes_per_us=4e6,
    flops_per_us=6e8,
    cache_bytes=3e7,
    masked_us=0.25,
    partial_us=0.5,
    tile_us=0.002,
)
ROW = dataclasses.asdict(PROFILE)


def write(folder, rows, name="some-gpu.json"):
    path = folder / name
    path.write_text(json.dumps({"profiles": rows}), encoding="utf-8")
    return path


def test_a_row_comes_back_whatever_else_it_holds(tmp_path):
    path = write(tmp_path, [ROW | {"held_out": {"points": 3}, "commit": "abc"}])
    assert load_profiles(path) == [PROFILE]


def test_later_costs_may_be_missing(tmp_path):
    later = ("masked_us", "partial_us", "short_us", "tile_us")
    (profile,) = load_profiles(write(tmp_path, [{k: v for k, v in ROW.items() if k not in later}]))
    assert profile == dataclasses.replace(PROFILE, **dict.fromkeys(later, 0.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_us": None}, r"`step_us` must be a number of at least 0; got None\."),
        ({"step_us": "1"}, r"`step_us` must be a number of at least 0; got '1'\."),
        ({"step_us": -0.5}, r"`step_us` must be a number of at least 0; got -0\.5\."),
        ({"launch_us": float("nan")}, r"`launch_us` must be a number of at least 0; got nan\."),
        ({"cache_bytes": float("inf")}, r"`cache_bytes` must be a number .*; got inf\."),
        ({"slot_us": True}, r"`slot_us` must be a number of at least 0; got True\."),
        ({"page_size": 64.0}, r"`page_size` must be a number of at least 0; got 64\.0\."),
        ({"num_workers": 0}, r"`num_workers` must be positive; got 0\."),
        ({"bytes_per_us": 0.0}, r"`bytes_per_us` must be positive; got 0\.0\."),
        ({"flops_per_us": 0}, r"`flops_per_us` must be positive; got 0\."),
        ({"dtype": "int8"}, r"`dtype` must be one of bfloat16, float16, float32; got 'int8'\."),
    ],
)
def test_bad_values_are_refused_with_the_file_and_the_field(tmp_path, change, message):
    path = write(tmp_path, [ROW | change])
    with pytest.raises(ValueError, match=rf"`path` must be .*some-gpu\.json: {message}"):
        load_profiles(path)


@pytest.mark.parametrize(
    "name", [name for name in ROW if name not in ("masked_us", "short_us", "tile_us")]
)
def test_missing_fields_are_named(tmp_path, name):
    path = write(tmp_path, [{key: value for key, value in ROW.items() if key != name}])
    if name == "partial_us":
        assert load_profiles(path)[0].partial_us == 0
    else:
        with pytest.raises(ValueError, match=rf"some-gpu\.json: `row` must .* it lacks '{name}'\."):
            load_profiles(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"profiles": 3}', '{"profiles": [1]}', "\0"])
def test_other_files_are_refused_by_name(tmp_path, text):
    path = tmp_path / "some-gpu.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"`path` must be .* wrote; .*some-gpu\.json: "):
        load_profiles(path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "FOLDER", tmp_path)
    profiles._profiles_of.cache_clear()
    yield tmp_path
    profiles._profiles_of.cache_clear()


def test_the_profile_of_such_pages_is_found(folder):
    rows = [ROW, ROW | {"head_dim": 64}, ROW | {"page_size": 16}, ROW | {"dtype": "float16"}]
    write(folder, rows)
    for row in rows:
        key = {name: row[name] for name in ("dtype", "head_dim", "page_size")}
        assert find_profile("some-gpu", **key) == CostProfile.from_row(row)
        assert find_profile("another-gpu", **key) is None
    assert find_profile("some-gpu", dtype="bfloat16", head_dim=256, page_size=64) is None


def test_costs_in_ticks():
    """64 ticks to the microsecond; a slot is the work of all 132 workers."""
    assert PROFILE.cost_model() == CostModel(
        step_ticks=48, wide_step_ticks=80, segment_ticks=128, slot_ticks=84
    )
    spec = PlanSpec(num_kv_heads=8, group_size=4, page_size=64)
    assert cost_for(spec, PROFILE) == PROFILE.cost_model()
    assert cost_for(spec, None) == CostModel.closed_form(spec)


def test_a_short_step_is_priced_where_it_was_measured():
    """Else it costs what any other does."""
    measured = dataclasses.replace(PROFILE, short_us=0.25)
    assert measured.cost_model().short_step_ticks == 16
    assert measured.worker_costs[-1] == 0.25
    assert PROFILE.cost_model().short_step_ticks == 0
    assert PROFILE.worker_costs[-1] == PROFILE.step_us + PROFILE.masked_us


def test_costs_never_become_zero_ticks():
    tiny = dataclasses.replace(PROFILE, step_us=0.0, masked_us=0.0, wide_step_us=0.001, slot_us=0.0)
    assert (tiny.cost_model().step_ticks, tiny.cost_model().wide_step_ticks) == (1, 1)
    assert tiny.cost_model().slot_ticks == 0


def test_bytes_of_a_page():
    assert PROFILE.page_bytes == 32768
    assert dataclasses.replace(PROFILE, dtype="float32", page_size=16).page_bytes == 16384


def test_the_wheel_carries_the_profiles(tmp_path):
    for name in ("pyproject.toml", ".gitignore"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for package in ("codec_jax", "experiments", "pallas_kernels"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    folder = tmp_path / profiles.FOLDER.relative_to(REPOSITORY)
    folder.mkdir(parents=True)
    write(folder, [ROW], "nvidia-h200.json")
    included = [
        file.distribution_path for file in WheelBuilder(str(tmp_path)).recurse_project_files()
    ]
    assert "codec_jax/planning/profiles/nvidia-h200.json" in included


def test_measured_profiles_can_be_read():
    for path in profiles.FOLDER.glob("*.json"):
        assert load_profiles(path)
