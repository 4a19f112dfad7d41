"""Generation: completions and deltas, refusals that leave the library usable, repeated runs."""

import dataclasses

import jax
import numpy as np
import pytest
from generate_cases import (
    CASES,
    ToyTokenizer,
    compilations,
    golden_new_ids,
    stories,
    stories_oracle,
    toy_greedy,
    toy_model,
)

from codec_jax.forest_drawing import draw_forest
from codec_jax.generate import Delta, Generation, Options, generate
from codec_jax.models import LoadedModel
from codec_jax.planning.build import build_plan
from codec_jax.sampling import Sampling

OPTIONS = Options(page_size=16)
TOY_OPTIONS = Options(page_size=4, steps_per_visit=4, prefill_chunk=16)
GREEDY = Sampling(max_new_tokens=6)


def token_ids(completions):
    return [completion.token_ids for completion in completions]


def toy_generate(prompts, sampling=GREEDY, model=None):
    return generate(model or toy_model(), prompts, sampling=sampling, options=TOY_OPTIONS)


def test_completions_come_prompt_by_prompt_and_sample_by_sample():
    settings = [Sampling(num_samples=3, max_new_tokens=5), Sampling(max_new_tokens=2)]
    completions = toy_generate(["f", "h"], settings)
    places = [(completion.prompt_index, completion.sample_index) for completion in completions]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0)]
    assert [completion.prompt for completion in completions] == ["f", "f", "f", "h"]
    assert token_ids(completions) == [toy_greedy(5, 5)] * 3 + [toy_greedy(7, 2)]
    assert [completion.num_prompt_tokens for completion in completions] == [1] * 4
    assert [completion.num_shared_tokens for completion in completions] == [1, 1, 1, 0]
    saved = [completion.reads_saved for completion in completions]
    assert saved == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0])


def test_text_leaves_out_the_prompt_and_the_stop_token():
    stopping = next(token for token in range(2, 32) if toy_greedy(token, 20)[-1] == 1)
    [completion] = toy_generate([[stopping]], Sampling(max_new_tokens=20))
    assert completion.finish_reason == "stop"
    assert completion.token_ids == toy_greedy(stopping, 20)
    assert completion.text == ToyTokenizer(32).decode(completion.token_ids[:-1])


def test_text_after_half_a_character_is_still_text():
    half, rest = [3 + 0xC3], 3 + 0xA9
    [completion] = generate(
        stories(), [[1, *half]], sampling=Sampling(max_new_tokens=1), options=OPTIONS
    )
    assert isinstance(completion.text, str)
    assert stories().tokenizer.decode([1, *half, rest]) == "é"


def test_deltas_join_to_the_completions():
    prompts = [case["prompt"] for case in CASES[:3]]
    limits = [Sampling(max_new_tokens=limit) for limit in (1, 17, 40)]
    generation = Generation(stories(), prompts, sampling=limits, options=OPTIONS)
    joined, reasons, num_ended = {}, {}, []
    for visit in generation:
        assert visit
        for delta in visit:
            assert isinstance(delta, Delta)
            assert delta.token_ids
            key = delta.prompt_index, delta.sample_index
            assert key not in reasons, "nothing comes after the end"
            joined[key] = joined.get(key, ()) + delta.token_ids
            if delta.finish_reason:
                reasons[key] = delta.finish_reason
        num_ended.append(len(generation.completions()))
    assert joined == {
        (index, 0): golden_new_ids(CASES[index], limit) for index, limit in enumerate((1, 17, 40))
    }
    assert num_ended == [1, 2, 2, 3]
    assert reasons == {(index, 0): "length" for index in range(3)}
    assert generation.finish() == generation.completions()
    assert list(generation) == []


def test_finish_goes_on_where_an_iteration_stopped():
    generation = Generation(
        stories(), ["Once"], sampling=Sampling(max_new_tokens=20), options=OPTIONS
    )
    next(iter(generation))
    [completion] = generation.finish()
    [expected] = generate(
        stories(), ["Once"], sampling=Sampling(max_new_tokens=20), options=OPTIONS
    )
    assert completion == expected


