"""`PagePool` keeps every page either free or used, with one owner of the free stack at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.pages import OutOfPagesError, PagePool

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["allocate", "retain", "release", "loan"]),
        st.integers(0, 7),
        st.integers(0, 10**6),
    ),
    max_size=40,
)


def check(pool: PagePool, model: dict[int, int]) -> None:
    """The pool agrees with a dictionary of page id -> references."""
    assert pool.num_used == len(model)
    assert pool.num_free + pool.num_used == pool.num_pages
    assert pool.refcounts(range(pool.num_pages)).tolist() == [
        model.get(i, 0) for i in range(pool.num_pages)
    ]


def take(pool: PagePool, model: dict[int, int], ids: np.ndarray) -> None:
    assert ids.dtype == np.int32
    assert len(set(ids.tolist())) == ids.size
    assert not model.keys() & set(ids.tolist())
    model.update(dict.fromkeys(ids.tolist(), 1))
    check(pool, model)


def allocate(pool: PagePool, model: dict[int, int], num: int) -> None:
    if num <= pool.num_free:
        return take(pool, model, pool.allocate(num))
    with pytest.raises(OutOfPagesError):
        pool.allocate(num)


def loan(pool: PagePool, model: dict[int, int], num: int) -> None:
    stack = pool.lend()
    num_popped = min(num, stack.size)
    popped = pool.settle(stack.size - num_popped)
    assert popped.tolist() == stack[::-1][:num_popped].tolist()
    take(pool, model, popped)


def retain(pool: PagePool, model: dict[int, int], pages: list[int]) -> None:
    pool.retain(pages)
    for page in pages:
        model[page] += 1


def release(pool: PagePool, model: dict[int, int], pages: list[int]) -> None:
    too_often = any(pages.count(page) > model[page] for page in pages)
    if too_often:
        with pytest.raises(ValueError, match="released too often"):
            pool.release(pages)
        return
    pool.release(pages)
    for page in pages:
        model[page] -= 1
        if not model[page]:
            del model[page]


@settings(max_examples=500, deadline=None)
@given(OPERATIONS)
def test_free_and_used_partition_the_pool(operations):
    pool, model = PagePool(12), {}
    most_used = 0
    for name, num, seed in operations:
        used = list(model)
        pages = [used[(seed + 3 * i) % len(used)] for i in range(min(num, 4))] if used else []
        if name == "allocate":
            allocate(pool, model, num)
        elif name == "loan":
            loan(pool, model, num)
        else:
            {"retain": retain, "release": release}[name](pool, model, pages)
        check(pool, model)
        most_used = max(most_used, len(model))
        assert pool.num_pages_touched == most_used
        assert all(page < most_used for page in model)


@settings(max_examples=500, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=30))
def test_pool_without_a_bound_never_runs_out(operations):
    pool, model = PagePool(), {}
    for is_allocation, num in operations:
        if is_allocation:
            take(pool, model, pool.allocate(num))
        else:
            release(pool, model, list(model)[:num])
        check(pool, model)
        assert pool.num_pages_touched == pool.num_pages


def test_ids_are_handed_out_lowest_first():
    pool = PagePool(5)
    assert pool.allocate(3).tolist() == [0, 1, 2]
    pool.release([0, 2])
    assert pool.allocate(3).tolist() == [0, 2, 3]


def test_growth_uses_free_ids_before_new_ones():
    pool = PagePool()
    pool.allocate(3)
    pool.release([1])
    assert pool.allocate(3).tolist() == [1, 3, 4]


def test_allocate_is_all_or_nothing():
    pool = PagePool(4)
    pool.allocate(3)
    with pytest.raises(OutOfPagesError, match=r"^2 pages wanted, 1 of 4 are free\. ") as caught:
        pool.allocate(2)
    assert (caught.value.num_wanted, caught.value.num_free, caught.value.num_pages) == (2, 1, 4)
    assert pool.num_free == 1


def test_release_is_all_or_nothing():
    pool = PagePool(4)
    first, second = pool.allocate(2)
    with pytest.raises(ValueError, match=f"page {second} has 1"):
        pool.release([first, second, second])
    assert pool.refcounts([first, second]).tolist() == [1, 1]


def test_a_shared_page_is_free_after_its_last_release():
    pool = PagePool(2)
    pages = pool.allocate(1)
    pool.retain(pages)
    pool.release(pages)
    assert pool.num_used == 1
    pool.release(pages)
    assert pool.num_used == 0


def test_nothing_moves_while_the_stack_is_lent():
    pool = PagePool(4)
    pages = pool.allocate(1)
    assert pool.lend().tolist() == [3, 2, 1]
    for call in (lambda: pool.allocate(1), lambda: pool.retain(pages), lambda: pool.release(pages)):
        with pytest.raises(RuntimeError, match="lent to the device loop"):
            call()
    with pytest.raises(RuntimeError, match="one owner at a time"):
        pool.lend()
    assert pool.settle(1).tolist() == [1, 2]
    assert pool.allocate(1).tolist() == [3]


def test_what_is_lent_is_a_copy():
    pool = PagePool(2)
    pool.lend()[:] = 7
    pool.settle(2)
    assert pool.allocate(2).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PagePool(-1), r"`num_pages` must be >= 0; got -1"),
        (lambda: PagePool(2).allocate(-1), r"`num_wanted` must be >= 0; got -1"),
        (lambda: PagePool(2).retain([0]), r"page 0 has 0"),
        (lambda: PagePool(2).release([2]), r"`page_ids` must be 0 to 1; got 2"),
        (lambda: PagePool(2).release([-1]), r"`page_ids` must be 0 to 1; got -1"),
        (lambda: PagePool(2).refcounts([0.5]), r"`page_ids` must be one list of integers; got fl"),
        (lambda: PagePool().lend(), r"without a bound cannot be lent.*`num_pages`"),
    ],
)
def test_errors_name_the_argument_and_the_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_settle_needs_a_loan_that_covers_it():
    pool = PagePool(2)
    with pytest.raises(RuntimeError, match="Call `lend` first"):
        pool.settle(0)
    pool.lend()
    with pytest.raises(ValueError, match=r"`num_left` must be 0 to 2, .* got 3"):
        pool.settle(3)
    assert pool.settle(2).size == 0
