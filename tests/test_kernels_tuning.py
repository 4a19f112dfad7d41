"""Tuned configurations: found by device and shape, refused by name, part of the package."""

import dataclasses
import json

import pytest

from pallas_kernels import tuning
from pallas_kernels.config import KernelConfig
from pallas_kernels.tuning import best_config, load_configs

SHAPE = {"dtype": "bfloat16", "head_dim": 128, "page_size": 64}
CONFIG = {"num_stages": 3, "num_query_buffers": 2, "queries_in_registers": True}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    tuning._configs_of.cache_clear()
    yield tmp_path
    tuning._configs_of.cache_clear()


def write(folder, rows):
    path = folder / "some-gpu.json"
    path.write_text(json.dumps({"configs": rows}), encoding="utf-8")
    return path


def test_the_tuned_configuration_of_a_shape_is_taken(folder):
    write(folder, [{"shape": SHAPE, "config": CONFIG}])
    sizes = {"head_dim": 128, "page_size": 64}
    assert best_config("some-gpu", "bfloat16", **sizes) == KernelConfig(**CONFIG)
    heuristic = KernelConfig.heuristic(128, "bfloat16")
    assert best_config("another-gpu", "bfloat16", **sizes) == heuristic
    assert best_config("some-gpu", "float16", **sizes) == heuristic
    assert best_config("some-gpu", "bfloat16", head_dim=128, page_size=16) == heuristic


def test_a_configuration_reads_as_it_was_written(folder):
    config = KernelConfig(num_stages=3, queries_in_registers=True)
    path = write(folder, [{"shape": SHAPE, "config": dataclasses.asdict(config)}])
    assert load_configs(path) == {tuning.Shape(**SHAPE): config}


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"shape": SHAPE}], "config"),
        ([{"shape": SHAPE, "config": {"num_stages": 9}}], "between 2 and 8; got 9"),
        ([{"shape": SHAPE, "config": {"speed": 9}}], "speed"),
        ([{"shape": SHAPE | {"head_dim": 256}, "config": {"num_stages": 4}}], "shared memory"),
        (7, "iterable"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_name(folder, rows, reason):
    path = write(folder, rows)
    with pytest.raises(ValueError) as error:
        load_configs(path)
    assert str(path) in str(error.value) and reason in str(error.value)


def test_the_seam_asks_for_the_device_and_the_shape(monkeypatch):
    import jax.numpy as jnp

    import codec_jax.attention as seam
    import pallas_kernels.partial_attention as kernels

    asked, config = [], KernelConfig(num_stages=2)

    def best(device, dtype, **sizes):
        asked.append((device, jnp.dtype(dtype).name, sizes))
        return config

    def stop(*_, **settings):
        assert settings["config"] is config
        raise InterruptedError

    monkeypatch.setattr(tuning, "best_config", best)
    monkeypatch.setattr(kernels, "partial_attention", stop)
    rows, pages = jnp.zeros((1, 64, 128), jnp.bfloat16), jnp.zeros((1, 1, 32, 128), jnp.bfloat16)
    with pytest.raises(InterruptedError):
        seam.launch_kernels(rows, ((pages, pages),), None, None, logits_scale=1.0)
    assert asked == [("cpu", "bfloat16", {"head_dim": 128, "page_size": 32})]
