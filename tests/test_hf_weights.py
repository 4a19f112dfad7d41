"""Checkpoint folders: layouts, dtypes bit for bit, what is missing or left over, host memory (O25).

The checkpoints are written here with safetensors, and read back as raw bytes by other code.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from golden_models import FOLDER, copy_of, golden_config
from safetensors.numpy import load_file, save_file

from codec_jax.models import load_hf, load_model, read_hf_config
from codec_jax.models.hf_weights import load_weights

INDEX = "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def tensors_of(name="llama2"):
    return load_file(FOLDER / name / "model.safetensors")


def write(folder: Path, tensors, file="model.safetensors"):
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, folder / file)


def shard(folder: Path, tensors, num_shards=2):
    """Writes shards and their index in place of the one file."""
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for index in range(num_shards):
        file = f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors"
        part = dict(list(tensors.items())[index::num_shards])
        write(folder, part, file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def bits(array):
    array = np.asarray(array)
    return array.view({2: np.uint16, 4: np.uint32}[array.dtype.itemsize])


def check_bits(decoder, tensors):
    """Every parameter holds the bits of its tensors; matrices of layers lie transposed."""
    arrays = decoder.arrays()
    np.testing.assert_array_equal(bits(arrays["embedding"]), bits(tensors[EMBEDDING]))
    np.testing.assert_array_equal(bits(arrays["final_norm"]), bits(tensors["model.norm.weight"]))
    for layer in range(decoder.config.num_layers):
        for ours, theirs in (
            ("q_proj", "self_attn.q_proj"),
            ("o_proj", "self_attn.o_proj"),
            ("down_proj", "mlp.down_proj"),
        ):
            stored = tensors[f"model.layers.{layer}.{theirs}.weight"]
            np.testing.assert_array_equal(bits(arrays[ours][layer]), bits(stored.T))
        norm = tensors[f"model.layers.{layer}.input_layernorm.weight"]
        np.testing.assert_array_equal(bits(arrays["attention_norm"][layer]), bits(norm))


def refusal(folder, name="llama2"):
    with pytest.raises(ValueError, match="`") as error:
        load_weights(folder, golden_config(name))
    return str(error.value)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_bit_pattern_survives(tmp_path, dtype):
    """Patterns of all finite numbers, denormals and both zeros included."""
    folder = copy_of("llama2", tmp_path, dtype=dtype)
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    rng = np.random.default_rng(0)
    unsigned = {2: np.uint16, 4: np.uint32}[kind.itemsize]
    tensors = {
        name: rng.integers(0, np.iinfo(unsigned).max, x.shape, unsigned, endpoint=True).view(kind)
        for name, x in tensors_of().items()
    }
    tensors = {name: np.where(np.isfinite(x), x, np.zeros((), kind)) for name, x in tensors.items()}
    write(folder, tensors)
    decoder = load_weights(folder, read_hf_config(folder))
    assert decoder.config.dtype == dtype
    check_bits(decoder, tensors)
    with pytest.raises(AssertionError):
        check_bits(decoder, tensors | {EMBEDDING: tensors[EMBEDDING][::-1]})


def test_o25_one_file_and_shards_and_a_stray_file_are_one_checkpoint(tmp_path):
    tensors = tensors_of("qwen2")
    one, two, stray = (copy_of("qwen2", tmp_path / place) for place in "abc")
    shard(two, tensors)
    shard(stray, tensors, num_shards=3)
    write(
        stray,
        {EMBEDDING: np.zeros((64, 48), np.float32), "other": np.ones(3)},
        "model-x.safetensors",
    )
    write(stray, {HEAD: np.zeros(2, np.float32)}, "consolidated.safetensors")
    (stray / "pytorch_model.bin").write_bytes(b"not read")
    for folder in (one, two, stray):
        decoder = load_weights(folder, read_hf_config(folder))
        assert decoder.config.dtype == "bfloat16"
        check_bits(decoder, tensors)


def test_o25_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    tensors = tensors_of("qwen3")
    assert HEAD not in tensors
    folder = copy_of("qwen3", tmp_path)
    write(folder, tensors | {HEAD: tensors[EMBEDDING]})
    decoder = load_weights(folder, golden_config("qwen3"))
    assert decoder.lm_head is None and decoder.config.tie_embeddings
    write(folder, tensors | {HEAD: tensors[EMBEDDING] * 2})
    assert refusal(folder, "qwen3") == (
        f"`lm_head.weight` in {folder / 'model.safetensors'} must equal model.embed_tokens.weight:"
        " the config says `tie_word_embeddings`; got another tensor."
    )


def test_tables_that_old_checkpoints_hold_are_left_out(tmp_path):
    folder = copy_of("llama2", tmp_path)
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32)}
    write(folder, tensors_of() | table)
    check_bits(load_hf_weights(folder), tensors_of())


def load_hf_weights(folder):
    return load_weights(folder, read_hf_config(folder))


def test_missing_and_left_over_tensors_are_named(tmp_path):
    folder, tensors = copy_of("llama2", tmp_path), tensors_of()
    short = {name: x for name, x in tensors.items() if name not in (HEAD, "model.norm.weight")}
    write(folder, short)
    assert refusal(folder) == (
        f"`{folder}` must hold the tensors of its config; got no lm_head.weight, model.norm.weight."
    )
    write(folder, {name: x for name, x in tensors.items() if "layers.1" not in name})
    assert refusal(folder).endswith(
        "model.layers.1.mlp.up_proj.weight, model.layers.1.post_attention_layernorm.weight and 4"
        " more."
    )
    extra = "model.layers.0.self_attn.q_norm.weight"
    write(folder, tensors | {extra: np.ones(12, np.float32)})
    assert refusal(folder) == (
        f"`{folder}` must hold no tensor that its config has no use for; got {extra}."
    )


def test_a_tensor_of_another_shape_or_dtype_is_named(tmp_path):
    folder, tensors = copy_of("llama2", tmp_path), tensors_of()
    name = "model.layers.1.self_attn.k_proj.weight"
    file = folder / "model.safetensors"
    write(folder, tensors | {name: tensors[name][:24]})
    assert refusal(folder) == f"`{name}` in {file} must have shape [48, 48]; got [24, 48]."
    write(folder, tensors | {name: np.zeros((48, 48), np.int8)})
    assert refusal(folder) == f"`{name}` in {file} must be F32, F16 or BF16; got I8."


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [EMBEDDING, "model.layers.1.mlp.up_proj.weight"])
def test_a_number_that_is_none_is_refused_by_its_tensor(tmp_path, name, value):
    folder, tensors = copy_of("llama2", tmp_path), tensors_of()
    file = folder / "model.safetensors"
    tensors[name] = tensors[name].copy()
    tensors[name][-1, 3] = value
    write(folder, tensors)
    assert refusal(folder) == (
        f"`{name}` in {file} must hold finite numbers in float32; got NaN or infinity."
    )
    tensors[name] = tensors[name].astype(np.float32)
    tensors[name][-1, 3] = 1e5
    write(folder, tensors)
    load_weights(folder, golden_config("llama2"))
    with pytest.raises(ValueError, match="`") as error:
        load_weights(folder, read_hf_config(folder, dtype="float16"))
    assert str(error.value) == (
        f"`{name}` in {file} must hold finite numbers in float16; got NaN or infinity."
    )


@pytest.mark.parametrize("num_bytes", [0, 5, 8, 1000, 70_000])
def test_a_truncated_file_is_named(tmp_path, num_bytes):
    folder = copy_of("llama2", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    message = refusal(folder)
    assert message.startswith(f"`{file}` must be a whole safetensors file; got: ")
    assert message.endswith("Copy the file again.")


@pytest.mark.parametrize("content", [b"PK\x03\x04" * 50, b"\x80\x02}q\x00." * 99, b"\xff" * 99])
def test_a_file_of_another_format_is_named(tmp_path, content):
    folder = copy_of("llama2", tmp_path)
    (folder / "model.safetensors").write_bytes(content)
    assert refusal(folder).startswith(f"`{folder / 'model.safetensors'}` must be a whole")


def test_an_index_is_followed_or_refused(tmp_path):
    folder, tensors = copy_of("llama2", tmp_path), tensors_of()
    shard(folder, tensors)
    first = folder / "model-00001-of-00002.safetensors"
    index = json.loads((folder / INDEX).read_text())

    def write_map(weight_map):
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    write_map(index["weight_map"] | {HEAD: "../../secret.safetensors"})
    assert refusal(folder) == (
        f"`weight_map` in {folder / INDEX} must name files in its own folder; got"
        " '../../secret.safetensors' for lm_head.weight."
    )
    write_map({})
    assert refusal(folder) == f"`weight_map` in {folder / INDEX} must name tensors; got none."
    write_map(index["weight_map"] | {"elsewhere": first.name})
    assert refusal(folder) == f"`{first}` must hold elsewhere: the index says so; got none."
    write_map(index["weight_map"])
    first.unlink()
    assert refusal(folder) == f"`{first}` must exist: the checkpoint names it; got no file."
    (folder / INDEX).write_text("{")
    assert refusal(folder).startswith(f"`{folder / INDEX}` must hold JSON; got ")
    (folder / INDEX).write_text("[]")
    assert refusal(folder) == f"`{folder / INDEX}` must hold a JSON object; got list."
    (folder / INDEX).write_bytes(b"\xff")
    assert refusal(folder) == f"`{folder / INDEX}` must be UTF-8; got other bytes at 0."


def test_a_pickle_is_never_read(tmp_path):
    folder = copy_of("llama2", tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert refusal(folder) == (
        f"`{folder}` must hold model.safetensors or {INDEX}; got neither. pytorch_model.bin is a"
        " pickle, which is never read: convert it."
    )


def test_dtype_of_the_config_or_of_the_tensors_or_as_asked(tmp_path):
    folder = copy_of("codellama", tmp_path, dtype=None)
    assert read_hf_config(folder).dtype == "float16"
    assert read_hf_config(folder, dtype="bfloat16").dtype == "bfloat16"
    assert read_hf_config(FOLDER / "llama2").dtype == "bfloat16"


def test_a_folder_without_a_config_is_refused(tmp_path):
    for load in (load_hf, lambda folder: load_model(str(folder))):
        with pytest.raises(ValueError, match="`") as error:
            load(tmp_path)
        assert str(error.value) == (f"`{tmp_path}` must hold config.json; got a folder without it.")


LOAD = """
import sys
from pathlib import Path
import jax, numpy as np
from codec_jax.models import read_hf_config
from codec_jax.models.hf_weights import load_weights
folder = Path(sys.argv[1])
load_weights(Path(sys.argv[2]), read_hf_config(Path(sys.argv[2])))  # what JAX itself needs
def peak(): return next(int(x.split()[1]) for x in open("/proc/self/status") if "VmHWM" in x) * 1024
def now(): return next(int(x.split()[1]) for x in open("/proc/self/status") if "VmRSS" in x) * 1024
open("/proc/self/clear_refs", "w").write("5")  # the peak so far
before = now()
decoder = load_weights(folder, read_hf_config(folder))
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_host_memory_is_that_of_the_file_and_little_more(tmp_path):
    """On a CPU the parameters are host memory too: 1.3 times the only file at most."""
    sizes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 12,
        "head_dim": 64,
    }
    sizes |= {"vocab_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}
    folder = copy_of("smollm2", tmp_path, **sizes, tie_word_embeddings=True, dtype="bfloat16")
    tensors = {EMBEDDING: np.zeros((4096, 1024)), "model.norm.weight": np.zeros(1024)}
    for name, x in tensors_of("smollm2").items():
        if "layers.0." not in name:
            continue
        shape = [{48: 1024, 24: 4096, 16: 1024}[n] for n in x.shape]
        tensors |= {name.replace("rs.0.", f"rs.{i}."): np.zeros(shape, "f2") for i in range(12)}
    write(folder, {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()})
    file_bytes = (folder / "model.safetensors").stat().st_size
    assert file_bytes > 350e6
    ran = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder), str(FOLDER / "smollm2")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert 0.9 * file_bytes < int(ran.stdout) < 1.3 * file_bytes


def test_a_second_load_compiles_nothing(tmp_path):
    events = []

    def record(event, duration_secs, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            events.append(duration_secs)

    load_hf_weights(FOLDER / "llama2")
    jax.monitoring.register_event_duration_secs_listener(record)
    load_hf_weights(FOLDER / "llama2")
    jax.monitoring.unregister_event_duration_listener(record)
    assert events == []
