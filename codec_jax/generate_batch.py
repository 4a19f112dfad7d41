"""One batch of requests: everything about it that is known on the host before the device works."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from codec_jax.attention import choose_implementation, default_num_workers, stored_head_dim
from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestArrays, ForestCapacity, export_arrays, node_order
from codec_jax.forest_prefill import PrefillChunks, prefill_chunks
from codec_jax.generate_memory import Memory, workspace_bytes
from codec_jax.generate_requests import Request
from codec_jax.generate_sizes import RunSizes
from codec_jax.models import LoadedModel
from codec_jax.models.memory import available_bytes
from codec_jax.planning.cost import CostModel
from codec_jax.planning.device import device_slug
from codec_jax.planning.policies import DEFAULT_POLICY, policy_named
from codec_jax.planning.profiles import cost_for, find_profile
from codec_jax.planning.spec import PlanCapacity, PlanSpec

MAX_OPTION = 2**24
"""Larger sizes would not fit the 32-bit arithmetic of plans; nobody needs them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a batch is run; none of these changes an answer beyond rounding.

    Attributes:
      page_size: tokens of a KV page.
      policy: which nodes are read once for all sharers, see `planning.policies.POLICIES`.
      implementation: "mosaic_gpu", "xla" or "reference"; None takes the first that can.
      steps_per_visit: decode steps between two visits of the host; one plan each.
      prefill_chunk: token rows of a prefill call.
      num_workers: equal ranges that a plan is cut into; None asks the device.
      num_pages: pages of the pool; None takes what the batch can need at most. With fewer, rows
        that have ended give theirs back, and a batch that still runs short raises OutOfPagesError.
    """

    page_size: int = 64
    policy: str = DEFAULT_POLICY
    implementation: str | None = None
    steps_per_visit: int = 16
    prefill_chunk: int = 128
    num_workers: int | None = None
    num_pages: int | None = None

    def __post_init__(self) -> None:
        policy_named(self.policy)
        optional = ("num_workers", "num_pages")
        for name in ("page_size", "steps_per_visit", "prefill_chunk", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
            if value is None or not is_integer or value < 1:
                raise ValueError(f"`{name}` must be a positive integer; got {value!r}.")
            if value > MAX_OPTION:
                raise ValueError(f"`{name}` must be at most {MAX_OPTION}; got {value}.")


class NodeSharing(NamedTuple):
    """A node's tokens, the requests that use them, and whether the policy reads it once for all."""

    tokens: int
    sharers: int
    is_read_once: bool

    @property
    def reads_saved(self) -> float:
        """KV token reads that each sharer is spared in a decode step: it pays its part only."""
        return self.tokens * (1 - 1 / self.sharers) if self.is_read_once else 0.0


