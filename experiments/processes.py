"""Jobs over several processes of one device: made ready beside each other, measured one at a time.

Most of an experiment's time on a GPU is compilation, and a process lowers one kernel at a time.
Nothing is measured before all processes are ready, and then by one of them at a time, so that no
measurement shares the device. Its memory is shared: see `cli.parse_flags`.
"""

import dataclasses
import itertools
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any, cast

from experiments.cli import set_up_process

_AT_ONCE = 4
"""Jobs that one process alone makes ready together (XLA lets go of Python while it compiles)."""


@dataclasses.dataclass(frozen=True)
class Stages[Job, Ready, Result]:
    """What is done with each job; for several processes both must be picklable.

    Attributes:
      prepare: compiles, and runs what is not timed.
      measure: times it.
    """

    prepare: Callable[[Job], Ready]
    measure: Callable[[Ready], Result]


def run_jobs[Job, Result](
    jobs: Sequence[Job], stages: Stages[Job, Any, Result], *, num_processes: int = 1
) -> Iterator[list[Result]]:
    """After each job the results so far, in the order of the jobs.

    Args:
      jobs: what to do.
      stages: how.
      num_processes: 1 for this process alone, a few jobs after the other; with more, all jobs are
        ready before the first is measured, and the device's memory must hold them.

    Raises:
      RuntimeError: a process failed; holds its traceback.
    """
    alone = num_processes < 2 or len(jobs) < 2
    found = _one_by_one(jobs, stages) if alone else _side_by_side(jobs, stages, num_processes)
    results: dict[int, Result] = {}
    for index, result in found:
        results[index] = result
        yield [results[index] for index in sorted(results)]


def _one_by_one(jobs: Sequence[Any], stages: Stages) -> Iterator[tuple[int, Any]]:
    for few in itertools.batched(enumerate(jobs), _AT_ONCE):
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            ready = list(pool.map(lambda job: stages.prepare(job[1]), few))
        for index, _ in few:
            yield index, stages.measure(ready.pop(0))


def _side_by_side(
    jobs: Sequence[Any], stages: Stages, num_processes: int
) -> Iterator[tuple[int, Any]]:
    num_processes = min(num_processes, len(jobs))
    # Processes that are started anew: JAX does not survive a fork.
    context = multiprocessing.get_context("spawn")
    barrier, turn = context.Barrier(num_processes), context.Lock()
    workers, waiting = [], {}
    try:
        for first in range(num_processes):
            receiver, sender = context.Pipe(duplex=False)
            share = list(enumerate(jobs))[first::num_processes]
            arguments = (share, stages, barrier, turn, sender)
            workers.append(context.Process(target=_work, args=arguments, daemon=True))
            workers[-1].start()
            sender.close()  # so that a process that dies ends its pipe
            waiting[receiver] = len(share)
        while waiting:
            for receiver in cast(list[Connection], wait(list(waiting))):
                yield _receive(receiver)
                waiting[receiver] -= 1
                if not waiting[receiver]:
                    del waiting[receiver]
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def _receive(receiver: Connection) -> tuple[int, Any]:
    try:
        index, result = receiver.recv()
    except EOFError:
        raise RuntimeError("a process of the experiment ended before its jobs did.") from None
    if index is None:
        raise RuntimeError(f"a process of the experiment failed:\n{result}")
    return index, result


def _work(share: Sequence[tuple[int, Any]], stages: Stages, barrier, turn, sender) -> None:
    """What each process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    set_up_process()
    try:
        ready = [(index, stages.prepare(job)) for index, job in share]
        barrier.wait()
        while ready:
            with turn:
                index, prepared = ready.pop(0)
                result = stages.measure(prepared)
            sender.send((index, result))
    except Exception:  # noqa: BLE001 - the first process shows it
        sender.send((None, traceback.format_exc()))
