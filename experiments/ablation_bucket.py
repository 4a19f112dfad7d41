"""Cases with the same heads and batch size: one pool, one compiled program, plans of one size."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from codec_jax import ForestArrays, ForestCapacity, Plan, PlanSpec, build_plan
from codec_jax.planning.build import plan_forest
from codec_jax.planning.cost import CostModel
from codec_jax.planning.estimate import estimate
from codec_jax.planning.policies import policy_named
from codec_jax.planning.prediction import predict
from codec_jax.planning.profiles import CostProfile, cost_for
from codec_jax.planning.spec import PlanCapacity
from codec_jax.planning.spec import Workload as PlanWork
from experiments.attention_step import (
    CompiledStep,
    Inputs,
    Measurable,
    MeasureConfig,
    arguments_of,
    checked_row,
    compile_attention,
    describe,
    implementation_of,
    make_inputs,
    make_pool,
    profile_of,
    reference_of,
    spec_of,
    timed_rows,
)
from experiments.cli import say
from experiments.dense_check import DenseReference
from experiments.provenance import provenance
from experiments.workloads import AnyWorkload, padded

MAX_STEPS = 2**22
"""Most page reads of one plan: above, its arrays alone would take over 80 MB for one case."""


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What the cases of a bucket share.

    Attributes:
      workloads: the cases.
      forests: of each case, all of one size.
      jobs: (case, policy) names to measure.
      skipped: steps of the plans that are too large to make, by (case, policy).
      spec, capacity, cost, profile: what all plans are made for; the measured costs of the device
        where there are any.
    """

    workloads: tuple[AnyWorkload, ...]
    forests: dict[str, ForestArrays]
    jobs: tuple[tuple[str, str], ...]
    skipped: dict[tuple[str, str], int]
    spec: PlanSpec
    capacity: PlanCapacity
    cost: CostModel
    profile: CostProfile | None

    def plan(self, name: str, policy: str) -> Plan:
        """The plan of a case."""
        return build_plan(
            self.forests[name], self.spec, policy=policy, capacity=self.capacity, cost=self.cost
        )


def make_bucket(
    workloads: Sequence[AnyWorkload], policies: Sequence[str], config: MeasureConfig
) -> Bucket:
    """The forests in one size, and room for every plan of theirs that is not too large."""
    first = workloads[0]
    spec = spec_of(first, page_size=config.page_size)
    exact = {case.name: case.forest(page_size=config.page_size) for case in workloads}
    size = ForestCapacity(
        nodes=max(forest.parent.size for forest in exact.values()),
        requests=first.batch_size,
        page_entries=max(forest.page_list.size for forest in exact.values()),
    )
    forests = {name: padded(forest, size) for name, forest in exact.items()}
    jobs = [(name, policy) for name in forests for policy in policies]
    steps = {job: _num_steps(forests[job[0]], spec, job[1]) for job in jobs}
    fitting = tuple(job for job in jobs if steps[job] <= MAX_STEPS)
    profile = profile_of(first, config)
    return Bucket(
        workloads=tuple(workloads),
        forests=forests,
        jobs=fitting,
        skipped={job: count for job, count in steps.items() if count > MAX_STEPS},
        spec=spec,
        capacity=PlanCapacity.largest(
            PlanCapacity.for_forest(forests[name], spec, policy=policy_named(policy))
            for name, policy in fitting or jobs[:1]
        ),
        cost=cost_for(spec, profile),
        profile=profile,
    )


def compile_bucket(bucket: Bucket, config: MeasureConfig) -> Any:
    """The program that runs any plan of the bucket, made from shapes alone; None for no plan."""
    if not bucket.jobs:
        return None
    name, policy = bucket.jobs[0]
    case, forest = bucket.workloads[0], bucket.forests[name]

    def arguments():
        plan = plan_forest(
            forest,
            np.int32(0),
            spec=bucket.spec,
            policy=policy_named(policy),
            cost=bucket.cost,
            capacity=bucket.capacity,
        )
        pool = make_pool(case, config, num_pages=forest.page_list.size)
        inputs = make_inputs(case, forest, pool, config=config)
        implementation = implementation_of(case, config)
        rows, resolved = arguments_of(inputs.q, inputs.kv, plan, implementation=implementation)
        return rows, pool, resolved

    return compile_attention(
        *jax.eval_shape(arguments),
        logits_scale=case.head_dim**-0.5,
        implementation=implementation_of(case, config),
    )


