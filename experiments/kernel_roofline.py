"""Attention over the papers' forests against the physical floor, one decode step, merge included.

    python -m experiments.kernel_roofline --output roofline.jsonl          # on an NVIDIA H200
    python -m experiments.kernel_roofline --smoke                          # on a CPU, tiny, untimed

Floor: the larger of unique KV bytes over 4.3 TB/s and operations over 790 TFLOP/s, both measured on
an H200. The time is the span of the two kernels' launches, the cache emptied before each call.
Expected: within 15% of the floor where a node is long, further where the whole step takes under
30 us; about 6 s a case.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from codec_jax import ForestArrays, KVCache, KVPool, Partial, Plan, PlanSpec, build_plan
from codec_jax.attention import (
    attend_packed,
    choose_implementation,
    prepare_plan,
    resolve_plan,
    run_kernels,
    stored_head_dim,
)
from codec_jax.attention_rows import pack_rows, unpack_rows
from experiments.cli import OK, exit_status, parse_flags, say, set_up_process, usage_errors
from experiments.dense_check import max_relative_error
from experiments.json_lines import check_writable, write_json_lines
from experiments.provenance import implementation_in, provenance
from experiments.timing import Timing, time_calls
from experiments.workloads import Workload, load_workloads

BYTES_PER_US, FLOPS_PER_US = 4.3e6, 790e6
"""Measured ceilings of an H200: device-to-device copy, and an 8192^3 bfloat16 product."""
SMOKE = (
    Workload("smoke-star", (1, 5), (40, 9), num_q_heads=8, num_kv_heads=2, head_dim=64),
    Workload("smoke-forest", (2, 4, 8), (20, 1, 33), num_q_heads=8, num_kv_heads=2, head_dim=64),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RooflineConfig:
    """What to measure.

    Attributes:
      cases: names in workloads.json; empty takes those of the speed table.
      policies: what to share, see `planning.policies.POLICIES`.
      dtype, page_size, implementation: as for `generate`.
      num_runs: timed calls of each case.
      smoke: tiny cases without times, on any device.
      commit: of the sources, where no repository travels along.
      output: JSON lines file; None writes none.
    """

    cases: tuple[str, ...] = ()
    policies: tuple[str, ...] = ("balanced",)
    dtype: str = "bfloat16"
    page_size: int = 64
    implementation: str | None = None
    num_runs: int = 20
    smoke: bool = False
    commit: str | None = None
    output: str | None = None


_BATCH = 5
"""Cases in memory at a time."""
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


@dataclasses.dataclass(frozen=True)
class _Step:
    """One case ready to run."""

    q: jax.Array
    kv: KVCache
    plan: Plan
    forest: ForestArrays
    logits_scale: float
    implementation: str


def run(config: RooflineConfig) -> list[dict[str, Any]]:
    """A row for each case and policy, also written to `config.output`."""
    rows = []
    jobs = list(itertools.product(_workloads(config), config.policies))
    for first in range(0, len(jobs), _BATCH):
        few = jobs[first : first + _BATCH]
        # Compiled together (XLA lets go of the interpreter), timed one after the other.
        with ThreadPoolExecutor(_BATCH) as pool:
            ready = list(pool.map(lambda job: _compile(_prepare(job[0], job[1], config)), few))
        for (workload, policy), compiled in zip(few, ready, strict=True):
            rows.append(_measure(workload, policy, compiled, config=config))
            say(_describe(rows[-1]))
    if config.output is not None:
        write_json_lines(config.output, rows)
    return rows


def _workloads(config: RooflineConfig) -> Sequence[Workload]:
    if config.smoke:
        return SMOKE
    known = load_workloads()
    unknown = [name for name in config.cases if name not in known]
    if unknown:
        raise ValueError(f"`cases` must be names in workloads.json; got {unknown[0]!r}.")
    return [known[name] for name in config.cases or SPEED_TABLE]


def _measure(
    workload: Workload, policy: str, compiled: "_Compiled", *, config: RooflineConfig
) -> dict[str, Any]:
    step, result = compiled.step, compiled.unpacked()
    error, lse_error = max_relative_error(
        result, step.q, step.kv, step.forest, logits_scale=step.logits_scale
    )
    floor_us = max(workload.kv_bytes() / BYTES_PER_US, workload.num_flops() / FLOPS_PER_US)
    times: dict[str, Any] = dict.fromkeys(("time_us", "p10_us", "p90_us", "floor_share"))
    if not config.smoke:
        timing: Timing = time_calls(compiled.call, num_runs=config.num_runs)
        times = {"time_us": timing.median_us, "p10_us": timing.p10_us, "p90_us": timing.p90_us}
        times["floor_share"] = floor_us / timing.median_us
        times["kernels"] = [[name, round(us, 2)] for name, us in timing.kernels]
    return {
        "case": workload.name,
        "policy": policy,
        "implementation": implementation_in(str(compiled.program.as_text())),
        "dtype": config.dtype,
        "num_q_heads": workload.num_q_heads,
        "num_kv_heads": workload.num_kv_heads,
        "head_dim": workload.head_dim,
        "page_size": config.page_size,
        "batch_size": workload.batch_size,
        **times,
        "floor_us": floor_us,
        "plan_us": _plan_us(workload, policy, step),
        "kv_bytes": workload.kv_bytes(),
        "max_rel_err": error,
        "max_lse_err": lse_error,
        "segments": int(step.plan.counts.segments),
        "slots": int(step.plan.counts.slots),
        **provenance(config.commit),
    }


def _spec(workload: Workload, page_size: int) -> PlanSpec:
    group_size = workload.num_q_heads // workload.num_kv_heads
    return PlanSpec(num_kv_heads=workload.num_kv_heads, group_size=group_size, page_size=page_size)


def _prepare(workload: Workload, policy: str, config: RooflineConfig) -> _Step:
    dtype = jnp.dtype(config.dtype)
    spec = _spec(workload, config.page_size)
    implementation, _ = choose_implementation(
        (workload.num_kv_heads, config.page_size, workload.head_dim),
        dtype,
        spec.group_size,
        implementation=config.implementation,
    )
    forest = workload.forest(page_size=config.page_size)
    width = stored_head_dim(workload.head_dim, implementation=implementation)
    shape = (forest.page_list.size, workload.num_kv_heads, config.page_size, workload.head_dim)
    padding = ((0, 0), (0, 0), (0, 0), (0, width - workload.head_dim))
    k, v, q = (jax.random.key(seed) for seed in range(3))
    k, v = (jnp.pad(jax.random.normal(key, shape, dtype), padding) for key in (k, v))
    q_shape = (workload.batch_size, workload.num_q_heads, workload.head_dim)
    return _Step(
        q=jax.random.normal(q, q_shape, dtype),
        kv=KVCache(KVPool(k, v), jnp.asarray(forest.page_list), jnp.asarray(forest.kv_len)),
        plan=build_plan(forest, spec, policy=policy),
        forest=forest,
        logits_scale=workload.head_dim**-0.5,
        implementation=implementation,
    )


@dataclasses.dataclass(frozen=True)
class _Compiled:
    """The attention of packed rows as a decode step's layer runs it, compiled."""

    step: _Step
    program: Any
    arguments: tuple

    def call(self) -> Partial:
        """Of packed rows."""
        return self.program(*self.arguments)

    def unpacked(self) -> Partial:
        """Of every request."""
        result = self.call()
        cut = Partial(result.out[..., : self.step.q.shape[2]], result.lse)
        return unpack_rows(cut, self.step.plan, dtype=self.step.q.dtype)


