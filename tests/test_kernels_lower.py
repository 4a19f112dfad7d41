"""Every kernel configuration lowers for CUDA, on a machine without a GPU.

Catches shapes, layouts, divisibility, shared memory and changes of JAX's interface; not what only
the GPU's assembler or a run can show.
"""

import itertools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from codec_jax.attention import attend_packed, prepare_plan, resolve_plan
from codec_jax.forest import Forest
from codec_jax.forest_arrays import export_arrays
from codec_jax.kv_cache import KVPool
from codec_jax.planning.build import build_plan
from codec_jax.planning.spec import PlanSpec
from pallas_kernels import Tables, padded_head_dim, supports
from pallas_kernels.config import MAX_SHARED_BYTES, KernelConfig
from pallas_kernels.merge import merge_partials
from pallas_kernels.partial_attention import NUM_REGISTERS, partial_attention
from pallas_kernels.support import DTYPES, PAGE_SIZES

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
HEAD_DIMS = (64, 128, 192, 256)


def lower(function, *arguments):
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.as_text()


def shape(*sizes, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(sizes, dtype)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "page_size"), list(itertools.product(DTYPES, HEAD_DIMS, PAGE_SIZES))
)
def test_partial_attention_lowers(dtype, head_dim, page_size):
    pages = shape(100, 8, page_size, head_dim, dtype=dtype)
    text = lower(
        lambda q, k, v, tables, offset: partial_attention(
            q, ((k, v),), tables, offset, logits_scale=0.1
        ),
        shape(8, 128, head_dim, dtype=dtype),
        pages,
        pages,
        Tables(shape(132, 16), shape(300, 8), shape(1000, 8), shape(132, 32, 8), shape(17)),
        shape(1),
    )
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("num_compute", NUM_REGISTERS)
def test_no_more_registers_than_the_launch_has(num_compute):
    """A warpgroup that asks for more waits for ever."""
    warpgroups = num_compute + 1
    at_launch = min(65_536 // (128 * warpgroups), 255) // 8 * 8
    compute, memory = NUM_REGISTERS[num_compute]
    assert num_compute * compute + memory <= warpgroups * at_launch


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("queries_in_registers", [False, True])
@pytest.mark.parametrize("products_ahead", [False, True])
def test_every_wide_loop_lowers(head_dim, queries_in_registers, products_ahead):
    pages = shape(100, 8, 64, head_dim, dtype=jnp.bfloat16)
    text = lower(
        lambda q, k, v, tables, offset: partial_attention(
            q,
            ((k, v),),
            tables,
            offset,
            logits_scale=0.1,
            config=KernelConfig(
                queries_in_registers=queries_in_registers, products_ahead=products_ahead
            ),
        ),
        shape(8, 128, head_dim, dtype=jnp.bfloat16),
        pages,
        pages,
        Tables(shape(132, 16), shape(300, 8), shape(1000, 8), shape(132, 32, 8), shape(17)),
        shape(1),
    )
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("rows", [128, 4096])
def test_merge_lowers(head_dim, rows):
    text = lower(
        lambda out, lse, indptr, *merged: merge_partials((out, lse), indptr, merged),
        shape(600, 64, head_dim, dtype=jnp.float32),
        shape(600, 64, dtype=jnp.float32),
        shape(rows // 8 + 1),
        shape(8, rows, head_dim, dtype=jnp.float32),
        shape(8, rows, dtype=jnp.float32),
    )
    assert text.count("mosaic_gpu_v2") == 1


def test_attention_is_two_kernels_and_no_copy_of_the_pool():
    forest = Forest.from_token_lists([[1] * 100 + [2 + i] * 70 for i in range(5)])
    arrays = export_arrays(forest)
    plan = build_plan(arrays, PlanSpec(num_kv_heads=2, group_size=4, page_size=64))

    def attention(rows, k, v, plan, page_list, kv_len):
        prepared = prepare_plan(plan, implementation="mosaic_gpu")
        resolved = resolve_plan(prepared, page_list, kv_len, page_size=64)
        return attend_packed(
            rows,
            KVPool(k, v),
            resolved,
            jnp.int32(0),
            logits_scale=0.1,
            implementation="mosaic_gpu",
        )

    pages = shape(arrays.page_list.size, 2, 64, 128, dtype=jnp.bfloat16)
    rows = shape(2, plan.num_tiles * 64, 128, dtype=jnp.bfloat16)
    text = lower(attention, rows, pages, pages, plan, arrays.page_list, arrays.kv_len)
    assert text.count("mosaic_gpu_v2") == 2
    pool = "x".join(map(str, pages.shape))
    made = [line for line in text.splitlines() if f"-> tensor<{pool}xbf16>" in line]
    assert made == []


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_heuristic_fits_in_shared_memory(head_dim, dtype):
    config = KernelConfig.heuristic(head_dim, dtype)
    assert config.shared_bytes(head_dim, dtype) <= MAX_SHARED_BYTES
    buffers = config.buffers(head_dim, dtype).values()
    assert config.shared_bytes(head_dim, dtype) > sum(
        jnp.zeros(b.shape, b.dtype).nbytes for b in buffers
    )


def test_config_errors():
    with pytest.raises(ValueError, match=r"`num_stages` must be between 2 and 8; got 1\."):
        KernelConfig(num_stages=1)
    with pytest.raises(ValueError, match=r"`num_stages` must be at least 3 with `products_ahead`"):
        KernelConfig(num_stages=2, products_ahead=True)
    with pytest.raises(ValueError, match=r"`num_query_buffers` must be between 1 and 4; got 5\."):
        KernelConfig(num_query_buffers=5)
    with pytest.raises(ValueError, match=r"at least `num_compute_warpgroups` \(2\); got 1\."):
        KernelConfig(num_query_buffers=1)
    with pytest.raises(ValueError, match=r"`head_dim` must be small enough .*; got 4096\."):
        KernelConfig.heuristic(4096, jnp.bfloat16)


class Device:
    """What `supports` asks of a device."""

    def __init__(self, platform="gpu", compute_capability="9.0"):
        self.platform, self.compute_capability = platform, compute_capability


GOOD = {"dtype": "bfloat16", "head_dim": 80, "page_size": 64, "group_size": 71}


@pytest.mark.parametrize(
    ("device", "change", "reason"),
    [
        (Device("cpu"), {}, "need an NVIDIA Hopper GPU; the device is a cpu"),
        (Device(compute_capability="8.0"), {}, "compute capability 9.0 (Hopper); this is 8.0"),
        (Device(), {"dtype": "float32"}, "take bfloat16 and float16; the keys are float32"),
        (Device(), {"page_size": 8}, "take pages of (16, 32, 64, 128) tokens; got 8"),
        (Device(), {"head_dim": 320}, "take a head_dim of at most 256; got 320"),
        (Device(), {"group_size": 0}, "need at least one query head"),
    ],
)
def test_refusals_say_why(device, change, reason):
    case = GOOD | change
    refusal = supports(device, case.pop("dtype"), **case)
    assert refusal is not None and reason in refusal.reason and refusal.reason.endswith(".")


def test_supported_and_padded():
    case = dict(GOOD)
    assert supports(Device(), case.pop("dtype"), **case) is None
    assert [padded_head_dim(d) for d in (1, 64, 80, 128, 192, 200)] == [64, 64, 128, 128, 192, 256]
