"""A plan in words: exact texts of small forests, facts of every policy's plan, refusals."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from plan_cases import SMALL, Case

from codec_jax import Forest, PlanSpec, build_plan, explain_plan, export_arrays
from codec_jax.planning.cost import CostModel
from codec_jax.planning.estimate import estimate
from codec_jax.planning.policies import POLICIES
from codec_jax.planning.prediction import predict
from codec_jax.planning.profiles import CostProfile

SPEC = PlanSpec(num_kv_heads=2, group_size=4, page_size=16, num_workers=4)
PROFILE = CostProfile(
    dtype="bfloat16",
    head_dim=128,
    page_size=16,
    num_workers=7,
    step_us=1.0,
    wide_step_us=1.5,
    segment_us=2.0,
    slot_us=0.01,
    launch_us=5.0,
    bytes_per_us=4e6,
    flops_per_us=8e8,
    cache_bytes=5e7,
)
# 4 requests below a root of 400 tokens (25 pages): 29 steps for each KV head, all in one tile, so
# 29 * 16 + 128 = 592 ticks a head on 4 workers. The cut at 296 ticks falls after 11 steps (304),
# which leaves 18 (416). Below 368 ticks a head needs 3 pieces, and 3 do not fit.
STAR = """\
plan      4 requests, 4 query heads to each of 2 KV heads; pages of 16 tokens
nodes     5, 1 of them shared; 408 KV tokens read for each KV head, 3.9x fewer than unshared
tiles     1 of 64 rows, 25% of them used
items     1: 1 stream, 0 blocks; 29 steps of a page
segments  4 of 2 (item, KV head) pairs, 2 cuts; 36% of all ticks are their own; 4 slots
workers   4; ticks of each: least 304, median 360, most 416; lower bound 368, 88% of it
load      304 |█                              █| 416

    node     tokens  sharers  read                        segments   share
      #0        400        4  once, in a stream                  4   55.6%
      #1          2        1  once, in a stream                  2    2.2%
      #2          2        1  once, in a stream                  2    2.2%
      #3          2        1  once, in a stream                  2    2.2%
      #4          2        1  once, in a stream                  2    2.2%"""


def arrays_of(token_lists):
    return export_arrays(Forest.from_token_lists(token_lists, page_size=16))


def explained(arrays, policy, *, spec=SPEC, **options):
    plan = build_plan(arrays, spec, policy=policy)
    return explain_plan(plan, arrays, spec=spec, **options)


def test_a_star_in_full():
    arrays = arrays_of([[1] * 400 + [i] * 2 for i in range(2, 6)])
    assert explained(arrays, "balanced") == STAR


def test_a_node_of_several_tiles_by_policy():
    """A root of 20 tokens (2 pages) and 40 leaves of 1: 32 requests fill a tile, 2 tiles."""
    root, found, texts = r"#0 +20 +40  (.*?) +\d+ +[\d.]+%", {}, {}
    for policy in POLICIES:
        case = Case(policy=policy)
        arrays = case.batch([[0] * 20 + [i] for i in range(1, 41)]).arrays
        texts[policy] = explain_plan(case.plan(arrays), arrays, spec=case.spec)
        found[policy] = re.search(root, texts[policy])[1].strip()
    assert found == {
        "balanced": "by 1 block",
        "one_task_per_node": "by 1 block",
        "codec": "by 1 block",
        "hydragen": "by 1 block",
        "flash_decoding": "40 times, in streams",
        "auto": "2 times, in streams",
    }
    assert "41, 1 of them shared; 60 KV tokens read" in texts["balanced"]
    assert "840 KV tokens read for each KV head, 1.0x" in texts["flash_decoding"]


def numbers(pattern, text):
    match = re.search(pattern, text)
    assert match, f"{pattern} in\n{text}"
    return [int(group.replace(",", "")) for group in match.groups()]


def table_of(text):
    """Node, tokens, sharers, segments and share of each line of the table."""
    line = r"^ +#(\d+) +([\d,]+) +([\d,]+)  .* +([\d,]+) +([\d.]+)%$"
    return [
        (*(int(x.replace(",", "")) for x in found[:4]), float(found[4]))
        for found in re.findall(line, text, re.MULTILINE)
    ]


def segments_by_hand(plan, node):
    walked = 0
    for w in range(plan.worker_indptr.size - 1):
        for i in range(plan.worker_indptr[w], plan.worker_indptr[w + 1]):
            lo = plan.segments.step_lo[i]
            walked += node in plan.steps.node[lo : lo + plan.segments.num_steps[i]]
    return walked


def shares_by_hand(plan, cost):
    """Share of each node in the ticks of all segments."""
    by_node, total = np.zeros(plan.num_nodes), 0
    for i in range(int(plan.counts.segments)):
        wide = plan.segments.num_tiles[i] == 2
        lo = plan.segments.step_lo[i]
        for step in range(lo, lo + plan.segments.num_steps[i]):
            narrow = cost.short_step_ticks if plan.steps.is_short[step] else cost.step_ticks
            by_node[plan.steps.node[step]] += cost.wide_step_ticks if wide else narrow
    total = by_node.sum() + int(plan.counts.segments) * cost.segment_ticks
    return 100 * by_node / total


