"""How long planning takes: the jitted planner on the device, and a whole plan on the host.

    python -m experiments.planning_time --output planning_time.jsonl   # any device, about 3 minutes
    python -m experiments.planning_time --smoke                        # a small forest, one policy

`plan_forest` alone for 1,024 nodes and 512 requests, its arrays already on the device: on a GPU the
span of its kernels, elsewhere wall time (aim on an H200: 120 us, so 15 us a step where a plan lasts
8). `build_plan` for 20,000 nodes with its checks, transfers included: wall time (aim: 50 ms on 2
cores). Everything is compiled before; rows say how busy the machine was.
"""

import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from codec_jax import ForestArrays, PlanSpec, build_plan
from codec_jax.planning.build import plan_forest
from codec_jax.planning.cost import CostModel
from codec_jax.planning.policies import POLICIES, policy_named
from codec_jax.planning.spec import PlanCapacity
from experiments.cli import run_experiment, say, set_up_process
from experiments.json_lines import write_json_lines
from experiments.provenance import provenance
from experiments.timing import time_calls
from experiments.workloads import RandomForest

DEVICE_FOREST = RandomForest("random-1024", 1024, 512, 100, window=40, seed=6)
HOST_FOREST = RandomForest("random-20000", 20_000, 10_000, 40, window=400, seed=7)
SMOKE_FOREST = RandomForest("random-24", 24, 12, 30, seed=8)
SPEC = PlanSpec(num_kv_heads=8, group_size=4, page_size=64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanningTimeConfig:
    """What to measure.

    Attributes:
      policies: what to share, see `planning.policies.POLICIES`.
      num_runs: timed calls.
      smoke: one small forest.
      commit: of the sources, where no repository travels along.
      output: JSON lines file; None writes none.
    """

    policies: tuple[str, ...] = tuple(POLICIES)
    num_runs: int = 20
    smoke: bool = False
    commit: str | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        for name in self.policies:
            policy_named(name)


def run(config: PlanningTimeConfig) -> list[dict[str, Any]]:
    """Two rows for each policy, also written to `config.output`."""
    rows = []
    for what, forest in (("device", DEVICE_FOREST), ("host", HOST_FOREST)):
        drawn = SMOKE_FOREST if config.smoke else forest
        arrays = drawn.forest(page_size=SPEC.page_size)
        for policy in config.policies:
            measure = _on_device if what == "device" else _on_host
            times = measure(arrays, policy, num_runs=config.num_runs)
            rows.append(
                {
                    "what": "plan_forest" if what == "device" else "build_plan",
                    "policy": policy,
                    "forest": drawn.name,
                    "nodes": int(arrays.num_nodes),
                    "requests": int(arrays.num_requests),
                    **times,
                    "num_runs": config.num_runs,
                    "cores": os.cpu_count(),
                    "load_average": os.getloadavg()[0],
                    **provenance(config.commit),
                }
            )
            say(describe(rows[-1]))
    if config.output is not None:
        write_json_lines(config.output, rows)
    return rows


def describe(row: dict[str, Any]) -> str:
    """A row on one line."""
    return (
        f"{row['what']:12} {row['policy']:18} {row['nodes']:6} nodes {row['requests']:6} requests:"
        f" {row['time_us']:9.1f} us ({row['clock']}), load average {row['load_average']:.1f}"
    )


def _on_device(arrays: ForestArrays, policy: str, *, num_runs: int) -> dict[str, Any]:
    """The planner alone: all arrays there, nothing checked, nothing read back."""
    chosen = policy_named(policy)
    capacity = PlanCapacity.for_forest(arrays, SPEC, policy=chosen)
    cost = CostModel.closed_form(SPEC)
    inputs = jax.device_put((arrays, np.int32(0)))
    program = plan_forest.lower(
        *inputs, spec=SPEC, policy=chosen, cost=cost, capacity=capacity
    ).compile()
    call = functools.partial(program, *inputs)
    if jax.default_backend() != "gpu":
        return wall_times(call, num_runs=num_runs)
    timing = time_calls(call, num_runs=num_runs)
    return {
        "clock": "device",
        "time_us": timing.median_us,
        "p10_us": timing.p10_us,
        "p90_us": timing.p90_us,
        "num_kernels": len(timing.kernels),
    }


def _on_host(arrays: ForestArrays, policy: str, *, num_runs: int) -> dict[str, Any]:
    """All that a caller waits for, the arrays given in NumPy."""
    return wall_times(lambda: build_plan(arrays, SPEC, policy=policy), num_runs=num_runs)


def wall_times(call: Callable[[], Any], *, num_runs: int) -> dict[str, Any]:
    """Median, 10th and 90th percentile of wall time, after a call that is not timed."""
    jax.block_until_ready(call())
    times = []
    for _ in range(num_runs):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(1e6 * (time.perf_counter() - start))
    p10, median, p90 = (float(value) for value in np.percentile(times, [10, 50, 90]))
    return {"clock": "wall", "time_us": median, "p10_us": p10, "p90_us": p90}


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    values = flags.FlagValues()
    default = PlanningTimeConfig()
    flags.DEFINE_list("policies", list(default.policies), "what to share", flag_values=values)
    flags.DEFINE_integer("num_runs", default.num_runs, "timed calls", flag_values=values)
    flags.DEFINE_bool("smoke", False, "one small forest", flag_values=values)
    flags.DEFINE_string("commit", None, "of a tree without repository", flag_values=values)
    flags.DEFINE_string("output", None, "JSON lines file", flag_values=values)
    return run_experiment(argv, values, PlanningTimeConfig, run)


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
