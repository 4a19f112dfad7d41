"""GGUF files: numbers of every kind, golden logits, what is missing, left over or corrupt."""

import sys

import ml_dtypes
import numpy as np
import pytest
from gguf_files import model_fields, stored_and_exact, tensor_shapes, tokenizer_fields, write_gguf
from golden_models import FOLDER, NAMES, config_fields, golden_config, goldens
from safetensors.numpy import load_file
from test_models import logits_of

from codec_jax.models import (
    Decoder,
    gguf_file,
    load_gguf,
    load_model,
    model_config,
    read_gguf_config,
)
from codec_jax.models.rope_scaling import LinearRope, Llama3Rope, YarnRope

KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"]
FIELDS = model_fields() | tokenizer_fields()
OURS = {
    "attn_norm": "attention_norm",
    "ffn_norm": "mlp_norm",
    "attn_output": "o_proj",
    **{f"attn_{x}": f"{x}_proj" for x in "qkv"},
    **{f"ffn_{x}": f"{x}_proj" for x in ("gate", "up", "down")},
}


def random_tensors(kind="F32", seed=0):
    """Stored tensors, and their numbers in float64; norms are always F32, as converters write."""
    rng = np.random.default_rng(seed)
    stored, exact = {}, {}
    for name, shape in tensor_shapes().items():
        of_tensor = kind if len(shape) > 1 else "F32"
        values, exact[name] = stored_and_exact(of_tensor, shape, rng)
        stored[name] = (of_tensor, values)
    return stored, exact


@pytest.fixture
def write(tmp_path):
    """Writes a file of a tiny decoder with changes; None takes a field or a tensor away."""

    def write_file(fields=None, tensors=None, name="tiny.gguf"):
        fields, tensors = FIELDS | (fields or {}), random_tensors()[0] | (tensors or {})
        kept = [{k: v for k, v in x.items() if v is not None} for x in (fields, tensors)]
        return write_gguf(tmp_path / name, *kept)

    return write_file


def refusal(path):
    with pytest.raises(ValueError, match="`") as error:
        load_gguf(path)
    return str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_every_number_is_that_of_the_format(write, kind):
    stored, exact = random_tensors(kind)
    arrays = load_gguf(write(tensors=stored), dtype="float32").decoder.arrays()

    def check(array, name):
        np.testing.assert_array_equal(np.asarray(array), exact[name].T.astype(np.float32), name)

    check(arrays["embedding"].T, "token_embd.weight")
    check(arrays["lm_head"].T, "output.weight")
    check(arrays["final_norm"], "output_norm.weight")
    for layer in range(2):
        for theirs, ours in OURS.items():
            check(arrays[ours][layer], f"blk.{layer}.{theirs}.weight")


@pytest.mark.parametrize("kind", KINDS)
def test_dtype_is_the_stored_one_or_bfloat16(write, kind):
    path = write(tensors=random_tensors(kind)[0])
    expected = {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    assert read_gguf_config(path).dtype == expected
    assert load_gguf(path).decoder.embedding[...].dtype == expected
    assert read_gguf_config(path, dtype="float16").dtype == "float16"


def test_matrices_of_several_kinds_are_bfloat16(write):
    rng = np.random.default_rng(0)
    half = ("F16", stored_and_exact("F16", (263, 96), rng)[0])
    assert read_gguf_config(write(tensors={"output.weight": half})).dtype == "bfloat16"


def in_gguf(name):
    """Fields and float32 tensors of a golden checkpoint, as the converter of llama.cpp has them."""
    config, old = golden_config(name), config_fields(name, "config_v4.json")
    arch = {"mistral": "llama"}.get(old["model_type"], old["model_type"])
    fields = {
        "general.architecture": arch,
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.max_context,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_q_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope_theta),
        f"{arch}.rope.dimension_count": config.head_dim,
    }
    tensors = {}
    scaling = config.rope_scaling
    if isinstance(scaling, Llama3Rope):
        plain = config.rope_theta ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
        scaled = scaling.frequencies(config.head_dim, config.rope_theta)
        tensors["rope_freqs.weight"] = (plain / scaled).astype(np.float32)
    elif isinstance(scaling, LinearRope | YarnRope):
        kind = "linear" if isinstance(scaling, LinearRope) else "yarn"
        fields[f"{arch}.rope.scaling.type"] = kind
        fields[f"{arch}.rope.scaling.factor"] = float(scaling.factor)
    if isinstance(scaling, YarnRope):
        original = scaling.original_max_context
        fields[f"{arch}.rope.scaling.original_context_length"] = original
    stored = load_file(FOLDER / name / "model.safetensors")
    for theirs, tensor in stored.items():
        tensor = tensor.astype(np.float32)
        is_q = "q_proj" in theirs
        if arch == "llama" and (is_q or "k_proj" in theirs):
            heads = config.num_q_heads if is_q else config.num_kv_heads
            tensor = pairs_side_by_side(tensor, heads)
        tensors[gguf_name(theirs)] = tensor
    return fields | tokenizer_of(config.vocab_size), tensors


