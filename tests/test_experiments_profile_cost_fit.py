"""The fit finds the costs that times were made from, and the grid is what it claims to be."""

import dataclasses
import itertools

import numpy as np
import pytest

from codec_jax.planning.estimate import count_work
from codec_jax.planning.profiles import CostProfile
from experiments.profile_cost_fit import Sample, fit_profile, held_out_error, predicted_us
from experiments.profile_cost_grid import (
    CACHE_BYTES,
    REUSE_BYTES,
    GridPoint,
    grid_sizes,
    make_grid,
)
from experiments.profile_cost_report import report
from experiments.uniform_plans import UniformWork, uniform_plan

TRUE = CostProfile(
    dtype="bfloat16",
    head_dim=128,
    page_size=64,
    num_workers=132,
    step_us=0.65,
    wide_step_us=1.25,
    segment_us=2.0,
    slot_us=0.02,
    launch_us=7.0,
    bytes_per_us=4.1e6,
    flops_per_us=1e15,
    cache_bytes=40.0 * 2**20,
    masked_us=0.2,
    partial_us=0.5,
    short_us=0.4,
    tile_us=0.015,
)
PAGES = {"dtype": "bfloat16", "head_dim": 128, "page_size": 64, "num_workers": 132}
COSTS = (
    "step_us",
    "wide_step_us",
    "segment_us",
    "slot_us",
    "launch_us",
    "bytes_per_us",
    "masked_us",
    "partial_us",
    "short_us",
    "tile_us",
)
SIZES = grid_sizes(num_workers=132, page_size=64, group_size=4)


def model_us(work, profile):
    """The model in words, by itself: the longest worker or the memory, and what is fixed."""
    per_step = [profile.segment_us, profile.step_us, profile.wide_step_us]
    rare = [profile.masked_us, profile.partial_us, profile.short_us]
    longest = (work.worker @ [*per_step, *rare]).max()
    page = 2 * 64 * 128 * 2
    again = max(0.0, 1 - profile.cache_bytes / (page * work.unique_pages))
    num_bytes = page * (work.unique_pages + again * (work.loaded_pages - work.unique_pages))
    merge = profile.slot_us * work.merged_slots + profile.tile_us * work.merged_tiles
    return profile.launch_us + merge + max(longest, num_bytes / profile.bytes_per_us)


@pytest.fixture(scope="module")
def grid():
    points = make_grid(SIZES, page_bytes=TRUE.page_bytes)
    made = [uniform_plan(point.work, SIZES) for point in points]
    return [(p, count_work(m.plan, kv_len=m.kv_len)) for p, m in zip(points, made, strict=True)]


def row(point):
    return point.row() | {"group_size": SIZES.group_size}


def samples(grid, profile, *, noise=0.0, repeats=1):
    rng = np.random.default_rng(0)
    return [
        Sample(work, model_us(work, profile) * (1 + noise * rng.standard_normal()), row(point))
        for (point, work), _ in itertools.product(grid, range(repeats))
    ]


def assert_found(found, wanted, *, within):
    for name in COSTS:
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=within), name
    assert found.cache_bytes == pytest.approx(wanted.cache_bytes, rel=0.2)  # one of its candidates


def test_costs_are_found_through_noise(grid):
    """Ten measurements of each point, each 3% off."""
    fit = fit_profile(samples(grid, TRUE, noise=0.03, repeats=10), **PAGES)
    assert_found(fit.profile, TRUE, within=0.05)


@pytest.mark.parametrize("name", COSTS)
def test_every_cost_is_seen(grid, name):
    """Were a cost a tenth higher, the fit would say so, and the unchanged costs would not fit."""
    other = dataclasses.replace(TRUE, **{name: 1.1 * getattr(TRUE, name)})
    found = fit_profile(samples(grid, other, noise=0.03, repeats=10), **PAGES).profile
    assert_found(found, other, within=0.05)
    with pytest.raises(AssertionError, match=name):
        assert_found(found, TRUE, within=0.05)


@pytest.mark.parametrize("mib", [12, 24, 60, 120])
def test_the_size_of_the_cache_is_found(grid, mib):
    other = dataclasses.replace(TRUE, cache_bytes=mib * 2.0**20)
    found = fit_profile(samples(grid, other, noise=0.01), **PAGES).profile
    assert found.cache_bytes == pytest.approx(other.cache_bytes, rel=0.13)


def test_it_is_known_where_memory_binds(grid):
    used = [(point, work) for point, work in grid if not point.held_out]
    fit = fit_profile(samples(grid, TRUE), **PAGES)
    free = dataclasses.replace(TRUE, bytes_per_us=1e15)
    wanted = [model_us(work, TRUE) > model_us(work, free) for _, work in used]
    wrong = [p for (p, _), is_, w in zip(used, fit.is_memory, wanted, strict=True) if is_ != w]
    assert len(wrong) <= 1, "the cache's size is not quite right, so a point on the edge may be"
    assert 10 < sum(wanted) < len(wanted) - 50


