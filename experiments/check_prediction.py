"""Predicted against measured time: named workloads and random forests, under every policy.

    python -m experiments.check_prediction --output prediction.jsonl     # on an NVIDIA H200
    python -m experiments.check_prediction --smoke --profile FILE        # on a CPU, tiny, untimed

Needs the device's cost profile, see `experiments.profile_cost`, which has seen none of these plans;
take a `--seed` that was chosen after the profile. A row for each case and policy: case, policy,
predicted_us, bound_by (work, memory or compute), time_us, rel_err = predicted / measured - 1.
Expected: a median error of 10%, at worst 25%.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import flags

from codec_jax.attention import stored_head_dim
from codec_jax.planning.device import device_slug
from codec_jax.planning.policies import POLICIES, policy_named
from codec_jax.planning.profiles import FOLDER, CostProfile, load_profiles
from experiments.cli import OK, exit_status, parse_flags, say, set_up_process, usage_errors
from experiments.json_lines import check_writable, write_json_lines
from experiments.kernel_roofline import SMOKE
from experiments.prediction_bench import PlanBench, PlannedCase
from experiments.prediction_cases import (
    RANDOM_HEADS,
    Case,
    Heads,
    make_batches,
    random_case,
    workload_case,
)
from experiments.processes import Stages, run_jobs
from experiments.profile_cost_points import Timer
from experiments.provenance import provenance
from experiments.random_forests import ForestSizes
from experiments.timing import time_each
from experiments.workloads import Workload, load_workloads

_AT_A_TIME = 8
"""Plans in one record of the profiler, their tables on the device together."""
_SMOKE_SIZES = ForestSizes(requests=(3, 8), tokens=(50, 300), levels=(2, 3))
_SMOKE_HEADS = Heads(num_kv_heads=2, group_size=4, head_dim=64)
_SEED_STRIDE = 1_000_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """What to compare.

    Attributes:
      cases: names in workloads.json; empty takes all.
      policies: see `planning.policies.POLICIES`; empty takes all.
      num_forests, seed: random forests.
      dtype, page_size: of keys and values.
      num_runs: timed calls of each plan.
      num_processes: that compile beside each other, see `experiments.processes`.
      profile: file of cost profiles; None takes the device's.
      output: JSON lines file; None writes none.
      smoke: tiny cases on the XLA path, on any device, without times.
      commit: of the sources, where no repository travels along.
    """

    cases: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    num_forests: int = 100
    seed: int = 0
    dtype: str = "bfloat16"
    page_size: int = 64
    num_runs: int = 10
    num_processes: int = 1
    profile: str | None = None
    output: str | None = None
    smoke: bool = False
    commit: str | None = None

    def __post_init__(self) -> None:
        for policy in self.policies:
            policy_named(policy)
        for name, least in (("num_forests", 0), ("seed", 0), ("num_runs", 1), ("num_processes", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}; got {getattr(self, name)}.")

    @property
    def all_policies(self) -> tuple[str, ...]:
        """The policies to run."""
        return self.policies or tuple(POLICIES)


class ReadyBench(NamedTuple):
    """A bench with its program, and its plans with their predictions."""

    bench: PlanBench
    program: Any
    planned: list[PlannedCase]


def run(config: CheckConfig, *, timer: Timer | None = time_each) -> list[dict[str, Any]]:
    """A row for each case and policy; `config.output` is written whenever a batch is done."""
    profiles, rows = find_profiles(config), []
    origin = provenance(config.commit)
    batches = make_batches(
        _cases(config),
        policies=config.all_policies,
        page_size=config.page_size,
        num_workers=next(iter(profiles.values())).num_workers,
    )
    implementation = "xla" if config.smoke else "mosaic_gpu"
    benches = [
        PlanBench(batch, profiles[batch.cases[0].head_dim], implementation, config.all_policies[0])
        for batch in batches
    ]
    stages = Stages(
        functools.partial(_prepare, policies=config.all_policies),
        functools.partial(_measure, timer=timer, num_runs=config.num_runs),
    )
    for found in run_jobs(benches, stages, num_processes=config.num_processes):
        rows = [row | origin for row in itertools.chain.from_iterable(found)]
        if config.output is not None:
            write_json_lines(config.output, rows)
        say(f"{len(rows)} plans; {describe(rows)}")
    return rows


def _prepare(bench: PlanBench, *, policies: Sequence[str]) -> ReadyBench:
    jobs = itertools.product(bench.batch.cases, policies)
    return ReadyBench(bench, bench.compile(), [bench.predict(*job) for job in jobs])


def _measure(ready: ReadyBench, *, timer: Timer | None, num_runs: int) -> list[dict[str, Any]]:
    rows = []
    for few in itertools.batched(ready.planned, _AT_A_TIME):
        times = _times(ready.bench.calls(few, ready.program), timer=timer, num_runs=num_runs)
        rows += [_row(*pair) for pair in zip(few, times, strict=True)]
    return rows


def _times(
    calls: Sequence[Callable[[], object]], *, timer: Timer | None, num_runs: int
) -> list[dict[str, Any]]:
    """Times of the calls; without a timer each runs once."""
    if timer is None:
        for call in calls:
            jax.block_until_ready(call())
        return [dict.fromkeys(("time_us", "p10_us", "p90_us")) for _ in calls]
    return [
        {"time_us": t.median_us, "p10_us": t.p10_us, "p90_us": t.p90_us}
        for t in timer(calls, num_runs=num_runs)
    ]


def find_profiles(config: CheckConfig) -> dict[int, CostProfile]:
    """The profile for each head_dim of the cases.

    Raises:
      OSError: there is no such file.
      ValueError: it has no profile for the cases, or `config.cases` names an unknown one.
    """
    path = FOLDER / f"{device_slug()}.json" if config.profile is None else Path(config.profile)
    profiles = load_profiles(path)
    found = {}
    for head_dim in sorted(_head_dims(config)):
        wanted = (
            config.dtype,
            stored_head_dim(head_dim, implementation="mosaic_gpu"),
            config.page_size,
        )
        mine = [p for p in profiles if (p.dtype, p.head_dim, p.page_size) == wanted]
        if not mine:
            raise ValueError(f"`profile` must have a profile for {wanted}; {path} has none.")
        found[head_dim] = mine[0]
    return found


def _head_dims(config: CheckConfig) -> set[int]:
    named = {workload.head_dim for workload in _workloads(config)}
    return named | ({_random_heads(config).head_dim} if config.num_forests else set())


def _random_heads(config: CheckConfig) -> Heads:
    return _SMOKE_HEADS if config.smoke else RANDOM_HEADS


def _workloads(config: CheckConfig) -> Sequence[Workload]:
    if config.smoke:
        return SMOKE
    known = load_workloads()
    unknown = [name for name in config.cases if name not in known]
    if unknown:
        raise ValueError(f"`cases` must be names in workloads.json; got {unknown[0]!r}.")
    return [known[name] for name in config.cases or known]


def _cases(config: CheckConfig) -> list[Case]:
    sizes = _SMOKE_SIZES if config.smoke else ForestSizes()
    named = [workload_case(w, page_size=config.page_size) for w in _workloads(config)]
    seeds = range(config.seed * _SEED_STRIDE, config.seed * _SEED_STRIDE + config.num_forests)
    draw = functools.partial(random_case, page_size=config.page_size, heads=_random_heads(config))
    return named + [draw(seed, sizes=sizes) for seed in seeds]


def _row(job: PlannedCase, times: dict[str, Any]) -> dict[str, Any]:
    found, counts = job.estimate, job.plan.counts
    bounds = {"work": found.work_us, "memory": found.memory_us, "compute": found.compute_us}
    time_us = times["time_us"]
    return {
        "case": job.case.name,
        "policy": job.policy,
        "batch_size": int(job.case.forest.num_requests),
        "unique_tokens": int(job.case.forest.kv_len.sum()),
        "segments": int(counts.segments),
        "slots": int(counts.slots),
        "predicted_us": found.predicted_us,
        "bound_by": max(bounds, key=lambda name: bounds[name]),
        **{f"{name}_us": us for name, us in bounds.items()},
        "fixed_us": found.fixed_us,
        **times,
        "rel_err": None if time_us is None else found.predicted_us / time_us - 1,
    }


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """Median and largest error of the rows, and which is the worst."""
    timed = [row for row in rows if row["rel_err"] is not None]
    if not timed:
        return "no times"
    errors = np.abs([row["rel_err"] for row in timed])
    worst = timed[int(errors.argmax())]
    return (
        f"median error {np.median(errors):.1%}, at most 10%: {np.mean(errors <= 0.1):.0%} of them,"
        f" worst {worst['rel_err']:+.1%} ({worst['case']}, {worst['policy']})"
    )


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    values, default = flags.FlagValues(), CheckConfig()

    def define(kind: Any, name: str, text: str) -> None:
        value = getattr(default, name)
        kind(name, list(value) if isinstance(value, tuple) else value, text, flag_values=values)

    define(flags.DEFINE_list, "cases", "names in workloads.json; default: all")
    define(flags.DEFINE_list, "policies", "what to share; default: all policies")
    define(flags.DEFINE_integer, "num_forests", "random forests")
    define(flags.DEFINE_integer, "seed", "of the random forests, chosen after the profile")
    define(flags.DEFINE_string, "dtype", "of keys and values")
    define(flags.DEFINE_integer, "page_size", "tokens of a page")
    define(flags.DEFINE_integer, "num_runs", "timed calls of each plan")
    define(flags.DEFINE_integer, "num_processes", "that compile side by side")
    define(flags.DEFINE_string, "profile", "file of cost profiles; default: the device's")
    define(flags.DEFINE_string, "output", "JSON lines file")
    define(flags.DEFINE_bool, "smoke", "tiny cases on XLA, no times, any device")
    define(flags.DEFINE_string, "commit", "of a tree without its repository")

    def command() -> int:
        parse_flags(argv, values)
        names = [field.name for field in dataclasses.fields(default)]
        settings: dict[str, Any] = {name: values[name].value for name in names}
        settings |= {name: tuple(settings[name] or ()) for name in ("cases", "policies")}
        with usage_errors():
            config = CheckConfig(**settings)
            find_profiles(config)
            if config.output is not None:
                check_writable(config.output)
        run(config, timer=None if config.smoke else time_each)
        return OK

    return exit_status(command)


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