class Batch:
    """Requests with their forest, sizes and memory; nothing of it is on the device.

    The forest numbers requests in batch order, so request i is row i.

    Attributes:
      requests: in batch order.
      options: how to run them.
      config: the model's sizes.
      forest: the prompts, with a private leaf for each request.
      num_prompt_pages: pages that hold the prompts.
      sizes: shapes of the run.
      chunks: what prefill computes.
      implementation, implementation_reason: what will run, and why.

    Raises:
      ValueError: the batch does not fit the device's memory, or `num_pages` not even the prompts.
      NotImplementedError: the implementation that was asked for cannot do it.
    """

    def __init__(self, model: LoadedModel, requests: Sequence[Request], *, options: Options):
        self.requests, self.options, self.config = requests, options, model.decoder.config
        self.implementation, self.implementation_reason = choose_implementation(
            (self.config.num_kv_heads, options.page_size, self.config.head_dim),
            self.config.array_dtype,
            self.config.group_size,
            implementation=options.implementation,
        )
        self.forest = Forest(page_size=options.page_size)
        for request in requests:
            limit = request.sampling.max_new_tokens
            self.forest.add_request(request.prompt_ids, max_new_tokens=limit)
        self.num_prompt_pages = self.forest.pages.num_used
        self.sizes = self._choose_sizes()
        self.memory = self._estimate_memory(model)
        self.memory.check()
        self.chunks: PrefillChunks = prefill_chunks(
            self.forest, chunk_size=options.prefill_chunk, batch_size=self.sizes.batch
        )
        self.forest.pages.bound(self.sizes.pages)

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """(num_kv_heads, page_size, head_dim) of the pool."""
        head_dim = stored_head_dim(self.config.head_dim, implementation=self.implementation)
        return (self.config.num_kv_heads, self.options.page_size, head_dim)

    @property
    def spec(self) -> PlanSpec:
        """What plans are made for."""
        return PlanSpec(
            num_kv_heads=self.config.num_kv_heads,
            group_size=self.config.group_size,
            page_size=self.options.page_size,
            num_workers=self.options.num_workers or default_num_workers(),
        )

    @property
    def cost(self) -> CostModel:
        """What plans are made with: costs measured on this device for such pages, if there are."""
        profile = find_profile(
            device_slug(),
            dtype=self.config.array_dtype.name,
            head_dim=self.page_shape[2],
            page_size=self.options.page_size,
        )
        return cost_for(self.spec, profile if self.implementation == "mosaic_gpu" else None)

    def plan_capacity(self, forest: ForestArrays, *, num_new_tokens: int = 0) -> PlanCapacity:
        """Room for the plans of a forest under the batch's policy."""
        return PlanCapacity.for_forest(
            forest,
            self.spec,
            policy=policy_named(self.options.policy),
            num_new_tokens=num_new_tokens,
        )

    def arrays(self) -> ForestArrays:
        """The forest as arrays of the run's sizes."""
        return export_arrays(self.forest, self.sizes.forest)

    def sharing(self, row: int) -> list[NodeSharing]:
        """The nodes on a row's path that other requests use too, from the root down."""
        path = self.forest.path(self.forest.end_node(row))
        return [self._sharing[node_id] for node_id in path if self._sharing[node_id].sharers > 1]

    @functools.cached_property
    def _sharing(self) -> dict[int, NodeSharing]:
        arrays, order = export_arrays(self.forest), node_order(self.forest).tolist()
        is_read_once = policy_named(self.options.policy).share(arrays.parent).tolist()
        sharers = (arrays.request_hi - arrays.request_lo).tolist()
        return {
            node_id: NodeSharing(self.forest.node(node_id).kv_len, count, once)
            for node_id, count, once in zip(order, sharers, is_read_once, strict=True)
        }

    def _choose_sizes(self) -> RunSizes:
        limits = [request.sampling.max_new_tokens for request in self.requests]
        reserved = sum(-(-limit // self.options.page_size) for limit in limits)
        sizes = RunSizes.for_run(
            ForestCapacity.for_forest(self.forest),
            num_pages=self.num_prompt_pages + reserved,
            max_new_tokens=max(limits, default=1),
            page_bytes=self._page_bytes(),
        )
        num_pages = self.options.num_pages
        if num_pages is None:
            return sizes
        if num_pages < self.num_prompt_pages:
            raise ValueError(
                f"`num_pages` must hold the prompts, {self.num_prompt_pages} pages; got"
                f" {num_pages}."
            )
        return dataclasses.replace(sizes, pages=num_pages)

    def _page_bytes(self) -> int:
        """Bytes of one page's keys and values in all layers."""
        num_kv_heads, page_size, head_dim = self.page_shape
        tokens = 2 * self.config.num_layers * num_kv_heads * page_size
        return tokens * head_dim * self.config.array_dtype.itemsize

    def _estimate_memory(self, model: LoadedModel) -> Memory:
        rows = max(self.sizes.batch, self.options.prefill_chunk) * self.spec.units_per_request
        workspace = workspace_bytes(
            self.config,
            batch_size=self.sizes.batch,
            prefill_chunk=self.options.prefill_chunk,
            num_tiles=2 * -(-rows // self.spec.units_per_tile) + 1,
            page_size=self.options.page_size,
        )
        return Memory(
            weights_bytes=sum(x.nbytes for x in jax.tree.leaves(model.decoder.arrays())),
            pool_bytes=self.sizes.pages * self._page_bytes(),
            workspace_bytes=workspace,
            available_bytes=available_bytes(),
        )
