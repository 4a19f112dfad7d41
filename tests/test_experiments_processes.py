"""Jobs over processes: order, one measurement at a time, failures."""

import functools
import os
import time
from pathlib import Path

import pytest

from experiments.processes import Stages, run_jobs


def prepare(job: int, *, log: Path) -> int:
    time.sleep(0.01 * job)
    _note(log, f"ready {job}")
    return job


def measure(job: int, *, log: Path) -> tuple[int, int]:
    _note(log, f"start {job}")
    time.sleep(0.02)
    _note(log, f"end {job}")
    return job, os.getpid()


def _note(log: Path, text: str) -> None:
    with log.open("a") as file:
        file.write(text + "\n")


def logged(log: Path) -> Stages:
    return Stages(functools.partial(prepare, log=log), functools.partial(measure, log=log))


def fail_at_two(job: int) -> int:
    if job == 2:
        raise ValueError(f"no {job}")
    return job


def die_at_two(job: int) -> int:
    if job == 2:
        os._exit(3)
    return job


def same(job: int) -> int:
    return job


@pytest.mark.parametrize("num_processes", [1, 3, 9])
def test_results_are_in_the_order_of_the_jobs(tmp_path, num_processes):
    jobs = [4, 0, 3, 1, 2]
    found = list(run_jobs(jobs, logged(tmp_path / "log"), num_processes=num_processes))
    assert [len(results) for results in found] == [1, 2, 3, 4, 5]
    assert [job for job, _ in found[-1]] == jobs
    pids = {pid for _, pid in found[-1]}
    assert len(pids) == min(num_processes, len(jobs))
    assert (os.getpid() in pids) == (num_processes == 1)


def test_processes_are_all_ready_before_one_measures_at_a_time(tmp_path):
    log = tmp_path / "log"
    list(run_jobs(range(6), logged(log), num_processes=3))
    lines = log.read_text().splitlines()
    assert {line.split()[0] for line in lines[:6]} == {"ready"}
    for start, end in zip(lines[6::2], lines[7::2], strict=True):
        assert start.split()[0] == "start" and end == start.replace("start", "end")


@pytest.mark.parametrize("num_processes", [2, 4])
def test_a_failure_ends_all_with_its_traceback(num_processes):
    """The others wait for it at the barrier."""
    with pytest.raises(RuntimeError, match="ValueError: no 2"):
        list(run_jobs(range(4), Stages(fail_at_two, same), num_processes=num_processes))


def test_a_failed_measurement_is_one_too():
    found = run_jobs(range(4), Stages(same, fail_at_two), num_processes=2)
    with pytest.raises(RuntimeError, match="ValueError: no 2"):
        list(found)


def test_a_process_that_dies_is_noticed():
    with pytest.raises(RuntimeError, match="ended before its jobs did"):
        list(run_jobs(range(4), Stages(die_at_two, same), num_processes=2))


def test_alone_the_failure_is_itself():
    with pytest.raises(ValueError, match="no 2"):
        list(run_jobs(range(4), Stages(fail_at_two, same)))


def test_no_jobs_have_no_results():
    assert list(run_jobs([], Stages(same, same), num_processes=4)) == []
