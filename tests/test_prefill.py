"""Prefill on the device: hidden states equal a dense causal forward of each prompt alone."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from generate_cases import stories, stories_hidden_oracle

from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestCapacity
from codec_jax.forest_prefill import prefill_chunks
from codec_jax.generate_sizes import pad_forest
from codec_jax.kv_cache import KVPool
from codec_jax.planning.build import build_plan
from codec_jax.planning.spec import PlanCapacity, PlanSpec
from codec_jax.prefill import PrefillInputs, PrefillState, prefill_chunk

PAGE, BATCH, NUM_PAGES = 16, 8, 256
SPEC = PlanSpec(num_kv_heads=4, group_size=2, page_size=PAGE, num_workers=8)
CAPACITY = PlanCapacity(virtual_nodes=64, tiles=9, steps=128, items=64, segments=263, slots=526)
GRAPHDEF, PARAMS = nnx.split(stories().decoder)
TOLERANCE = 3e-5
"""Absolute, on hidden states of up to 10; at most 5e-6 was measured."""


def random_ids(num_tokens, seed=0):
    return np.random.default_rng(seed).integers(3, 512, num_tokens).tolist()


P, Q = random_ids(70, seed=1), random_ids(21, seed=2)
BATCHES = {
    "lengths around a page": [random_ids(n, seed=n) for n in (1, 15, 16, 17, 32, 33, 48, 49)],
    "duplicates": [P, Q, P, P, Q, [1], [1], [1]],
    "strict prefixes": [P, P[:1], P[:15], P[:16], P[:17], P[:32], P[:69]],
    "suffixes of all lengths": [[*P, *random_ids(n, seed=n)] for n in (1, 2, 7, 33, 50)],
    "a suffix after a hit one token short": [P, [*P[:-1], *Q], [*P, *Q], [*P[:31], *Q]],
    "one token": [[1]],
}


def empty_state():
    """A pool in which every slot is NaN, so that reading one that was not written shows."""
    config = stories().decoder.config
    shape = (config.num_layers * NUM_PAGES, config.num_kv_heads, PAGE, config.head_dim)
    pages = np.full(shape, np.nan, np.float32)
    pool = KVPool(jax.device_put(pages), jax.device_put(pages.copy()), config.num_layers)
    hidden = np.full((BATCH, config.hidden_size), 77, np.float32)
    return PrefillState(pool, jax.device_put(hidden))


def chunk_calls(forest, *, chunk_size=128, num_computed=None):
    """Inputs and plan of each call."""
    room = ForestCapacity(nodes=64, requests=chunk_size, page_entries=128)
    chunks = prefill_chunks(
        forest, chunk_size=chunk_size, batch_size=BATCH, num_computed=num_computed
    )
    for chunk in chunks:
        nodes = pad_forest(chunk.forest, room)
        inputs = PrefillInputs(
            *chunk[:5], page_list=nodes.page_list, kv_len=nodes.kv_len, node_position=nodes.position
        )
        yield inputs, build_plan(nodes, SPEC, capacity=CAPACITY)


def prefill(forest, state, **options):
    for inputs, plan in chunk_calls(forest, **options):
        state = prefill_chunk(PARAMS, state, inputs, plan, graphdef=GRAPHDEF, implementation="xla")
    return state


def dense_hidden(prompt):
    """The last token's hidden state from the float64 oracle."""
    return stories_hidden_oracle().logits(prompt)[-1]


def forest_of(prompts):
    return Forest.from_token_lists(prompts, page_size=PAGE, max_new_tokens=4)


def all_computed(forest):
    return {node_id: forest.node(node_id).kv_len for node_id in forest.preorder()}


def copies(state):
    """The pool and the hidden states in NumPy; a donated state cannot be read later."""
    return [np.array(x) for x in (state.pool.k_pages, state.pool.v_pages, state.last_hidden)]


@pytest.mark.parametrize("name", BATCHES)
def test_hidden_states_are_those_of_a_dense_forward(name):
    prompts = BATCHES[name]
    hidden = np.asarray(prefill(forest_of(prompts), empty_state()).last_hidden)
    for request, prompt in enumerate(prompts):
        np.testing.assert_allclose(hidden[request], dense_hidden(prompt), atol=TOLERANCE)
    assert (hidden[len(prompts) :] == 77).all(), "rows without a request must stay"


