"""Logits of another implementation: dense, prefill in one call and in chunks, decoding, sharing.

Tolerance 1e-4 in float32, on logits of up to 6; at most 1.4e-5 was measured.
"""

import dataclasses

import jax
import numpy as np
import pytest
from golden_models import FOLDER, NAMES, config_fields, golden_config, golden_model, goldens
from test_models import logits_of

import codec_jax.decode as decode
from codec_jax.generate import Options, generate
from codec_jax.models import Decoder
from codec_jax.sampling import Sampling, sample

TOLERANCE = 1e-4
NUM_NEW, NUM_SHARED = 12, 23
IN_CHUNKS = Options(page_size=16, policy="balanced", prefill_chunk=8)
UNSHARED = Options(page_size=16, policy="flash_decoding")
UNSHARED_IN_CHUNKS = Options(page_size=16, policy="flash_decoding", prefill_chunk=8)
SHARED = Options(page_size=16, policy="balanced")


def is_close(logits, expected):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=TOLERANCE)


@pytest.fixture
def logits_of_steps(monkeypatch):
    """Logits of every draw, `{num_new: [batch, vocab]}`: the tokens drawn before it."""
    seen = {}

    def record(logits, num_new):
        seen[int(num_new.max())] = np.array(logits)

    def recording(logits, sampling, num_new):
        jax.debug.callback(record, logits, num_new)
        return sample(logits, sampling, num_new)

    forget_traces()  # what was traced before would not record
    monkeypatch.setattr(decode, "sample", recording)
    yield seen
    forget_traces()


def forget_traces():
    for traced in (decode.draw_first, decode.decode_steps):
        traced.clear_cache()


def test_every_family_and_rope_is_there():
    fields = [config_fields(name) for name in NAMES]
    assert {field["model_type"] for field in fields} == {"llama", "mistral", "qwen2", "qwen3"}
    kinds = {field["rope_parameters"]["rope_type"] for field in fields}
    assert kinds == {"default", "linear", "llama3", "yarn"}
    assert {field["dtype"] for field in fields} == {"float32", "float16", "bfloat16"}
    for name in NAMES:
        assert (FOLDER / name / "model.safetensors").stat().st_size < 100_000
        assert goldens(name)[0].ids[:NUM_SHARED] == goldens(name)[1].ids[:NUM_SHARED]
        assert 10000 not in (field["rope_parameters"]["rope_theta"] for field in fields)


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_are_one_config(name):
    old, new = config_fields(name, "config_v4.json"), config_fields(name)
    assert "rope_theta" in old and "torch_dtype" in old and "rope_parameters" not in old
    assert "rope_parameters" in new and "dtype" in new and "rope_theta" not in new
    assert golden_config(name, "config_v4.json") == golden_config(name)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_dense_forward(name):
    for golden in goldens(name):
        is_close(logits_of(golden_model(name).decoder, golden.ids), golden.logits)


def check_steps(name, options, seen):
    """Greedy tokens, and the logits that each was drawn from, are those of the golden."""
    sequences = goldens(name)
    completions = generate(
        golden_model(name),
        [golden.ids[: golden.prompt_len] for golden in sequences],
        sampling=Sampling(max_new_tokens=NUM_NEW),
        options=options,
    )
    jax.effects_barrier()
    assert set(range(NUM_NEW)) <= set(seen)
    for row, (completion, golden) in enumerate(zip(completions, sequences, strict=True)):
        assert list(completion.token_ids) == golden.ids[golden.prompt_len :]
        is_close(
            np.stack([seen[step][row] for step in range(NUM_NEW)]),
            golden.logits[golden.prompt_len - 1 : -1],
        )
        assert completion.num_shared_tokens >= NUM_SHARED


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [IN_CHUNKS, UNSHARED], ids=["shared, chunks", "unshared"])
def test_logits_of_prefill_and_decoding(name, options, logits_of_steps):
    check_steps(name, options, logits_of_steps)


@pytest.mark.parametrize(
    "options", [SHARED, UNSHARED_IN_CHUNKS], ids=["shared", "unshared, chunks"]
)
def test_logits_of_prefill_and_decoding_the_other_way(options, logits_of_steps):
    check_steps("qwen3", options, logits_of_steps)


def error_with(name, **changes):
    decoder = golden_model(name).decoder
    changed = Decoder(dataclasses.replace(decoder.config, **changes), decoder.arrays())
    return np.abs(logits_of(changed, goldens(name)[0].ids) - goldens(name)[0].logits).max()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama2", {"rope_theta": 5100.0}),
        ("llama2", {"rope_pairing": "interleaved"}),
        ("llama2", {"rms_norm_eps": 1e-3}),
        ("llama3", {"rope_scaling": None}),
        ("llama-linear", {"rope_scaling": None}),
        ("llama-yarn", {"rope_scaling": None}),
    ],
)
def test_the_goldens_tell_a_wrong_setting(name, changes):
    assert error_with(name, **changes) > 10 * TOLERANCE
