"""Temporaries of a compiled step follow neither the number of sharers nor the tokens.

Everything is lowered from shapes alone; nothing is planned, filled or run.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from codec_jax.attention import _attend
from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestCapacity, export_arrays
from codec_jax.kv_cache import KVCache, KVPool
from codec_jax.planning.build import plan_forest
from codec_jax.planning.cost import CostModel
from codec_jax.planning.policies import POLICIES
from codec_jax.planning.spec import PlanCapacity, PlanSpec

NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM = 2, 64, 64
SPEC = PlanSpec(num_kv_heads=NUM_KV_HEADS, group_size=1, page_size=PAGE_SIZE, num_workers=8)


def shapes(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def temporary_bytes(*, num_tokens, num_sharers):
    """Temporaries of `_attend` beyond its packed queries and results, and bytes of the plan."""
    forest = Forest.from_token_lists([np.zeros(num_tokens, np.int32)] * num_sharers,
                                     page_size=PAGE_SIZE)  # fmt: skip
    capacity = ForestCapacity(nodes=64, requests=num_sharers, page_entries=num_tokens // PAGE_SIZE)
    arrays = export_arrays(forest, capacity)
    policy = POLICIES["balanced"]
    plan = jax.eval_shape(
        lambda arrays: plan_forest(
            arrays,
            jnp.int32(0),
            spec=SPEC,
            policy=policy,
            cost=CostModel.closed_form(SPEC),
            capacity=PlanCapacity.for_forest(export_arrays(forest, capacity), SPEC,
                                             policy=POLICIES["balanced"]),
        ),
        shapes(arrays),
    )  # fmt: skip
    pages = jax.ShapeDtypeStruct(
        (capacity.page_entries, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM), jnp.float32
    )
    kv = KVCache(KVPool(pages, pages), shapes(arrays.page_list), shapes(arrays.kv_len))
    q = jax.ShapeDtypeStruct((num_sharers, NUM_KV_HEADS, HEAD_DIM), jnp.float32)
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    compiled = _attend.lower(q, kv, plan, layer, logits_scale=0.125, implementation="xla").compile()
    rows = NUM_KV_HEADS * plan.num_tiles * 64
    packed_bytes = rows * (2 * HEAD_DIM + 2) * 4
    plan_bytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(plan))
    return compiled.memory_analysis().temp_size_in_bytes - packed_bytes, plan_bytes


@pytest.fixture(scope="module")
def one_sharer():
    return temporary_bytes(num_tokens=4096, num_sharers=1)[0]


def test_temporaries_do_not_grow_with_the_sharers(one_sharer):
    """Copying K and V for each of 64 sharers would take 64 * 4 MiB."""
    many = temporary_bytes(num_tokens=4096, num_sharers=64)[0]
    assert many <= 1.05 * one_sharer


def test_temporaries_do_not_grow_with_a_long_node(one_sharer):
    """K and V of 65,536 tokens are 64 MiB; only the steps, some integers a page, may grow."""
    long, plan_bytes = temporary_bytes(num_tokens=65536, num_sharers=1)
    assert plan_bytes < 2**17
    assert long <= one_sharer + 4 * plan_bytes


def test_temporaries_are_a_few_chunks(one_sharer):
    """A chunk's pages and their zeroed copies, K and V, are 16 KiB a page each."""
    assert one_sharer < 16 * 2**20
