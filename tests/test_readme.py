"""What the README says is so: its Python runs, its picture is the demo's, its tables are whole."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from codec_jax import draw_forest
from codec_jax.planning.policies import DEFAULT_POLICY, POLICIES
from experiments.ablation_cases import is_paper_point
from experiments.ablation_summary import mean_speed_ups
from experiments.generate_config import GenerateConfig
from experiments.generate_job import prepare
from experiments.json_lines import read_json_lines

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS = REPOSITORY / "experiments" / "results" / "nvidia-h200"
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_the_two_uses():
    assert len(PYTHON) == 2
    for block in PYTHON:
        statements = [line for line in block.splitlines() if line and "import" not in line]
        assert len(statements) <= 10


@pytest.mark.parametrize("block", PYTHON, ids=["generate", "attend"])
def test_python_runs(block, capsys):
    exec(compile(block, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("\n") in (1, 4)


def test_the_picture_is_what_the_demo_draws():
    job = prepare(GenerateConfig())
    drawn = draw_forest(job.generation.forest, decode=job.model.tokenizer.decode, width=80)
    assert f"```text\n{drawn}\n```" in README


def test_the_gpu_table_is_the_committed_rows():
    rows = read_json_lines(RESULTS / "kernel_roofline.jsonl")
    lines = []
    for row in rows:
        numbers = f"{row['time_us']:.1f} | {row['floor_us']:.1f} | {row['floor_share']:.0%}"
        lines.append(f"| {row['case']} | {row['policy']} | {numbers} |")
    in_readme = re.findall(r"^\| .*% \|$", README, flags=re.MULTILINE)
    assert sorted(in_readme) == sorted(lines) and lines
    for row in rows:
        assert row["implementation"] == "mosaic_gpu" and row["max_rel_err"] < 5e-3


def test_the_gpu_tests_are_the_committed_ones():
    result = json.loads((RESULTS / "gpu_tests.json").read_text(encoding="utf-8"))
    assert f"({result['passed']} tests, all passed:" in README
    assert (result["failed"], result["skipped"]) == (0, 0)


def test_the_table_of_policies_is_the_committed_rows():
    rows = read_json_lines(RESULTS / "planner_ablation.jsonl")
    groups = (
        (is_paper_point, 25),
        (lambda case: case.startswith("codec-vary-batch-120k"), 5),
        (lambda case: case.startswith("fasttree"), 45),
        (lambda case: case.startswith("random"), 6),
    )
    means = [mean_speed_ups(rows, is_counted=is_counted) for is_counted, _ in groups]
    expected = []
    for policy in POLICIES.keys() - {"flash_decoding"}:
        assert [mean[policy][1] for mean in means] == [count for _, count in groups]
        factors = " | ".join(f"{mean[policy][0]:.2f}x" for mean in means)
        expected.append(f"| `{policy}` | {factors} |")
    assert sorted(re.findall(r"^\| .*x \|$", README, flags=re.MULTILINE)) == sorted(expected)


def test_every_policy_has_its_row():
    rows = re.findall(r"^\| `(\w+)`( \(default\))? \| \D", README, flags=re.MULTILINE)
    assert set(POLICIES) <= {name for name, _ in rows}
    assert [name for name, mark in rows if mark and name in POLICIES] == [DEFAULT_POLICY]


def test_every_experiment_has_its_row():
    programs = {
        path.stem
        for path in (REPOSITORY / "experiments").glob("*.py")
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
    }
    section = README.split("## Experiments\n")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(named) == sorted(programs)


def test_every_flag_is_named():
    from absl import flags

    from experiments.generate_flags import define_flags

    values = flags.FlagValues()
    define_flags(values)
    of_the_main_job = README.split("## Experiments\n")[0]
    named = set(re.findall(r"`--(\w+)`", of_the_main_job))
    expected = "model prompt prompts_file num_samples max_new_tokens temperature top_k top_p seed"
    expected += " page_size policy implementation dtype output version"
    assert set(expected.split()) <= named <= set(values) | {"help"}


@pytest.mark.slow
def test_the_wheel_runs_the_ten_lines_elsewhere(tmp_path):
    """Built without isolation, installed without dependencies into a folder of its own."""
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    subprocess.run([*build, str(tmp_path), str(REPOSITORY)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(site), str(wheel)], check=True)
    script = tmp_path / "ten_lines.py"
    script.write_text(f"import codec_jax\n{PYTHON[0]}print(codec_jax.__file__)\n")
    ran = subprocess.run(
        [sys.executable, str(script)],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(site), "PATH": ""},
    )
    assert ran.stdout.splitlines()[-1].startswith(str(site))
    assert len(ran.stdout.splitlines()) >= 5
