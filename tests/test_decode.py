"""The decode loop: pure steps, pages, rows that have ended, positions, memory, no host work."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from generate_cases import CASES, golden_new_ids, stories, stories_oracle

import codec_jax.generate_loop as generate_loop
from codec_jax.attention import prepare_plan
from codec_jax.decode import FULL, RUNNING, STOPPED, decode_step, decode_steps
from codec_jax.generate import Generation, Options
from codec_jax.kv_cache import KVPool
from codec_jax.sampling import Sampling

OPTIONS = Options(page_size=16, steps_per_visit=4)
LIMITS = [1, 2, 15, 16, 17, 3, 40]
LOGITS_TOLERANCE = 2e-4
"""Absolute, on logits of up to 20; 3e-5 was measured."""


class Recorder:
    """Stands for `decode_steps`: calls it, and keeps a NumPy copy of the state around each call."""

    def __init__(self):
        self.states = []
        self.calls = []

    def __call__(self, params, state, plan, **statics):
        if not self.states:
            self.states.append(jax.tree.map(np.array, state))
        self.calls.append((params, plan, statics))
        state = decode_steps(params, state, plan, **statics)
        self.states.append(jax.tree.map(np.array, state))
        return state


@pytest.fixture(scope="module")
def run():
    """A run whose rows end at different times: (generation, completions, recorder)."""
    recorder = Recorder()
    prompts = [case["prompt"] for case in CASES[: len(LIMITS)]]
    sampling = [Sampling(max_new_tokens=limit) for limit in LIMITS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_loop, "decode_steps", recorder)
        generation = Generation(stories(), prompts, sampling=sampling, options=OPTIONS)
        completions = generation.finish()
    return generation, completions, recorder


def leaf_entries(state, row, limit):
    """The page-list entries of a row's private leaf."""
    first = int(state.rows.leaf_entry[row])
    return state.page_list[first : first + -(-limit // OPTIONS.page_size)]


def test_rows_that_end_early_do_not_disturb_the_others(run):
    _, completions, _ = run
    for case, limit, completion in zip(CASES, LIMITS, completions, strict=False):
        assert completion.token_ids == golden_new_ids(case, limit)
        assert completion.finish_reason == "length"


def test_ended_rows_stay_inert(run):
    _, _, recorder = run
    for row, limit in enumerate(LIMITS):
        ended = [state for state in recorder.states if state.rows.status[row] != RUNNING]
        assert ended, "a row that ends must be seen ended"
        for state in ended:
            for name in ("token", "position", "num_new", "status"):
                value, first = getattr(state.rows, name)[row], getattr(ended[0].rows, name)[row]
                assert value == first, name
            leaf = state.rows.leaf[row]
            assert state.kv_len[leaf] == ended[0].kv_len[leaf] == limit - 1
            np.testing.assert_array_equal(state.new_tokens[row], ended[0].new_tokens[row])
            np.testing.assert_array_equal(
                leaf_entries(state, row, limit), leaf_entries(ended[0], row, limit)
            )
    assert recorder.states[0].rows.status[0] == FULL, "one token is drawn before the first visit"
    assert recorder.states[0].rows.status[len(LIMITS) - 1] == RUNNING


def test_rows_without_a_request_do_nothing(run):
    _, _, recorder = run
    for state in recorder.states:
        for row in range(len(LIMITS), recorder.states[0].rows.status.size):
            assert state.rows.status[row] == FULL
            assert state.rows.num_new[row] == 0
            assert not state.new_tokens[row].any()


def test_new_tokens_are_zero_from_num_new_on(run):
    _, completions, recorder = run
    for state in recorder.states:
        for row, completion in enumerate(completions):
            num_new = state.rows.num_new[row]
            assert tuple(state.new_tokens[row, :num_new]) == completion.token_ids[:num_new]
            assert not state.new_tokens[row, num_new:].any()
            assert state.rows.token[row] == completion.token_ids[num_new - 1]
            prompt_len = completion.num_prompt_tokens
            assert state.rows.position[row] == prompt_len + num_new - 1


def test_pages_popped_are_those_that_the_leaves_own(run):
    generation, _, recorder = run
    first, last = recorder.states[0], recorder.states[-1]
    prompt_pages = owned_pages(generation.forest)
    assert not set(first.free_pages[: first.num_free].tolist()) & set(prompt_pages)
    for state in recorder.states:
        popped = first.free_pages[int(state.num_free) : int(first.num_free)]
        owned = []
        for row, limit in enumerate(LIMITS):
            entries = leaf_entries(state, row, limit)
            kv_len = state.kv_len[state.rows.leaf[row]]
            num_owned = -(-int(kv_len) // OPTIONS.page_size)
            assert (entries[num_owned:] == -1).all()
            owned += entries[:num_owned].tolist()
        assert sorted(owned) == sorted(popped.tolist())
        assert len(set(owned)) == len(owned)
    assert first.num_free - last.num_free == sum(-(-(n - 1) // 16) for n in LIMITS)


def owned_pages(forest):
    """Physical pages of the prompts."""
    nodes = [forest.node(node_id) for node_id in forest.preorder()]
    return [page for node in nodes if not node.is_private_leaf for page in node.page_ids.tolist()]


def test_no_bit_of_a_prompts_pages_changes(run):
    generation, _, recorder = run
    pages = sorted(set(owned_pages(generation.forest)))
    assert pages
    first, last = recorder.states[0].pool, recorder.states[-1].pool
    ids = np.concatenate([np.array(pages) + i * first.num_pages for i in range(first.num_layers)])
    for name in ("k_pages", "v_pages"):
        before, after = getattr(first, name)[ids], getattr(last, name)[ids]
        assert before.any()
        np.testing.assert_array_equal(before.view(np.int32), after.view(np.int32))


def test_no_page_leaks_after_a_run(run):
    generation, _, recorder = run
    pages = generation.forest.pages
    assert not pages.is_lent
    assert pages.num_free == recorder.states[-1].num_free
    popped = sum(-(-(limit - 1) // 16) for limit in LIMITS)
    assert pages.num_used == generation.statistics.num_prompt_pages + popped


class LogitsTap:
    """A decoder that also keeps the logits it returns."""

    def __init__(self, decoder):
        self._decoder = decoder
        self.logits_seen = None

    def __call__(self, *args):
        return self._decoder(*args)

    def logits(self, hidden):
        self.logits_seen = self._decoder.logits(hidden)
        return self.logits_seen


def tapped_step(graphdef):
    """Jitted: the state after one `decode_step` without donation, and the step's logits."""

    @jax.jit
    def step(params, state, plan):
        tap = LogitsTap(nnx.merge(graphdef, params))
        prepared = prepare_plan(plan, implementation="xla")
        state = decode_step(tap, state, prepared, implementation="xla")
        return state, tap.logits_seen

    return step


def run_with_logits(prompts, sampling):
    """Completions of a run on single, pure steps, the states, and each step's logits."""
    step = tapped_step(nnx.split(stories().decoder)[0])
    states, logits = [], []

    def steps(params, state, plan, *, num_steps, **_):
        for _ in range(num_steps):
            states.append((params, state, plan))
            state, seen = step(params, state, plan)
            logits.append(np.asarray(seen))
        return state

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate_loop, "decode_steps", steps)
        generation = Generation(stories(), prompts, sampling=sampling, options=OPTIONS)
        return generation.finish(), step, states, logits


@pytest.fixture(scope="module")
def tapped():
    """Suffixes of different lengths on a prefix of 100 tokens, one short of it, and a stranger."""
    rng = np.random.default_rng(4)
    prefix = [1, *rng.integers(3, 512, 99).tolist()]
    suffixes = [rng.integers(3, 512, n).tolist() for n in (1, 7, 50, 16)]
    prompts = [[*prefix, *suffix] for suffix in suffixes]
    prompts += [prefix, [*prefix[:-1], *suffixes[1]], prefix[:64], suffixes[2]]
    return prompts, *run_with_logits(prompts, Sampling(max_new_tokens=19))


def test_o15_logits_of_every_step_are_those_of_unshared_decoding(tapped):
    prompts, completions, _, _, logits = tapped
    num_compared = 0
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        expected = stories_oracle().logits([*prompt, *completion.token_ids])
        assert completion.token_ids[0] == expected[len(prompt) - 1].argmax()
        for step in range(len(completion.token_ids) - 1):
            np.testing.assert_allclose(
                logits[step][row], expected[len(prompt) + step], atol=LOGITS_TOLERANCE, rtol=0
            )
            num_compared += 1
    assert num_compared > 100


def test_a_step_is_pure(tapped):
    _, _, step, states, _ = tapped
    params, state, plan = states[3]
    before = jax.tree.map(np.array, state)
    once, twice = step(params, state, plan), step(params, state, plan)
    for left, right in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True):
        np.testing.assert_array_equal(left, right)
    for left, right in zip(jax.tree.leaves(before), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_state_is_one_pytree_that_a_step_keeps(tapped):
    _, _, step, states, _ = tapped
    after, _ = step(*states[0])
    assert jax.tree.structure(after) == jax.tree.structure(states[0][1])
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(after)]
    assert shapes == [(x.shape, x.dtype) for x in jax.tree.leaves(states[0][1])]


def test_status_names_are_distinct():
    assert len({RUNNING, STOPPED, FULL}) == 3


def primitives(jaxpr):
    """Names of all primitives of a jaxpr and of those inside it."""
    names, stack = [], [jaxpr]
    while stack:
        for equation in stack.pop().eqns:
            names.append(equation.primitive.name)
            for value in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
            ):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    stack.append(inner)
    return names


def host_work(names):
    words = ("callback", "infeed", "outfeed", "debug", "print", "device_put")
    return [name for name in names if any(word in name for word in words)]


def traced_loop(recorder, state=None):
    params, plan, statics = recorder.calls[0]
    return decode_steps, (params, state or recorder.states[0], plan), statics


def test_the_loop_holds_no_host_work(run):
    function, arguments, statics = traced_loop(run[2])
    names = primitives(function.trace(*arguments, **statics).jaxpr.jaxpr)
    assert {"scan", "dot_general", "scatter"} <= set(names), "the walk must reach the layers"
    assert host_work(names) == []


def test_host_work_would_be_found():
    def body(_, x):
        jax.debug.print("{}", x)
        return jax.lax.cond(x > 0, lambda y: jax.pure_callback(abs, y, y), lambda y: y, x)

    jaxpr = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, body, x))(np.float32(1))
    assert len(host_work(primitives(jaxpr.jaxpr))) >= 2


@pytest.mark.slow
def test_o23_temporaries_do_not_grow_with_the_pool_and_the_pool_is_aliased(run):
    generation, _, recorder = run
    small = recorder.states[0].pool
    page_bytes = 2 * small.k_pages.nbytes // small.num_pages
    temporaries = []
    for gib in (1, 8):
        num_pages = gib * 2**30 // page_bytes
        shape = (small.num_layers * num_pages, *small.k_pages.shape[1:])
        pages = jax.ShapeDtypeStruct(shape, np.float32)
        pool = KVPool(pages, pages, small.num_layers)
        free_pages = jax.ShapeDtypeStruct((num_pages,), np.int32)
        state = dataclasses.replace(recorder.states[0], pool=pool, free_pages=free_pages)
        function, arguments, statics = traced_loop(recorder, state)
        memory = function.lower(*arguments, **statics).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= 2 * 4 * np.prod(shape, dtype=np.int64)
        temporaries.append(memory.temp_size_in_bytes)
    assert temporaries[0] == pytest.approx(temporaries[1], rel=0.01)
    assert max(temporaries) < 2**26
    # What users are told before anything is allocated is an upper bound, and not an idle one.
    estimate = generation.memory.workspace_bytes
    assert max(temporaries) <= estimate < 20 * max(temporaries)
