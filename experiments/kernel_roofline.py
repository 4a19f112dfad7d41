"""Attention over the papers' forests against the physical floor, one decode step, merge included.

    python -m experiments.kernel_roofline --output roofline.jsonl          # on an NVIDIA H200
    python -m experiments.kernel_roofline --smoke                          # on a CPU, tiny, untimed

Floor: the larger of unique KV bytes over 4.3 TB/s and operations over 790 TFLOP/s, both measured on
an H200. The time is the span of the two kernels' launches, the cache emptied before each call.
Expected: within 15% of the floor where a node is long, further where the whole step takes under
30 us; about 6 s a case. `--heads=32/32 --head_dim=64` asks for another attention over the same
forests; `--num_processes=10` compiles the cases beside each other.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from codec_jax import ForestArrays, Plan, build_plan
from codec_jax.planning.policies import DEFAULT_POLICY, policy_named
from codec_jax.planning.profiles import cost_for
from experiments.attention_step import (
    Measurable,
    MeasureConfig,
    checked_row,
    compile_step,
    describe,
    make_inputs,
    make_pool,
    profile_of,
    spec_of,
    timed_rows,
)
from experiments.cli import run_experiment, say, set_up_process
from experiments.json_lines import write_json_lines
from experiments.processes import Stages, run_jobs
from experiments.workloads import Workload, load_workloads

SMOKE = (
    Workload("smoke-star", (1, 5), (40, 9), num_q_heads=8, num_kv_heads=2, head_dim=64),
    Workload("smoke-forest", (2, 4, 8), (20, 1, 33), num_q_heads=8, num_kv_heads=2, head_dim=64),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RooflineConfig(MeasureConfig):
    """What to measure; `smoke` takes tiny cases.

    Attributes:
      cases: names in workloads.json; empty takes those of the speed table.
      policies: what to share, see `planning.policies.POLICIES`.
      heads: query and KV heads, as "32/8", instead of each case's own.
      head_dim: width of a head instead of each case's own.
    """

    cases: tuple[str, ...] = ()
    policies: tuple[str, ...] = (DEFAULT_POLICY,)
    heads: str | None = None
    head_dim: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.policies:
            policy_named(name)
        _workloads(self)

    def other_sizes(self) -> dict[str, int]:
        """What replaces the cases' own sizes.

        Raises:
          ValueError: `heads` are not two numbers, the first a multiple of the second, or
            `head_dim` is not positive.
        """
        sizes = {} if self.head_dim is None else {"head_dim": self.head_dim}
        if self.head_dim is not None and self.head_dim < 1:
            raise ValueError(f"`head_dim` must be positive; got {self.head_dim}.")
        if self.heads is None:
            return sizes
        parts = self.heads.split("/")
        is_valid = len(parts) == 2 and all(part.isdecimal() and int(part) > 0 for part in parts)
        if not is_valid or int(parts[0]) % int(parts[1]):
            raise ValueError(
                "`heads` must be query heads and KV heads, the first a multiple of the second, as"
                f" 32/8; got {self.heads!r}."
            )
        return {**sizes, "num_q_heads": int(parts[0]), "num_kv_heads": int(parts[1])}


SPEED_TABLE = (
    "codec-vary-batch-120k-16",
    "codec-vary-batch-64",
    "unshared-64x4096",
    "root16k-b16",
    "codec-vary-depth-6",
    "codec-vary-batch-16",
    "matrix-bound-b256",
    "fasttree-6",
    "deep-binary",
    "codec-vary-seq-1024",
)


class Job(NamedTuple):
    """A case under a policy, and how it is measured."""

    workload: Workload
    policy: str
    config: MeasureConfig


def run(config: RooflineConfig) -> list[dict[str, Any]]:
    """A row for each case and policy; `config.output` is written whenever one is done."""
    jobs = itertools.product(_workloads(config), config.policies, [config])
    return measure_jobs(list(itertools.starmap(Job, jobs)), config)


def measure_jobs(jobs: Sequence[Job], config: MeasureConfig) -> list[dict[str, Any]]:
    """A row for each job; `config` says where they go, and over how many processes."""
    rows: list[dict[str, Any]] = []
    for rows in run_jobs(jobs, Stages(_prepare, _measure), num_processes=config.num_processes):
        if config.output is not None:
            write_json_lines(config.output, rows)
    return rows


def _workloads(config: RooflineConfig) -> Sequence[Workload]:
    sizes = config.other_sizes()
    return [dataclasses.replace(workload, **sizes) for workload in _named(config)]


def _named(config: RooflineConfig) -> Sequence[Workload]:
    if config.smoke:
        return SMOKE
    known = load_workloads()
    unknown = [name for name in config.cases if name not in known]
    if unknown:
        raise ValueError(f"`cases` must be names in workloads.json; got {unknown[0]!r}.")
    return [known[name] for name in config.cases or SPEED_TABLE]


class _Ready(NamedTuple):
    measurable: Measurable
    config: MeasureConfig


def _plan(job: Job, forest: ForestArrays) -> Plan:
    workload, policy, config = job
    spec = spec_of(workload, page_size=config.page_size)
    # The costs that the decode loop plans with.
    cost = cost_for(spec, profile_of(workload, config))
    return build_plan(forest, spec, policy=policy, cost=cost)


def _prepare(job: Job) -> _Ready:
    workload, policy, config = job
    forest = workload.forest(page_size=config.page_size)
    pool = make_pool(workload, config, num_pages=forest.page_list.size)
    inputs = make_inputs(workload, forest, pool, config=config)
    plan = functools.partial(_plan, job, forest)
    compiled = compile_step(inputs, plan())
    row = checked_row(workload, policy, compiled, config=config)
    return _Ready(Measurable(row, compiled.call, plan), config)


def _measure(ready: _Ready) -> dict[str, Any]:
    (row,) = timed_rows([ready.measurable], config=ready.config)
    say(describe(row))
    return row


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    values = flags.FlagValues()
    default = RooflineConfig()
    for name in ("cases", "policies"):
        text = {"cases": "names in workloads.json", "policies": "what to share"}[name]
        flags.DEFINE_list(name, list(getattr(default, name)), text, flag_values=values)
    flags.DEFINE_string("heads", None, "as 32/8: instead of the cases' own", flag_values=values)
    flags.DEFINE_integer("head_dim", None, "instead of the cases' own", flag_values=values)
    flags.DEFINE_string("dtype", default.dtype, "of keys and values", flag_values=values)
    flags.DEFINE_integer("page_size", default.page_size, "tokens of a page", flag_values=values)
    flags.DEFINE_string("implementation", None, "default: what supports it", flag_values=values)
    flags.DEFINE_integer("num_runs", default.num_runs, "timed calls a case", flag_values=values)
    flags.DEFINE_integer("num_processes", 1, "that compile side by side", flag_values=values)
    flags.DEFINE_bool("smoke", False, "tiny cases, no times, any device", flag_values=values)
    flags.DEFINE_string("commit", None, "of a tree without repository", flag_values=values)
    flags.DEFINE_string("output", None, "JSON lines file", flag_values=values)
    return run_experiment(argv, values, RooflineConfig, run)


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
