"""Prefill chunks: every token once, after all that it attends to, at the slots of its prompt.

The check runs the chunks on a pool that holds, for each slot, the token prefix written there.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from codec_jax.forest import Forest
from codec_jax.forest_arrays import export_arrays
from codec_jax.forest_prefill import prefill_chunks

P = [7, 8, 9, 7, 8, 9, 7]
NAMED_BATCHES = {
    "twice the same": [P, P],
    "the same around another": [P, [5, 6], P],
    "many copies": [P] * 20 + [[5, 6]] * 5,
    "strict prefixes": [P, P[:3], P[:1], P[:4], P[:6]],
    "prefixes first": [P[:1], P[:2], P[:5], P],
    "one token each": [[1], [2], [3]],
    "a page, a page and one, less": [[1] * 4, [2] * 5, [3] * 3, [4] * 8, [5] * 9],
    "several trees": [[1, 1, 2], [1, 1, 3], [2, 1], [2, 2], [3]],
}


class Pool:
    """Slots by (page, row); a slot holds the prefix that ends with its token."""

    def __init__(self):
        self.slots = {}
        self.num_rows = 0

    def store(self, forest, num_computed):
        """Fills the slots of the first `num_computed` tokens of each node."""
        for node_id in forest.preorder():
            node, prefix = forest.node(node_id), prefix_at(forest, node_id)
            for i in range(num_computed.get(node_id, 0)):
                page, row = divmod(node.first_row + i, forest.page_size)
                self.slots[int(node.page_ids[page]), row] = prefix[: node.position + i + 1]

    def run(self, chunk, page_size):
        """Writes a chunk's rows, then returns the prefix that each row sees through its path."""
        prefixes = [self._written(chunk, row, page_size) for row in range(chunk.num_tokens)]
        for node in range(int(chunk.forest.num_nodes)):
            for i in range(int(chunk.forest.kv_len[node])):
                assert self._slot(chunk.forest, node, i, page_size) in self.slots, "not written yet"
        self.num_rows += len(chunk.token_ids)
        return prefixes

    def _written(self, chunk, row, page_size):
        position = int(chunk.position[row])
        slot = int(chunk.page[row]), int(chunk.row[row])
        seen = self._keys(chunk, row, page_size, below=position)
        prefix = (*seen, int(chunk.token_ids[row]))
        assert len(prefix) == position + 1
        if slot[0] >= 0:
            assert slot not in self.slots, f"slot {slot} is written twice"
            self.slots[slot] = prefix
        assert self._keys(chunk, row, page_size, below=position + 1) == prefix
        return prefix

    def _keys(self, chunk, row, page_size, *, below):
        """The tokens on the row's path before a position, read from the pool."""
        forest, node = chunk.forest, int(chunk.forest.request_node[row])
        assert forest.request_row[row] == row
        path = []
        while node >= 0:
            assert forest.request_lo[node] <= row < forest.request_hi[node]
            path.append(node)
            node = int(forest.parent[node])
        tokens = ()
        for node in path[::-1]:
            assert forest.position[node] == len(tokens) or len(tokens) == below
            for i in range(int(forest.kv_len[node])):
                if forest.position[node] + i >= below:
                    break
                prefix = self.slots[self._slot(forest, node, i, page_size)]
                assert prefix[:-1] == tokens, "a key of another prefix"
                tokens = prefix
        return tokens

    def _slot(self, forest, node, i, page_size):
        """Page and row of a node's token i."""
        page, row = divmod(int(forest.first_row[node]) + i, page_size)
        return int(forest.page_list[forest.page_lo[node] + page]), row


def prefix_at(forest, node_id):
    """The tokens from the root to the end of a node."""
    runs = [forest.node(above).tokens.tolist() for above in forest.path(node_id)]
    return tuple(token for run in runs for token in run)


def check_chunks(forest, prompts, *, chunk_size, batch_size, num_computed=None):
    """Runs the chunks; returns (rows of tokens, rows of tokens that were in the pool already)."""
    num_computed = num_computed or {}
    chunks = prefill_chunks(
        forest, chunk_size=chunk_size, batch_size=batch_size, num_computed=num_computed
    )
    pool, ended, num_repeated = Pool(), {}, 0
    pool.store(forest, num_computed)
    num_stored = len(pool.slots)
    for chunk in chunks:
        prefixes = pool.run(chunk, forest.page_size)
        check_padding(chunk, chunk_size, batch_size)
        num_repeated += int((chunk.page[: chunk.num_tokens] < 0).sum())
        for request in np.flatnonzero(chunk.last_row >= 0).tolist():
            assert request not in ended
            ended[request] = prefixes[chunk.last_row[request]]
    assert ended == {request: tuple(prompt) for request, prompt in enumerate(prompts)}
    unique = {tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))}
    assert sorted(pool.slots.values()) == sorted(unique), "a token twice, or never"
    assert chunks.num_tokens == len(unique) - num_stored + num_repeated
    assert pool.num_rows == len(chunks) * chunk_size
    return chunks.num_tokens, num_repeated


