"""The host loop: what prefill is given, visits, pages that are short, and toy runs bit by bit."""

import dataclasses
import itertools

import numpy as np
import pytest
from generate_cases import (
    CASES,
    TOY_VOCAB,
    golden_new_ids,
    stories,
    toy_greedy,
    toy_model,
)

import codec_jax.generate_loop as generate_loop
from codec_jax.generate import Generation, Options, generate
from codec_jax.pages import OutOfPagesError
from codec_jax.prefill import prefill_chunk
from codec_jax.sampling import Sampling

PAGE = 16
OPTIONS = Options(page_size=PAGE)
TOY_OPTIONS = Options(page_size=4, steps_per_visit=4, prefill_chunk=16)
FEW_PAGES = 18


def token_ids(completions):
    return [completion.token_ids for completion in completions]


def run_with_spy(prompts, *, options=OPTIONS, max_new_tokens=6):
    """Completions, statistics, and the inputs of every call of `prefill_chunk`."""
    calls = []

    def spy(params, state, inputs, plan, **statics):
        calls.append(inputs)
        return prefill_chunk(params, state, inputs, plan, **statics)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_loop, "prefill_chunk", spy)
        sampling = Sampling(max_new_tokens=max_new_tokens)
        generation = Generation(stories(), prompts, sampling=sampling, options=options)
        return generation.finish(), generation.statistics, calls


def check_prefill(prompts, statistics, calls):
    """Each unique token is given once; the rest is the padding that the statistics state."""
    unique = {tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))}
    num_rows = sum(len(inputs.token_ids) for inputs in calls)
    slots = [
        (int(page), int(row))
        for inputs in calls
        for page, row in zip(inputs.page, inputs.row, strict=True)
        if page >= 0
    ]
    assert len(slots) == len(set(slots)) == len(unique)
    assert statistics.num_prefill_rows == num_rows
    assert statistics.num_prefill_padding == num_rows - len(unique)
    assert statistics.unique_kv_tokens == len(unique)
    assert statistics.total_kv_tokens == sum(len(prompt) for prompt in prompts)


def ids(num_tokens, seed):
    return [1, *np.random.default_rng(seed).integers(3, 512, num_tokens - 1).tolist()]


P, Q = CASES[3]["prompt_ids"], CASES[5]["prompt_ids"]
SMALL_BATCHES = {
    "one token": [[1]],
    "twice the same": [P, P],
    "the same around another": [P, Q, P],
    "a page twice, and one more": [ids(16, 1), ids(16, 1), ids(17, 2), ids(17, 2)],
    "two pages twice, and one more": [ids(32, 3), ids(32, 3), ids(33, 4), ids(33, 4)],
    "below a page": [ids(1, 5), ids(15, 6), ids(15, 6), ids(16, 7)],
    "all but the last token of a page": [ids(16, 8), [*ids(16, 8)[:-1], 77], ids(16, 8)[:-1]],
    "strict prefixes": [P, P[:1], P[:16], P[:17], P[:39]],
}


@pytest.fixture(scope="module")
def alone():
    """The tokens of a prompt in a batch of its own, by prompt."""
    known = {}

    def run(prompt):
        key = tuple(prompt)
        if key not in known:
            [completion] = generate(
                stories(), [prompt], sampling=Sampling(max_new_tokens=6), options=OPTIONS
            )
            known[key] = completion.token_ids
        return known[key]

    return run


@pytest.mark.parametrize("name", SMALL_BATCHES)
def test_o08_o09_o10_prompts_in_a_batch_are_prefilled_once_and_answered_as_alone(name, alone):
    prompts = SMALL_BATCHES[name]
    completions, statistics, calls = run_with_spy(prompts)
    check_prefill(prompts, statistics, calls)
    assert token_ids(completions) == [alone(prompt) for prompt in prompts]


def test_o08_many_copies_take_the_pages_of_one(alone):
    prompts = [P] * 20 + [Q] * 5
    completions, statistics, calls = run_with_spy(prompts)
    check_prefill(prompts, statistics, calls)
    assert token_ids(completions) == [alone(prompt) for prompt in prompts]
    num_common = sum(
        1 for _ in itertools.takewhile(lambda ab: ab[0] == ab[1], zip(P, Q, strict=False))
    )
    assert num_common == 36
    assert statistics.num_prompt_pages == -(-len(P) // PAGE) + -(-(len(Q) - num_common) // PAGE)


@pytest.mark.slow
def test_chunks_of_eight_rows_give_the_golden_ids():
    options = Options(page_size=PAGE, prefill_chunk=8)
    prompts = [case["prompt_ids"] for case in CASES[:8]]
    completions, statistics, calls = run_with_spy(prompts, options=options, max_new_tokens=30)
    check_prefill(prompts, statistics, calls)
    assert len(calls) > 1
    for completion, case in zip(completions, CASES, strict=False):
        assert completion.token_ids == golden_new_ids(case, 30)


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_visit", [1, 3, 16])
def test_visits_of_any_length_give_the_golden_ids(steps_per_visit):
    options = Options(page_size=PAGE, steps_per_visit=steps_per_visit)
    limits = [1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1, 50]
    generation = Generation(
        stories(),
        [case["prompt"] for case in CASES[:8]],
        sampling=[Sampling(max_new_tokens=limit) for limit in limits],
        options=options,
    )
    visits = list(generation)
    for completion, case, limit in zip(generation.completions(), CASES, limits, strict=False):
        assert completion.token_ids == golden_new_ids(case, limit)
    assert len(visits) == 1 + -(-(50 - 1) // steps_per_visit)


def toy_generate(prompts, sampling, **options):
    options = dataclasses.replace(TOY_OPTIONS, **options)
    return generate(toy_model(), prompts, sampling=sampling, options=options)


def test_toy_rows_stop_by_themselves():
    completions = []
    for first in range(0, TOY_VOCAB, 8):
        prompts = [[token] for token in range(first, first + 8)]
        completions += toy_generate(prompts, Sampling(max_new_tokens=21))
    assert token_ids(completions) == [toy_greedy(token, 21) for token in range(TOY_VOCAB)]
    reasons = {completion.finish_reason for completion in completions}
    assert reasons == {"stop", "length"}, "the toy must show both ends"
    for completion in completions:
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] == 1)
        assert 1 not in completion.token_ids[:-1]