def _compile(step: _Step) -> _Compiled:
    prepared = jax.jit(lambda plan: prepare_plan(plan, implementation=step.implementation))(
        step.plan
    )
    resolved = jax.jit(
        lambda prepared, kv: resolve_plan(
            prepared, kv.page_list, kv.kv_len, page_size=kv.pool.page_size
        )
    )(prepared, step.kv)
    padding = ((0, 0), (0, 0), (0, step.kv.pool.head_dim - step.q.shape[2]))
    rows = jax.jit(lambda q, plan: pack_rows(jnp.pad(q, padding), plan))(step.q, step.plan)

    def attention(rows, pool, resolved) -> Partial:
        # Bare: in a decode step, what else `attend_packed` does is fused into the unpacking.
        if step.implementation == "mosaic_gpu":
            return run_kernels(rows, pool, resolved, layer, logits_scale=step.logits_scale)
        return attend_packed(
            rows,
            pool,
            resolved,
            layer,
            logits_scale=step.logits_scale,
            implementation=step.implementation,
        )

    layer, arguments = jnp.int32(0), (rows, step.kv.pool, resolved)
    return _Compiled(step, jax.jit(attention).lower(*arguments).compile(), arguments)


def _plan_us(workload: Workload, policy: str, step: _Step) -> float:
    """Wall time of a plan with everything compiled, host work included; median of 5."""
    spec, times = _spec(workload, step.kv.pool.page_size), []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(build_plan(step.forest, spec, policy=policy))
        times.append(1e6 * (time.perf_counter() - start))
    return float(np.median(times))


def _describe(row: dict[str, Any]) -> str:
    line = f"{row['case']:26} {row['policy']:16} {row['implementation']:10}"
    if row["time_us"] is not None:
        line += f" {row['time_us']:8.1f} us, floor {row['floor_us']:7.1f} us = "
        line += f"{row['floor_share']:4.0%}, kernels {[us for _, us in row['kernels']]}"
    return f"{line}, error {row['max_rel_err']:.1e}, lse {row['max_lse_err']:.1e}"


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    values = flags.FlagValues()
    default = RooflineConfig()
    for name in ("cases", "policies"):
        text = {"cases": "names in workloads.json", "policies": "what to share"}[name]
        flags.DEFINE_list(name, list(getattr(default, name)), text, flag_values=values)
    flags.DEFINE_string("dtype", default.dtype, "of keys and values", flag_values=values)
    flags.DEFINE_integer("page_size", default.page_size, "tokens of a page", flag_values=values)
    flags.DEFINE_string("implementation", None, "default: what supports it", flag_values=values)
    flags.DEFINE_integer("num_runs", default.num_runs, "timed calls a case", flag_values=values)
    flags.DEFINE_bool("smoke", False, "tiny cases, no times, any device", flag_values=values)
    flags.DEFINE_string("commit", None, "of a tree without repository", flag_values=values)
    flags.DEFINE_string("output", None, "JSON lines file", flag_values=values)

    def command() -> int:
        parse_flags(argv, values)
        names = [field.name for field in dataclasses.fields(default)]
        settings: dict[str, Any] = {name: values[name].value for name in names}
        settings |= {name: tuple(settings[name] or ()) for name in ("cases", "policies")}
        with usage_errors():
            config = RooflineConfig(**settings)
            _workloads(config)
            if config.output is not None:
                check_writable(config.output)
        run(config)
        return OK

    return exit_status(command)


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
