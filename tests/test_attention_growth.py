"""A plan made for k new tokens serves every length on the way, with pages popped late."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import Batch, make_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import keys_and_values
from plan_cases import Case, attend_arguments

from codec_jax.attention import attend
from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestCapacity, export_arrays
from codec_jax.planning.build import build_plan
from codec_jax.planning.interpreter import interpret

CASE = Case(page_size=4, max_requests=8, max_tail=20, max_kept=20)
MAX_NEW_TOKENS = 11
CAPACITY = ForestCapacity(nodes=96, requests=8, page_entries=160)
PLAN_CAPACITY = dataclasses.replace(CASE.capacity, steps=160)


@dataclasses.dataclass
class Decode:
    """Requests with private leaves that grow a token at a time; a page is popped when needed."""

    prompts: list[list[int]]
    forest: Forest
    batch: Batch

    @classmethod
    def start(cls, prompts):
        forest = Forest.from_token_lists(
            prompts, page_size=CASE.page_size, max_new_tokens=MAX_NEW_TOKENS
        )
        arrays = export_arrays(forest, CAPACITY)
        prompt_batch = make_batch(prompts, page_size=CASE.page_size,
                                  capacity=dataclasses.asdict(CAPACITY))  # fmt: skip
        batch = dataclasses.replace(
            prompt_batch, arrays=arrays, forest=forest, token_lists=[list(p) for p in prompts]
        )
        return cls(prompts, forest, batch)

    def grow(self, request, free_pages):
        """One more token of a request, whose keys and values go to the next row of its leaf."""
        arrays, place = self.batch.arrays, self.leaf_place(request)
        new = int(arrays.kv_len[place])
        tokens = self.batch.token_lists[request]
        tokens.append(100 + request)
        entry, row = arrays.page_lo[place] + new // CASE.page_size, new % CASE.page_size
        if row == 0:
            assert arrays.page_list[entry] == -1
            arrays.page_list[entry] = free_pages.pop()
        k, v = keys_and_values(tokens, CASE.num_kv_heads, CASE.head_dim)[:, -1]
        for pages, values in zip(self.batch.pages, (k, v), strict=True):
            pages[arrays.page_list[entry], :, row] = values
        arrays.kv_len[place] += 1

    def leaf_place(self, request):
        place = np.flatnonzero(self.batch.arrays.request_row == request)[0]
        return self.batch.arrays.request_node[place]


def assert_answers(plan, batch):
    out, lse = batch.expected()
    arrays = batch.arrays
    interpreted = interpret(plan, batch.q, batch.pages, arrays.page_list, arrays.kv_len)
    np.testing.assert_allclose(interpreted[0], out, atol=1e-11)
    np.testing.assert_allclose(interpreted[1], lse, atol=1e-11)
    for implementation in ("xla", "reference"):
        partial = attend(*attend_arguments(batch, plan), implementation=implementation)
        np.testing.assert_allclose(partial.out, out, atol=1e-5)
        np.testing.assert_allclose(partial.lse, lse, atol=1e-5)


@settings(max_examples=10)
@given(prompts=CASE.token_lists(), num_new=st.integers(0, MAX_NEW_TOKENS), seed=st.integers(0, 99))
def test_every_length_on_the_way_is_exact(prompts, num_new, seed):
    """Leaves grow at their own pace, so lengths are ragged at every check."""
    rng = np.random.default_rng(seed)
    decode = Decode.start(prompts)
    free_pages = list(range(decode.forest.pages.num_pages_touched, CAPACITY.page_entries))
    plan = plan_with(decode.batch.arrays, num_new)
    assert_answers(plan, decode.batch)
    paces = rng.integers(0, 2, (num_new, len(prompts)))
    paces[:, 0] = 1
    for step in range(num_new):
        for request in np.flatnonzero(paces[step]):
            decode.grow(int(request), free_pages)
        assert_answers(plan, decode.batch)


def plan_with(arrays, num_new_tokens):
    return jax.device_get(
        build_plan(arrays, CASE.spec, num_new_tokens=num_new_tokens, capacity=PLAN_CAPACITY)
    )


def test_pages_are_planned_for_the_new_tokens_and_no_more():
    """An empty leaf for 11 tokens on pages of 4: never more than its 3 pages."""
    arrays = Decode.start([[1, 2]]).batch.arrays
    steps = [int(plan_with(arrays, n).counts.steps) for n in (0, 1, 4, 5, 9, 11, 500)]
    assert steps == [1, 2, 2, 3, 4, 4, 4]


def test_tokens_past_the_planned_number_are_not_seen():
    """What the plan was not made for stays out; the host must plan again first."""
    decode = Decode.start([[1, 2]])
    plan = plan_with(decode.batch.arrays, 4)
    free_pages = list(range(50, 60))
    for _ in range(5):
        decode.grow(0, free_pages)
    partial = attend(*attend_arguments(decode.batch, plan), implementation="xla")
    decode.batch.token_lists[0].pop()
    np.testing.assert_allclose(partial.out, decode.batch.expected()[0], atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_pages_not_popped_yet_are_no_pages(implementation):
    """Entries of -1 would wrap around to the pool's last page: it holds live tokens here."""
    decode = Decode.start([[1, 2], [1, 3]])
    decode.grow(0, [CAPACITY.page_entries - 1])
    plan = plan_with(decode.batch.arrays, MAX_NEW_TOKENS)
    assert (decode.batch.arrays.page_list == -1).any()
    partial = attend(*attend_arguments(decode.batch, plan), implementation=implementation)
    np.testing.assert_allclose(partial.out, decode.batch.expected()[0], atol=1e-5)
    assert jnp.isfinite(partial.lse[:2]).all()
