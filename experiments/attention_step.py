"""One decode step's attention over a workload as a layer runs it: made, compiled, measured.

What `kernel_roofline` and `planner_ablation` have in common.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from codec_jax import ForestArrays, KVCache, KVPool, Partial, Plan, PlanSpec
from codec_jax.attention import (
    ResolvedPlan,
    attend_packed,
    choose_implementation,
    prepare_plan,
    resolve_plan,
    run_kernels,
    stored_head_dim,
)
from codec_jax.attention_rows import pack_rows, unpack_rows
from codec_jax.planning.device import device_slug
from codec_jax.planning.profiles import CostProfile, find_profile
from experiments.dense_check import DenseReference, dense_reference, largest_errors
from experiments.provenance import implementation_in, provenance
from experiments.timing import Timing, time_each
from experiments.workloads import AnyWorkload

BYTES_PER_US, FLOPS_PER_US = 4.3e6, 790e6
"""Measured ceilings of an H200: device-to-device copy, and an 8192^3 bfloat16 product."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """How attention is measured.

    Attributes:
      dtype, page_size, implementation: as for `generate`.
      num_runs: timed calls of each case.
      num_processes: that compile beside each other, see `experiments.processes`.
      smoke: without times, on any device.
      commit: of the sources, where no repository travels along.
      output: JSON lines file; None writes none.
    """

    dtype: str = "bfloat16"
    page_size: int = 64
    implementation: str | None = None
    num_runs: int = 20
    num_processes: int = 1
    smoke: bool = False
    commit: str | None = None
    output: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_runs", "num_processes"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be positive; got {getattr(self, name)}.")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Queries, keys and values of a workload."""

    q: jax.Array
    kv: KVCache
    forest: ForestArrays
    logits_scale: float
    implementation: str


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The attention of packed rows as a decode step's layer runs it, compiled.

    Attributes:
      inputs, plan: what it is compiled with; others of the same shapes do as well.
      program: from `arguments` to a `Partial` of packed rows.
      arguments: packed rows, pool, resolved plan.
    """

    inputs: Inputs
    plan: Plan
    program: Any
    arguments: tuple

    def call(self) -> Partial:
        """Of packed rows."""
        return self.program(*self.arguments)

    def unpacked(self) -> Partial:
        """Of every request."""
        result = self.call()
        cut = Partial(result.out[..., : self.inputs.q.shape[2]], result.lse)
        return unpack_rows(cut, self.plan, dtype=self.inputs.q.dtype)


def spec_of(workload: AnyWorkload, *, page_size: int, num_workers: int = 132) -> PlanSpec:
    """What plans of a workload are made for."""
    return PlanSpec(
        num_kv_heads=workload.num_kv_heads,
        group_size=workload.num_q_heads // workload.num_kv_heads,
        page_size=page_size,
        num_workers=num_workers,
    )


def floor_us_of(workload: AnyWorkload, dtype: str = "bfloat16") -> float:
    """The larger of unique KV bytes over bandwidth and operations over peak, on an H200."""
    num_bytes = workload.kv_bytes(jnp.dtype(dtype).itemsize)
    return max(num_bytes / BYTES_PER_US, workload.num_flops() / FLOPS_PER_US)


def implementation_of(workload: AnyWorkload, config: MeasureConfig) -> str:
    """What will run it; `NotImplementedError` where the implementation asked for cannot."""
    implementation, _ = choose_implementation(
        (workload.num_kv_heads, config.page_size, workload.head_dim),
        jnp.dtype(config.dtype),
        workload.num_q_heads // workload.num_kv_heads,
        implementation=config.implementation,
    )
    return implementation


def make_pool(workload: AnyWorkload, config: MeasureConfig, *, num_pages: int) -> KVPool:
    """Random keys and values of one layer."""
    width = stored_head_dim(workload.head_dim, implementation=implementation_of(workload, config))
    shape = (num_pages, workload.num_kv_heads, config.page_size, workload.head_dim)
    padding = ((0, 0), (0, 0), (0, 0), (0, width - workload.head_dim))
    dtype = jnp.dtype(config.dtype)
    k, v = (jax.random.normal(jax.random.key(seed), shape, dtype) for seed in range(2))
    return KVPool(jnp.pad(k, padding), jnp.pad(v, padding))


def profile_of(workload: AnyWorkload, config: MeasureConfig) -> CostProfile | None:
    """The measured costs that the decode loop would plan with, if there are: the kernels' alone."""
    implementation = implementation_of(workload, config)
    if implementation != "mosaic_gpu":
        return None
    return find_profile(
        device_slug(),
        dtype=jnp.dtype(config.dtype).name,
        head_dim=stored_head_dim(workload.head_dim, implementation=implementation),
        page_size=config.page_size,
    )


def make_inputs(
    workload: AnyWorkload, forest: ForestArrays, pool: KVPool, *, config: MeasureConfig
) -> Inputs:
    """Random queries over a forest in a pool."""
    q_shape = (workload.batch_size, workload.num_q_heads, workload.head_dim)
    return Inputs(
        q=jax.random.normal(jax.random.key(2), q_shape, jnp.dtype(config.dtype)),
        kv=KVCache(pool, jnp.asarray(forest.page_list), jnp.asarray(forest.kv_len)),
        forest=forest,
        logits_scale=workload.head_dim**-0.5,
        implementation=implementation_of(workload, config),
    )