def test_where_memory_never_binds_it_is_as_fast_as_was_seen(grid):
    free = dataclasses.replace(TRUE, bytes_per_us=1e15)
    found = fit_profile(samples(grid, free), **PAGES).profile
    rates = [w.unique_pages * TRUE.page_bytes / model_us(w, free) for p, w in grid]
    assert found.step_us == pytest.approx(TRUE.step_us, rel=1e-3)
    assert found.bytes_per_us >= 0.9 * max(rates)


def test_products_never_bind_where_something_was_faster(grid):
    measured = samples(grid, TRUE)
    found = fit_profile(measured, **PAGES).profile
    without = dataclasses.replace(found, flops_per_us=1e15)
    for sample in measured:
        assert predicted_us(sample.work, found) <= 1.01 * predicted_us(sample.work, without)
    # 128 rows by 64 tokens by 128 columns, two products, in 1.25 us on each of 132 workers.
    assert found.flops_per_us == pytest.approx(132 * 4 * 128 * 64 * 128 / 1.25, rel=0.03)


def test_held_out_points_have_no_part_in_the_fit(grid):
    measured = samples(grid, TRUE, noise=0.03)
    spoilt = [
        dataclasses.replace(s, time_us=1.25 * model_us(s.work, TRUE)) if s.row["held_out"] else s
        for s in measured
    ]
    found = fit_profile(spoilt, **PAGES).profile
    assert found == fit_profile(measured, **PAGES).profile
    error = held_out_error(spoilt, found)
    held_out = [s for s in spoilt if s.row["held_out"]]
    wanted = [abs(predicted_us(s.work, found) / s.time_us - 1) for s in held_out]
    assert error["points"] == len(held_out) == len(grid) // 4
    assert error["median_rel_err"] == pytest.approx(np.median(wanted))
    assert error["max_rel_err"] == pytest.approx(max(wanted))
    assert 0.17 < error["median_rel_err"] < 0.23


def test_too_few_and_impossible_times_are_refused(grid):
    measured = samples(grid, TRUE)
    with pytest.raises(ValueError, match=r"`samples` must be at least 10 .*; got 3\."):
        fit_profile(measured[:4], **PAGES)
    with pytest.raises(ValueError, match=r"`samples` must have positive times; got nan\."):
        fit_profile([dataclasses.replace(measured[0], time_us=float("nan")), *measured], **PAGES)


def test_the_report_names_costs_classes_and_the_worst(grid):
    measured = samples(grid, TRUE)
    slow = next(i for i, (point, _) in enumerate(grid) if point.axis == "partial")
    measured[slow] = dataclasses.replace(measured[slow], time_us=2 * measured[slow].time_us)
    lines = list(report(measured, TRUE))
    assert lines[0] == "bfloat16, head_dim 128, page 64:"
    assert any("step_us" in line and "0.6500 us" in line for line in lines)
    partial = next(line for line in lines if "partial, cache, narrow" in line)
    assert partial.split()[-1] == "50.0%"
    assert any(line.split()[:2] == ["held", "out"] for line in lines)
    assert any(line.split()[:2] == ["group", "4"] or "group" in line for line in lines)
    worst = [line for line in lines if "worst: " in line]
    assert len(worst) == 5
    assert "-50.0%" in worst[0] and "dead tokens" in worst[0]


def test_the_grid_is_as_wide_as_it_claims(grid):
    works = [point.work for point, _ in grid]
    for regime in ("cache", "memory"):
        for tiles in (1, 2):
            steps = {
                p.work.num_steps
                for p, _ in grid
                if p.regime == regime and p.work.num_tiles == tiles and p.axis == "steps"
            }
            assert steps == {2**power for power in range(12)}
    rows = {work.rows for work in works}
    assert min(rows) == 4 and max(rows) == 512
    assert {work.num_segments for work in works} == {1, 2, 4, 8}
    assert max(work.slots_per_tile for work in works) == 32
    assert len({*works}) == len(works)
    assert sum(point.held_out for point, _ in grid) == len(grid) // 4


def test_regimes_are_what_they_say(grid):
    for point, work in grid:
        footprint = work.unique_pages * TRUE.page_bytes
        if point.regime == "cache":
            assert footprint <= CACHE_BYTES
        elif point.regime == "reuse":
            assert work.loaded_pages > 2 * work.unique_pages
        elif point.work.num_steps <= 512 and point.work.items_per_node == 1:
            assert work.loaded_pages == work.unique_pages
        else:
            assert footprint > 10 * REUSE_BYTES[-1] or point.work.items_per_node > 1
    reuse = [w.unique_pages * TRUE.page_bytes for p, w in grid if p.regime == "reuse"]
    assert sorted(reuse) == list(REUSE_BYTES)


def test_points_travel_as_rows(grid):
    for point, _ in grid:
        assert GridPoint.from_row(point.row() | {"time_us": 1.0}) == point


@pytest.mark.parametrize("group_size", [1, 3, 8, 64])
@pytest.mark.parametrize("page_size", [16, 128])
def test_every_grid_fits_its_sizes(group_size, page_size):
    sizes = grid_sizes(num_workers=6, page_size=page_size, group_size=group_size, smoke=True)
    points = make_grid(sizes, page_bytes=page_size * 512)
    assert len(points) > 30
    for point in points:
        assert isinstance(point.work, UniformWork)
        assert point.work.rows % group_size == 0
        uniform_plan(point.work, sizes)
