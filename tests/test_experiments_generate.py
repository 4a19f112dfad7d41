"""The main job: rows, reports, command line, result files.

Runs share their shapes with each other, so only the first one in a process compiles.
"""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from absl import flags
from hypothesis import given
from hypothesis import strategies as st

from codec_jax import Sampling
from experiments import generate, generate_job
from experiments.generate_config import DEMO_PROMPTS, GenerateConfig
from experiments.generate_report import describe_samples, describe_timing
from experiments.json_lines import check_writable, write_json_lines
from experiments.prompt_files import PromptRequest, read_prompts
from experiments.visit_timing import Visit, decode_rate

REPOSITORY = Path(__file__).resolve().parent.parent
GOLDEN = REPOSITORY / "tests" / "data" / "golden" / "stories260K_greedy.json"
ESCAPE = "\x1b"
SETTINGS = {"num_samples": 2, "max_new_tokens": 20}
PROMPTS = DEMO_PROMPTS[:3]


@pytest.fixture(scope="module")
def rows():
    return generate.run(GenerateConfig(prompts=PROMPTS, **SETTINGS))


def main(*arguments: str) -> int:
    return generate.main(["generate", *arguments])


def error_line(capsys) -> str:
    """The one line that a refused command line leaves, all of it on standard error."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_run_gives_a_row_for_each_sample(rows):
    assert [(row["prompt_index"], row["sample_index"]) for row in rows] == [
        (prompt, sample) for prompt in range(3) for sample in range(2)
    ]
    for row in rows:
        assert list(row) == [
            "prompt_index",
            "sample_index",
            "seed",
            "prompt",
            "text",
            "token_ids",
            "finish_reason",
            "stats",
        ]
        assert row["prompt"] == PROMPTS[row["prompt_index"]]
        assert row["seed"] == 0 and row["stats"]["policy"] == "auto"
        assert len(row["token_ids"]) == 20 or row["finish_reason"] == "stop"
    assert json.loads(json.dumps(rows)) == rows


def test_shared_tokens_are_the_common_prefix(rows):
    stats = [row["stats"] for row in rows]
    assert all(stat["num_shared_tokens"] == stat["num_prompt_tokens"] for stat in stats)


def test_seed_decides_the_texts(rows):
    config = GenerateConfig(prompts=PROMPTS, **SETTINGS)
    assert generate.run(config) == rows
    other = generate.run(GenerateConfig(prompts=PROMPTS, seed=1, **SETTINGS))
    assert [row["text"] for row in other] != [row["text"] for row in rows]


def test_without_prompts_it_is_the_demonstration():
    job = generate_job.prepare(GenerateConfig())
    assert tuple(request.prompt for request in job.requests) == DEMO_PROMPTS
    assert job.generation.statistics.unique_kv_tokens < job.generation.statistics.total_kv_tokens


def test_an_empty_file_gives_nothing(tmp_path, capsys):
    path, output = tmp_path / "none.txt", tmp_path / "out.jsonl"
    path.write_bytes(b"")
    assert main(f"--prompts_file={path}", f"--output={output}") == 0
    assert output.read_bytes() == b""
    assert "0 requests" in capsys.readouterr().out


def test_one_string_is_no_list_of_prompts():
    with pytest.raises(ValueError, match="`prompts` must be several texts"):
        GenerateConfig(prompts="Once")  # pyright: ignore[reportArgumentType]


def test_command_line_gives_the_golden_text(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    case = json.loads(GOLDEN.read_text(encoding="utf-8"))["cases"][3]
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    flags_ = [f"--prompt={case['prompt']}", "--num_samples=2", "--temperature=0"]
    assert main(*flags_, "--max_new_tokens=20", f"--output={output}") == 0
    rows = read_rows(output)
    expected = case["ids"][len(case["prompt_ids"]) :][:20]
    assert [row["token_ids"] for row in rows] == [expected, expected]
    assert case["text"].startswith(rows[0]["prompt"] + rows[0]["text"])
    out, err = capsys.readouterr()
    assert rows[0]["text"] in out.replace("\n    ", "\n")
    forest = out[: out.index("policy:")].splitlines()
    assert len(forest) >= 4 and all(len(line) <= 60 for line in forest)
    assert re.search(r"[\d,]+ tokens/s, .* ms per output token", out)
    assert ESCAPE not in out
    assert re.fullmatch(r"memory: weights 1\.0 MiB, KV pool .* MiB, workspace .* MiB\n", err)
    assert names_in(tmp_path) == ["out.jsonl"]


def test_flags_come_before_the_file_and_lines_have_settings(tmp_path):
    path, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    path.write_text('"a"\n{"prompt": "b", "num_samples": 3, "seed": 7, "max_new_tokens": 2}\n')
    arguments = ["--num_samples=1", "--max_new_tokens=3", "--prompt=c", "--prompt=d"]
    assert main(*arguments, f"--prompts_file={path}", f"--output={output}") == 0
    rows = read_rows(output)
    assert [(row["prompt"], row["seed"]) for row in rows] == [
        ("c", 0),
        ("d", 0),
        ("a", 0),
        ("b", 7),
        ("b", 7),
        ("b", 7),
    ]
    assert all(len(row["token_ids"]) <= (2 if row["prompt"] == "b" else 3) for row in rows)


REFUSED = {
    "an unknown flag": ("--polcy=balanced", "polcy"),
    "an argument": ("story", "'story'"),
    "an unknown policy": ("--policy=best", "--policy=best"),
    "an unknown model": ("--model=big", "`--model` must be a folder with config.json, a .gguf"),
    "a model without a chat template": ("--chat", "stories260k has none"),
    "a folder that holds no model": ("--model=.", "`.` must hold config.json"),
    "an unknown dtype": ("--dtype=int4", "--dtype=int4"),
    "an unknown implementation": ("--implementation=cuda", "--implementation=cuda"),
    "a word for a number": ("--num_samples=few", "num_samples"),
    "no sample": ("--num_samples=0", "`num_samples` must be at least 1; got 0"),
    "a negative seed": ("--seed=-1", "`seed`"),
    "no temperature": ("--temperature=nan", "`temperature`"),
    "a long completion": ("--max_new_tokens=600", "512"),
    "a prompt that is no text": ("--prompt=\udcff", "valid Unicode"),
    "a missing file": ("--prompts_file=missing.txt", "missing.txt"),
    "a folder for a file": ("--prompts_file=.", "directory"),
    "an output in no folder": ("--output=missing/out.jsonl", "missing/out.jsonl"),
    "a folder for an output": ("--output=.", "`output` must be a regular file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_in_one_line(case, capsys, monkeypatch, tmp_path):
    argument, reason = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    assert main(argument) == 2
    assert reason in error_line(capsys)
    assert names_in(tmp_path) == []


def test_output_is_refused_before_any_work(monkeypatch, capsys):
    monkeypatch.setattr(generate_job, "load_model", lambda *_, **__: pytest.fail("worked"))
    assert main("--output=/missing/out.jsonl") == 2
    assert "/missing/out.jsonl" in error_line(capsys)


BAD_FILES = {
    "UTF-8": ("p.txt", b"one\ntw\xffo\n", "p.txt, line 2: .* byte offset 2 of"),
    "UTF-8 after a mark": ("p.txt", b"\xef\xbb\xbfa\xff", "line 1: .* byte offset 4 of"),
    "JSON": ("p.jsonl", b'"one"\n{"prompt":\n', "p.jsonl, line 2: "),
    "an empty line": ("p.jsonl", b'"one"\n\n"two"', "line 2: "),
    "deep JSON": ("p.jsonl", b"[" * 200_000, "line 1: "),
    "no prompt": ("p.jsonl", b'{"seed": 1}', 'line 1: .*"prompt"'),
    "a surrogate": ("p.jsonl", b'"\\ud800"', "line 1: .*Unicode"),
    "an unknown setting": ("p.jsonl", b'{"prompt": "", "tempo": 1}', "line 1: .*'tempo'"),
    "a kind": ("p.jsonl", b'{"prompt": "", "top_k": 1.5}', "line 1: `top_k` must be an integer"),
    "a truth": ("p.jsonl", b'{"prompt": "", "top_p": true}', "line 1: `top_p` must be a number"),
    "a value": ("p.jsonl", b'{"prompt": "", "top_p": 2}', "line 1: `top_p` must be between"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file_names_the_line(case, tmp_path, capsys):
    name, content, message = BAD_FILES[case]
    path = tmp_path / name
    path.write_bytes(content)
    assert main(f"--prompts_file={path}") == 2
    assert re.search(message, error_line(capsys))


@given(
    texts=st.lists(st.text().filter(lambda text: "\n" not in text and text[-1:] != "\r")),
    mark=st.booleans(),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_a_line_is_a_prompt_as_it_stands(tmp_path_factory, texts, mark, end):
    path = tmp_path_factory.getbasetemp() / "prompts.txt"
    content = "".join(text + end for text in texts).encode()
    path.write_bytes((b"\xef\xbb\xbf" if mark else b"") + content)
    expected = [text.removeprefix("\ufeff") if i == 0 else text for i, text in enumerate(texts)]
    read = [request.prompt for request in read_prompts(str(path), Sampling())]
    assert read == (texts if mark else expected)


@pytest.mark.parametrize("content", [b"a\n\nb", b"a\n\nb\n", b"a\r\n\r\nb\r\n"])
def test_an_empty_line_is_an_empty_prompt(content, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(content)
    texts = [request.prompt for request in read_prompts(str(path), Sampling())]
    assert texts == ["a", "", "b"]


def test_standard_input_is_a_file_of_lines(monkeypatch, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(r"one\n" + "\ntwo", encoding="utf-8")
    with path.open(encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        sampling = Sampling(seed=3)
        assert read_prompts("-", sampling) == [
            PromptRequest(r"one\n", sampling),
            PromptRequest("two", sampling),
        ]


def test_version_names_packages_device_and_implementation(capsys):
    """At once: this model would take 15 GiB."""
    asked = ("--version", "--implementation=reference", "--model=random-llama-3.1-8b")
    assert main(*asked) == 0
    out, err = capsys.readouterr()
    assert "random-llama-3.1-8b: reference" in out
    for name in ("codec_jax ", "jax 0.", "jaxlib 0.", "flax 0.", "device: ", "reference (asked"):
        assert name in out
    assert err == ""


def test_help_names_every_flag(capsys):
    assert main("--help") == 0
    out = capsys.readouterr().out
    assert all(f"--{name}" in out for name in ("prompt", "prompts_file", "top_k", "output"))


def test_o30_importing_leaves_the_flags_of_others_alone(monkeypatch, rows):
    before = list(flags.FLAGS)
    monkeypatch.setattr(sys, "argv", ["x", "-f", "k.json"])
    module = importlib.reload(importlib.reload(generate))
    assert list(flags.FLAGS) == before
    assert module.run(GenerateConfig(prompts=PROMPTS, **SETTINGS)) == rows


def test_output_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text("old")
    path.chmod(0o640)
    with pytest.raises(ValueError, match="JSON"):
        write_json_lines(path, [{"x": 1}, {"x": float("nan")}])
    assert path.read_text() == "old" and names_in(tmp_path) == ["out.jsonl"]
    write_json_lines(path, [{"x": "ä\u2028"}])
    assert path.read_text(encoding="utf-8") == '{"x": "ä\u2028"}\n'
    assert path.stat().st_mode & 0o777 == 0o640 and names_in(tmp_path) == ["out.jsonl"]


def test_output_follows_a_link_and_refuses_a_device(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    check_writable(link)
    assert not target.exists()
    write_json_lines(link, [])
    assert link.is_symlink() and target.read_bytes() == b""
    with pytest.raises(ValueError, match="`output`"):
        check_writable("/dev/null")


def test_failed_write_still_prints_the_texts(monkeypatch, tmp_path, capsys):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(generate, "write_json_lines", fail)
    flags_ = ["--max_new_tokens=2", "--num_samples=1", f"--output={tmp_path / 'out'}"]
    assert main(*flags_) == 1
    out, err = capsys.readouterr()
    assert out.count("sample 0") == 4
    assert err.endswith("error: the results are not written: No space left on device\n")


def visit(seconds: float, num_tokens: int, num_steps: int, num_compilations: int = 0) -> Visit:
    return Visit(seconds, num_tokens, num_steps, num_compilations, 1.0 * num_compilations)


def test_rate_leaves_out_prefill_and_what_compiled():
    visits = [visit(9, 4, 1), visit(8, 64, 16, 2), visit(0.5, 60, 16), visit(0.5, 20, 4)]
    rate = decode_rate(visits)
    assert rate is not None
    assert (rate.num_tokens, rate.num_steps, rate.seconds, rate.num_left_out) == (80, 20, 1.0, 1)
    text = describe_timing(visits)
    assert "80 tokens/s" in text and "50.00 ms" in text and "without the visits" in text


def test_rate_says_when_it_includes_compilation():
    text = describe_timing([visit(9, 4, 1, 1), visit(8, 64, 16, 2)])
    assert "8 tokens/s" in text and "including compilation" in text
    assert "nothing to time" in describe_timing([visit(9, 4, 1)])
    assert ": 0.25 tokens/s" in describe_timing([visit(9, 4, 1), visit(8, 2, 2)])


def test_control_characters_of_a_text_are_written_out():
    row = {"prompt_index": 0, "sample_index": 0, "prompt": "a\x1b[2J", "finish_reason": "stop"}
    text = describe_samples([row | {"text": "b\rc\nd"}])
    assert r"a\x1b[2J" in text and "b\\x0dc\n    d" in text


def test_weights_that_take_long_are_announced_before_they_are_made(capsys):
    assert main("--model=random-codellama-34b", "--dtype=float32") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == ("random-codellama-34b: 33.74 billion parameters, 125.71 GiB in float32")
    assert second.startswith("error: `random-codellama-34b` needs 125.71 GiB for its weights")
