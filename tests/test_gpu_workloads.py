"""Every named workload on the kernels, bfloat16, pages of 64 tokens.

Forests of fewer than 64K unique tokens against float64 NumPy over each request's own list of token
slots, made here from the workload's levels; larger ones against float32 products on the device.
Workloads with the same heads share a pool and one padded signature.
"""

import functools
from typing import NamedTuple

import gpu_batches
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from codec_jax.attention import attend
from codec_jax.forest_arrays import ForestCapacity
from codec_jax.kv_cache import KVCache, KVPool
from codec_jax.partial import Partial
from codec_jax.planning.build import build_plan
from codec_jax.planning.policies import DEFAULT_POLICY, policy_named
from codec_jax.planning.spec import PlanCapacity, PlanSpec
from experiments.dense_check import max_relative_error
from experiments.workloads import load_workloads

# In one process: the tests share what they compile.
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("workloads")]

WORKLOADS = load_workloads()
PAGE_SIZE = 64
SMALL = 65_536
TOLERANCE = 6e-3
LSE_TOLERANCE = 1e-3
NUM_CHECKED = 16
PADDING = {"parent": -1, "page_list": -1, "request_row": -1, "request_node": -1}


class Heads(NamedTuple):
    num_q_heads: int
    num_kv_heads: int
    head_dim: int


class Bucket(NamedTuple):
    """What the workloads with the same heads share."""

    spec: PlanSpec
    forest: ForestCapacity
    plan: PlanCapacity
    pool: KVPool


def heads_of(workload):
    return Heads(workload.num_q_heads, workload.num_kv_heads, workload.head_dim)


def members(heads):
    return [workload for workload in WORKLOADS.values() if heads_of(workload) == heads]


@functools.cache
def forest_of(name):
    return WORKLOADS[name].forest(page_size=PAGE_SIZE)


def padded(arrays, capacity):
    """The forest's arrays with the capacity's sizes."""
    sizes = {
        "request_row": capacity.requests,
        "request_node": capacity.requests,
        "page_list": capacity.page_entries,
    }
    grown = {
        name: np.pad(
            array,
            (0, sizes.get(name, capacity.nodes) - array.size),
            constant_values=PADDING.get(name, 0),
        )
        for name, array in arrays._asdict().items()
        if array.ndim
    }
    return arrays._replace(**grown)


@functools.cache
def bucket(heads):
    """Sizes for all workloads with these heads, and one pool for them, made on the device."""
    spec = PlanSpec(
        num_kv_heads=heads.num_kv_heads,
        group_size=heads.num_q_heads // heads.num_kv_heads,
        page_size=PAGE_SIZE,
    )
    forests = [forest_of(workload.name) for workload in members(heads)]
    capacity = ForestCapacity(
        nodes=max(arrays.parent.size for arrays in forests),
        requests=max(arrays.request_row.size for arrays in forests),
        page_entries=max(arrays.page_list.size for arrays in forests),
    )
    plan = PlanCapacity.largest(
        PlanCapacity.for_forest(padded(arrays, capacity), spec, policy=policy_named(DEFAULT_POLICY))
        for arrays in forests
    )
    shape = (capacity.page_entries, heads.num_kv_heads, PAGE_SIZE, heads.head_dim)
    k, v = (jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) for seed in (0, 1))
    return Bucket(spec, capacity, plan, KVPool(k, v))


@functools.cache
def host_pages(heads):
    """K and V `[num_kv_heads, slots, head_dim]`, float64, of the pages of small workloads."""
    small = [workload for workload in members(heads) if workload.unique_tokens < SMALL]
    num_pages = max(forest_of(workload.name).page_list.size for workload in small)
    pool = bucket(heads).pool
    pages = [np.asarray(x[:num_pages]).astype(np.float32) for x in (pool.k_pages, pool.v_pages)]
    return [
        np.moveaxis(x, 1, 0).reshape(heads.num_kv_heads, -1, heads.head_dim).astype(np.float64)
        for x in pages
    ]


