"""The kernels' configurations against each other, and the best of each shape for the library.

    python -m experiments.tune_kernels --num_processes=12   # on an NVIDIA H200
    python -m experiments.tune_kernels --dry_run            # anywhere: the candidates, not measured

Every configuration that fits in shared memory is timed on a few forests that different things bound
(products, memory, launches). The best has the smallest geometric mean of times, or of those as good
within the noise the most stages; `pallas_kernels/data/<device>.json` holds it with all times, and
the library takes it from there; rows of other shapes in it are kept.
"""

import dataclasses
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags

from codec_jax import build_plan
from codec_jax.attention import run_kernels, stored_head_dim
from codec_jax.planning.device import device_slug
from experiments.attention_step import (
    Inputs,
    MeasureConfig,
    arguments_of,
    floor_us_of,
    make_inputs,
    make_pool,
    spec_of,
)
from experiments.cli import OK, exit_status, parse_flags, say, set_up_process, usage_errors
from experiments.json_lines import check_writable, write_text
from experiments.processes import Stages, run_jobs
from experiments.provenance import provenance
from experiments.timing import time_each
from experiments.workloads import Workload, load_workloads
from pallas_kernels.config import MAX_HEAD_DIM_IN_REGISTERS, MAX_SHARED_BYTES, KernelConfig
from pallas_kernels.tuning import FOLDER, Shape, load_configs

CASES = ("matrix-bound-b256", "codec-vary-batch-64", "codec-vary-depth-6", "deep-binary")
"""Bound by products, by memory, by both, by launches."""
NOISE = 0.005
"""Geometric means that differ by less do so from one run to the next."""
_AT_A_TIME = 6
"""Configurations of a job."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuneConfig:
    """What to tune.

    Attributes:
      dtypes, head_dims, page_sizes: every combination is a shape.
      cases: names in workloads.json, with their head counts and another head_dim.
      num_runs: timed calls of each configuration and case.
      num_processes: that compile beside each other, see `experiments.processes`.
      dry_run: say what would be measured, and stop.
      commit: of the sources, where no repository travels along.
      output: the file; by default the library's own for this device.
    """

    dtypes: tuple[str, ...] = ("bfloat16",)
    head_dims: tuple[int, ...] = (128,)
    page_sizes: tuple[int, ...] = (64,)
    cases: tuple[str, ...] = CASES
    num_runs: int = 20
    num_processes: int = 1
    dry_run: bool = False
    commit: str | None = None
    output: str | None = None

    def shapes(self) -> list[Shape]:
        """All combinations, heads as wide as they are stored."""
        combinations = itertools.product(self.dtypes, self.head_dims, self.page_sizes)
        return [
            Shape(dtype, stored_head_dim(head_dim, implementation="mosaic_gpu"), page_size)
            for dtype, head_dim, page_size in combinations
        ]

    def path(self) -> Path:
        """Where the result goes."""
        return FOLDER / f"{device_slug()}.json" if self.output is None else Path(self.output)


def candidates(shape: Shape) -> list[KernelConfig]:
    """The configurations of two compute warpgroups that fit, the heuristic one first."""
    heuristic = KernelConfig.heuristic(shape.head_dim, shape.dtype)
    places = (False, True) if shape.head_dim <= MAX_HEAD_DIM_IN_REGISTERS else (False,)
    others = (
        KernelConfig(num_stages=stages, num_query_buffers=buffers, queries_in_registers=registers)
        for stages, buffers, registers in itertools.product((2, 3, 4, 5), (2, 3, 4), places)
    )
    fitting = (c for c in others if c.shared_bytes(shape.head_dim, shape.dtype) <= MAX_SHARED_BYTES)
    return list(dict.fromkeys([heuristic, *fitting]))


def best_of(times_us: Mapping[KernelConfig, Sequence[float]]) -> KernelConfig:
    """The configuration with the smallest geometric mean.

    Of those within `NOISE` of it the one with the most stages: its loads run furthest ahead where
    memory answers later than in these cases. Of several such the fastest.
    """
    means = {config: _geometric_mean(times) for config, times in times_us.items()}
    limit = min(means.values()) * (1 + NOISE)
    as_good = [config for config, mean in means.items() if mean <= limit]
    return min(as_good, key=lambda config: (-config.num_stages, means[config]))


def _geometric_mean(times: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, times)) / len(times))


class Job(NamedTuple):
    """Some configurations of a shape on one forest."""

    shape: Shape
    workload: Workload
    tried: tuple[KernelConfig, ...]


class ReadyJob(NamedTuple):
    """A job with what is timed for each of its configurations."""

    job: Job
    calls: list[Callable[[], Any]]


def make_jobs(config: TuneConfig) -> list[Job]:
    """Every configuration of every shape on every forest."""
    return [
        Job(shape, _workload(name, shape), few)
        for shape in config.shapes()
        for name in config.cases
        for few in itertools.batched(candidates(shape), _AT_A_TIME)
    ]


def run(
    config: TuneConfig, *, stages: Stages[Job, Any, list[float]] | None = None
) -> list[dict[str, Any]]:
    """A row for each shape, also written: the best configuration, and where it comes from.

    Args:
      config: what to tune.
      stages: how a job becomes the microseconds of its configurations; by default on the device.
    """
    if config.dry_run:
        for shape in config.shapes():
            say(f"{shape}: {len(candidates(shape))} configurations, {len(config.cases)} cases")
        return []
    stages = stages or Stages(_prepare, functools.partial(_measure, num_runs=config.num_runs))
    jobs, times = make_jobs(config), []
    for times in run_jobs(jobs, stages, num_processes=config.num_processes):
        say(f"{len(times)} of {len(jobs)} jobs")
    found = {
        (job.shape, candidate, job.workload.name): us
        for job, each in zip(jobs, times, strict=True)
        for candidate, us in zip(job.tried, each, strict=True)
    }
    origin = provenance(config.commit)
    rows = [_choose(shape, config, found) | origin for shape in config.shapes()]
    _write(config.path(), rows)
    for row in rows:
        say(f"{row['shape']}: {row['config']}")
    return rows


def _write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Replaces the rows of the same shapes, and keeps the others."""
    old = json.loads(path.read_text(encoding="utf-8"))["configs"] if path.exists() else []
    by_shape = {Shape(**row["shape"]): row for row in (*old, *rows)}
    path.parent.mkdir(exist_ok=True)
    write_text(path, [json.dumps({"configs": list(by_shape.values())}, indent=1) + "\n"])


