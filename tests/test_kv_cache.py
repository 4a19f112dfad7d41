"""The KV pool: where tokens are written, what is refused, and that nothing else changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forests import make_batch, random_token_lists
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_jax.attention_layer import append_in_one_launch
from codec_jax.forest_arrays import node_order
from codec_jax.kv_cache import KVCache, KVPool, TokenSlots, append, check_pool, fill_cache

SHAPE = (2, 4, 3)
"""KV heads, page size, head_dim."""
append_jitted = jax.jit(append)


def numbered_pool(num_pages=3, num_layers=2):
    """A pool whose every number is different and negative."""
    shape = (num_layers * num_pages, *SHAPE)
    numbers = -1.0 - np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return KVPool(jnp.asarray(numbers), jnp.asarray(numbers - 0.5), num_layers)


def token_values(num_tokens):
    k = 1.0 + np.arange(num_tokens * 6, dtype=np.float32).reshape(num_tokens, 2, 3)
    return k, 100 + k


def test_zeros():
    pool = KVPool.zeros(5, SHAPE, num_layers=3, dtype="bfloat16")
    assert pool.k_pages.shape == pool.v_pages.shape == (15, *SHAPE)
    assert pool.k_pages.dtype == pool.v_pages.dtype == jnp.bfloat16
    assert (pool.num_pages, pool.page_size, pool.page_shape) == (5, 4, SHAPE)
    assert not pool.k_pages.any()
    assert not pool.v_pages.any()
    assert KVPool.zeros(5, SHAPE).k_pages.dtype == jnp.float32


def test_a_pool_is_a_pytree_of_its_two_arrays():
    pool = KVPool.zeros(5, SHAPE, num_layers=3)
    assert len(jax.tree.leaves(pool)) == 2
    assert jax.tree.map(lambda x: x, pool).num_layers == 3


@settings(max_examples=50)
@given(
    slots=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 3)), min_size=5, max_size=5, unique=True
    ),
    layer=st.integers(0, 1),
)
def test_append_writes_its_slots_and_nothing_else(slots, layer):
    pool, (k, v) = numbered_pool(), token_values(5)
    page, row = np.array(slots, np.int32).T
    written = append_jitted(pool, np.int32(layer), TokenSlots(page, row), k, v)
    for before, after, values in (
        (pool.k_pages, written.k_pages, k),
        (pool.v_pages, written.v_pages, v),
    ):
        expected = np.array(before)
        for i in range(5):
            expected[layer * 3 + page[i], :, row[i]] = values[i]
        np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("page", [-1, -3, 3, 4, 2**31 - 1])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_token_without_a_page_is_dropped(page, layer):
    """Not written to the next layer, nor to the last page."""
    pool, (k, v) = numbered_pool(), token_values(1)
    slots = TokenSlots(np.array([page], np.int32), np.array([0], np.int32))
    written = append_jitted(pool, np.int32(layer), slots, k, v)
    jax.tree.map(np.testing.assert_array_equal, written, pool)


def test_appended_values_are_rounded_to_the_pool():
    pool, (k, v) = KVPool.zeros(1, SHAPE, dtype="bfloat16"), token_values(1)
    slots = TokenSlots(np.zeros(1, np.int32), np.zeros(1, np.int32))
    written = append_jitted(pool, np.int32(0), slots, k + np.float32(0.001), v)
    assert written.k_pages.dtype == jnp.bfloat16
    expected = jnp.asarray(k[0] + np.float32(0.001)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(written.k_pages[0, :, 0], expected)


def test_append_updates_a_donated_pool_in_place():
    pool, (k, v) = KVPool.zeros(64, SHAPE), token_values(1)
    slots = TokenSlots(np.zeros(1, np.int32), np.zeros(1, np.int32))
    compiled = jax.jit(append, donate_argnums=0).lower(pool, np.int32(0), slots, k, v).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.k_pages.nbytes + pool.v_pages.nbytes
    assert memory.temp_size_in_bytes < pool.k_pages.nbytes / 4


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_fill_cache_puts_every_token_where_the_forest_says(page_size, seed):
    lists = random_token_lists(np.random.default_rng(seed), num_requests=9)
    batch = make_batch(lists, page_size=page_size)
    k, v = values_by_node(batch)
    cache = fill_cache(batch.arrays, k, v, page_size=page_size)
    live = batch.live_slots()
    for filled, pages in zip((cache.pool.k_pages, cache.pool.v_pages), batch.pages, strict=True):
        filled = np.asarray(filled)
        assert filled.shape == pages.shape
        np.testing.assert_array_equal(
            np.moveaxis(filled, 2, 1)[live], np.moveaxis(pages, 2, 1)[live]
        )
        assert not np.moveaxis(filled, 2, 1)[~live].any()
    np.testing.assert_array_equal(cache.page_list, batch.arrays.page_list)
    np.testing.assert_array_equal(cache.kv_len, batch.arrays.kv_len)


def values_by_node(batch):
    """K and V of every node's tokens in preorder, from the requests' own."""
    of_node = {}
    for request in range(len(batch.token_lists)):
        kv = batch.keys_and_values(request).astype(np.float32)
        for node_id in batch.forest.path(batch.forest.end_node(request)):
            node = batch.forest.node(node_id)
            of_node[node_id] = kv[:, node.position : node.position + node.kv_len]
    return np.concatenate([of_node[i] for i in node_order(batch.forest).tolist()], axis=1)


@pytest.fixture(scope="module")
def batch():
    return make_batch([[1] * 20, [1] * 20 + [2], [3]], page_size=16)


@pytest.mark.parametrize(
    ("k_shape", "v_shape"),
    [
        ((21, 2, 8), (21, 2, 8)),
        ((22, 2, 8), (22, 2, 4)),
        ((22, 16), (22, 16)),
        ((23, 2, 8), (23, 2, 8)),
    ],
)
def test_fill_cache_refuses_other_shapes(batch, k_shape, v_shape):
    with pytest.raises(ValueError) as error:
        fill_cache(batch.arrays, np.zeros(k_shape), np.zeros(v_shape), page_size=16)
    assert str(error.value) == (
        "`k` and `v` must both be [22, num_kv_heads, head_dim], a row for each token of the"
        f" forest; got {k_shape} and {v_shape}."
    )


@pytest.mark.parametrize("page_size", [8, 32])
def test_fill_cache_refuses_a_page_size_that_is_not_the_forests(batch, page_size):
    """O07: the tokens would go to the wrong rows, silently; `num_pages` tells the page size."""
    k = np.zeros((22, 2, 8), np.float32)
    with pytest.raises(ValueError, match="`page_size`"):
        fill_cache(batch.arrays, k, k, page_size=page_size)


def test_fill_cache_refuses_a_live_token_without_a_page(batch):
    """The caller was to give "a physical page for each entry in use"; the token is dropped."""
    page_list = batch.arrays.page_list.copy()
    page_list[0] = -1
    k = np.zeros((22, 2, 8), np.float32)
    with pytest.raises(ValueError, match="`forest`"):
        fill_cache(batch.arrays._replace(page_list=page_list), k, k, page_size=16)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("num_pages", (0, SHAPE, 1)),
        ("num_layers", (1, SHAPE, 0)),
        ("num_kv_heads", (1, (0, 4, 3), 1)),
        ("page_size", (1, (2, 0, 3), 1)),
        ("head_dim", (1, (2, 4, 0), 1)),
    ],
)
def test_sizes_that_are_not_positive_are_refused(name, sizes):
    num_pages, shape, num_layers = sizes
    rule = rf"^`{name}` must be positive; got 0\.$"
    with pytest.raises(ValueError, match=rule):
        check_pool(num_pages, shape, num_layers=num_layers)
    with pytest.raises(ValueError, match=rule):
        KVPool.zeros(num_pages, shape, num_layers=num_layers)


def test_o05_a_pool_whose_page_ids_pass_int32_is_refused():
    """The largest pool in bounds is checked by sizes alone: nothing is allocated."""
    check_pool(2**28 - 1, (4, 16, 64), num_layers=2)
    with pytest.raises(ValueError) as error:
        KVPool.zeros(2**28, (4, 16, 64), num_layers=2)
    assert str(error.value) == (
        "`num_layers * num_pages * num_kv_heads` must be below 2**31 (page ids are 32-bit); got"
        " 2147483648. Use a larger `page_size` or fewer pages."
    )


def test_a_cache_is_a_pytree(batch):
    cache = KVCache(KVPool.zeros(2, SHAPE), batch.arrays.page_list, batch.arrays.kv_len)
    assert len(jax.tree.leaves(cache)) == 4
    assert dataclasses.replace(cache, kv_len=cache.kv_len + 1).pool is cache.pool


@pytest.mark.parametrize("write", [append, append_in_one_launch])
@pytest.mark.parametrize(
    ("argument", "shape"),
    [
        ("k", (3, 2, 3)),
        ("k", (1, 2, 3)),
        ("k", (2, 1, 3)),
        ("v", (2, 4, 3)),
        ("v", (2, 2, 4)),
        ("v", (2, 6)),
    ],
)
def test_values_that_do_not_fit_are_refused_by_name(write, argument, shape):
    """Two tokens, two KV heads of width 3: what would broadcast or read past the end."""
    slots = TokenSlots(jnp.asarray([0, 1]), jnp.asarray([0, 3]))
    values = {"k": jnp.zeros((2, 2, 3)), "v": jnp.zeros((2, 2, 3)), argument: jnp.zeros(shape)}
    with pytest.raises(ValueError) as error:
        write(numbered_pool(), jnp.int32(0), slots, values["k"], values["v"])
    assert str(error.value).startswith(f"`{argument}` must be [2, 2, at most 3]")
    assert str(error.value).endswith(f"got {shape}.")


@pytest.mark.parametrize("write", [append, append_in_one_launch])
def test_a_slot_is_a_page_and_a_row(write):
    slots = TokenSlots(jnp.asarray([0, 1]), jnp.asarray([0]))
    values = jnp.zeros((2, 2, 3))
    with pytest.raises(ValueError, match=r"`slots` must have a page and a row for each token"):
        write(numbered_pool(), jnp.int32(0), slots, values, values)
