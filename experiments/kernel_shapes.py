"""The kernels over other shapes of attention: heads, widths, dtypes and pages that models use.

    python -m experiments.kernel_shapes --num_processes=16 --output shapes.jsonl  # on an H200
    python -m experiments.kernel_shapes --smoke                        # on a CPU, untimed

Rows are those of `experiments.kernel_roofline`. Multi-head attention (32/32), heads of 64 and 256,
float16, pages of 16 and of 128 tokens, two forests each; and one KV head for 8 query heads over all
forests of Hydragen's micro-benchmark (arXiv 2402.05099, section 4.2, figure 4). Expected: of the
floor as much as the same forest with 32/8 heads of 128 reaches.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags

from codec_jax.planning.policies import DEFAULT_POLICY, policy_named
from experiments.attention_step import MeasureConfig
from experiments.cli import run_experiment, set_up_process
from experiments.kernel_roofline import SMOKE, Job, measure_jobs
from experiments.workloads import Workload, load_workloads

SMALL, LONG_ROOT, LEAVES = "codec-vary-batch-16", "root16k-b16", "fasttree-6"


class Shape(NamedTuple):
    """What differs from 32/8 heads of 128, bfloat16 and pages of 64, and the cases.

    Attributes:
      cases: names in workloads.json.
      sizes: fields of the workloads.
      settings: fields of `MeasureConfig`.
    """

    cases: tuple[str, ...]
    sizes: dict[str, Any]
    settings: dict[str, Any]


SHAPES = (
    Shape((SMALL, LEAVES), {"num_q_heads": 32, "num_kv_heads": 32}, {}),
    Shape((SMALL, LONG_ROOT), {"head_dim": 64}, {}),
    Shape((SMALL, LONG_ROOT), {"head_dim": 256}, {}),
    Shape((SMALL, LONG_ROOT), {}, {"dtype": "float16"}),
    Shape((SMALL, LEAVES), {}, {"page_size": 16}),
    Shape((SMALL, LONG_ROOT), {}, {"page_size": 128}),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapesConfig(MeasureConfig):
    """What to measure; `smoke` takes a tiny case for each shape.

    Attributes:
      policy: what to share, see `planning.policies.POLICIES`.
    """

    policy: str = DEFAULT_POLICY

    def __post_init__(self) -> None:
        super().__post_init__()
        policy_named(self.policy)


def make_jobs(config: ShapesConfig) -> list[Job]:
    """Every shape over its cases, then Hydragen's."""
    known = load_workloads()
    jobs = []
    for shape in SHAPES:
        workloads = SMOKE[:1] if config.smoke else [known[name] for name in shape.cases]
        settings = dataclasses.replace(config, **shape.settings)
        jobs += [
            Job(dataclasses.replace(workload, **shape.sizes), config.policy, settings)
            for workload in workloads
        ]
    return jobs + [Job(workload, config.policy, config) for workload in _hydragen(config)]


def _hydragen(config: ShapesConfig) -> list[Workload]:
    if config.smoke:
        return [dataclasses.replace(SMOKE[0], num_q_heads=8, num_kv_heads=1)]
    named = load_workloads().items()
    return [workload for name, workload in named if name.startswith("hydragen-micro-")]


def run(config: ShapesConfig) -> list[dict[str, Any]]:
    """A row for each shape and case; `config.output` is written whenever one is done."""
    return measure_jobs(make_jobs(config), config)


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    values, default = flags.FlagValues(), ShapesConfig()
    flags.DEFINE_string("policy", default.policy, "what to share", flag_values=values)
    flags.DEFINE_integer("num_runs", default.num_runs, "timed calls a case", flag_values=values)
    flags.DEFINE_integer("num_processes", 1, "that compile side by side", flag_values=values)
    flags.DEFINE_bool("smoke", False, "tiny cases, no times, any device", flag_values=values)
    flags.DEFINE_string("commit", None, "of a tree without repository", flag_values=values)
    flags.DEFINE_string("output", None, "JSON lines file", flag_values=values)
    return run_experiment(argv, values, ShapesConfig, run)


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