def chain_of(workload, level, node):
    """The nodes on the path to a node, root first; levels without tokens have none."""
    nodes = []
    for i in range(level, -1, -1):
        if workload.tokens_per_node[i]:
            nodes.append((i, node))
        if i:
            node = node * workload.nodes_per_level[i - 1] // workload.nodes_per_level[i]
    return tuple(nodes[::-1])


def slots_of_nodes(workload, page_list):
    """Slot (page * PAGE_SIZE + row) of each token of each node: page lists are in preorder."""
    chains = [
        chain_of(workload, level, node)
        for level, num_nodes in enumerate(workload.nodes_per_level)
        if workload.tokens_per_node[level]
        for node in range(num_nodes)
    ]
    slots, first = {}, 0
    for chain in sorted(chains, key=lambda chain: [node for _, node in chain]):
        token = np.arange(workload.tokens_per_node[chain[-1][0]])
        page = page_list[first + token // PAGE_SIZE].astype(np.int64)
        slots[chain[-1]] = page * PAGE_SIZE + token % PAGE_SIZE
        first += -(-token.size // PAGE_SIZE)
    return slots


def attention(q, k, v):
    """Softmax attention of `[group, head_dim]` over `[tokens, head_dim]`, float64: out and lse."""
    score = q @ k.T * q.shape[1] ** -0.5
    top = score.max(axis=1, keepdims=True)
    weight = np.exp(score - top)
    total = weight.sum(axis=1, keepdims=True)
    return weight @ v / total, (top + np.log(total))[:, 0]


def check_in_float64(workload, q, out, lse):
    """Some requests, evenly spread, with all their heads."""
    heads, group = heads_of(workload), workload.num_q_heads // workload.num_kv_heads
    slots = slots_of_nodes(workload, forest_of(workload.name).page_list)
    last = len(workload.nodes_per_level) - 1
    k, v = host_pages(heads)
    for request in np.unique(np.linspace(0, len(q) - 1, NUM_CHECKED).astype(int)).tolist():
        mine = np.concatenate([slots[node] for node in chain_of(workload, last, request)])
        for head in range(heads.num_kv_heads):
            rows = slice(head * group, (head + 1) * group)
            query = q[request, rows].astype(np.float64)
            expected, expected_lse = attention(query, k[head, mine], v[head, mine])
            gap = np.linalg.norm(out[request, rows].astype(np.float64) - expected, axis=-1)
            assert (gap / np.linalg.norm(expected, axis=-1)).max() < TOLERANCE
            assert np.abs(lse[request, rows] - expected_lse).max() < LSE_TOLERANCE


def check_in_float32(workload, q, out, lse):
    scale = workload.head_dim**-0.5
    arrays = forest_of(workload.name)
    pool = bucket(heads_of(workload)).pool
    cache = KVCache(pool, jnp.asarray(arrays.page_list), jnp.asarray(arrays.kv_len))
    result = Partial(jnp.asarray(out), jnp.asarray(lse))
    error, lse_error = max_relative_error(
        result, jnp.asarray(q), cache, arrays, logits_scale=scale, max_requests=NUM_CHECKED
    )
    assert error < TOLERANCE
    assert lse_error < LSE_TOLERANCE


@pytest.mark.parametrize("name", WORKLOADS)
def test_workload(name):
    workload = WORKLOADS[name]
    spec, capacity, plan_capacity, pool = bucket(heads_of(workload))
    arrays = padded(forest_of(name), capacity)
    shape = (capacity.requests, workload.num_q_heads, workload.head_dim)
    q = np.random.default_rng(1).standard_normal(shape, np.float32).astype(jnp.bfloat16)
    result = attend(
        jnp.asarray(q),
        KVCache(pool, jnp.asarray(arrays.page_list), jnp.asarray(arrays.kv_len)),
        build_plan(arrays, spec, capacity=plan_capacity),
        implementation=gpu_batches.IMPLEMENTATION,
    )
    count = workload.batch_size
    q, out, lse = q[:count], np.asarray(result.out)[:count], np.asarray(result.lse)[:count]
    assert np.isfinite(out.astype(np.float32)).all()
    assert np.isfinite(lse).all()
    check = check_in_float64 if workload.unique_tokens < SMALL else check_in_float32
    check(workload, q, out, lse)