@pytest.mark.parametrize("name", ["duplicates", "suffixes of all lengths", "strict prefixes"])
def test_chunks_of_eight_rows_give_the_same_hidden_states(name):
    forest = forest_of(BATCHES[name])
    small = copies(prefill(forest, empty_state(), chunk_size=8))
    large = copies(prefill(forest, empty_state()))
    for one, other in zip(small, large, strict=True):
        np.testing.assert_array_equal(np.isnan(one), np.isnan(other))
        np.testing.assert_allclose(one, other, atol=TOLERANCE)


def test_nothing_is_written_but_the_tokens():
    prompts = BATCHES["a suffix after a hit one token short"]
    forest = forest_of(prompts)
    k_pages, v_pages, _ = copies(prefill(forest, empty_state()))
    num_tokens = forest.unique_tokens
    for pages in (k_pages, v_pages):
        is_written = ~np.isnan(pages).reshape(5, NUM_PAGES, 4, PAGE, 8)
        assert is_written.sum() == num_tokens * 5 * 4 * 8
        assert (is_written.any(axis=(0, 2, 4)) == is_written.all(axis=(0, 2, 4))).all()


@pytest.mark.parametrize("name", ["lengths around a page", "duplicates", "strict prefixes"])
def test_o09_a_whole_prompt_hit_gives_the_cold_hidden_state_and_writes_nothing(name):
    prompts = BATCHES[name]
    forest = forest_of(prompts)
    cold = prefill(forest, empty_state())
    before = copies(cold)
    wiped = PrefillState(cold.pool, jax.device_put(np.zeros_like(before[2])))
    [(inputs, _)] = chunk_calls(forest, num_computed=all_computed(forest))
    assert (inputs.page == -1).all()
    after = copies(prefill(forest, wiped, num_computed=all_computed(forest)))
    for one, other in zip(before[:2], after[:2], strict=True):
        np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))
    used = len(prompts)
    np.testing.assert_allclose(after[2][:used], before[2][:used], atol=TOLERANCE)


@pytest.mark.parametrize("num_short", [1, 2, 16, 17])
def test_o15_o16_a_hit_that_ends_before_the_suffix_goes_on_at_the_right_position(num_short):
    prompts = [[*P, *random_ids(n, seed=n)] for n in (1, 7, 50)]
    forest = forest_of(prompts)
    [root] = [node_id for node_id in forest.preorder() if forest.node(node_id).parent < 0]
    assert forest.node(root).kv_len == len(P)
    cold = prefill(forest, empty_state())
    num_kept = len(P) - num_short
    pool = keep_first_tokens(cold.pool, forest.node(root), num_kept)
    warm = prefill(forest, PrefillState(pool, cold.last_hidden), num_computed={root: num_kept})
    hidden = np.asarray(warm.last_hidden)
    for request, prompt in enumerate(prompts):
        np.testing.assert_allclose(hidden[request], dense_hidden(prompt), atol=TOLERANCE)


def keep_first_tokens(pool, node, num_kept):
    """The pool with NaN everywhere but in a node's first tokens."""
    token = np.arange(num_kept)
    page, row = node.page_ids[token // PAGE], token % PAGE
    fields = {}
    for name in ("k_pages", "v_pages"):
        old = np.array(getattr(pool, name)).reshape(pool.num_layers, NUM_PAGES, 4, PAGE, 8)
        new = np.full_like(old, np.nan)
        new[:, page, :, row] = old[:, page, :, row]
        fields[name] = jax.device_put(new.reshape(pool.k_pages.shape))
    return dataclasses.replace(pool, **fields)


@pytest.mark.slow
def test_o23_temporaries_do_not_grow_with_the_pool_and_the_pool_is_aliased():
    [(inputs, plan)] = chunk_calls(forest_of(BATCHES["one token"]))
    config = stories().decoder.config
    page_bytes = 2 * 4 * config.num_layers * config.num_kv_heads * PAGE * config.head_dim
    temporaries = []
    for gib in (1, 8):
        num_pages = gib * 2**30 // page_bytes
        shape = (config.num_layers * num_pages, config.num_kv_heads, PAGE, config.head_dim)
        pages = jax.ShapeDtypeStruct(shape, np.float32)
        hidden = jax.ShapeDtypeStruct((BATCH, config.hidden_size), np.float32)
        state = PrefillState(KVPool(pages, pages, config.num_layers), hidden)
        lowered = prefill_chunk.lower(
            PARAMS, state, inputs, plan, graphdef=GRAPHDEF, implementation="xla"
        )
        memory = lowered.compile().memory_analysis()
        assert memory.alias_size_in_bytes >= 2 * 4 * np.prod(shape, dtype=np.int64)
        temporaries.append(memory.temp_size_in_bytes)
    assert temporaries[0] == pytest.approx(temporaries[1], rel=0.01)
    assert max(temporaries) < 2**26
