"""Reading what the user asked for: token ids, rows as arrays, and every refusal's text."""

import jax.numpy as jnp
import numpy as np
import pytest
from generate_cases import TOY_VOCAB, stories, toy_model

from codec_jax.generate_requests import read_requests, row_sampling
from codec_jax.sampling import Sampling

GREEDY = Sampling(max_new_tokens=2)


def refusal(model, prompts, sampling=GREEDY):
    """The text of the ValueError that these prompts raise."""
    with pytest.raises(ValueError) as error:
        read_requests(model, prompts, sampling)
    return str(error.value)


def prompt_ids(model, prompts):
    return [request.prompt_ids for request in read_requests(model, prompts, GREEDY)]


def test_requests_are_numbered_prompt_by_prompt_and_sample_by_sample():
    settings = [Sampling(num_samples=2), Sampling(), Sampling(num_samples=3)]
    requests = read_requests(stories(), ["a", "b", "a"], settings)
    places = [(request.prompt_index, request.sample_index) for request in requests]
    assert places == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert [request.prompt for request in requests] == ["a", "a", "b", "a", "a", "a"]
    assert [request.sampling for request in requests] == [settings[i] for i, _ in places]


def test_text_gets_a_bos_token_and_ids_do_not():
    assert prompt_ids(stories(), ["Once", [5, 6]]) == [(1, 403), (5, 6)]


@pytest.mark.parametrize(
    "prompt",
    [
        [3, 4],
        (3, 4),
        range(3, 5),
        np.array([3, 4]),
        np.array([3, 4], np.uint8),
        jnp.array([3, 4]),
        [np.int32(3), np.int64(4)],
    ],
    ids=lambda prompt: type(prompt).__name__,
)
def test_integers_of_every_kind_are_token_ids(prompt):
    [ids] = prompt_ids(stories(), [prompt])
    assert ids == (3, 4)
    assert all(type(token) is int for token in ids)


def test_o22_an_empty_text_is_its_bos_token():
    assert prompt_ids(stories(), ["", "a"])[0] == (1,)
    assert prompt_ids(toy_model(bos_id=0), [""]) == [(0,)]


def test_o22_no_prompts_are_no_requests():
    assert read_requests(stories(), [], GREEDY) == []
    assert read_requests(stories(), [], []) == []


@pytest.mark.parametrize("prompts", [["b", ""], ["b", []], ["b", np.array([])]], ids=repr)
def test_o22_an_empty_prompt_is_refused_by_its_row(prompts):
    expected = "`prompts[1]` must hold at least one token; got none, and no BOS token."
    assert refusal(toy_model(), prompts) == expected


@pytest.mark.parametrize(
    ("prompt", "got"),
    [
        ([1.0, 2.0], "float64 of shape (2,)"),
        ([True, False], "bool of shape (2,)"),
        ([[1, 2], [3, 4]], "int64 of shape (2, 2)"),
        (["a", "b"], "<U1 of shape (2,)"),
        (7, "int64 of shape ()"),
        (None, "object of shape ()"),
        (b"text", "|S4 of shape ()"),
        ([2**70], "object of shape (1,)"),
    ],
    ids=repr,
)
def test_what_is_no_list_of_ids_is_refused(prompt, got):
    text = "`prompts[1]` must be a string or one flat list of token ids; got " + got + "."
    assert refusal(stories(), ["a", prompt]) == text


@pytest.mark.parametrize("prompt", [[[1, 2], [3]], [[]], [[], []], [[1], 2]], ids=repr)
def test_ragged_and_empty_nested_lists_are_refused_by_their_row(prompt):
    text = refusal(stories(), ["a", prompt])
    assert text.startswith("`prompts[1]` must ")


@pytest.mark.parametrize(("prompt", "token"), [([3, -1], -1), ([512, 3], 512), ([2**40], 2**40)])
def test_ids_outside_the_vocabulary_are_refused(prompt, token):
    text = refusal(stories(), ["a", "b", prompt])
    assert text == f"`prompts[2]` must hold ids in [0, 512); got {token}."


def test_text_outside_the_decoders_vocabulary_is_refused():
    assert refusal(toy_model(), ["b", "ü"]) == (
        f"`prompts[1]` must hold ids in [0, {TOY_VOCAB}); got {ord('ü') - ord('a')}."
    )


