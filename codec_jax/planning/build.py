"""The planner: forest arrays in, plan out, jit-compiled with fixed capacities."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from codec_jax.forest_arrays import ForestArrays, check_page_size
from codec_jax.planning.cost import CostModel, StepTicks
from codec_jax.planning.items import items_of_tiles, lay_runs, make_items, make_steps
from codec_jax.planning.plan import Plan, PlanCounts
from codec_jax.planning.policies import DEFAULT_POLICY, Policy, policy_named
from codec_jax.planning.scans import iota
from codec_jax.planning.segments import divide
from codec_jax.planning.spec import TILE_ROWS, PlanCapacity, PlanSpec, Workload
from codec_jax.planning.tiles import Tiles, form_tiles
from codec_jax.planning.virtual_nodes import (
    NodeUnits,
    VirtualNodes,
    copies_of,
    node_units,
    num_short_pages,
    reach_of,
    virtual_nodes,
)


class PlanOverflowError(RuntimeError):
    """A plan needs more room than its capacity; it must not be used."""


def build_plan(
    forest: ForestArrays,
    spec: PlanSpec,
    *,
    policy: str = DEFAULT_POLICY,
    num_new_tokens: int = 0,
    capacity: PlanCapacity | None = None,
    cost: CostModel | None = None,
) -> Plan:
    """A checked plan for one host visit (CoDec, arXiv 2505.17694, section on task division).

    Args:
      forest: the forest's arrays (NumPy or JAX), see `export_arrays`.
      spec: head counts, page size, workers.
      policy: which nodes are shared; see `planning.policies.POLICIES`.
      num_new_tokens: tokens that each private leaf may gain while the plan is in use.
      capacity: array sizes; by default sizes that always suffice, in powers of two.
      cost: ticks of steps and segments; by default a closed form. See `planning.profiles`.

    Raises:
      ValueError: unknown policy, a forest that is empty, of another page size or with requests
        numbered past its capacity, or costs that could exceed 32-bit integers.
      PlanOverflowError: the given capacity is too small; names each array with need and room.
    """
    chosen = policy_named(policy)
    if not isinstance(forest, ForestArrays):
        raise ValueError(
            f"`forest` must be ForestArrays, see `export_arrays`; got {type(forest).__name__}."
        )
    forest = ForestArrays(*(np.asarray(field) for field in forest))
    _check_forest(forest, spec, num_new_tokens)
    work = Workload.of_forest(forest, spec, policy=chosen, num_new_tokens=num_new_tokens)
    if capacity is None:
        capacity = PlanCapacity.for_forest(
            forest, spec, policy=chosen, num_new_tokens=num_new_tokens
        )
    cost = cost or CostModel.closed_form(spec)
    _check_ticks(spec, capacity, cost, most_steps=work.most_steps())
    plan = plan_forest(
        forest, np.int32(num_new_tokens), spec=spec, policy=chosen, cost=cost, capacity=capacity
    )
    check_capacity(plan, capacity)
    return plan


@functools.partial(jax.jit, static_argnames=("spec", "policy", "cost", "capacity"))
def plan_forest(
    forest: ForestArrays,
    num_new_tokens: Int32[Array, ""],
    *,
    spec: PlanSpec,
    policy: Policy,
    cost: CostModel,
    capacity: PlanCapacity,
) -> Plan:
    """The plan, unchecked: compare `plan.counts` with the capacity before the first use.

    Pure and jit-compiled: arrays in, arrays out, no host work. Tiles along the depth-first order;
    one stream for the narrow nodes of a tile, blocks of two tiles for wide nodes; all on one line
    of cost, cut into equal ranges.
    """
    units = node_units(forest, num_new_tokens, spec=spec)
    tiles = form_tiles(
        *units,
        forest.num_requests * spec.units_per_request,
        spec=spec,
        shape=(forest.request_row.shape[0] * spec.units_per_request, capacity.tiles),
    )
    nodes = _as_read(
        forest, units, tiles, num_new_tokens, spec=spec, policy=policy, cost=cost, capacity=capacity
    )
    runs = lay_runs(nodes, tiles, spec=spec)
    reach = reach_of(forest, num_new_tokens)
    steps = make_steps(
        forest, nodes, runs, reach, page_size=spec.page_size, capacity=capacity.steps
    )
    items, num_items = make_items(nodes, runs, num_tiles=capacity.tiles, capacity=capacity.items)
    division = divide(
        items,
        StepTicks.of(steps, cost),
        spec=spec,
        policy=policy,
        cost=cost,
        capacity=capacity.segments,
    )
    tile_indptr, tile_items = items_of_tiles(items, num_tiles=capacity.tiles)
    counts = PlanCounts(
        virtual_nodes=nodes.total,
        tiles=tiles.num_tiles,
        steps=jnp.sum(nodes.num_pages, dtype=jnp.int32),
        items=num_items,
        segments=division.num_segments,
        slots=division.num_slots,
    )
    return Plan(
        steps=steps,
        items=items,
        segments=division.segments,
        worker_indptr=division.worker_indptr,
        slot_indptr=division.slot_indptr,
        tile_indptr=tile_indptr,
        tile_items=tile_items,
        packed_row=_packed_rows(forest, tiles, spec=spec, num_tiles=capacity.tiles),
        counts=counts,
        page_size=spec.page_size,
        num_nodes=forest.parent.shape[0],
        num_page_entries=forest.page_list.shape[0],
    )


def _as_read(
    forest: ForestArrays,
    units: NodeUnits,
    tiles: Tiles,
    num_new_tokens: Int32[Array, ""],
    *,
    spec: PlanSpec,
    policy: Policy,
    cost: CostModel,
    capacity: PlanCapacity,
) -> VirtualNodes:
    """The nodes, each as often as the policy reads it."""
    if not policy.repeats and capacity.virtual_nodes == forest.parent.shape[0]:
        # The nodes themselves, in order already.
        return VirtualNodes(iota(capacity.virtual_nodes), *units, forest.num_nodes)
    num_short = num_short_pages(forest, units, num_new_tokens, page_size=spec.page_size)
    return virtual_nodes(
        units,
        tiles,
        copies_of(forest, units, tiles, num_short, policy=policy, cost=cost),
        units_per_request=spec.units_per_request,
        capacity=capacity.virtual_nodes,
    )


def check_capacity(plan: Plan, capacity: PlanCapacity) -> None:
    """Raises PlanOverflowError when a count exceeds its capacity."""
    counts = jax.device_get(plan.counts)
    short = [
        f"{field.name} {getattr(counts, field.name)} > {getattr(capacity, field.name)}"
        for field in dataclasses.fields(PlanCapacity)
        if getattr(counts, field.name) > getattr(capacity, field.name)
    ]
    if short:
        raise PlanOverflowError(
            f"`capacity` is too small for this forest: {', '.join(short)}. Leave `capacity` out, or"
            " plan again with at least these sizes (what did not fit may need more)."
        )


def _packed_rows(forest: ForestArrays, tiles: Tiles, *, spec: PlanSpec, num_tiles: int):
    """Packed row of each (batch row, query head of the group); out of range without a request."""
    num_requests = forest.request_row.shape[0]
    unit_rows = jnp.reshape(tiles.unit_row, (num_requests, spec.units_per_request))
    offsets = iota(spec.rows_per_unit)
    rows = jnp.reshape(
        unit_rows[:, :, None] + offsets[None, None, :], (num_requests, spec.group_size)
    )
    inert = num_tiles * TILE_ROWS
    batch_row = jnp.where(
        iota(num_requests) < forest.num_requests, forest.request_row, num_requests
    )
    empty = jnp.full((num_requests, spec.group_size), inert, jnp.int32)
    return empty.at[batch_row].set(rows, mode="drop")


def _check_forest(forest: ForestArrays, spec: PlanSpec, num_new_tokens: int) -> None:
    if not isinstance(num_new_tokens, int | np.integer) or num_new_tokens < 0:
        raise ValueError(f"`num_new_tokens` must be a whole number; got {num_new_tokens}.")
    if not forest.parent.size or not forest.request_row.size:
        raise ValueError("`forest` must have room for a node and a request; it is empty.")
    check_page_size(forest, spec.page_size)
    row, capacity = int(forest.request_row.max()), forest.request_row.size
    if row >= capacity:
        raise ValueError(
            f"`forest` must number its requests below its capacity of {capacity}; one has number"
            f" {row}. Export it with a larger capacity, or build it anew after removals."
        )


def _check_ticks(
    spec: PlanSpec, capacity: PlanCapacity, cost: CostModel, *, most_steps: int
) -> None:
    """Refuses work whose running cost could pass 2**31 - 1 ticks, before any array is made."""
    step = max(cost.step_ticks, cost.wide_step_ticks)
    most = (capacity.items * cost.segment_ticks + most_steps * step) * spec.num_kv_heads
    if most >= 2**31:
        raise ValueError(
            f"`forest` is too large for one plan: up to {most} ticks of work, at most"
            " 2**31 - 1 are possible. Plan fewer requests at a time."
        )
