"""The kernels' bodies in Pallas's Mosaic interpreter, on a CPU, with race detection.

Covered: both compute divisions of partial attention (one and two compute warpgroups) with their
rings, barriers, hand-over, masks and table chunks, and the merge; all as `interpretable`. That body
passes the weights through shared memory, since the interpreter has no products from registers, and
leaves out programmatic dependent launch. What only hardware shows (registers, the order of wgmma,
the launch of the merge) is in tests/test_gpu_*.py.
"""

import dataclasses

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from forests import make_batch

from codec_jax.attention import prepare_plan, resolve_plan
from codec_jax.attention_rows import pack_rows, unpack_rows
from codec_jax.partial import Partial
from codec_jax.planning.build import build_plan
from codec_jax.planning.spec import PlanSpec
from pallas_kernels.config import KernelConfig
from pallas_kernels.merge import merge_partials
from pallas_kernels.partial_attention import partial_attention


def one_warpgroup():
    return KernelConfig(
        num_stages=2, num_query_buffers=2, num_compute_warpgroups=1, interpretable=True
    )


def two_warpgroups():
    return KernelConfig(num_stages=2, num_query_buffers=3, interpretable=True)


def batch_of(lists, *, page_size=64, group_size=4):
    """A batch in bfloat16 with one KV head of 64 columns."""
    return make_batch(
        lists,
        page_size=page_size,
        num_kv_heads=1,
        group_size=group_size,
        head_dim=64,
        dtype="bfloat16",
        q_dtype="bfloat16",
    )


def interpreted(batch, plan, page_size, config, *, factor=1.0):
    """out and lse of every request, the usual scale of the logits times `factor`."""
    cache = batch.cache()
    resolved = resolve_plan(
        prepare_plan(plan, implementation="mosaic_gpu"),
        cache.page_list,
        cache.kv_len,
        page_size=page_size,
    )
    rows = pack_rows(jnp.asarray(batch.q), plan).astype(jnp.bfloat16)
    kv = ((cache.pool.k_pages, cache.pool.v_pages),)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        partials, merged = partial_attention(
            rows,
            kv,
            resolved.tables,
            jnp.zeros(1, jnp.int32),
            logits_scale=factor * batch.q.shape[2] ** -0.5,
            config=config,
        )
        jax.block_until_ready(partials)
        out, lse = merge_partials(partials, resolved.tables.slot_indptr, merged, interpretable=True)
        jax.block_until_ready(out)
    return unpack_rows(Partial(out, lse), plan, dtype=jnp.float32)


@pytest.mark.parametrize(
    ("page_size", "num_workers", "make_config"),
    [
        (64, 1, two_warpgroups),
        (64, 9, two_warpgroups),
        (64, 3, two_warpgroups),
        (16, 3, two_warpgroups),
        (32, 3, two_warpgroups),
        (128, 2, one_warpgroup),
        (128, 3, two_warpgroups),
    ],
)
def test_right_and_without_races(page_size, num_workers, make_config, capfd):
    """A node of two tiles, streams of partly live pages, NaN in every dead row; several slots."""
    lists = [[1] * (page_size + 70) + [2 + i] * 40 for i in range(3)] + [[9] * 5]
    batch = batch_of(lists, page_size=page_size, group_size=32)
    spec = PlanSpec(num_kv_heads=1, group_size=32, page_size=page_size, num_workers=num_workers)
    result = interpreted(batch, build_plan(batch.arrays, spec), page_size, make_config())
    out, lse = batch.expected()
    np.testing.assert_allclose(result.out, out, rtol=0, atol=1e-2)
    np.testing.assert_allclose(result.lse, lse, rtol=0, atol=1e-5)
    printed = capfd.readouterr()  # the detector of JAX 0.11 does not raise, it prints
    assert "RACE" not in (printed.out + printed.err).upper()


@pytest.mark.parametrize(
    ("page_size", "num_workers", "num_stages", "lengths"),
    [
        (64, 1, 2, [32, 32, 9, 1, 33, 20, 70, 5]),
        (64, 5, 4, [32, 32, 9, 1, 33, 20, 70, 5]),
        (64, 1, 4, [84, 84, 100, 64, 65, 95, 84]),
        (64, 3, 2, [84, 20, 128, 65, 64]),
        (128, 1, 4, [20, 140, 30, 97, 160, 65]),
    ],
)
def test_starts_of_pages_share_blocks(page_size, num_workers, num_stages, lengths, capfd):
    """Two short pages are one block, also with others between them; NaN behind each."""
    lists = [[1] * page_size + [2 + i] * length for i, length in enumerate(lengths)]
    batch = batch_of(lists, page_size=page_size)
    spec = PlanSpec(num_kv_heads=1, group_size=4, page_size=page_size, num_workers=num_workers)
    config = KernelConfig(num_stages=num_stages, num_query_buffers=3, interpretable=True)
    result = interpreted(batch, build_plan(batch.arrays, spec), page_size, config)
    out, lse = batch.expected()
    np.testing.assert_allclose(result.out, out, rtol=0, atol=1e-2)
    np.testing.assert_allclose(result.lse, lse, rtol=0, atol=1e-5)
    printed = capfd.readouterr()
    assert "RACE" not in (printed.out + printed.err).upper()


@pytest.mark.parametrize("exponent", [10, 20, 24, 30, 60])
def test_scores_of_any_size(exponent):
    """Scores whose rounding alone would make a weight overflow, or a row look empty."""
    lists = [[1] * 80 + [2 + i] * 9 for i in range(3)] + [[9] * 5]
    batch = batch_of(lists)
    q = np.asarray(batch.q, np.float32) * np.float32(2.0) ** exponent
    batch = dataclasses.replace(batch, q=q.astype(batch.q.dtype))
    spec = PlanSpec(num_kv_heads=1, group_size=4, page_size=64, num_workers=1)
    result = interpreted(batch, build_plan(batch.arrays, spec), 64, two_warpgroups())
    out, lse = batch.expected()
    np.testing.assert_allclose(result.out, out, rtol=0, atol=1e-2)
    np.testing.assert_allclose(result.lse, lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("factor", [-1.0, 0.0, 2.0**-30, 0.25, 16.0, 2.0**34])
def test_any_scale_of_the_logits(factor):
    """A masked score stays below any other, and a weight is at most 1 however large the scores."""
    lists = [[1] * 20 + [2 + i] * 9 for i in range(3)] + [[9] * 5]
    batch = batch_of(lists)
    spec = PlanSpec(num_kv_heads=1, group_size=4, page_size=64, num_workers=2)
    plan = build_plan(batch.arrays, spec)
    result = interpreted(batch, plan, 64, two_warpgroups(), factor=factor)
    # A power of two, or 0: the scaled queries are exact.
    q = (np.asarray(batch.q, np.float32) * np.float32(factor)).astype(batch.q.dtype)
    out, lse = dataclasses.replace(batch, q=q).expected()
    np.testing.assert_allclose(result.out, out, rtol=0, atol=1e-2)
    np.testing.assert_allclose(result.lse, lse, rtol=1e-6, atol=1e-5)
