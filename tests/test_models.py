"""Decoder: golden texts, the float64 oracle, dtypes, compilations, and refused arguments."""

import dataclasses
import functools
import json
import struct
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from oracle_llama import OracleLlama, read_llama2c

from codec_jax.models import (
    Decoder,
    ModelConfig,
    cast,
    init_decoder,
    load_llama2c,
    load_model,
    model_names,
    param_shapes,
)

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "codec_jax" / "models" / "data" / "stories260k" / "stories260K.bin"
GOLDEN = json.loads((ROOT / "tests" / "data" / "golden" / "stories260K_greedy.json").read_text())
COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
TINY = ModelConfig(
    vocab_size=29,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=10,
    max_context=64,
)


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture(scope="module")
def stories():
    return load_model("stories260k").decoder


@pytest.fixture
def compilations():
    """A list that grows by one at every compilation."""
    events = []

    def record(event, duration_secs, **_):
        if event == COMPILE_EVENT:
            events.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(record)
    yield events
    jax.monitoring.unregister_event_duration_listener(record)


def causal_attention(layer, q, k, v, cache):
    """Dense attention of one sequence; the cache counts the tokens that every layer stored."""
    group_size = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x.astype(jnp.float32), group_size, axis=1) for x in (k, v))
    scores = jnp.einsum("tnh,snh->nts", q.astype(jnp.float32), k, precision="highest")
    mask = jnp.tril(jnp.ones((q.shape[0], q.shape[0]), bool))
    scores = jnp.where(mask[None], scores * q.shape[-1] ** -0.5, -jnp.inf)
    out = jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores), v, precision="highest")
    return out.astype(q.dtype), cache.at[layer].add(q.shape[0])


def forward(decoder, token_ids):
    num_tokens = len(token_ids)
    cache = jnp.zeros(decoder.config.num_layers, jnp.int32)
    positions = jnp.arange(num_tokens, dtype=jnp.int32)
    hidden, cache = decoder(token_ids, positions, cache, causal_attention)
    return decoder.logits(hidden), cache


@functools.partial(jax.jit, static_argnums=0)
def jitted_forward(graphdef, params, token_ids):
    return forward(nnx.merge(graphdef, params), token_ids)


def logits_of(decoder, token_ids):
    logits, _ = jitted_forward(*nnx.split(decoder), np.asarray(token_ids, np.int32))
    return np.asarray(logits)


def random_ids(config, num_tokens=17):
    return np.random.default_rng(7).integers(0, config.vocab_size, num_tokens).astype(np.int32)


def random_arrays(config):
    rng = np.random.default_rng(3)
    return {
        name: rng.standard_normal(shape, np.float32) / 4
        for name, shape in param_shapes(config).items()
    }