MINE = Sampling(max_new_tokens=9, temperature=2.0, seed=42)


@pytest.fixture(scope="module")
def my_draw():
    """A sampled prompt, second in the user's list: its tokens whatever else there is."""
    _, completion = toy_generate([[5], [7]], [Sampling(max_new_tokens=1), MINE])
    assert len(completion.token_ids) == 9
    assert completion.token_ids != toy_greedy(7, 9)
    return completion.token_ids


@pytest.mark.parametrize("place", [1, 3, 7, 32])
def test_o19_a_draw_is_the_same_at_any_row_beside_rows_that_end_early(place, my_draw):
    mates = Sampling(num_samples=place, max_new_tokens=2, temperature=1.0, seed=1)
    prompts, sampling = [[5], [7]], [mates, MINE]
    if place == 3:
        prompts, sampling = [*prompts, [9]], [*sampling, Sampling(max_new_tokens=3)]
    completions = toy_generate(prompts, sampling)
    assert completions[place].prompt_index == 1
    assert completions[place].token_ids == my_draw
    assert len(completions) == (5 if place == 3 else place + 1)


@pytest.mark.parametrize(
    "options",
    [{"policy": "flash_decoding", "page_size": 8}, {"steps_per_visit": 1}],
    ids=str,
)
def test_o19_a_draw_is_the_same_however_it_is_run(options, my_draw):
    completions = toy_generate([[5], [7]], [Sampling(max_new_tokens=1), MINE], **options)
    assert completions[1].token_ids == my_draw


def test_o19_seeds_samples_and_prompts_draw_differently():
    settings = [
        Sampling(num_samples=3, max_new_tokens=9, temperature=2.0, seed=42),
        Sampling(num_samples=1, max_new_tokens=9, temperature=2.0, seed=43),
        Sampling(num_samples=1, max_new_tokens=9, temperature=2.0, seed=42),
    ]
    drawn = token_ids(toy_generate([[7], [7], [7]], settings))
    assert len(set(drawn)) == 5
    assert token_ids(toy_generate([[7], [7], [7]], settings)) == drawn


def toy_prompts_that_go_on(limit):
    """One-token prompts whose greedy text does not stop before the limit."""
    return [[token] for token in range(2, TOY_VOCAB) if 1 not in toy_greedy(token, limit)]


def test_ended_rows_give_their_pages_back_when_pages_are_short():
    prompts = toy_prompts_that_go_on(40)[:6]
    limits = [8, 40, 12, 8, 4, 16]
    assert len(prompts) == len(limits)
    sampling = [Sampling(max_new_tokens=limit) for limit in limits]
    assert 6 + sum(-(-(limit - 1) // 4) for limit in limits) > FEW_PAGES
    completions = toy_generate(prompts, sampling, num_pages=FEW_PAGES)
    expected = [toy_greedy(prompt[0], limit) for prompt, limit in zip(prompts, limits, strict=True)]
    assert token_ids(completions) == expected


def test_a_batch_that_runs_short_of_pages_says_so_and_leaves_the_rest_usable():
    prompts = toy_prompts_that_go_on(40)[:8]
    assert len(prompts) == 8
    options = dataclasses.replace(TOY_OPTIONS, num_pages=FEW_PAGES)
    generation = Generation(
        toy_model(), prompts, sampling=Sampling(max_new_tokens=40), options=options
    )
    got = dict.fromkeys(range(8), ())
    with pytest.raises(OutOfPagesError) as error:
        for visit in generation:
            for delta in visit:
                got[delta.prompt_index] += delta.token_ids
    assert (error.value.num_wanted, error.value.num_free) == (8, FEW_PAGES - 16)
    assert str(error.value).startswith(f"8 pages wanted, 2 of {FEW_PAGES} are free.")
    assert got == {index: toy_greedy(prompts[index][0], 5) for index in range(8)}
    assert generation.completions() == []
    assert not generation.forest.pages.is_lent
    assert generation.forest.pages.num_used == 16
    [after] = toy_generate([[7]], Sampling(max_new_tokens=3))
    assert after.token_ids == toy_greedy(7, 3)


def test_a_run_that_is_left_early_gives_the_stack_back():
    generation = Generation(
        toy_model(), [[7]], sampling=Sampling(max_new_tokens=40), options=TOY_OPTIONS
    )
    visits = iter(generation)
    next(visits)
    next(visits)
    assert generation.forest.pages.is_lent
    visits.close()
    assert not generation.forest.pages.is_lent
    assert generation.forest.pages.num_used == 2