class ReadyBucket(NamedTuple):
    """A bucket whose plans have run once and are checked.

    Attributes:
      left_out: rows of the plans that are too large.
      cases: of each case what is timed, policy by policy.
    """

    left_out: list[dict[str, Any]]
    cases: list[list[Measurable]]


def prepare_bucket(
    cases: Sequence[AnyWorkload], *, policies: Sequence[str], config: MeasureConfig
) -> ReadyBucket:
    """Everything but the times: the programs, the plans, how far their results are from dense."""
    bucket = make_bucket(cases, policies, config)
    left_out = list(_left_out(bucket, config))
    program = compile_bucket(bucket, config)
    if program is None:
        return ReadyBucket(left_out, [])
    num_pages = next(iter(bucket.forests.values())).page_list.size
    pool = make_pool(bucket.workloads[0], config, num_pages=num_pages)
    ready = []
    for case in bucket.workloads:
        inputs = make_inputs(case, bucket.forests[case.name], pool, config=config)
        check = functools.partial(
            _check, inputs=inputs, reference=reference_of(inputs), bucket=bucket, program=program
        )
        mine = [policy for name, policy in bucket.jobs if name == case.name]
        ready.append([check(case, policy, config=config) for policy in mine])
    return ReadyBucket(left_out, ready)


def measure_bucket(ready: ReadyBucket, *, config: MeasureConfig) -> list[dict[str, Any]]:
    """A row for each case and policy, a case's policies one after the other in one record.

    First those of plans that are too large, each with the reason in `skipped`.
    """
    rows = list(ready.left_out)
    for case in ready.cases:
        found = timed_rows(case, config=config)
        for row in found:
            say(describe(row))
        rows += found
    return rows


def prediction_of(plan: Plan, bucket: Bucket) -> dict[str, Any]:
    """What the model says of a plan: ticks, and microseconds where costs were measured."""
    predicted = predict(plan, spec=bucket.spec, cost=bucket.cost)
    fields: dict[str, Any] = {
        "cost": "closed form" if bucket.profile is None else "measured",
        "predicted_ticks": int(predicted.makespan_ticks),
        "lower_bound_ticks": int(predicted.lower_bound_ticks),
        "predicted_us": None,
        "lower_bound_us": None,
    }
    if bucket.profile is not None:
        in_us = estimate(plan, spec=bucket.spec, profile=bucket.profile)
        fields |= {"predicted_us": in_us.predicted_us, "lower_bound_us": in_us.lower_bound_us}
    return fields


def _check(
    case: AnyWorkload,
    policy: str,
    *,
    inputs: Inputs,
    reference: DenseReference,
    bucket: Bucket,
    program: Any,
    config: MeasureConfig,
) -> Measurable:
    make_plan = functools.partial(bucket.plan, case.name, policy)
    plan = make_plan()
    rows, resolved = arguments_of(inputs.q, inputs.kv, plan, implementation=inputs.implementation)
    compiled = CompiledStep(inputs, plan, program, (rows, inputs.kv.pool, resolved))
    row = checked_row(case, policy, compiled, config=config, reference=reference)
    return Measurable(row | prediction_of(plan, bucket), compiled.call, make_plan)


def _left_out(bucket: Bucket, config: MeasureConfig) -> Iterator[dict[str, Any]]:
    for (name, policy), steps in bucket.skipped.items():
        reason = f"the plan would have {steps} steps, more than {MAX_STEPS}"
        say(f"{name} {policy} left out: {reason}")
        yield {"case": name, "policy": policy, "skipped": reason, **provenance(config.commit)}


def _num_steps(forest: ForestArrays, spec: PlanSpec, policy: str) -> int:
    work = PlanWork.of_forest(forest, spec, policy=policy_named(policy), num_new_tokens=0)
    return int(work.steps.sum())
