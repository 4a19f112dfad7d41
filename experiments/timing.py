"""The one timer of GPU work: spans of a call's kernels, the cache emptied before each call.

JAX's profiler (CUPTI) gives every kernel with its start and end on the device. A span runs from the
start of the first to the end of the last kernel of a call, gaps between its launches included. The
L2 cache is emptied by READING a large buffer: writing would leave dirty lines, whose write-back is
then charged to the call.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

L2_BYTES = 256 * 2**20
"""More than twice any GPU's L2 cache."""
_MARK = "empty_l2"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Microseconds of a call over several runs, and its kernels' names and own durations."""

    median_us: float
    p10_us: float
    p90_us: float
    kernels: tuple[tuple[str, float], ...]


@jax.jit
def empty_l2(buffer):
    """Reads the whole buffer."""
    return jnp.sum(buffer)


def time_calls(call: Callable[[], object], *, num_runs: int = 20) -> Timing:
    """The time of a call, from the profiler's record of `num_runs` runs.

    Args:
      call: runs jitted work and returns its arrays; compiled by a first run that is not timed.
      num_runs: timed runs.

    Raises:
      RuntimeError: there is no GPU, or the profiler did not record every run.
    """
    return time_each([call], num_runs=num_runs)[0]


def time_each(calls: Sequence[Callable[[], object]], *, num_runs: int = 20) -> list[Timing]:
    """The times of several calls, one after the other in one record: starting the profiler costs.

    Raises:
      RuntimeError: there is no GPU, or the profiler did not record every run.
    """
    if jax.default_backend() != "gpu":
        raise RuntimeError(f"timing needs a GPU; the default backend is {jax.default_backend()}.")
    buffer = jax.block_until_ready(jnp.ones(L2_BYTES // 4, jnp.float32))
    for call in (*calls, lambda: empty_l2(buffer)):
        jax.block_until_ready(call())
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=_only_the_device()):
            for call in calls:
                for _ in range(num_runs):
                    jax.block_until_ready(empty_l2(buffer))
                    jax.block_until_ready(call())
        kernels = _read_kernels(Path(folder))
    found = _split_calls(kernels)
    if len(found) != num_runs * len(calls) or not all(found):
        counts = [len(call) for call in found]
        raise RuntimeError(
            f"the profiler must record {num_runs * len(calls)} calls; it has kernels {counts}."
        )
    return [_summarise(found[i : i + num_runs]) for i in range(0, len(found), num_runs)]


def _only_the_device() -> jax.profiler.ProfileOptions:
    """No record of the host's work, which would slow it down."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    return options


@dataclasses.dataclass(frozen=True)
class _Kernel:
    name: str
    module: str
    start_ns: float
    end_ns: float


def _read_kernels(folder: Path) -> list[_Kernel]:
    """Every kernel of the trace, by start."""
    (path,) = folder.rglob("*.xplane.pb")
    kernels = []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                module = str(dict(event.stats).get("hlo_module", ""))
                end = event.start_ns + event.duration_ns
                kernels.append(_Kernel(event.name, module, event.start_ns, end))
    return sorted(kernels, key=lambda kernel: kernel.start_ns)


def _split_calls(kernels: list[_Kernel]) -> list[list[_Kernel]]:
    """The kernels between two readings of the buffer, call by call."""
    calls: list[list[_Kernel]] = []
    was_mark = False
    for kernel in kernels:
        is_mark = _MARK in kernel.module
        if is_mark and not was_mark:
            calls.append([])
        elif not is_mark and calls:
            calls[-1].append(kernel)
        was_mark = is_mark
    return calls


def _summarise(calls: list[list[_Kernel]]) -> Timing:
    spans = [(call[-1].end_ns - call[0].start_ns) / 1000 for call in calls]
    middle = calls[int(np.argsort(spans)[len(spans) // 2])]
    p10, median, p90 = np.percentile(spans, [10, 50, 90])
    names = tuple((kernel.name, (kernel.end_ns - kernel.start_ns) / 1000) for kernel in middle)
    return Timing(float(median), float(p10), float(p90), names)
