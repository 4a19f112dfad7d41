"""`auto` is predicted to lose to no fixed policy by more than 2.5% or half a microsecond."""

import functools

import numpy as np
import pytest

from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestCapacity, export_arrays
from codec_jax.planning.build import build_plan
from codec_jax.planning.cost import CostModel
from codec_jax.planning.estimate import estimate
from codec_jax.planning.policies import POLICIES
from codec_jax.planning.prediction import predict
from codec_jax.planning.profiles import TICKS_PER_US, CostProfile
from codec_jax.planning.spec import PlanCapacity, PlanSpec
from experiments.ablation_cases import auto_grid
from experiments.ablation_summary import AUTO, FIXED, MAX_LOSS, MAX_LOSS_US
from experiments.workloads import padded

PAGE_SIZE = 64
HEADS = PlanSpec(num_kv_heads=8, group_size=4, page_size=PAGE_SIZE)
ONE_KV_HEAD = PlanSpec(num_kv_heads=1, group_size=16, page_size=PAGE_SIZE)
PROFILE = CostProfile(
    dtype="bfloat16",
    head_dim=128,
    page_size=PAGE_SIZE,
    num_workers=132,
    step_us=1.0,
    wide_step_us=1.6,
    segment_us=2.1,
    slot_us=0.01,
    launch_us=5.0,
    bytes_per_us=4.3e6,
    flops_per_us=7.9e8,
    cache_bytes=5e7,
)


def random_forest(rng):
    """Up to 64 nodes of 1 to 4,000 tokens, up to 96 requests that end anywhere."""
    forest, nodes, is_parent = Forest(page_size=PAGE_SIZE), [], set()
    median, window = rng.choice([20, 100, 400, 1500]), rng.choice([1, 3, 100])
    for i in range(int(rng.integers(1, 64))):
        above = None
        if nodes and rng.random() > 0.1:
            above = nodes[rng.integers(max(0, i - window), i)]
            is_parent.add(above)
        tokens = int(np.clip(rng.lognormal(np.log(median), 1.2), 1, 4000))
        nodes.append(forest.insert(np.full(tokens, i), parent=above))
    ends = [node for node in nodes if node not in is_parent]
    ends += [nodes[i] for i in rng.integers(0, len(nodes), rng.choice([0, 2, 32]))]
    for end in ends:
        forest.add_request([], parent=end)
    return forest


def random_arrays(count):
    """Forests of one size of arrays."""
    capacity = ForestCapacity(nodes=64, requests=96, page_entries=2048)
    rng, found = np.random.default_rng(0), []
    while len(found) < count:
        forest = random_forest(rng)
        if ForestCapacity.for_forest(forest).page_entries <= capacity.page_entries:
            found.append(export_arrays(forest, capacity))
    return found


@functools.cache
def grid_arrays():
    """All forests of the grid by name, in arrays of one size: a policy is compiled once."""
    exact = {case.name: case.forest(page_size=PAGE_SIZE) for case in auto_grid()}
    capacity = ForestCapacity(
        nodes=max(arrays.parent.size for arrays in exact.values()),
        requests=max(arrays.request_row.size for arrays in exact.values()),
        page_entries=max(arrays.page_list.size for arrays in exact.values()),
    )
    return {name: padded(arrays, capacity) for name, arrays in exact.items()}


def predictor(all_arrays, spec, profile):
    """From (arrays, policy) to the predicted microseconds; the closed form's by 64 ticks."""
    cost = CostModel.closed_form(spec) if profile is None else profile.cost_model()
    capacity = {
        name: PlanCapacity.largest(
            PlanCapacity.for_forest(arrays, spec, policy=POLICIES[name]) for arrays in all_arrays
        )
        for name in (*FIXED, AUTO)
    }

    def predicted(arrays, policy):
        plan = build_plan(arrays, spec, policy=policy, cost=cost, capacity=capacity[policy])
        if profile is not None:
            return estimate(plan, spec=spec, profile=profile).predicted_us
        return int(predict(plan, spec=spec, cost=cost).makespan_ticks) / TICKS_PER_US

    return predicted


def losses(named_arrays, spec, profile, *, allowed_us):
    """Where `auto` is slower than the best fixed policy by more than is allowed."""
    predicted, found = predictor(list(named_arrays.values()), spec, profile), []
    for name, arrays in named_arrays.items():
        times = {policy: predicted(arrays, policy) for policy in (*FIXED, AUTO)}
        best = min(times[policy] for policy in FIXED)
        if times[AUTO] > max(best * (1 + MAX_LOSS), best + allowed_us):
            found.append((name, times))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("profile", [None, PROFILE], ids=["closed form", "profile"])
def test_auto_loses_nowhere_on_the_grid(profile):
    assert len(grid_arrays()) == 126
    assert losses(grid_arrays(), HEADS, profile, allowed_us=MAX_LOSS_US) == []


@pytest.mark.slow
@pytest.mark.parametrize("profile", [None, PROFILE], ids=["closed form", "profile"])
@pytest.mark.parametrize("spec", [HEADS, ONE_KV_HEAD], ids=["32/8", "16/1"])
def test_auto_loses_on_no_random_forest(spec, profile):
    """With one KV head a worker has few steps, and cuts are rounded to a step of 1 or 1.6 us."""
    named = {str(i): arrays for i, arrays in enumerate(random_arrays(20))}
    allowed_us = MAX_LOSS_US if spec is HEADS else PROFILE.wide_step_us
    assert losses(named, spec, profile, allowed_us=allowed_us) == []


@pytest.mark.parametrize(("tokens", "is_repeated"), [(20, True), (40, False)])
def test_a_short_page_is_repeated_at_the_price_of_a_short_step(tokens, is_repeated):
    """A root over two tiles: one segment of 100 ticks, or in streams twice 32 or twice 64."""
    forest = Forest(page_size=PAGE_SIZE)
    root = forest.insert(np.zeros(tokens, int))
    for i in range(32):
        forest.add_request([1 + i], parent=root)
    cost = CostModel(step_ticks=64, wide_step_ticks=90, segment_ticks=10, short_step_ticks=32)
    plan = build_plan(export_arrays(forest), HEADS, policy=AUTO, cost=cost)
    assert int(plan.counts.steps) == 32 + (2 if is_repeated else 1)
    assert int(plan.counts.items) == 2 + (not is_repeated)