@pytest.mark.parametrize("policy", POLICIES)
def test_the_text_says_what_the_arrays_say(policy):
    case = Case(policy=policy)
    batch = case.batch([[i // 9] * 20 + [i // 3] * 9 + [i] * (i % 20) for i in range(38)])
    plan, cost = case.plan(batch.arrays), CostModel.closed_form(case.spec)
    text = explain_plan(plan, batch.arrays, spec=case.spec, profile=PROFILE, cost=cost)
    counts, prediction = plan.counts, jax.device_get(predict(plan, spec=case.spec, cost=cost))
    assert numbers(r"tiles +(\d+) of", text) == [counts.tiles]
    items, streams, blocks, steps = numbers(
        r"items +(\d+): (\d+) streams?, (\d+) blocks?; ([\d,]+) steps?", text
    )
    assert (items, streams + blocks, steps) == (counts.items, items, counts.steps)
    assert numbers(r"segments +([\d,]+) of ([\d,]+).* ([\d,]+) cuts?;.* ([\d,]+) slots?", text) == [
        counts.segments,
        2 * items,
        counts.segments - 2 * items,
        counts.slots,
    ]
    ticks = prediction.worker_ticks
    assert numbers(
        r"least ([\d,]+), median ([\d,]+), most ([\d,]+); lower bound ([\d,]+)", text
    ) == [
        ticks.min(),
        int(np.median(ticks)),
        ticks.max(),
        prediction.lower_bound_ticks,
    ]
    in_us = estimate(plan, spec=case.spec, profile=PROFILE)
    assert f"predicted {in_us.predicted_us:.1f} us" in text
    assert f"floor     {in_us.lower_bound_us:.1f} us" in text
    table, shares = table_of(text), shares_by_hand(plan, cost)
    assert len(table) >= 5
    assert [row[-1] for row in table] == sorted((row[-1] for row in table), reverse=True)
    assert table[0][-1] == pytest.approx(shares.max(), abs=0.051)
    for node, tokens, sharers, segments, share in table:
        arrays = batch.arrays
        assert tokens == arrays.kv_len[node]
        assert sharers == arrays.request_hi[node] - arrays.request_lo[node]
        assert segments == segments_by_hand(plan, node)
        assert share == pytest.approx(shares[node], abs=0.051)
    rest = float(re.search(r"more +([\d.]+)%", text)[1])
    assert rest == pytest.approx(shares.sum() - sum(row[-1] for row in table), abs=0.6)


def test_a_plan_of_many_nodes_fits_a_screen():
    arrays = arrays_of([[i] * 900 + [i + 1] * 33 for i in range(300)])
    spec = dataclasses.replace(SPEC, num_kv_heads=8, num_workers=132)
    text = explained(arrays, "balanced", spec=spec, profile=PROFILE)
    lines = text.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    assert re.search(r"\.\.\. \d+ more", lines[-1])


def test_what_bounds_the_time_is_named():
    arrays = arrays_of([[1] * 400 + [i] * 2 for i in range(2, 6)])
    plan = build_plan(arrays, SPEC)
    slow = {"memory": {"bytes_per_us": 1.0}, "compute": {"flops_per_us": 1.0}, "work": {}}
    for bound, fields in slow.items():
        profile = dataclasses.replace(PROFILE, **fields)
        assert f"us, bound by {bound}:" in explain_plan(plan, arrays, spec=SPEC, profile=profile)


def test_an_empty_plan_is_explained():
    forest = Forest(page_size=16)
    forest.add_request([1])
    arrays = export_arrays(forest)._replace(kv_len=np.zeros(1, np.int32))
    arrays = arrays._replace(max_kv_len=np.zeros(1, np.int32), num_pages=np.zeros(1, np.int32))
    text = explained(arrays, "balanced")
    assert "0 KV tokens read" in text and "load      0 |" in text


def test_a_plan_of_another_forest_or_specification_is_refused():
    arrays = arrays_of([[1, 2], [1, 3]])
    plan = build_plan(arrays, SPEC)
    with pytest.raises(ValueError, match=r"`forest` must be the plan's, with room for 3 nodes; it"):
        explain_plan(plan, arrays_of([[1]]), spec=SPEC)
    for name in ("num_kv_heads", "group_size", "page_size", "num_workers"):
        spec = dataclasses.replace(SPEC, **{name: 32})
        with pytest.raises(ValueError, match=rf"`spec` must be the plan's, with {name} .* got 32"):
            explain_plan(plan, arrays, spec=spec)


def test_a_given_cost_goes_before_the_profiles():
    batch = SMALL.batch([[1] * 40, [1] * 20 + [2]])
    plan = SMALL.plan(batch.arrays)
    cost = CostModel(step_ticks=1, wide_step_ticks=1, segment_ticks=1000)
    text = explain_plan(plan, batch.arrays, spec=SMALL.spec, cost=cost, profile=PROFILE)
    assert "99% of all ticks are their own" in text or "100% of all ticks" in text