def compile_step(inputs: Inputs, plan: Plan) -> CompiledStep:
    """The attention with that plan."""
    implementation = inputs.implementation
    rows, resolved = arguments_of(inputs.q, inputs.kv, plan, implementation=implementation)
    arguments = (rows, inputs.kv.pool, resolved)
    program = compile_attention(
        *arguments, logits_scale=inputs.logits_scale, implementation=implementation
    )
    return CompiledStep(inputs, plan, program, arguments)


@functools.partial(jax.jit, static_argnames="implementation")
def arguments_of(
    q: jax.Array, kv: KVCache, plan: Plan, *, implementation: str
) -> tuple[jax.Array, ResolvedPlan]:
    """The packed rows and the resolved plan, made once and not timed."""
    prepared = prepare_plan(plan, implementation=implementation)
    resolved = resolve_plan(prepared, kv.page_list, kv.kv_len, page_size=kv.pool.page_size)
    padding = ((0, 0), (0, 0), (0, kv.pool.head_dim - q.shape[2]))
    return pack_rows(jnp.pad(q, padding), plan), resolved


def compile_attention(
    rows: Any, pool: Any, resolved: Any, *, logits_scale: float, implementation: str
) -> Any:
    """The compiled program for arguments of these shapes (arrays, or their shapes alone)."""

    def attention(rows, pool, resolved) -> Partial:
        layer = jnp.int32(0)
        # Bare: in a decode step, what else `attend_packed` does is fused into the unpacking.
        if implementation == "mosaic_gpu":
            return run_kernels(rows, pool, resolved, layer, logits_scale=logits_scale)
        scale = {"logits_scale": logits_scale, "implementation": implementation}
        return attend_packed(rows, pool, resolved, layer, **scale)

    return jax.jit(attention).lower(rows, pool, resolved).compile()


def checked_row(
    workload: AnyWorkload,
    policy: str,
    compiled: CompiledStep,
    *,
    config: MeasureConfig,
    reference: DenseReference | None = None,
) -> dict[str, Any]:
    """A result row without times: errors against dense attention, the plan's sizes.

    Args:
      workload, policy: what `compiled` is of.
      compiled: what is run.
      config: dtype, commit.
      reference: of its inputs; by default it is made here.
    """
    inputs = compiled.inputs
    error, lse_error = largest_errors(compiled.unpacked(), reference or reference_of(inputs))
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
        "floor_us": floor_us_of(workload, config.dtype),
        "kv_bytes": workload.kv_bytes(jnp.dtype(config.dtype).itemsize),
        "max_rel_err": error,
        "max_lse_err": lse_error,
        "segments": int(compiled.plan.counts.segments),
        "slots": int(compiled.plan.counts.slots),
        **provenance(config.commit),
    }


def reference_of(inputs: Inputs) -> DenseReference:
    """Dense attention of the inputs."""
    return dense_reference(inputs.q, inputs.kv, inputs.forest, logits_scale=inputs.logits_scale)


class Measurable(NamedTuple):
    """A checked row, what is timed for it, and what makes its plan again."""

    row: dict[str, Any]
    call: Callable[[], Any]
    plan: Callable[[], Plan]


def timed_rows(ready: Sequence[Measurable], *, config: MeasureConfig) -> list[dict[str, Any]]:
    """The rows with their times, one after the other in one record of the profiler.

    A smoke test has no times, but for that of planning.
    """
    fields = [dict.fromkeys(("time_us", "p10_us", "p90_us", "floor_share"))] * len(ready)
    if not config.smoke:
        timings = time_each([each.call for each in ready], num_runs=config.num_runs)
        fields = [_fields(each.row, t) for each, t in zip(ready, timings, strict=True)]
    return [
        each.row | times | {"plan_us": _wall_us(each.plan)}
        for each, times in zip(ready, fields, strict=True)
    ]


def describe(row: dict[str, Any]) -> str:
    """A row on one line."""
    line = f"{row['case']:26} {row['policy']:16} {row['implementation']:10}"
    if row["time_us"] is not None:
        line += f" {row['time_us']:8.1f} us, floor {row['floor_us']:7.1f} us = "
        line += f"{row['floor_share']:4.0%}, kernels {[us for _, us in row['kernels']]}"
    return f"{line}, error {row['max_rel_err']:.1e}, lse {row['max_lse_err']:.1e}"


def _fields(row: dict[str, Any], timing: Timing) -> dict[str, Any]:
    return {
        "time_us": timing.median_us,
        "p10_us": timing.p10_us,
        "p90_us": timing.p90_us,
        "floor_share": row["floor_us"] / timing.median_us,
        "kernels": [[name, round(us, 2)] for name, us in timing.kernels],
    }


def _wall_us(make: Callable[[], Any]) -> float:
    """Wall time with everything compiled, host work included; median of 5."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(make())
        times.append(1e6 * (time.perf_counter() - start))
    return float(np.median(times))
