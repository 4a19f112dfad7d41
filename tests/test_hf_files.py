"""Files of a checkpoint folder that are no files, no JSON, no safetensors, or lie elsewhere."""

import json
import os
import re
import struct

import ml_dtypes
import numpy as np
import pytest
from golden_models import copy_of
from safetensors.numpy import load_file, save_file

from codec_jax.models import read_hf_config
from codec_jax.models.hf_files import read_json, tensor_files
from codec_jax.models.hf_weights import load_weights

INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"


@pytest.fixture
def folder(tmp_path):
    """A copy of a checkpoint, whose files a test may change."""
    return copy_of("llama2", tmp_path)


def refusal(call, *args):
    with pytest.raises(ValueError, match="`") as error:
        call(*args)
    return str(error.value)


def refused_weights(folder):
    return refusal(lambda: load_weights(folder, read_hf_config(folder)))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "b": {"c": 1, "c": 2}}', "two values of 'c'"),
        ("{bad", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ('{"a":' * 100_000, None),
        ('{"a": ' + "9" * 5000 + "}", None),
        ("\ufeff{}", None),
    ],
)
def test_what_is_no_json_is_refused(tmp_path, text, reason):
    path = tmp_path / "config.json"
    path.write_text(text)
    message = refusal(read_json, path)
    assert message.startswith(f"`{path}` must hold JSON; got {reason or ''}")
    assert message.endswith(". Copy the file again.")


def test_a_name_may_be_given_twice_with_one_value(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a": [1], "a": [1]}')
    assert read_json(path) == {"a": [1]}


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "shard.safetensors"])
def test_what_is_no_file_is_refused_by_its_name(folder, file):
    path = folder / file
    if file.startswith("shard"):
        (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: file}}))
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    if file.startswith("model"):
        expected = f"`{folder}` must hold model.safetensors or {INDEX}; got neither."
    else:
        expected = f"`{path}` must be a file; got a folder, a pipe or a device."
    assert refused_weights(folder) == expected
    path.unlink()
    path.mkdir()
    assert refused_weights(folder) == expected


def test_a_link_to_itself_is_refused_by_its_name(folder):
    path = folder / "config.json"
    path.unlink()
    path.symlink_to(path)
    assert refusal(read_hf_config, folder) == (
        f"`{path}` must be a file that can be read; got: Too many levels of symbolic links."
    )


def test_a_shard_may_be_a_link(folder, tmp_path):
    """As in the cache of the Hugging Face hub, whose files lie in another folder."""
    file = folder / "model.safetensors"
    file.rename(tmp_path / "blob")
    file.symlink_to(tmp_path / "blob")
    load_weights(folder, read_hf_config(folder))


@pytest.mark.parametrize(
    "entry", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "C:x", "a\0b", "\ud800", 3, None]
)
def test_an_index_names_nothing_outside_its_folder(folder, entry):
    (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: entry}}))
    assert refusal(tensor_files, folder) == (
        f"`weight_map` in {folder / INDEX} must name files in its own folder; got {entry!r} for"
        f" {NORM}."
    )


def test_a_name_that_no_file_can_have_is_refused(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {NORM: "x" * 300}}))
    assert refused_weights(folder) == (
        f"`{folder / ('x' * 300)}` must be a file that can be read; got: File name too long."
    )


def test_an_index_that_gives_a_tensor_to_two_shards_is_refused(folder):
    (folder / INDEX).write_text('{"weight_map": {"a": "1.safetensors", "a": "2.safetensors"}}')
    assert refusal(tensor_files, folder) == (
        f"`{folder / INDEX}` must hold JSON; got two values of 'a'. Copy the file again."
    )


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b"\xff" * 8,
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}',
        b'{"a": {"dtype": "F99", "shape": [4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [1152921504606846976, 4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},'
        b' "b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},'
        b' "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    ],
)
def test_a_header_that_does_not_describe_the_file_is_refused(folder, header):
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    assert re.fullmatch(
        rf"`{re.escape(str(file))}` must be a whole safetensors file; got: .*\. Copy the file"
        r" again\.",
        refused_weights(folder),
    )


@pytest.mark.parametrize("length", [2**60, 2**64 - 1, 100_000_001, 0])
def test_a_header_of_an_impossible_length_is_refused(folder, length):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(struct.pack("<Q", length) + content[8:])
    assert refused_weights(folder).startswith(f"`{file}` must be a whole safetensors file; got: ")


def test_a_file_without_tensors_lacks_them(folder):
    save_file({}, folder / "model.safetensors")
    assert refused_weights(folder).startswith(
        f"`{folder}` must hold the tensors of its config; got no lm_head.weight, model.embed_token"
    )


@pytest.mark.parametrize(
    ("dtype", "stored"), [("f8", "F64"), ("i4", "I32"), ("?", "BOOL"), ("float8_e4m3fn", "F8_E4M3")]
)
def test_a_tensor_of_another_dtype_is_refused_by_its_name(folder, dtype, stored):
    file = folder / "model.safetensors"
    dtype = np.dtype(getattr(ml_dtypes, dtype) if dtype.startswith("float8") else dtype)
    save_file(load_file(file) | {NORM: np.ones(48, dtype)}, file)
    assert refused_weights(folder) == (
        f"`{NORM}` in {file} must be F32, F16 or BF16; got {stored}."
    )
