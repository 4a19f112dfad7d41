"""`export_arrays` says in flat arrays what the forest says node by node."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestArrays, ForestCapacity, export_arrays, node_order

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=12)
REQUESTS = st.lists(st.tuples(TOKENS, st.sampled_from([0, 0, 1, 5])), max_size=12)


def padding() -> st.SearchStrategy[tuple[int, int, int]]:
    return st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3))


def larger(forest: Forest, extra: tuple[int, int, int]) -> ForestCapacity:
    exact = ForestCapacity.for_forest(forest)
    return ForestCapacity(
        nodes=exact.nodes + extra[0],
        requests=exact.requests + extra[1],
        page_entries=exact.page_entries + extra[2],
    )


def check_nodes(forest: Forest, arrays: ForestArrays) -> None:
    order = node_order(forest).tolist()
    assert arrays.num_nodes == len(order)
    entry = 0
    for i, node_id in enumerate(order):
        node = forest.node(node_id)
        assert arrays.parent[i] == (-1 if node.parent < 0 else order.index(node.parent))
        assert arrays.parent[i] < i
        assert arrays.position[i] == node.position
        assert arrays.kv_len[i] == node.kv_len
        assert arrays.max_kv_len[i] == node.max_kv_len
        assert arrays.first_row[i] == node.first_row
        assert arrays.page_lo[i] == entry
        entry += arrays.num_pages[i]
        assert arrays.page_list[arrays.page_lo[i] : entry].tolist() == node.page_ids.tolist()
    assert arrays.num_page_entries == entry


def check_requests(forest: Forest, arrays: ForestArrays, requests: list[int]) -> None:
    order = node_order(forest).tolist()
    num_requests = int(arrays.num_requests)
    rows = arrays.request_row[:num_requests].tolist()
    assert sorted(rows) == requests
    sharers = {node_id: set() for node_id in order}
    for request, place in zip(rows, arrays.request_node.tolist(), strict=False):
        assert order[place] == forest.end_node(request)
        for node_id in forest.path(order[place]):
            sharers[node_id].add(request)
    for i, node_id in enumerate(order):
        run = rows[arrays.request_lo[i] : arrays.request_hi[i]]
        assert set(run) == sharers[node_id]
        assert len(run) == len(sharers[node_id]) == forest.num_sharers(node_id)


def check_padding(arrays: ForestArrays) -> None:
    num_nodes, num_requests = int(arrays.num_nodes), int(arrays.num_requests)
    for name in ("position", "kv_len", "max_kv_len", "first_row", "page_lo", "num_pages"):
        assert not getattr(arrays, name)[num_nodes:].any()
    assert not arrays.request_lo[num_nodes:].any()
    assert not arrays.request_hi[num_nodes:].any()
    assert (arrays.parent[num_nodes:] == -1).all()
    assert (arrays.request_row[num_requests:] == -1).all()
    assert (arrays.request_node[num_requests:] == -1).all()
    assert (arrays.page_list[int(arrays.num_page_entries) :] == -1).all()


@settings(max_examples=500, deadline=None)
@given(REQUESTS, st.sampled_from([1, 4, 16]), padding(), st.randoms(use_true_random=False))
def test_arrays_agree_with_the_forest(requests, page_size, extra, random):
    forest = Forest(page_size=page_size)
    live = []
    for tokens, max_new_tokens in requests:
        live.append(forest.add_request(tokens, max_new_tokens=max_new_tokens))
        if random.random() < 0.25:
            forest.remove_request(live.pop(random.randrange(len(live))))
    capacity = larger(forest, extra)
    arrays = export_arrays(forest, capacity)
    assert all(array.dtype == np.int32 for array in arrays)
    assert arrays.parent.size == capacity.nodes
    assert arrays.request_row.size == capacity.requests
    assert arrays.page_list.size == capacity.page_entries
    check_nodes(forest, arrays)
    check_requests(forest, arrays, sorted(live))
    check_padding(arrays)


def test_requests_at_a_node_come_before_those_below_it():
    forest = Forest(page_size=4)
    below = forest.add_request([1, 2, 3])
    sample = forest.add_request([1, 2], max_new_tokens=6)
    ends_here = forest.add_request([1, 2])
    other_root = forest.add_request([7])
    arrays = export_arrays(forest)
    assert arrays.request_row.tolist() == [ends_here, below, sample, other_root]
    assert arrays.request_node.tolist() == [0, 1, 2, 3]
    assert arrays.parent.tolist() == [-1, 0, 0, -1]
    assert arrays.request_lo.tolist() == [0, 1, 2, 3]
    assert arrays.request_hi.tolist() == [3, 2, 3, 4]
    assert arrays.max_kv_len.tolist() == [2, 1, 6, 1]
    assert arrays.page_list.tolist() == [0, 0, -1, -1, 1]


def test_nodes_without_requests_have_empty_runs():
    forest = Forest()
    forest.insert([1, 2])
    arrays = export_arrays(forest)
    assert (arrays.request_lo.tolist(), arrays.request_hi.tolist()) == ([0], [0])


def test_too_small_a_capacity_is_refused():
    forest = Forest.from_token_lists([[1], [2]], max_new_tokens=1)
    capacity = ForestCapacity(nodes=3, requests=2, page_entries=0)
    message = r"`capacity` must have nodes >= 4 \(got 3\), page_entries >= 4 \(got 0\)\. "
    with pytest.raises(ValueError, match=message):
        export_arrays(forest, capacity)


def test_twenty_thousand_nodes_export_quickly():
    forest = Forest()
    root = forest.insert(range(100))
    for token in range(20_000):
        forest.insert([token], parent=root)
    start = time.perf_counter()
    export_arrays(forest)
    # 70 ms on 2 cores.
    assert time.perf_counter() - start < 2
