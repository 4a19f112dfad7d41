"""Policies against each other on one kernel: only what is shared and how work is cut differs.

    python -m experiments.planner_ablation --group codec --output codec.jsonl   # on an NVIDIA H200
    python -m experiments.planner_ablation --smoke                              # on a CPU, untimed

Groups: the 25 points of CoDec's benchmark (`codec`), its sweep with a root of 120,000 tokens
(`sweep120k`), FastTree's 15 trees with three sets of heads (`fasttree`), `unshared`, `random`, all
of these (`main`), and the grid on which `auto` must not lose to any fixed policy (`o27`; give it
`--policies flash_decoding,hydragen,balanced,auto`). `--cases 'o27-b1-*,o27-b2-*'` takes a part: a
case's policies are always measured in one run, and files of several runs can be joined.

Cases with the same heads and batch size share one compiled program whose arrays have room for any
of their plans, so that all policies run the very same kernel. Expected: `balanced` and `auto` 1.8
times as fast as `flash_decoding` in the geometric mean over the 25 points, as README says (the
paper, over another kernel: 1.9 times).
Most of the time is compilation: `--num_processes=12` compiles as many buckets side by side.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from codec_jax.planning.policies import policy_named
from experiments.ablation_bucket import measure_bucket, prepare_bucket
from experiments.ablation_cases import GROUPS, buckets, cases_of
from experiments.ablation_summary import summary
from experiments.attention_step import MeasureConfig
from experiments.cli import run_experiment, say, set_up_process
from experiments.json_lines import write_json_lines
from experiments.processes import Stages, run_jobs
from experiments.workloads import AnyWorkload

POLICY_NAMES = ("flash_decoding", "hydragen", "one_task_per_node", "codec", "balanced", "auto")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationConfig(MeasureConfig):
    """What to measure; `smoke` takes tiny cases.

    Attributes:
      group, cases: see `ablation_cases.cases_of`.
      policies: what to share, see `planning.policies.POLICIES`.
    """

    group: str = "main"
    cases: tuple[str, ...] = ()
    policies: tuple[str, ...] = POLICY_NAMES

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.policies or len(set(self.policies)) < len(self.policies):
            raise ValueError(f"`policies` must be different names; got {self.policies}.")
        for name in self.policies:
            policy_named(name)
        _ = self.workloads

    @property
    def workloads(self) -> list[AnyWorkload]:
        """The cases to measure."""
        return cases_of("smoke" if self.smoke else self.group, self.cases)


def run(config: AblationConfig) -> list[dict[str, Any]]:
    """A row for each case and policy; `config.output` is written whenever a bucket is done."""
    rows: list[dict[str, Any]] = []
    stages = Stages(
        functools.partial(prepare_bucket, policies=config.policies, config=config),
        functools.partial(measure_bucket, config=config),
    )
    jobs = buckets(config.workloads)
    for results in run_jobs(jobs, stages, num_processes=config.num_processes):
        rows = list(itertools.chain.from_iterable(results))
        if config.output is not None:
            write_json_lines(config.output, rows)
    for line in summary(rows):
        say(line)
    return rows


def define_flags(flag_values: flags.FlagValues) -> None:
    """Adds the flags to `flag_values`; their defaults are those of `AblationConfig`."""
    default = AblationConfig()

    def define(kind: Any, name: str, text: str) -> None:
        value = getattr(default, name)
        value = list(value) if isinstance(value, tuple) else value
        kind(name, value, text, flag_values=flag_values)

    define(flags.DEFINE_string, "group", f"main, {', '.join(GROUPS)}")
    define(flags.DEFINE_list, "cases", "names of the group, * for anything; default: all")
    define(flags.DEFINE_list, "policies", "what to share")
    define(flags.DEFINE_string, "dtype", "of keys and values")
    define(flags.DEFINE_integer, "page_size", "tokens of a page")
    define(flags.DEFINE_string, "implementation", "default: what supports it")
    define(flags.DEFINE_integer, "num_runs", "timed calls of each case and policy")
    define(flags.DEFINE_integer, "num_processes", "that compile side by side")
    define(flags.DEFINE_bool, "smoke", "tiny cases, no times, any device")
    define(flags.DEFINE_string, "commit", "of a tree without repository")
    define(flags.DEFINE_string, "output", "JSON lines file")


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    values = flags.FlagValues()
    define_flags(values)
    return run_experiment(argv, values, AblationConfig, run)


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
