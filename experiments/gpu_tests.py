"""The kernels' contract tests on this machine's GPU, and what they said as one JSON object.

    python -m experiments.gpu_tests --output experiments/results/nvidia-h200/gpu_tests.json

Fields: passed, failed, skipped, seconds, device, jax, commit, tree_hash (of the library and the
kernels), date. Exit status 0 only if something passed and nothing failed or was skipped.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from absl import flags

from experiments.cli import FAILED, OK, exit_status, parse_flags, set_up_process
from experiments.provenance import provenance

_REPOSITORY = Path(__file__).resolve().parent.parent


@dataclasses.dataclass
class _Count:
    """Outcomes of the tests marked `gpu`; a pytest plugin."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Counts a test once: by its call, or by the set-up or tear-down that broke it."""
        if report.when == "call" and report.passed:
            self.passed += 1
        elif report.failed:
            self.failed += 1
        elif report.skipped:
            self.skipped += 1


def run(*, commit: str | None = None, select: str = "", num_processes: int = 0) -> dict[str, Any]:
    """The outcome of all tests marked `gpu`, those that `select` (pytest's -k) matches.

    Most of the time is compilation: several processes (pytest-xdist) share the GPU.
    """
    count, start = _Count(), time.perf_counter()
    files = sorted(map(str, (_REPOSITORY / "tests").glob("test_gpu*.py")))
    # The GPU's machine may have an older pytest, and packages that warn.
    leniently = ["-o", "minversion=1.0", "-W", "ignore::DeprecationWarning"]
    leniently += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    leniently += ["-p", "no:benchmark"]  # it warns where there are several processes
    arguments = ["-m", "gpu", "-q", "--durations=8", "-p", "no:cacheprovider", *leniently]
    arguments += ["-k", select] if select else []
    arguments += ["-n", str(num_processes), "--dist", "loadgroup"] if num_processes else []
    pytest.main([*files, *arguments], plugins=[count])
    seconds = round(time.perf_counter() - start, 1)
    return {**dataclasses.asdict(count), "seconds": seconds, **provenance(commit)}


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    values = flags.FlagValues()
    flags.DEFINE_string("commit", None, "of a tree without its repository", flag_values=values)
    flags.DEFINE_string("select", "", "pytest's -k", flag_values=values)
    flags.DEFINE_integer("num_processes", 0, "0: this one alone", flag_values=values)
    flags.DEFINE_string("output", None, "JSON file", flag_values=values)

    def command() -> int:
        parse_flags(argv, values)
        result = run(
            commit=values["commit"].value,
            select=str(values["select"].value),
            num_processes=int(str(values["num_processes"].value)),
        )
        text = json.dumps(result, indent=1)
        print(text)
        if values["output"].value:
            Path(str(values["output"].value)).write_text(text + "\n", encoding="utf-8")
        is_good = result["passed"] and not result["failed"] and not result["skipped"]
        return OK if is_good else FAILED

    return exit_status(command)


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