def oracle_of(config, arrays):
    old_names = {"attention_norm": "norm1", "mlp_norm": "norm2", "gate_proj": "w1", "up_proj": "w3"}
    old_names |= {"down_proj": "w2", "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"}
    layers = [
        {old: arrays[name][index].T for name, old in old_names.items()}
        for index in range(config.num_layers)
    ]
    return OracleLlama(
        arrays["embedding"],
        layers,
        arrays["final_norm"],
        arrays["embedding"] if config.tie_embeddings else arrays["lm_head"],
        config.num_q_heads,
        config.num_kv_heads,
        config.rope_pairing == "interleaved",
        theta=config.rope_theta,
        eps=config.rms_norm_eps,
    )


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["prompt"][-12:])
def test_golden_tokens_and_oracle(stories, case):
    ids = case["ids"]
    padded = np.zeros(201, np.int32)
    padded[: len(ids)] = ids
    logits = logits_of(stories, padded)[: len(ids)]
    first = len(case["prompt_ids"])
    assert logits[first - 1 : -1].argmax(-1).tolist() == ids[first:]
    np.testing.assert_allclose(logits, read_llama2c(CHECKPOINT).logits(ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize("pairing", ["interleaved", "halves"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_random_weights_agree_with_oracle(pairing, tied, num_kv_heads):
    config = dataclasses.replace(
        TINY,
        num_kv_heads=num_kv_heads,
        rope_pairing=pairing,
        tie_embeddings=tied,
        rope_theta=500.0,
        rms_norm_eps=1e-3,
    )
    assert config.group_size == 4 // num_kv_heads
    arrays, ids = random_arrays(config), random_ids(config)
    expected = oracle_of(config, arrays).logits(ids.tolist())
    logits = logits_of(Decoder.from_arrays(config, arrays), ids)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_jit_agrees_with_no_jit_and_threads_the_cache():
    decoder, ids = init_decoder(TINY), random_ids(TINY)
    expected, cache = forward(decoder, jnp.asarray(ids))
    assert cache.tolist() == [len(ids)] * TINY.num_layers
    np.testing.assert_allclose(logits_of(decoder, ids), expected, rtol=0, atol=1e-5)


def test_positions_are_absolute_and_only_their_difference_matters(stories):
    ids = random_ids(stories.config)
    cache = jnp.zeros(stories.config.num_layers, jnp.int32)

    @jax.jit
    def logits_at(positions):
        hidden, _ = stories(jnp.asarray(ids), positions, cache, causal_attention)
        return stories.logits(hidden)

    from_zero = np.arange(len(ids), dtype=np.int32)
    expected = np.asarray(logits_at(from_zero))
    np.testing.assert_allclose(logits_at(from_zero + 100), expected, rtol=0, atol=1e-3)
    assert np.abs(np.asarray(logits_at(from_zero[::-1])) - expected).max() > 0.1


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.3), ("float16", 0.04)])
def test_half_precision_is_near_float32(stories, dtype, tolerance):
    ids = GOLDEN["cases"][0]["ids"][:60]
    half = load_model("stories260k", dtype=dtype).decoder
    assert {str(array.dtype) for array in half.arrays().values()} == {dtype}
    logits = logits_of(half, ids)
    assert logits.dtype == np.float32
    error = np.abs(logits - logits_of(stories, ids)).max()
    assert 1e-4 < error < tolerance
    np.testing.assert_array_equal(logits_of(cast(stories, dtype), ids), logits)


def test_float32_products_are_full_precision(stories):
    jaxpr = str(jax.make_jaxpr(lambda x: stories.logits(x))(jnp.zeros((2, 64), jnp.float32)))
    assert "HIGHEST" in jaxpr


def test_layers_are_scanned_not_unrolled():
    def num_equations(num_layers):
        graphdef, params = nnx.split(init_decoder(dataclasses.replace(TINY, num_layers=num_layers)))
        jaxpr = jax.make_jaxpr(jitted_forward, static_argnums=0)(graphdef, params, random_ids(TINY))
        return str(jaxpr).count("dot_general")

    assert num_equations(2) == num_equations(5)


def test_init_is_deterministic_in_the_seed_and_arrays_round_trip():
    first, again, other = (init_decoder(TINY, seed=seed).arrays() for seed in (1, 1, 2))
    assert {name: array.shape for name, array in first.items()} == param_shapes(TINY)
    np.testing.assert_array_equal(first["q_proj"], again["q_proj"])
    assert not np.array_equal(first["q_proj"], other["q_proj"])
    copied = Decoder.from_arrays(TINY, {name: np.asarray(array) for name, array in first.items()})
    np.testing.assert_array_equal(copied.arrays()["lm_head"], first["lm_head"])


def test_loading_compiles_nothing(compilations):
    jax.clear_caches()
    load_model("stories260k")
    load_model("stories260k", dtype="bfloat16")
    assert not compilations
    jnp.negative(jnp.zeros(3))
    assert compilations


def test_init_and_cast_compile_once_each(compilations):
    config = dataclasses.replace(TINY, vocab_size=31)
    decoder = init_decoder(config)
    assert len(compilations) == 1
    cast(decoder, "bfloat16")
    assert len(compilations) == 2


def test_second_call_and_second_model_compile_nothing(compilations):
    ids = random_ids(TINY, num_tokens=11)
    logits_of(init_decoder(TINY, seed=5), ids)
    num_compilations = len(compilations)
    logits_of(init_decoder(TINY, seed=5), ids)
    logits_of(init_decoder(TINY, seed=6), ids[::-1])
    assert len(compilations) == num_compilations


def test_random_preset():
    loaded = load_model("random-4l-128", dtype="float32")
    config = loaded.decoder.config
    assert (config.head_dim, config.group_size, config.num_layers) == (128, 4, 4)
    assert config.vocab_size == loaded.tokenizer.vocab_size
    assert loaded.tokenizer.encode("a") == load_model("stories260k").tokenizer.encode("a")
    logits = logits_of(loaded.decoder, [1, 403, 407])
    assert 0.5 < logits.std() < 2


def test_unknown_model_lists_the_names():
    with pytest.raises(ValueError, match=rf"{', '.join(model_names())}; got 'gpt5'"):
        load_model("gpt5")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "`num_q_heads` must be a multiple of `num_kv_heads`; got 4 and 3"),
        ({"head_dim": 7}, "`head_dim` must be even; got 7"),
        ({"num_layers": 0}, "`num_layers` must be an integer from 1 to 65536; got 0"),
        ({"hidden_size": 8.0}, "`hidden_size` must be an integer from 1 to 2147483647; got 8.0"),
        (
            {"rope_pairing": "pairs"},
            "`rope_pairing` must be one of interleaved, halves; got 'pairs'",
        ),
        ({"dtype": "int8"}, "`dtype` must be one of float32, bfloat16, float16; got 'int8'"),
        ({"rms_norm_eps": 0.0}, "`rms_norm_eps` must be a positive number up to 3.4e38; got 0.0"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(TINY, **changes)


def test_from_arrays_errors():
    arrays = random_arrays(TINY)
    with pytest.raises(ValueError, match=r"`arrays\['q_proj'\]` must have shape \(3, 24, 40\)"):
        Decoder.from_arrays(TINY, arrays | {"q_proj": arrays["k_proj"]})
    with pytest.raises(ValueError, match="`arrays` must have the names"):
        Decoder.from_arrays(dataclasses.replace(TINY, tie_embeddings=True), arrays)


def test_call_errors():
    decoder, cache = init_decoder(TINY), jnp.zeros(3, jnp.int32)
    ids = jnp.zeros(4, jnp.int32)
    with pytest.raises(
        ValueError, match=r"`token_ids` must be one-dimensional; got shape \(1, 4\)"
    ):
        decoder(ids[None], ids[None], cache, causal_attention)
    with pytest.raises(ValueError, match=r"`positions` must have the shape .* \(4,\); got \(3,\)"):
        decoder(ids, ids[:3], cache, causal_attention)
    with pytest.raises(
        ValueError, match=r"`attention` must return .* \(4, 4, 10\); got \(4, 2, 10\)"
    ):
        decoder(ids, ids, cache, lambda layer, q, k, v, cache: (v, cache))


@pytest.mark.parametrize("num_bytes", [0, 27, 28, 1056536, 1056544])
def test_checkpoint_of_wrong_length_is_refused(tmp_path, num_bytes):
    path = tmp_path / "model.bin"
    path.write_bytes((CHECKPOINT.read_bytes() + bytes(8))[:num_bytes])
    expected = "1056540 bytes; got" if num_bytes >= 28 else "at least 28 bytes; got"
    with pytest.raises(ValueError, match=rf"{expected} {num_bytes} bytes in .*model\.bin"):
        load_llama2c(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ((64, 172, 5, 0, 4, 512, 512), "dim is a multiple of n_heads; got 64 and 0"),
        ((64, 172, 5, 8, 3, 512, 512), "`num_q_heads` must be a multiple"),
        ((64, 172, 0, 8, 4, 512, 512), "`num_layers` must be an integer from 1 to 65536; got 0"),
    ],
)
def test_checkpoint_with_impossible_header_is_refused(tmp_path, header, message):
    path = tmp_path / "model.bin"
    path.write_bytes(struct.pack("<7i", *header) + CHECKPOINT.read_bytes()[28:])
    with pytest.raises(ValueError, match=rf"model\.bin.*{message}|{message}.*model\.bin"):
        load_llama2c(path)