def _choose(
    shape: Shape, config: TuneConfig, found: Mapping[tuple[Shape, KernelConfig, str], float]
) -> dict[str, Any]:
    """The best configuration of a shape, with all times in microseconds."""
    times = {c: [found[shape, c, name] for name in config.cases] for c in candidates(shape)}
    floors = [floor_us_of(_workload(name, shape), shape.dtype) for name in config.cases]
    return {
        "shape": dataclasses.asdict(shape),
        "config": dataclasses.asdict(best_of(times)),
        "cases": list(config.cases),
        "floors_us": [round(us, 2) for us in floors],
        "tried": [
            {"config": dataclasses.asdict(c), "times_us": [round(us, 2) for us in times[c]]}
            for c in sorted(times, key=lambda c: _geometric_mean(times[c]))
        ],
    }


def _prepare(job: Job) -> ReadyJob:
    inputs = _inputs(job.workload, job.shape)
    return ReadyJob(job, [_compile(inputs, job.workload, tried) for tried in job.tried])


def _measure(ready: ReadyJob, *, num_runs: int) -> list[float]:
    times = [timing.median_us for timing in time_each(ready.calls, num_runs=num_runs)]
    for candidate, us in zip(ready.job.tried, times, strict=True):
        say(f"{ready.job.workload.name:26} {us:8.1f} us  {candidate}")
    return times


def _workload(name: str, shape: Shape) -> Workload:
    return dataclasses.replace(load_workloads()[name], head_dim=shape.head_dim)


def _inputs(workload: Workload, shape: Shape) -> Inputs:
    config = MeasureConfig(
        dtype=shape.dtype, page_size=shape.page_size, implementation="mosaic_gpu"
    )
    forest = workload.forest(page_size=shape.page_size)
    pool = make_pool(workload, config, num_pages=forest.page_list.size)
    return make_inputs(workload, forest, pool, config=config)


def _compile(inputs: Inputs, workload: Workload, candidate: KernelConfig) -> Callable[[], Any]:
    plan = build_plan(inputs.forest, spec_of(workload, page_size=inputs.kv.pool.page_size))
    rows, resolved = arguments_of(inputs.q, inputs.kv, plan, implementation="mosaic_gpu")

    def attention(rows, pool, resolved):
        scale = inputs.logits_scale
        return run_kernels(rows, pool, resolved, jnp.int32(0), logits_scale=scale, config=candidate)

    arguments = (rows, inputs.kv.pool, resolved)
    program = jax.jit(attention).lower(*arguments).compile()
    return lambda: program(*arguments)


def _check(config: TuneConfig) -> None:
    known: Iterable[str] = load_workloads()
    unknown = [name for name in config.cases if name not in known]
    if unknown or not config.cases:
        raise ValueError(f"`cases` must be names in workloads.json; got {(*unknown, '')[0]!r}.")
    for name in ("num_runs", "num_processes"):
        if getattr(config, name) < 1:
            raise ValueError(f"`{name}` must be positive; got {getattr(config, name)}.")
    for shape in config.shapes():
        candidates(shape)
    if config.path().exists() and not config.dry_run:
        load_configs(config.path())


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    values, default = flags.FlagValues(), TuneConfig()
    flags.DEFINE_list("dtypes", list(default.dtypes), "of keys and values", flag_values=values)
    for name, text in (("head_dims", "widths of a head"), ("page_sizes", "tokens of a page")):
        numbers = [str(number) for number in getattr(default, name)]
        flags.DEFINE_list(name, numbers, text, flag_values=values)
    flags.DEFINE_list("cases", list(default.cases), "in workloads.json", flag_values=values)
    flags.DEFINE_integer("num_runs", default.num_runs, "timed calls", flag_values=values)
    flags.DEFINE_integer("num_processes", 1, "that compile side by side", flag_values=values)
    flags.DEFINE_bool("dry_run", False, "measure nothing", flag_values=values)
    flags.DEFINE_string("commit", None, "of a tree without repository", flag_values=values)
    flags.DEFINE_string("output", None, "JSON file", flag_values=values)

    def command() -> int:
        parse_flags(argv, values)
        names = [field.name for field in dataclasses.fields(default)]
        settings: dict[str, Any] = {name: values[name].value for name in names}
        settings |= {name: tuple(settings[name] or ()) for name in ("dtypes", "cases")}
        with usage_errors():
            for name in ("head_dims", "page_sizes"):
                settings[name] = tuple(_whole_number(name, text) for text in settings[name] or ())
            config = TuneConfig(**settings)
            _check(config)
            if config.output is not None:
                check_writable(config.output)
        run(config)
        return OK

    return exit_status(command)


def _whole_number(name: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"`{name}` must be positive integers; got {text!r}.")
    return int(text)


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
