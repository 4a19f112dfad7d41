"""Names and paths of models: what is taken for one, in the library and on the command line."""

import pytest
from golden_models import copy_of

from codec_jax.models import load_model, model_config, model_names
from experiments import generate
from experiments.generate_config import GenerateConfig

RULE = f"must be a folder with config.json, a .gguf file or one of {', '.join(model_names())}; got"
UNKNOWN = [
    "",
    "big",
    "Qwen/Qwen3-0.6B",
    "~/nothing",
    "~nobody-here/x.gguf",
    "a\nb",
    "a\0b",
    "x.bin",
]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The home folder and the working folder, with a file that is no model."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.bin").write_bytes(b"")
    return tmp_path


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_model_is_refused_by_the_name_of_the_argument(name, capsys):
    for call in (load_model, model_config):
        with pytest.raises(ValueError, match="`name`") as error:
            call(name)
        assert str(error.value) == f"`name` {RULE} {name!r}."
    with pytest.raises(ValueError, match="`model`") as error:
        generate.run(GenerateConfig(model=name))
    assert str(error.value) == f"`model` {RULE} {name!r}."
    for more in ("--nohelp", "--version"):
        assert generate.main(["generate", f"--model={name}", more]) == 2
        assert capsys.readouterr().err == f"error: `--model` {RULE} {name!r}.\n"


@pytest.mark.usefixtures("home")
def test_a_name_that_no_path_can_have_is_refused(capsys):
    name = "x" * 5000
    assert generate.main(["generate", f"--model={name}"]) == 2
    assert capsys.readouterr().err == (
        f"error: `--model` must be a path that can be read; got {name!r}: File name too long.\n"
    )


def test_the_home_folder_is_expanded(home):
    copy_of("llama2", home)
    assert model_config("~/llama2") == model_config(str(home / "llama2"))
    with pytest.raises(ValueError, match=r"tokenizer\.json` must exist"):
        load_model("~/llama2")