def test_checkpoint_with_untied_head(tmp_path):
    content = CHECKPOINT.read_bytes()
    dim, *_, vocab_size, _ = header = struct.unpack_from("<7i", content)
    head = np.random.default_rng(0).standard_normal((vocab_size, dim), np.float32)
    path = tmp_path / "untied.bin"
    untied_header = struct.pack("<7i", *header[:5], -vocab_size, header[6])
    path.write_bytes(untied_header + content[28:] + head.tobytes())
    decoder, oracle = load_llama2c(path), read_llama2c(CHECKPOINT)
    assert not decoder.config.tie_embeddings
    oracle.head = head
    ids = random_ids(decoder.config)
    np.testing.assert_allclose(logits_of(decoder, ids), oracle.logits(ids.tolist()), atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 2, 64])
def test_logits_make_no_float32_copy_of_the_head(num_rows):
    """On a CPU XLA makes one in the wrong form, which is another for one row than for several."""
    config = dataclasses.replace(TINY, vocab_size=20_000, hidden_size=64, dtype="bfloat16")
    decoder = init_decoder(config)
    hidden = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.bfloat16)
    scores = jax.jit(lambda decoder, hidden: decoder.logits(hidden))
    compiled = scores.lower(decoder, hidden[:num_rows]).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 20_000 * 64 * 4 / 2
    exact = np.asarray(hidden, np.float64) @ np.asarray(decoder.arrays()["lm_head"], np.float64).T
    given = compiled(decoder, hidden[:num_rows])
    np.testing.assert_allclose(given, exact[:num_rows], rtol=0, atol=1e-4)