def check_padding(chunk, chunk_size, batch_size):
    n = chunk.num_tokens
    assert 1 <= n <= chunk_size
    padding = {"token_ids": 0, "position": 0, "page": -1, "row": 0}
    for name, fill in padding.items():
        values = getattr(chunk, name)
        assert values.shape == (chunk_size,)
        assert values.dtype == np.int32
        assert (values[n:] == fill).all()
    assert chunk.last_row.shape == (batch_size,)
    assert (chunk.last_row < n).all()
    assert chunk.forest.num_requests == n
    assert (chunk.forest.request_row[n:] == -1).all()


def make_forest(prompts, *, page_size=4, max_new_tokens=3):
    return Forest.from_token_lists(prompts, page_size=page_size, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("chunk_size", [1, 3, 8, 128])
@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("name", NAMED_BATCHES)
def test_named_batches(name, page_size, chunk_size):
    prompts = NAMED_BATCHES[name]
    forest = make_forest(prompts, page_size=page_size)
    check_chunks(forest, prompts, chunk_size=chunk_size, batch_size=len(prompts) + 2)


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


@given(PROMPTS, st.integers(1, 5), st.integers(1, 9), st.integers(0, 3))
def test_every_token_once_after_those_it_attends_to(prompts, page_size, chunk_size, max_new):
    forest = make_forest(prompts, page_size=page_size, max_new_tokens=max_new)
    check_chunks(forest, prompts, chunk_size=chunk_size, batch_size=len(prompts))


@given(PROMPTS, PROMPTS, st.integers(1, 5), st.integers(1, 9), st.data())
def test_what_is_in_the_pool_is_not_computed_again(old, new, page_size, chunk_size, data):
    prompts = old + new
    forest = make_forest(prompts, page_size=page_size)
    num_computed = {}
    for node_id in forest.preorder():
        node = forest.node(node_id)
        above = num_computed.get(node.parent)
        if node.parent < 0 or above == forest.node(node.parent).kv_len:
            num_computed[node_id] = data.draw(st.integers(0, node.kv_len))
    check_chunks(
        forest, prompts, chunk_size=chunk_size, batch_size=len(prompts), num_computed=num_computed
    )


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_o09_a_whole_prompt_in_the_pool_recomputes_its_last_token_only(length):
    prompt = list(range(1, length + 1))
    forest = make_forest([prompt, prompt])
    num_computed = {node_id: forest.node(node_id).kv_len for node_id in forest.preorder()}
    num_tokens, num_repeated = check_chunks(
        forest, [prompt, prompt], chunk_size=8, batch_size=2, num_computed=num_computed
    )
    assert (num_tokens, num_repeated) == (1, 1)


def test_a_prompt_that_ends_inside_another_ones_pages_recomputes_its_own_last_token():
    prompts = [P, P[:3]]
    forest = make_forest(prompts)
    num_computed = {node_id: forest.node(node_id).kv_len for node_id in forest.preorder()}
    counts = check_chunks(forest, prompts, chunk_size=8, batch_size=2, num_computed=num_computed)
    assert counts == (2, 2)


@pytest.mark.parametrize("length", [1, 29, 63, 64, 65])
def test_o10_prompts_below_a_page_leave_no_empty_node(length):
    prompts = [list(range(length)), list(range(length)), [*range(length - 1), 99]]
    forest = make_forest(prompts, page_size=64)
    check_chunks(forest, prompts, chunk_size=128, batch_size=3)
    nodes = [forest.node(node_id) for node_id in forest.preorder()]
    assert all(node.kv_len > 0 or node.is_private_leaf for node in nodes)


def test_chunks_may_be_read_twice():
    forest = make_forest([P, P[:3]])
    chunks = prefill_chunks(forest, chunk_size=2, batch_size=2)
    first = [chunk.token_ids.tolist() for chunk in chunks]
    assert [chunk.token_ids.tolist() for chunk in chunks] == first
    assert len(first) == len(chunks) == 4


def test_no_requests_need_no_chunks():
    chunks = prefill_chunks(Forest(), chunk_size=8, batch_size=8)
    assert (len(chunks), list(chunks), chunks.num_tokens) == (0, [], 0)


def test_o14_three_thousand_nested_prompts_are_cut_into_chunks():
    prompts = [[5 + i % 7 for i in range(length)] for length in range(3000, 0, -1)]
    forest = make_forest(prompts, page_size=64, max_new_tokens=1)
    chunks = prefill_chunks(forest, chunk_size=128, batch_size=3000)
    assert (chunks.num_tokens, len(chunks)) == (3000, 24)
    last = list(chunks)[-1]
    assert last.forest.num_nodes == 3000
    assert export_arrays(forest).num_nodes == 6000


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"chunk_size": 0, "batch_size": 2}, "`chunk_size` must be positive; got 0."),
        (
            {"chunk_size": 8, "batch_size": 1},
            "`batch_size` must be at least the 2 requests; got 1.",
        ),
    ],
)
def test_sizes_that_are_too_small_are_refused(sizes, message):
    with pytest.raises(ValueError) as error:
        prefill_chunks(make_forest([[1], [2]]), **sizes)
    assert str(error.value) == message


@pytest.mark.parametrize("count", [-1, 4])
def test_more_computed_tokens_than_the_node_has_are_refused(count):
    forest = Forest.from_token_lists([[1, 2, 3]], page_size=4)
    rule = rf"^`num_computed` must be 0 to 3 for node 0; got {count}\.$"
    with pytest.raises(ValueError, match=rule):
        prefill_chunks(forest, chunk_size=4, batch_size=1, num_computed={0: count})
