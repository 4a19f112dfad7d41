"""What weights take and what the device has, before anything is allocated."""

import jax
import pytest

from codec_jax.models import load_model, model_config, model_names
from codec_jax.models import memory as memory_module
from codec_jax.models.memory import as_gib, available_bytes, weights_bytes


def test_sizes_are_written_for_people():
    assert as_gib(3 * 2**29) == "1.50 GiB"
    assert as_gib(3 * 2**19) == "1.5 MiB"


def test_the_devices_own_limit_comes_first():
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 123}

    class Silent(Device):
        def memory_stats(self):
            return None

    assert available_bytes(Device()) == 123
    assert available_bytes(Silent()) is None


BILLIONS = {
    "random-codellama-7b": 6.74,
    "random-codellama-13b": 13.02,
    "random-codellama-34b": 33.74,
    "random-llama-3.1-8b": 8.03,
    "random-qwen3-4b": 4.02,
    "random-yi-6b-200k": 6.06,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_presets_have_the_number_of_parameters_that_their_models_are_known_for(name):
    assert weights_bytes(model_config(name)) / 2e9 == pytest.approx(BILLIONS[name], abs=0.005)
    assert model_config(name).dtype == "bfloat16"
    assert model_config(name, dtype="float32").dtype == "float32"


def test_weights_are_what_the_decoder_holds():
    decoder = load_model("stories260k", dtype="bfloat16").decoder
    held = sum(array.nbytes for array in decoder.arrays().values())
    assert weights_bytes(decoder.config) == held
    assert weights_bytes(model_config("stories260k")) == 2 * held


@pytest.mark.parametrize("name", model_names())
def test_a_model_beyond_the_devices_memory_is_refused_before_it_is_made(name, monkeypatch):
    num_arrays = len(jax.live_arrays())
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 2**18)
    with pytest.raises(ValueError, match="needs") as error:
        load_model(name)
    config = model_config(name)
    assert str(error.value) == (
        f"`{name}` needs {as_gib(weights_bytes(config))} for its weights in {config.dtype}; the"
        " device has 0.2 MiB. Take a smaller model, or `dtype` bfloat16."
    )
    assert len(jax.live_arrays()) == num_arrays
