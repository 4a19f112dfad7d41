"""Where the time of a generation goes: compilation, prefill, decoding."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence

import jax.monitoring

from codec_jax import Generation
from codec_jax.generate import Delta

_COMPILATION = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class CompilationCount:
    """Compilations by XLA, and the seconds in them; tracing and lowering are not among these."""

    number: int = 0
    seconds: float = 0.0


@contextlib.contextmanager
def count_compilations() -> Iterator[CompilationCount]:
    """Counts the compilations of the whole process, of all threads, while the context is open."""
    count = CompilationCount()

    def add(event: str, duration_secs: float, **metadata: str | int) -> None:
        del metadata
        if event == _COMPILATION:
            count.number += 1
            count.seconds += duration_secs

    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        yield count
    finally:
        jax.monitoring.unregister_event_duration_listener(add)


@dataclasses.dataclass(frozen=True)
class Visit:
    """The time between two visits of the host, and what the device did in it.

    Attributes:
      seconds: wall time, compilations and planning included.
      num_tokens: tokens that all rows gained.
      num_steps: decode steps in which some row gained one.
      num_compilations: compilations by XLA in this time.
      compile_seconds: wall time of these.
    """

    seconds: float
    num_tokens: int
    num_steps: int
    num_compilations: int
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class DecodeRate:
    """Tokens and time of some visits.

    Attributes:
      num_tokens, num_steps, seconds: sums over the visits.
      num_left_out: decode visits that compiled and are not in the sums.
      includes_compilation: every decode visit compiled, so all of them are in the sums.
    """

    num_tokens: int
    num_steps: int
    seconds: float
    num_left_out: int
    includes_compilation: bool


def timed_visits(generation: Generation) -> Iterator[tuple[list[Delta], Visit]]:
    """The generation's deltas, each list with its time. The first is prefill and first tokens."""
    with count_compilations() as count:
        before, start = dataclasses.replace(count), time.perf_counter()
        for deltas in generation:
            gained = [len(delta.token_ids) for delta in deltas]
            visit = Visit(
                seconds=time.perf_counter() - start,
                num_tokens=sum(gained),
                num_steps=max(gained, default=0),
                num_compilations=count.number - before.number,
                compile_seconds=count.seconds - before.seconds,
            )
            yield deltas, visit
            before, start = dataclasses.replace(count), time.perf_counter()


def decode_rate(visits: Sequence[Visit]) -> DecodeRate | None:
    """The rate of the decode visits that compiled nothing; of all of them where each did.

    `visits` starts with the prefill's, which is never counted. None without a decode visit.
    """
    decoding = visits[1:]
    counted = [visit for visit in decoding if not visit.num_compilations] or decoding
    if not counted:
        return None
    return DecodeRate(
        num_tokens=sum(visit.num_tokens for visit in counted),
        num_steps=sum(visit.num_steps for visit in counted),
        seconds=sum(visit.seconds for visit in counted),
        num_left_out=len(decoding) - len(counted),
        includes_compilation=any(visit.num_compilations for visit in counted),
    )