def test_one_string_is_refused():
    text = refusal(stories(), "Once upon a time")
    assert text == "`prompts` must be a list of prompts; got one string. Wrap it in a list."


def test_settings_must_match_the_prompts():
    assert refusal(stories(), ["a", "b", "c"], [GREEDY, GREEDY]) == (
        "`sampling` must be one setting, or one for each of the 3 prompts; got 2."
    )


@pytest.mark.parametrize(("prompt_len", "max_new"), [(512, 1), (1, 512), (300, 213)])
def test_more_than_the_context_is_refused_by_row_length_and_limit(prompt_len, max_new):
    settings = [Sampling(), Sampling(max_new_tokens=max_new)]
    assert refusal(stories(), ["a", [5] * prompt_len], settings) == (
        "`prompts[1]` must fit the model's context of 512 tokens with its new ones; got"
        f" {prompt_len} prompt tokens + {max_new} `max_new_tokens` = {prompt_len + max_new}."
    )


@pytest.mark.parametrize(("prompt_len", "max_new"), [(511, 1), (1, 511), (300, 212)])
def test_all_of_the_context_is_accepted(prompt_len, max_new):
    settings = Sampling(max_new_tokens=max_new)
    assert len(read_requests(stories(), [[5] * prompt_len], settings)) == 1


def test_rows_hold_their_requests_settings_and_padding_is_greedy():
    settings = [
        Sampling(num_samples=2, temperature=0.5, top_k=2**40, top_p=0.25, seed=2**32 - 1),
        Sampling(seed=3, top_k=7),
    ]
    rows = row_sampling(read_requests(stories(), ["a", "b"], settings), 5)
    assert np.asarray(rows.temperature).tolist() == [0.5, 0.5, 0, 0, 0]
    assert np.asarray(rows.top_k).tolist() == [2**31 - 1, 2**31 - 1, 7, 0, 0]
    assert np.asarray(rows.top_p).tolist() == [0.25, 0.25, 1, 1, 1]
    assert np.asarray(rows.seed).tolist() == [2**32 - 1, 2**32 - 1, 3, 0, 0]
    assert np.asarray(rows.prompt_index).tolist() == [0, 0, 1, 0, 0]
    assert np.asarray(rows.sample_index).tolist() == [0, 1, 0, 0, 0]
    dtypes = [np.float32, np.int32, np.float32, np.uint32, np.int32, np.int32]
    assert [np.asarray(field).dtype for field in rows] == dtypes


def test_a_setting_that_is_no_sampling_is_refused_by_its_row():
    with pytest.raises(ValueError, match=r"^`sampling\[1\]` must be a Sampling; got dict\.$"):
        read_requests(stories(), ["a", "b"], [Sampling(), {}])


def test_a_lone_surrogate_is_refused_by_its_row():
    rule = r"^`prompts\[1\]` must be tokenizable: `text` must be valid Unicode; got the lone surr"
    with pytest.raises(ValueError, match=rule):
        read_requests(stories(), ["a", "ab\ud800"], Sampling())


def test_too_many_completions_are_refused_before_they_are_listed():
    rule = (
        r"^`num_samples` over all prompts must be at most 131,072 completions; got 100,000,000\.$"
    )
    with pytest.raises(ValueError, match=rule):
        read_requests(stories(), ["a"], Sampling(num_samples=100_000_000))


@pytest.mark.parametrize(
    "prompts",
    [5, None, {"a": 1}, (text for text in "ab")],
    ids=["number", "none", "dict", "generator"],
)
def test_prompts_that_are_no_list_are_refused(prompts):
    with pytest.raises(ValueError, match=r"^`prompts` must be a list of prompts; got "):
        read_requests(stories(), prompts, Sampling())


def test_sampling_that_is_neither_one_nor_a_list_is_refused():
    with pytest.raises(ValueError, match=r"^`sampling` must be a Sampling or a list of them; got"):
        read_requests(stories(), ["a"], 5)


@pytest.mark.parametrize("settings", [{"temperature": "0.5"}, {"top_p": None}], ids=str)
def test_numbers_are_numbers(settings):
    (name,) = settings
    with pytest.raises(ValueError, match=rf"^`{name}` must be a number; got "):
        Sampling(**settings)
