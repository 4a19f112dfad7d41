"""Dense prefix and suffixes on the kernels: interpreted against float64, lowered without a copy."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import codec_jax.attention as seam
from codec_jax.attention import kernel_tables
from codec_jax.attention_dense import (
    attend_two_levels,
    choose_dense_implementation,
    plan_and_sources,
    step_columns,
)
from codec_jax.attention_hydragen import hydragen_attention
from codec_jax.attention_rows import pack_rows, unpack_rows
from codec_jax.partial import Partial
from pallas_kernels.config import KernelConfig
from pallas_kernels.merge import merge_partials
from pallas_kernels.partial_attention import partial_attention

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def make_case(batch, prefix_len, max_suffix_len, suffix_len, *, group_size=4, num_kv_heads=2):
    """Random bfloat16 tensors, NaN in every dead row of a suffix."""
    rng = np.random.default_rng(0)

    def draw(*sizes):
        return rng.standard_normal(sizes).astype(jnp.bfloat16)

    q = draw(batch, num_kv_heads * group_size, 64)
    shared = (draw(prefix_len, num_kv_heads, 64), draw(prefix_len, num_kv_heads, 64))
    suffix = tuple(draw(batch, max_suffix_len, num_kv_heads, 64) for _ in range(2))
    for request, length in enumerate(suffix_len):
        for values in suffix:
            values[request, length:] = np.nan
    return q, shared, suffix, np.array(suffix_len, np.int32)


def oracle(q, shared, suffix, suffix_len):
    """out and lse in float64, one request and query head at a time."""
    batch, num_q_heads, head_dim = q.shape
    group_size = num_q_heads // shared[0].shape[1]
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for b in range(batch):
        for h in range(num_q_heads):
            k, v = (
                np.concatenate(
                    [whole[:, h // group_size], own[b, : suffix_len[b], h // group_size]]
                ).astype(np.float64)
                for whole, own in zip(shared, suffix, strict=True)
            )
            if k.shape[0]:
                scores = k @ q[b, h].astype(np.float64) * head_dim**-0.5
                lse[b, h] = np.logaddexp.reduce(scores)
                out[b, h] = np.exp(scores - lse[b, h]) @ v
    return out, lse


def interpreted(q, shared, suffix, suffix_len, *, num_workers):
    """The kernels' bodies on these tensors, with race detection."""
    levels, sources = plan_and_sources(q.shape[1], shared, suffix, num_workers=num_workers)
    columns = step_columns(levels, sources, jnp.asarray(suffix_len), shared[0].shape[0])
    tables = kernel_tables(levels.plan).with_steps(*columns)
    config = KernelConfig(num_stages=2, num_query_buffers=3, interpretable=True)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        partials, merged = partial_attention(
            pack_rows(jnp.asarray(q), levels.plan),
            jax.tree.map(jnp.asarray, sources),
            tables,
            jnp.zeros(1, jnp.int32),
            logits_scale=q.shape[2] ** -0.5,
            config=config,
        )
        jax.block_until_ready(partials)
        out, lse = merge_partials(partials, tables.slot_indptr, merged, interpretable=True)
        jax.block_until_ready(out)
    return unpack_rows(Partial(out, lse), levels.plan, dtype=jnp.float32)


CASES = {
    "both": (3, 104, 72, (70, 0, 33)),
    "a last block that would pass the end": (2, 72, 40, (40, 7)),
    "no prefix": (2, 0, 72, (72, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_right_and_without_races(case, capfd):
    arrays = make_case(*CASES[case])
    result = interpreted(*arrays, num_workers=3)
    out, lse = oracle(*arrays)
    np.testing.assert_allclose(result.out, out, rtol=0, atol=1e-2)
    np.testing.assert_allclose(result.lse, lse, rtol=0, atol=1e-5)
    printed = capfd.readouterr()
    assert "RACE" not in (printed.out + printed.err).upper()


def struct(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def test_nothing_of_the_size_of_the_keys_is_made():
    shared, suffix = struct(200, 2, 128), struct(5, 72, 2, 128)
    function = jax.jit(lambda *arrays: attend_two_levels(*arrays, num_workers=132))
    arguments = (struct(5, 8, 128), shared, shared, suffix, suffix, struct(5, dtype=jnp.int32))
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        text = function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 2
    sizes = ("200x2x128xbf16", "5x72x2x128xbf16", "360x2x128xbf16")
    made = [line for line in text.splitlines() if any(f"-> tensor<{s}>" in line for s in sizes)]
    assert all("stablehlo.reshape" in line for line in made)


def test_hydragen_attention_takes_the_kernels_where_they_support_it(monkeypatch):
    """Without a GPU: who is asked, and what is handed on."""
    import codec_jax.attention_hydragen as door

    arrays = make_case(3, 104, 72, (70, 0, 33))
    flat = (arrays[0], *arrays[1], *arrays[2], arrays[3])
    calls = []
    monkeypatch.setattr(seam, "supports", lambda *_, **__: None)
    monkeypatch.setattr(door, "attend_two_levels", lambda *a, **k: calls.append((a, k)))
    hydragen_attention(*flat)
    assert len(calls) == 1
    assert all(mine is given for mine, given in zip(calls[0][0], flat, strict=True))
    result = hydragen_attention(*flat, implementation="xla")
    np.testing.assert_allclose(result.lse, oracle(*arrays)[1], rtol=0, atol=1e-5)
    assert len(calls) == 1


REFUSED = {
    "narrow heads": ((100, 2, 80), (3, 70, 2, 80), "head_dim must be a multiple of 64; got 80"),
    "few rows": ((104, 2, 64), (3, 16, 2, 64), "at least 64 rows of keys; got [104, 48]"),
    "odd lengths": ((100, 2, 64), (3, 72, 2, 64), "must be multiples of 8; got [100, 72]"),
    "no keys": ((0, 2, 64), (3, 0, 2, 64), "there are no keys"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernels_cannot_read_in_place_is_refused_or_left_to_xla(case, monkeypatch):
    prefix, suffix, reason = REFUSED[case]
    keys = (jnp.zeros(prefix, jnp.bfloat16), jnp.zeros(suffix, jnp.bfloat16))
    monkeypatch.setattr(seam, "supports", lambda *_, **__: None)
    q_shape = (3, 8, prefix[2])
    assert choose_dense_implementation(q_shape, keys, implementation=None) == "xla"
    with pytest.raises(NotImplementedError) as error:
        choose_dense_implementation(q_shape, keys, implementation="mosaic_gpu")
    assert reason in str(error.value) and str(error.value).endswith(". Use 'xla'.")


def test_two_dtypes_and_the_reference_are_refused(monkeypatch):
    monkeypatch.setattr(seam, "supports", lambda *_, **__: None)
    keys = (jnp.zeros((104, 2, 64), jnp.bfloat16), jnp.zeros((3, 72, 2, 64), jnp.float16))
    with pytest.raises(NotImplementedError, match="of one dtype; got bfloat16, float16"):
        choose_dense_implementation((3, 8, 64), keys, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="'reference' cannot do this"):
        choose_dense_implementation((3, 8, 64), keys, implementation="reference")
