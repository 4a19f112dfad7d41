"""Hand-made plans: they compute what their description says, and every worker does the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from codec_jax.attention import attend
from codec_jax.kv_cache import KVCache, KVPool
from codec_jax.planning.estimate import count_work
from codec_jax.planning.interpreter import interpret
from experiments.uniform_plans import UniformSizes, UniformWork, uniform_plan

SIZES = UniformSizes(
    num_workers=4, num_tiles=20, num_steps=64, num_segments=16, num_pages=40, page_size=8
)
WORKS = {
    "narrow": UniformWork(num_steps=3, num_pages=12),
    "one page": UniformWork(num_steps=1, num_pages=1),
    "few rows": UniformWork(num_steps=2, rows=8, num_pages=8),
    "several segments": UniformWork(num_steps=2, num_segments=3, num_pages=24),
    "slots": UniformWork(num_steps=2, num_segments=4, slots_per_tile=4, num_pages=32),
    "slots left over": UniformWork(num_steps=2, num_segments=2, slots_per_tile=3, num_pages=30),
    "wide": UniformWork(num_steps=2, rows=128, num_pages=8),
    "wide, second tile partly": UniformWork(num_steps=2, rows=72, num_pages=5),
    "blocks": UniformWork(num_steps=3, rows=256, slots_per_tile=2, num_pages=6),
    "blocks missing": UniformWork(num_steps=2, rows=512, num_segments=1, num_pages=8),
    "blocks left over": UniformWork(num_steps=2, rows=256, slots_per_tile=3, num_pages=6),
    "cache": UniformWork(num_steps=12, num_pages=7),
    "dead tokens": UniformWork(num_steps=2, slots_per_tile=2, num_pages=8, dead_tokens=5),
}
HEAD_DIM = 8


def arguments(work, sizes=SIZES):
    made = uniform_plan(work, sizes)
    rng = np.random.default_rng(1)
    shape = (2, sizes.num_pages, 1, sizes.page_size, HEAD_DIM)
    pages = rng.standard_normal(shape, np.float32)
    batch, group = made.plan.packed_row.shape
    q = rng.standard_normal((batch, group, HEAD_DIM), np.float32)
    return made, q, (pages[0], pages[1])


def expected(work, sizes, made, q, pages):
    """The description in words: request by request, node by node, part by part."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    per_node, blocks = work.rows // sizes.group_size, max(1, -(-work.rows // 128))
    num_segments = sizes.num_workers * work.num_segments
    num_nodes = -(-num_segments // (work.slots_per_tile * blocks))
    parts = {
        i // work.slots_per_tile // blocks * work.slots_per_tile + i % work.slots_per_tile
        for i in range(num_segments)
    }
    num_parts = len(parts)
    for request in range(num_nodes * per_node):
        node, place = divmod(request, per_node)
        for g in range(sizes.group_size):
            block = (place * sizes.group_size + g) // 128
            tokens = []
            for part in range(work.slots_per_tile):
                if (node * blocks + block) * work.slots_per_tile + part >= num_segments:
                    continue
                start = (node * work.slots_per_tile + part) * work.num_pages // num_parts
                for step in range(work.num_steps):
                    page = made.page_list[(start + step) % work.num_pages]
                    live = range(sizes.page_size - work.dead_tokens)
                    tokens += [(page, row) for row in live]
            if tokens:
                page, row = np.array(tokens).T
                kv = [stored[page, :, row] for stored in pages]
                mine = slice(g, g + 1)
                out[request, mine], lse[request, mine] = oracle.attention(q[request, mine], *kv)
    return out, lse


@pytest.mark.parametrize("group_size", [1, 4])
@pytest.mark.parametrize("name", WORKS)
def test_interpreter_and_xla_give_the_oracles_answer(name, group_size):
    work, sizes = WORKS[name], dataclasses.replace(SIZES, group_size=group_size)
    made, q, pages = arguments(work, sizes)
    wanted_out, wanted_lse = expected(work, sizes, made, q, pages)
    assert np.isfinite(wanted_lse).any()
    out, lse = interpret(made.plan, q, pages, made.page_list, made.kv_len)
    np.testing.assert_allclose(out, wanted_out, atol=1e-11)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-11)
    cache = KVCache(
        KVPool(*map(jnp.asarray, pages)), jnp.asarray(made.page_list), jnp.asarray(made.kv_len)
    )
    plan = jax.tree.map(jnp.asarray, made.plan)
    result = attend(jnp.asarray(q), cache, plan, implementation="xla")
    np.testing.assert_allclose(result.out, wanted_out, atol=1e-5)
    np.testing.assert_allclose(result.lse, wanted_lse, atol=1e-5)


