"""What every experiment's command line has in common."""

import importlib
import os

import pytest
from absl import flags

from experiments import provenance
from experiments.cli import parse_flags

NAMES = """append_time check_prediction compare_implementations generate gpu_tests kernel_roofline
kernel_shapes planner_ablation planning_time plot_ablation plot_plan plot_roofline profile_cost
tune_kernels"""


@pytest.mark.parametrize("name", NAMES.split())
def test_help_is_the_experiments_own_docstring_and_its_flags(name, capsys):
    module = importlib.import_module(f"experiments.{name}")
    assert module.main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(module.__doc__) and "--output" in text


@pytest.mark.parametrize("name", ["a.py", "data/some-gpu.json"])
def test_the_hash_of_the_sources_sees_code_and_tuned_data(name, tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "_REPOSITORY", tmp_path)
    file = tmp_path / "package" / name
    file.parent.mkdir(parents=True)
    file.write_text("1")
    before = provenance.source_hash(("package",))
    file.write_text("2")
    assert provenance.source_hash(("package",)) != before


@pytest.mark.parametrize(("number", "expected"), [("1", None), ("2", "false")])
def test_processes_leave_each_other_memory(number, expected, monkeypatch):
    """Before any use of the device: the process that starts the others has one too."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "")  # so that it is as before afterwards
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE")
    values = flags.FlagValues()
    flags.DEFINE_integer("num_processes", 1, "", flag_values=values)
    parse_flags(["program", f"--num_processes={number}"], values)
    assert os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") == expected