def pairs_side_by_side(tensor, num_heads):
    """Rows i and i + head_dim / 2 of each head become rows 2i and 2i + 1."""
    head_dim = len(tensor) // num_heads
    rows = np.arange(len(tensor)).reshape(num_heads, head_dim)
    order = [
        row[i + half] for row in rows for i in range(head_dim // 2) for half in (0, head_dim // 2)
    ]
    return tensor[np.array(order)]


def gguf_name(theirs):
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, kind = theirs.rsplit(".", 1)
    if stem in names:
        return f"{names[stem]}.{kind}"
    _, _, layer, module = stem.split(".", 3)
    inside = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    inside |= {f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"} | {
        "self_attn.o_proj": "attn_output"
    }
    inside |= {f"self_attn.{x}_norm": f"attn_{x}_norm" for x in "qk"}
    inside |= {f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")}
    return f"blk.{layer}.{inside[module]}.{kind}"


def tokenizer_of(vocab_size):
    tokens = [chr(ord("0") + index) for index in range(vocab_size)]
    changes = {"tokens": tokens, "merges": ["0 1"], "token_type": [1] * vocab_size}
    tokens[2] = "01"
    return tokenizer_fields(**changes, bos_token_id=1, eos_token_id=2)


# The yarn of llama-yarn has settings that GGUF's metadata do not hold.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "llama-yarn"])
def test_logits_of_the_golden_models(tmp_path, name):
    path = write_gguf(tmp_path / "golden.gguf", *in_gguf(name))
    decoder: Decoder = load_gguf(path).decoder
    golden = goldens(name)[0]
    np.testing.assert_allclose(logits_of(decoder, golden.ids), golden.logits, rtol=0, atol=1e-4)


def test_load_model_takes_a_file(write):
    path = write()
    loaded = load_model(str(path), dtype="bfloat16")
    assert loaded.name == "tiny.gguf"
    assert loaded.decoder.config == model_config(str(path), dtype="bfloat16")
    assert loaded.decoder.config.group_size == 3
    assert loaded.as_chat().tokenizer.encode("ab") == [259, 261, 256, 262]
    for wrong in (path.with_name("none.gguf"), write(name="tiny.bin")):
        with pytest.raises(ValueError, match=r"a \.gguf file or one of"):
            load_model(str(wrong))


def test_missing_left_over_and_wrong_tensors_are_named(write):
    path = write(tensors={"output_norm.weight": None, "blk.1.ffn_up.weight": None})
    assert refusal(path) == (
        f"`{path}` must hold the tensors of its config; got no blk.1.ffn_up.weight,"
        " output_norm.weight."
    )
    path = write(tensors={"blk.0.ffn_gate_inp.weight": np.ones((2, 96), np.float32)})
    assert refusal(path) == (
        f"`{path}` must hold no tensor that its config has no use for; got"
        " blk.0.ffn_gate_inp.weight."
    )
    path = write(tensors={"blk.0.attn_k.weight": np.ones((96, 96), np.float32)})
    assert refusal(path) == (
        f"`blk.0.attn_k.weight` in {path} must have shape [32, 96]; got [96, 96]."
    )
    path = write(tensors={"output.weight": ("Q5_0", np.zeros((263, 66), np.uint8))})
    assert refusal(path) == (
        f"`output.weight` in {path} must be one of F32, F16, BF16, Q4_0, Q4_1, Q8_0; got Q5_0."
    )


def test_a_file_cut_anywhere_is_refused_by_its_name(write):
    path = write()
    content = path.read_bytes()
    whole = len(content) - 32  # the padding at the end is nobody's
    for size in [*range(0, 64), *range(64, whole, whole // 60), whole]:
        path.write_bytes(content[:size])
        message = refusal(path)
        assert message.startswith(f"`{path}` must be a whole GGUF file; got: "), size
        assert message.endswith(". Copy the file again."), size


@pytest.mark.parametrize("name", ["tokenizer.ggml.token_type", "tokenizer.ggml.tokens"])
def test_a_corrupt_count_is_refused_at_once(write, name):
    path = write()
    content = bytearray(path.read_bytes())
    count = content.index(name.encode()) + len(name) + 8
    content[count : count + 8] = (2**60).to_bytes(8, "little")
    path.write_bytes(content)
    assert "must be a whole GGUF file; got: " in refusal(path)


def test_a_vocabulary_of_another_size_is_refused(write):
    tokens = FIELDS["tokenizer.ggml.tokens"]
    changes = {"tokens": [*tokens, "more"], "token_type": [1] * 264}
    path = write(tokenizer_fields(**changes))
    assert refusal(path) == (
        f"`tokenizer.ggml.tokens` in {path} must be 263, one for each row of token_embd.weight; got"
        " 264."
    )


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_number_that_is_none_is_refused_by_its_tensor(write, kind):
    stored = random_tensors(kind)[0]
    _, values = stored["blk.1.ffn_up.weight"]
    values.view(np.float16)[5, 0] = np.nan  # a number, or the scale of a block
    path = write(tensors=stored)
    with pytest.raises(ValueError, match="`") as error:
        load_gguf(path, dtype="bfloat16")
    assert str(error.value) == (
        f"`blk.1.ffn_up.weight` in {path} must hold finite numbers in bfloat16; got NaN or"
        " infinity."
    )


def with_tensor_field(path, name, index, value):
    """Overwrites a number of what the file says of a tensor: 0, 1 are sizes, 2 kind, 3 offset."""
    content = bytearray(path.read_bytes())
    start = content.index(len(name).to_bytes(8, "little") + name.encode()) + 8 + len(name) + 4
    start += {0: 0, 1: 8, 2: 16, 3: 20}[index]
    num_bytes = 4 if index == 2 else 8
    content[start : start + num_bytes] = value.to_bytes(num_bytes, "little")
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("index", "value", "reason"),
    [
        (0, 2**60, None),
        (0, 0, "shape [263, 0] for output.weight"),
        (1, 2**63, None),
        (2, 999, None),
        (3, 2**60, None),
        (3, 2**64 - 32, None),
        (3, 32, None),
        (3, 33, None),
    ],
)
def test_tensors_that_cannot_lie_there_are_refused(write, index, value, reason):
    path = with_tensor_field(write(), "output.weight", index, value)
    message = refusal(path)
    assert message.startswith(f"`{path}` must be a whole GGUF file; got: {reason or ''}"), message
    assert message.endswith(". Copy the file again.")


def test_two_tensors_of_one_name_are_refused(write):
    path = write()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"))
    assert refusal(path) == (
        f"`{path}` must be a whole GGUF file; got: Found duplicated tensor with name"
        " blk.0.attn_q.weight. Copy the file again."
    )


def test_two_keys_of_one_name_are_refused(write):
    path = write()
    content = path.read_bytes()
    path.write_bytes(
        content.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id")
    )
    assert "got: 'Duplicate tokenizer.ggml.eos_token_id already in list" in refusal(path)


def test_what_is_no_file_is_refused_by_its_name(tmp_path):
    assert refusal(tmp_path) == f"`{tmp_path}` must be a file; got a folder, a pipe or a device."
    assert refusal(tmp_path / "none") == f"`{tmp_path / 'none'}` must exist; got no file."


def test_rows_in_chunks_are_the_tensor(write, monkeypatch):
    path = write(tensors=random_tensors("Q4_0")[0])
    file = gguf_file.read_gguf(path)
    whole = gguf_file.dequantise(file, "output.weight")
    monkeypatch.setattr(gguf_file, "_CHUNK_ELEMENTS", 1000)
    np.testing.assert_array_equal(gguf_file.dequantise(file, "output.weight"), whole)
    rounded = gguf_file.dequantise(file, "output.weight", ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded, whole.astype(ml_dtypes.bfloat16))


def test_other_files_are_refused(write):
    path = write()
    content = path.read_bytes()
    for other in (b"GGML" + content[4:], content[:4] + b"\x00\x00\x00\x03" + content[8:]):
        path.write_bytes(other)
        assert refusal(path).startswith(f"`{path}` must be a whole GGUF file; got: ")


def test_a_changed_file_is_read_again(write):
    path = write()
    assert read_gguf_config(path).max_context == 128
    assert read_gguf_config(write({"llama.context_length": 4096})).max_context == 4096


def test_a_missing_package_is_named_with_the_command(write, monkeypatch):
    path = write()
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert refusal(path) == (
        f"`{path}` needs the package gguf, which is not installed. Install it: pip install gguf (or"
        " this package with its extra `gguf`)."
    )
