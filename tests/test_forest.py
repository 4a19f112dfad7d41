"""`Forest` against brute force: which tokens are shared, and where their KV lies."""

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.forest import Forest
from codec_jax.forest_node import NO_NODE
from codec_jax.pages import OutOfPagesError, PagePool

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
REQUESTS = st.lists(st.tuples(TOKENS, st.sampled_from([0, 0, 1, 5])), min_size=1, max_size=12)
PAGE_SIZES = st.sampled_from([1, 4, 16])


def slots(forest: Forest, request: int) -> list[tuple[int, int]]:
    """(page, row) of each KV token of a request."""
    found = []
    for node_id in forest.path(forest.end_node(request)):
        node = forest.node(node_id)
        assert node.position == len(found)
        rows = [node.first_row + i for i in range(node.kv_len)]
        size = forest.page_size
        found += [(int(node.page_ids[row // size]), row % size) for row in rows]
    return found


def path_tokens(forest: Forest, request: int) -> list[int]:
    path = forest.path(forest.end_node(request))
    return [int(token) for node_id in path for token in forest.node(node_id).tokens]


def snapshot(forest: Forest) -> list[str]:
    nodes = [f"{node_id}: {forest.node(node_id)!r}" for node_id in forest.preorder()]
    return [*nodes, f"{forest.num_requests}, {forest.pages.num_free} free"]


def check(forest: Forest, prompts: dict[int, list[int]]) -> None:
    """All invariants, for requests whose leaves are still empty."""
    prefix_of_slot, slot_of_prefix = {}, {}
    for request, tokens in prompts.items():
        assert path_tokens(forest, request) == tokens
        for i, slot in enumerate(slots(forest, request)):
            prefix = tuple(tokens[: i + 1])
            assert prefix_of_slot.setdefault(slot, prefix) == prefix
            assert slot_of_prefix.setdefault(prefix, slot) == slot
    assert forest.unique_tokens == len(slot_of_prefix)
    assert forest.total_tokens == sum(map(len, prompts.values()))
    assert forest.num_requests == len(prompts)
    check_nodes(forest)


def check_nodes(forest: Forest) -> None:
    references = Counter()
    order = forest.preorder()
    assert len(set(order)) == len(order) == forest.num_nodes
    for node_id in order:
        node = forest.node(node_id)
        references.update(node.popped_page_ids.tolist())
        assert 0 <= node.first_row < forest.page_size
        assert node.page_ids.size == -(-(node.first_row + node.max_kv_len) // forest.page_size)
        assert node.tokens.size == (0 if node.is_private_leaf else node.kv_len)
        firsts = [forest.node(child).tokens[:1].tolist() for child in node.children.values()]
        assert all(firsts.count(first) == 1 for first in firsts if first)
    assert len(references) == forest.pages.num_used
    for page, num_references in references.items():
        assert forest.pages.refcounts([page]) == num_references


@settings(max_examples=500, deadline=None)
@given(REQUESTS, PAGE_SIZES, st.randoms(use_true_random=False))
def test_prefixes_are_shared_exactly_where_they_are_equal(requests, page_size, random):
    forest = Forest(page_size=page_size)
    prompts = {}
    for tokens, max_new_tokens in requests:
        prompts[forest.add_request(tokens, max_new_tokens=max_new_tokens)] = tokens
        check(forest, prompts)
        if random.random() < 0.25:
            removed = random.choice(list(prompts))
            del prompts[removed]
            forest.remove_request(removed)
            check(forest, prompts)
    for request in random.sample(list(prompts), len(prompts)):
        forest.remove_request(request)
    assert (forest.num_nodes, forest.pages.num_used) == (0, 0)


@settings(max_examples=500, deadline=None)
@given(REQUESTS, PAGE_SIZES, st.integers(1, 8))
def test_a_request_without_room_changes_nothing(requests, page_size, num_pages):
    forest = Forest(page_size=page_size, pages=PagePool(num_pages))
    prompts = {}
    for tokens, max_new_tokens in requests:
        before = snapshot(forest)
        try:
            request = forest.add_request(tokens, max_new_tokens=max_new_tokens)
        except OutOfPagesError:
            assert snapshot(forest) == before
        else:
            assert request == len(prompts)
            prompts[request] = tokens
        check(forest, prompts)


@settings(max_examples=500, deadline=None)
@given(REQUESTS, st.randoms(use_true_random=False))
def test_node_ids_stay_the_place_where_their_tokens_end(requests, random):
    forest = Forest(page_size=4)
    ends = {}
    for tokens, _ in requests:
        ends[forest.insert(tokens)] = tokens
        cut = random.randint(0, len(tokens) - 1)
        above = forest.insert(tokens[:cut]) if cut else None
        assert forest.insert(tokens[cut:], parent=above) == forest.insert(tokens)
        for node_id, end in ends.items():
            path = forest.path(node_id)
            assert np.concatenate([forest.node(i).tokens for i in path]).tolist() == end


def test_a_split_copies_nothing_and_shares_the_page_that_it_cuts():
    forest = Forest(page_size=4)
    below = forest.insert([1, 2, 3, 4, 5, 6, 7])
    above = forest.insert([1, 2, 3, 4, 5])
    upper, lower = forest.node(above), forest.node(below)
    assert (upper.page_ids.tolist(), upper.first_row, upper.kv_len) == ([0, 1], 0, 5)
    assert (lower.page_ids.tolist(), lower.first_row, lower.kv_len) == ([1], 1, 2)
    assert (upper.parent, lower.parent, lower.position) == (NO_NODE, above, 5)
    assert forest.pages.refcounts([0, 1]).tolist() == [1, 2]


def test_a_split_keeps_the_place_among_the_siblings():
    forest = Forest()
    root = forest.insert([0])
    first, second = (forest.insert([token, 8, 9], parent=root) for token in (1, 2))
    above_first = forest.insert([1, 8], parent=root)
    assert forest.preorder() == [root, above_first, first, second]


def test_a_divergence_starts_a_fresh_page():
    forest = Forest(page_size=4)
    forest.add_request([1, 2, 3])
    other = forest.node(forest.end_node(forest.add_request([1, 2, 9])))
    assert (other.page_ids.tolist(), other.first_row) == ([1], 0)


def test_private_leaves_reserve_entries_but_no_page():
    forest = Forest(page_size=4)
    first, second, third = (forest.add_request([1, 2], max_new_tokens=n) for n in (9, 9, 0))
    leaf = forest.node(forest.end_node(first))
    assert leaf.is_private_leaf
    assert (leaf.position, leaf.kv_len, leaf.max_kv_len) == (2, 0, 9)
    assert leaf.page_ids.tolist() == [-1, -1, -1]
    assert forest.end_node(second) != forest.end_node(first)
    assert leaf.parent == forest.end_node(third)
    assert forest.pages.num_used == 1
    assert [forest.num_sharers(node_id) for node_id in forest.preorder()] == [3, 1, 1]
    assert forest.depth(forest.end_node(first)) == 1


def test_leaves_grow_into_the_pages_that_the_device_popped():
    forest = Forest(page_size=2, pages=PagePool(8))
    first, second = forest.add_requests([[1, 2, 3], [1, 2, 3]], max_new_tokens=5)
    forest.pages.lend()
    popped = forest.pages.settle(3).tolist()
    forest.set_leaf_progress(first, kv_len=3, page_ids=[popped[0], popped[2], -1])
    forest.set_leaf_progress(second, kv_len=1, page_ids=[popped[1]])
    assert (forest.unique_tokens, forest.total_tokens) == (3 + 3 + 1, 6 + 4)
    assert slots(forest, first)[3:] == [(popped[0], 0), (popped[0], 1), (popped[2], 0)]
    assert slots(forest, second)[3:] == [(popped[1], 0)]
    check_nodes(forest)
    forest.pages.lend()
    [page] = forest.pages.settle(2).tolist()
    forest.set_leaf_progress(second, kv_len=3, page_ids=[popped[1], page])
    check_nodes(forest)
    forest.remove_request(second)
    assert forest.pages.num_used == 4
    forest.remove_request(first)
    assert forest.pages.num_used == 0


@pytest.mark.parametrize(
    ("kv_len", "page_ids", "message"),
    [
        (1, [4], r"`kv_len` must be 2 \(before\) to 5 \(`max_new_tokens`\) for request 0; got 1"),
        (6, [4], r"`kv_len` must be .* got 6"),
        (3, [4], r"`page_ids` must be 2 to 3 pages, .* got 1"),
        (3, [4, 5, 6, 7], r"`page_ids` must be 2 to 3 pages, .* got 4"),
        (3, [5, 6], r"begin with the pages recorded before, \[4\]; got \[5, 6\]"),
        (5, [4, -1, 5], r"-1 at the end only, .* got \[4, -1, 5\]"),
        (3, [4, 7], r"belong to this leaf alone; got \[7\]. Call `settle`"),
        (3, [4, 0], r"belong to this leaf alone; got \[0\]"),
        (5, [4, 5, 5], r"belong to this leaf alone; got \[5, 5\]"),
    ],
)
def test_impossible_leaf_progress_is_refused(kv_len, page_ids, message):
    forest = Forest(page_size=2, pages=PagePool(8))
    forest.add_request([1, 2, 3], max_new_tokens=5)
    forest.add_requests([[1, 5, 6], [1, 9]])
    assert forest.pages.refcounts([0, 3, 4]).tolist() == [2, 1, 0]
    forest.pages.lend()
    forest.pages.settle(1)
    forest.set_leaf_progress(0, kv_len=2, page_ids=[4])
    before = snapshot(forest)
    with pytest.raises(ValueError, match=message):
        forest.set_leaf_progress(0, kv_len=kv_len, page_ids=page_ids)
    assert snapshot(forest) == before


def test_nothing_changes_while_the_pages_are_lent():
    forest = Forest(page_size=2, pages=PagePool(8))
    forest.add_requests([[1, 2, 3], [1, 2, 4]])
    before = snapshot(forest)
    forest.pages.lend()
    for call in (lambda: forest.add_request([1]), lambda: forest.remove_request(0)):
        with pytest.raises(RuntimeError, match="lent"):
            call()
    assert snapshot(forest) == before


def test_removal_keeps_ancestors_that_others_use():
    forest = Forest(page_size=4)
    short, long = forest.add_requests([[1, 2], [1, 2, 3, 4, 5]])
    forest.remove_request(short)
    assert path_tokens(forest, long) == [1, 2, 3, 4, 5]
    assert forest.num_nodes == 2
    again = forest.add_request([1, 2])
    assert again == 2
    forest.remove_request(long)
    assert (forest.num_nodes, forest.unique_tokens) == (1, 2)


def test_the_forest_owns_its_tokens():
    forest = Forest()
    tokens = np.array([1, 2, 3], np.uint8)
    node = forest.node(forest.insert(tokens))
    tokens[:] = 0
    assert node.tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        node.tokens[0] = 0


def chain(num_nodes: int) -> Forest:
    forest = Forest()
    node_id = None
    for token in range(num_nodes):
        node_id = forest.insert([token], parent=node_id)
    forest.add_request([], parent=node_id, max_new_tokens=1)
    return forest


def star(num_leaves: int) -> Forest:
    forest = Forest()
    root = forest.insert(range(100))
    for token in range(num_leaves):
        forest.add_request([token], parent=root)
    return forest


@pytest.mark.parametrize("build", [chain, star])
def test_twenty_thousand_nodes_take_less_than_quadratic_time(build):
    start = time.perf_counter()
    forest = build(20_000)
    assert len(forest.preorder()) == 20_001
    assert forest.num_sharers(forest.preorder()[0]) == forest.num_requests
    for request in range(forest.num_requests):
        forest.remove_request(request)
    assert forest.num_nodes == 0
    # Well under a second each on 2 cores; a quadratic walk takes minutes.
    assert time.perf_counter() - start < 10


def private_leaf_as_parent() -> int:
    forest = Forest()
    return forest.insert([1], parent=forest.end_node(forest.add_request([2], max_new_tokens=1)))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Forest(page_size=0), r"`page_size` must be >= 1 token, whole; got 0"),
        (lambda: Forest().insert([]), r"`tokens` must not be empty without a `parent`"),
        (lambda: Forest().insert([1], parent=5), r"`parent` must be a live node, .* got 5"),
        (private_leaf_as_parent, r"`parent` must not be a private leaf, .* got 1"),
        (lambda: Forest().add_request([1], max_new_tokens=-1), r"`max_new_tokens` .* got -1"),
        (lambda: Forest().node(3), r"`node_id` must be a live node; got 3"),
        (lambda: Forest().remove_request(0), r"`request` must be a live request; got 0"),
        (
            lambda: Forest.from_token_lists([[1]]).set_leaf_progress(0, kv_len=0, page_ids=[]),
            r"`request` must have a private leaf; got 0. Add it with `max_new_tokens` > 0",
        ),
    ],
)
def test_errors_name_the_argument_and_the_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("limit", [1.5, "a", 2**30, -1])
def test_new_tokens_that_cannot_be_are_refused_and_nothing_has_changed(limit):
    forest = Forest(page_size=4)
    with pytest.raises(
        ValueError, match=r"^`max_new_tokens` must be >= 0 and < 2\*\*30, whole; got"
    ):
        forest.add_request([5, 6], max_new_tokens=limit)
    assert forest.num_nodes == 0 and forest.pages.num_used == 0