def test_o16_three_runs_and_permuted_rows_are_identical():
    prompts = [CASES[3]["prompt"]] * 4 + [case["prompt"] for case in CASES[4:7]]
    sampling = [Sampling(max_new_tokens=20, temperature=0.6 * (i % 2), seed=i) for i in range(7)]
    runs = [generate(stories(), prompts, sampling=sampling, options=OPTIONS) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
    order = [5, 2, 6, 0, 4, 1, 3]
    permuted = generate(
        stories(),
        [prompts[i] for i in order],
        sampling=[sampling[i] for i in order],
        options=OPTIONS,
    )
    for completion, place in zip(permuted, order, strict=True):
        if sampling[place].temperature == 0:
            assert completion.token_ids == runs[0][place].token_ids
            assert completion.text == runs[0][place].text


def test_o22_an_empty_batch_gives_an_empty_list():
    with compilations() as events:
        assert generate(stories(), []) == []
        assert generate(stories(), [], sampling=[]) == []
        assert list(Generation(stories(), [])) == []
    assert events == []


def test_o22_an_empty_prompt_starts_from_the_bos_token():
    completions = generate(stories(), ["", "Once"], sampling=GREEDY, options=OPTIONS)
    assert completions[0].token_ids == golden_new_ids(CASES[0], 6)
    assert completions[0].num_prompt_tokens == 1
    assert toy_generate([""], model=toy_model(bos_id=0))[0].token_ids == toy_greedy(0, 6)


REFUSED = {
    "empty, no BOS": (["f", ""], "`prompts[1]` must hold at least one token"),
    "empty list": (["f", []], "`prompts[1]` must hold at least one token"),
    "empty array": ([np.array([])], "`prompts[0]` must hold at least one token"),
    "floats": ([[1.5]], "`prompts[0]` must be a string or one flat list"),
    "nested": ([[[2], [3]]], "`prompts[0]` must be a string or one flat list"),
    "outside": ([[2], [32]], "`prompts[1]` must hold ids in [0, 32); got 32."),
    "too long": ([[2], [3] * 251], "`prompts[1]` must fit the model's context of 256 tokens"),
    "one string": ("fgh", "`prompts` must be a list of prompts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_comes_before_any_work_and_leaves_the_library_usable(name):
    prompts, message = REFUSED[name]
    model = toy_model()
    num_arrays = len(jax.live_arrays())
    with compilations() as events, pytest.raises(ValueError, match="`prompts") as error:
        toy_generate(prompts)
    assert str(error.value).startswith(message)
    assert events == []
    assert len(jax.live_arrays()) == num_arrays
    assert token_ids(toy_generate([[7]], model=model)) == [toy_greedy(7, 6)]


def test_more_than_512_tokens_are_refused_before_any_work():
    num_arrays = len(jax.live_arrays()) if stories() else 0
    sampling = [Sampling(max_new_tokens=100), Sampling(max_new_tokens=413)]
    with compilations() as events, pytest.raises(ValueError, match="`prompts") as error:
        generate(stories(), ["a", [5] * 100], sampling=sampling, options=OPTIONS)
    assert str(error.value) == (
        "`prompts[1]` must fit the model's context of 512 tokens with its new ones; got 100 prompt"
        " tokens + 413 `max_new_tokens` = 513."
    )
    assert events == []
    assert len(jax.live_arrays()) == num_arrays


def test_all_of_the_context_can_be_used():
    prompt = [5] * 510
    [completion] = generate(
        stories(), [prompt], sampling=Sampling(max_new_tokens=2), options=OPTIONS
    )
    assert len(completion.token_ids) == 2
    logits = stories_oracle().logits([*prompt, completion.token_ids[0]])
    assert completion.token_ids == tuple(logits[-2:].argmax(axis=-1).tolist())


def test_any_stop_id_ends_a_row_and_a_prompt_may_hold_it():
    [other] = toy_greedy(7, 1)
    before = next(token for token in range(2, 32) if toy_greedy(token, 1) == (1,))

    class Tokenizer(ToyTokenizer):
        stop_ids = (1, other)

    model = LoadedModel(toy_model().decoder, Tokenizer(32), "toy")
    for stop_id, prompt in ((1, [other, 1, before]), (other, [1, other, 7])):
        [completion] = toy_generate([prompt], model=model)
        assert completion.token_ids == (stop_id,)
        assert (completion.finish_reason, completion.text) == ("stop", "")


def test_o14_three_thousand_nested_prompts_plan_and_draw(monkeypatch):
    decoder = toy_model().decoder
    monkeypatch.setattr(decoder, "config", dataclasses.replace(decoder.config, max_context=4000))
    prompts = [[5 + i % 7 for i in range(length)] for length in range(3000, 0, -1)]
    generation = Generation(
        toy_model(), prompts, sampling=Sampling(max_new_tokens=1), options=OPTIONS
    )
    assert generation.statistics.unique_kv_tokens == 3000
    assert generation.statistics.total_kv_tokens == 3000 * 3001 // 2
    assert generation.forest.depth(generation.forest.end_node(0)) == 3000
    drawing = draw_forest(generation.forest, max_lines=12)
    assert len(drawing.splitlines()) <= 12
    assert "3,000 requests" in drawing
    batch = generation._batch
    arrays = batch.arrays()
    plan = build_plan(arrays, batch.spec, num_new_tokens=1)
    assert int(plan.counts.steps) >= 3000
    assert sum(node.tokens for node in batch.sharing(1)) == 2999


def test_o14_nested_prompts_are_answered_and_counted():
    prompts = [[5 + i % 7 for i in range(length)] for length in range(1, 9)]
    completions = toy_generate(prompts, Sampling(max_new_tokens=2))
    expected = [toy_greedy(5 + (len(prompt) - 1) % 7, 2) for prompt in prompts]
    assert token_ids(completions) == expected
    shared = [completion.num_shared_tokens for completion in completions]
    assert shared == [*range(1, 8), 7]
