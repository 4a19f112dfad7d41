"""One batch on the device: pages, prefill, and visits of k decode steps, each with its plan."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from flax import nnx

from codec_jax.attention import choose_implementation, default_num_workers
from codec_jax.decode import FULL, RUNNING, STOPPED, DecodeState, RowState, decode_steps, draw_first
from codec_jax.forest import Forest
from codec_jax.forest_arrays import ForestArrays, ForestCapacity, export_arrays
from codec_jax.generate_requests import Request, row_sampling
from codec_jax.generate_sizes import RunSizes, common_capacity, pad_forest
from codec_jax.kv_cache import KVPool
from codec_jax.models import LoadedModel
from codec_jax.planning.build import build_plan
from codec_jax.planning.policies import policy_named
from codec_jax.planning.spec import PlanCapacity, PlanSpec
from codec_jax.prefill import PrefillInputs, PrefillState, prefill_chunk
from codec_jax.forest_prefill import PrefillChunk, prefill_chunks

FINISH_REASONS = {RUNNING: None, STOPPED: "stop", FULL: "length"}


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
    """

    page_size: int = 64
    policy: str = "balanced"
    implementation: str | None = None
    steps_per_visit: int = 16
    prefill_chunk: int = 128
    num_workers: int | None = None

    def __post_init__(self) -> None:
        policy_named(self.policy)
        for name in ("page_size", "steps_per_visit", "prefill_chunk", "num_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"`{name}` must be positive; got {value}.")


class Batch:
    """Requests with their forest, made on the host; `run` does the device's work.

    The forest numbers requests in batch order, so request i is row i.
    """

    def __init__(self, model: LoadedModel, requests: Sequence[Request], *, options: Options):
        self._config = model.decoder.config
        self._graphdef, self._params = nnx.split(model.decoder)
        self._stop_ids = np.array(model.tokenizer.stop_ids or (-1,), np.int32)
        self._requests = requests
        self.options = options
        self.implementation, self.implementation_reason = choose_implementation(
            self._pool_shape(),
            self._config.array_dtype,
            self._config.group_size,
            implementation=options.implementation,
        )
        self.forest = Forest(page_size=options.page_size)
        for request in requests:
            limit = request.sampling.max_new_tokens
            self.forest.add_request(request.prompt_ids, max_new_tokens=limit)
        self.num_prompt_pages = self.forest.pages.num_used
        self._sizes = self._choose_sizes()
        self._chunks = self._cut_prefill()

    @property
    def num_prefill_rows(self) -> int:
        """Token rows given to prefill, padding included."""
        return len(self._chunks) * self.options.prefill_chunk

    @property
    def num_prefill_padding(self) -> int:
        """Prefill rows that hold no token."""
        return self.num_prefill_rows - sum(chunk.num_tokens for chunk in self._chunks)

    def num_shared_tokens(self, row: int) -> int:
        """Tokens on the row's path that another request uses too."""
        nodes = (self.forest.node(i) for i in self._shared_nodes(row))
        return sum(node.kv_len for node in nodes)

    def run(self) -> Iterator[list[tuple[tuple[int, ...], str | None]]]:
        """After prefill and after each visit: every row's new tokens so far, and why it ended."""
        prefilled = self._prefill()
        arrays = export_arrays(self.forest, self._sizes.forest)
        state = jax.device_put(self._first_state(prefilled.pool, arrays))
        state = draw_first(self._params, state, prefilled.last_hidden, graphdef=self._graphdef)
        spec, capacity = self._spec(), self._decode_capacity(arrays)
        while True:
            status, num_new, new_tokens, kv_len = jax.device_get(
                (state.rows.status, state.rows.num_new, state.new_tokens, state.kv_len)
            )
            yield [
                (
                    tuple(new_tokens[row, : num_new[row]].tolist()),
                    FINISH_REASONS[status[row].item()],
                )
                for row in range(len(self._requests))
            ]
            if not (status == RUNNING).any():
                return
            plan = build_plan(
                self._live_forest(arrays, kv_len, status),
                spec,
                policy=self.options.policy,
                num_new_tokens=self.options.steps_per_visit,
                capacity=capacity,
            )
            state = decode_steps(
                self._params,
                state,
                plan,
                graphdef=self._graphdef,
                num_steps=self.options.steps_per_visit,
                implementation=self.implementation,
            )

    def _choose_sizes(self) -> RunSizes:
        reserved = sum(
            -(-request.sampling.max_new_tokens // self.options.page_size)
            for request in self._requests
        )
        heads, page_size, head_dim = self._pool_shape()
        itemsize = self._config.array_dtype.itemsize
        return RunSizes.for_run(
            ForestCapacity.for_forest(self.forest),
            num_pages=self.num_prompt_pages + reserved,
            max_new_tokens=max((r.sampling.max_new_tokens for r in self._requests), default=1),
            page_bytes=2 * self._config.num_layers * heads * page_size * head_dim * itemsize,
        )

    def _cut_prefill(self) -> list[PrefillChunk]:
        return prefill_chunks(
            self.forest, chunk_size=self.options.prefill_chunk, batch_size=self._sizes.batch
        )

    def _prefill(self) -> PrefillState:
        self.forest.pages.bound(self._sizes.pages)
        pool = KVPool.zeros(
            self._sizes.pages,
            self._pool_shape(),
            num_layers=self._config.num_layers,
            dtype=self._config.array_dtype,
        )
        hidden = np.zeros((self._sizes.batch, self._config.hidden_size), self._config.array_dtype)
        state = PrefillState(pool, jax.device_put(hidden))
        spec = self._spec()
        chunks, capacity = self._padded_chunks(spec)
        for chunk in chunks:
            plan = build_plan(chunk.forest, spec, policy=self.options.policy, capacity=capacity)
            state = prefill_chunk(
                self._params,
                state,
                _prefill_inputs(chunk),
                plan,
                graphdef=self._graphdef,
                implementation="reference" if self.implementation == "reference" else "xla",
            )
        return state

    def _padded_chunks(self, spec: PlanSpec) -> tuple[list[PrefillChunk], PlanCapacity]:
        """The chunks in arrays of one size, with one plan capacity, so that one program serves all."""
        size = self.options.prefill_chunk
        common = common_capacity((chunk.forest for chunk in self._chunks), requests=size)
        chunks = [chunk._replace(forest=pad_forest(chunk.forest, common)) for chunk in self._chunks]
        share = policy_named(self.options.policy).share
        capacities = [
            PlanCapacity.for_forest(chunk.forest, spec, share=share(chunk.forest.parent))
            for chunk in chunks
        ]
        return chunks, PlanCapacity.largest(capacities)

    def _first_state(self, pool: KVPool, arrays: ForestArrays) -> DecodeState:
        batch, used = self._sizes.batch, len(self._requests)
        is_used = np.arange(batch) < used
        free_pages = np.full(self._sizes.pages, -1, np.int32)
        lent = self.forest.pages.lend()
        free_pages[: lent.size] = lent
        leaf = np.full(batch, arrays.parent.size, np.int32)
        leaf[arrays.request_row[:used]] = arrays.request_node[:used]
        entry = np.append(arrays.page_lo, 0)[leaf]
        prompt_len = [len(request.prompt_ids) for request in self._requests]
        max_new = [request.sampling.max_new_tokens for request in self._requests]

        def column(values):
            padded = np.zeros(batch, np.int32)
            padded[:used] = values
            return padded

        rows = RowState(
            token=np.zeros(batch, np.int32),
            position=column(prompt_len) - 1,
            num_new=np.zeros(batch, np.int32),
            max_new=column(max_new),
            status=np.where(is_used, RUNNING, FULL).astype(np.int32),
            leaf=leaf,
            leaf_entry=entry,
            sampling=row_sampling(self._requests, batch),
        )
        return DecodeState(
            pool=pool,
            page_list=arrays.page_list,
            kv_len=arrays.kv_len,
            free_pages=free_pages,
            num_free=np.int32(lent.size),
            rows=rows,
            new_tokens=np.zeros((batch, self._sizes.new_tokens), np.int32),
            stop_ids=self._stop_ids,
        )

    def _live_forest(self, arrays: ForestArrays, kv_len, status) -> ForestArrays:
        """The forest as it stands: grown leaves, and those of ended rows without work."""
        max_kv_len = arrays.max_kv_len.copy()
        ended = arrays.request_node[: len(self._requests)][
            status[arrays.request_row[: len(self._requests)]] != RUNNING
        ]
        kv_len = np.array(kv_len)
        kv_len[ended], max_kv_len[ended] = 0, 0
        return arrays._replace(kv_len=kv_len, max_kv_len=max_kv_len)

    def _decode_capacity(self, arrays: ForestArrays) -> PlanCapacity:
        """Room for every plan of the run: all leaves full."""
        share = policy_named(self.options.policy).share(arrays.parent)
        most = max(request.sampling.max_new_tokens for request in self._requests)
        return PlanCapacity.for_forest(arrays, self._spec(), share=share, num_new_tokens=most)

    def _spec(self) -> PlanSpec:
        return PlanSpec(
            num_kv_heads=self._config.num_kv_heads,
            group_size=self._config.group_size,
            page_size=self.options.page_size,
            num_workers=self.options.num_workers or default_num_workers(),
        )

    def _pool_shape(self) -> tuple[int, int, int]:
        return (self._config.num_kv_heads, self.options.page_size, self._config.head_dim)

    def _shared_nodes(self, row: int) -> Iterator[int]:
        for node_id in self.forest.path(self.forest.end_node(row)):
            if self.forest.num_sharers(node_id) < 2:
                return
            yield node_id


def _prefill_inputs(chunk: PrefillChunk) -> PrefillInputs:
    return PrefillInputs(
        chunk.token_ids,
        chunk.position,
        chunk.page,
        chunk.row,
        chunk.last_row,
        chunk.forest.page_list,
        chunk.forest.kv_len,
        chunk.forest.position,
    )
