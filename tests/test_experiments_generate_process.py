"""The main job as a process of its own: exit statuses, and what an interrupt leaves."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.cli import exit_status

REPOSITORY = Path(__file__).resolve().parent.parent
# A shell starts what runs in its background with interrupts ignored, and its children inherit it.
# The child itself undoes that: JAX warns of a fork that runs Python first (`preexec_fn`).
HEEDING_INTERRUPTS = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("experiments.generate", run_name="__main__", alter_sys=True)
"""


def test_exit_status_of_an_interrupt_and_of_a_closed_pipe(capfd):
    def interrupt():
        raise KeyboardInterrupt

    assert exit_status(interrupt) == 130
    assert capfd.readouterr().err == "interrupted\n"
    script = "import sys; from experiments.cli import exit_status\n"
    script += "sys.exit(exit_status(lambda: print('x' * 100_000) or 0))"
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_process_ends_with_the_status(tmp_path):
    command = [sys.executable, "-m", "experiments.generate", "--prompts_file=missing.txt"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: missing.txt: No such file or directory\n"


@pytest.mark.slow
def test_interrupt_keeps_what_has_ended(tmp_path):
    """Standard error is a terminal here: the progress bar tells when to interrupt."""
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    short = {"prompt": "One", "num_samples": 1, "max_new_tokens": 2}
    long = {"prompt": "Two", "num_samples": 24, "max_new_tokens": 500}
    prompts.write_text(f"{json.dumps(short)}\n{json.dumps(long)}\n")
    flags = [f"--prompts_file={prompts}", f"--output={output}"]
    command = [sys.executable, "-c", HEEDING_INTERRUPTS, *flags]
    terminal, stderr = pty.openpty()
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=stderr, text=True
    ) as process:
        os.close(stderr)
        shown = read_until(terminal, b"1 of 25 samples ended", seconds=120)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        out = process.stdout.read()
        assert process.wait() == 130
    shown += read_until(terminal, b"have ended", seconds=10)
    os.close(terminal)
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    assert 1 <= len(rows) < 25 and rows[0]["prompt"] == "One"
    assert f"interrupted: {len(rows)} of 25 samples have ended" in shown.decode()
    assert out.count("  sample ") == len(rows) and "\x1b" not in out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "prompts.jsonl"]


def read_until(terminal: int, text: bytes, *, seconds: float) -> bytes:
    """What a terminal shows until `text` is among it."""
    shown, end = b"", time.monotonic() + seconds
    while text not in shown:
        assert time.monotonic() < end, shown
        shown += os.read(terminal, 4096)
    return shown