@pytest.mark.parametrize("name", WORKS)
def test_every_worker_does_the_same(name):
    work = WORKS[name]
    made = uniform_plan(work, SIZES)
    counted = count_work(made.plan)
    assert (counted.worker == counted.worker[0]).all()
    steps = work.num_segments * work.num_steps
    wide = work.rows > 64
    masked = 2 * steps if wide else steps
    wanted = [work.num_segments, 0 if wide else steps, steps if wide else 0]
    assert counted.worker[0, :3].tolist() == wanted
    if work.rows % 64:
        assert counted.worker[0, 3] == masked
    elif work.rows <= 128:
        assert counted.worker[0, 3] == 0
    assert counted.loaded_pages == SIZES.num_workers * steps
    assert counted.unique_pages <= work.num_pages
    items, num_steps = made.plan.items, made.plan.segments.num_steps
    assert (items.num_steps * (items.num_tiles > 0)).sum() == num_steps.sum()


def test_pages_are_all_different_or_few():
    far = count_work(uniform_plan(WORKS["narrow"], SIZES).plan)
    assert far.unique_pages == far.loaded_pages == 12
    near = count_work(uniform_plan(WORKS["cache"], SIZES).plan)
    assert (near.unique_pages, near.loaded_pages) == (7, 48)
    shared = count_work(uniform_plan(WORKS["blocks"], SIZES).plan)
    assert (shared.unique_pages, shared.loaded_pages) == (6, 12)


def test_partial_results_are_counted_where_there_is_something_to_merge():
    alone = count_work(uniform_plan(WORKS["narrow"], SIZES).plan)
    assert (alone.merged_slots, alone.merged_tiles) == (0, 20 - 4)
    several = count_work(uniform_plan(WORKS["slots"], SIZES).plan)
    assert (several.merged_slots, several.merged_tiles) == (16, 20)
    left_over = count_work(uniform_plan(WORKS["slots left over"], SIZES).plan)
    assert (left_over.merged_slots, left_over.merged_tiles) == (8, 20)
    wide = count_work(uniform_plan(WORKS["blocks"], SIZES).plan)
    assert (wide.merged_slots, wide.merged_tiles) == (8, 20)


def test_partly_live_pages_are_counted_with_the_lengths():
    made = uniform_plan(WORKS["dead tokens"], SIZES)
    assert count_work(made.plan).worker[:, 4].tolist() == [0, 0, 0, 0]
    assert count_work(made.plan, kv_len=made.kv_len).worker[:, 4].tolist() == [2, 2, 2, 2]


def test_physical_pages_are_scattered():
    page_list = uniform_plan(WORKS["narrow"], SIZES).page_list
    assert sorted(page_list.tolist()) == list(range(SIZES.num_pages))
    assert (np.diff(page_list) != 1).mean() > 0.8


def test_all_plans_have_the_same_shapes():
    shapes = {
        str(jax.tree.map(np.shape, uniform_plan(work, SIZES).plan)) for work in WORKS.values()
    }
    assert len(shapes) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 0}, r"`num_steps` must be positive; got 0\."),
        ({"rows": 0}, r"`rows` must be positive; got 0\."),
        ({"rows": 130}, r"`rows` must fill one tile or pairs of tiles; got 130\."),
        ({"num_segments": 5}, r"room for the work: num_segments 20 > 16\."),
        ({"num_steps": 20}, r"room for the work: num_steps 80 > 64\."),
        ({"num_pages": 41}, r"room for the work: num_pages 41 > 40\."),
        ({"rows": 512, "num_segments": 4}, r"room for the work: num_tiles 32 > 20\."),
        ({"dead_tokens": 8}, r"`dead_tokens` must be less than a page of 8; got 8\."),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        uniform_plan(UniformWork(**({"num_steps": 1, "num_pages": 4} | change)), SIZES)


def test_rows_are_whole_groups():
    with pytest.raises(ValueError, match=r"`rows` must be whole groups of 4; got 6\."):
        sizes = dataclasses.replace(SIZES, group_size=4)
        uniform_plan(UniformWork(num_steps=1, rows=6, num_pages=4), sizes)
