"""The host loop of a batch: prefill, then visits of k decode steps, each under one plan."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from codec_jax.decode import (
    FULL,
    RUNNING,
    STOPPED,
    DecodeState,
    Decoding,
    RowState,
    decode_steps,
    draw_first,
)
from codec_jax.forest_arrays import ForestArrays, ForestCapacity
from codec_jax.forest_prefill import PrefillChunk
from codec_jax.generate_batch import Batch
from codec_jax.generate_requests import row_sampling
from codec_jax.generate_sizes import common_capacity, pad_forest
from codec_jax.kv_cache import KVPool
from codec_jax.models import LoadedModel
from codec_jax.pages import OutOfPagesError
from codec_jax.planning.build import build_plan
from codec_jax.planning.spec import PlanCapacity
from codec_jax.prefill import PrefillInputs, PrefillState, prefill_chunk

FINISH_REASONS = {RUNNING: None, STOPPED: "stop", FULL: "length"}


class Progress(NamedTuple):
    """A row's new tokens so far, and why it ended (None: it has not)."""

    token_ids: tuple[int, ...]
    finish_reason: str | None


class _Readback(NamedTuple):
    """What the host reads of a state at each visit."""

    status: np.ndarray
    num_new: np.ndarray
    new_tokens: np.ndarray
    kv_len: np.ndarray
    num_free: np.ndarray


class Loop:
    """Runs one batch once.

    A page has one owner at a time: the forest's pool before `run`, the device's stack during it,
    and the pool again afterwards, however the run ends.
    """

    def __init__(self, model: LoadedModel, batch: Batch, *, decoding: Decoding | None = None):
        self._batch = batch
        self._decoding = decoding or Decoding(draw_first, decode_steps)
        self._graphdef, self._params = nnx.split(model.decoder)
        self._stop_ids = np.array(model.tokenizer.stop_ids or (-1,), np.int32)
        self._reclaimed: set[int] = set()
        self._num_free = 0  # pages on the device's stack when it was last known

    def run(self) -> Iterator[list[Progress]]:
        """Every row's progress after prefill with the first token, and after each visit.

        Raises:
          OutOfPagesError: the next visit could need more pages than are free; what was yielded
            before stands.
        """
        batch, steps = self._batch, self._batch.options.steps_per_visit
        prefilled = self._prefill()
        arrays = batch.arrays()
        state = self._first_state(prefilled.pool, arrays)
        self._num_free = int(jax.device_get(state.num_free))
        try:
            state = self._decoding.first(
                self._params, state, prefilled.last_hidden, graphdef=self._graphdef
            )
            most = max(request.sampling.max_new_tokens for request in batch.requests)
            capacity = batch.plan_capacity(arrays, num_new_tokens=most)
            while True:
                seen = _read_back(state)
                self._num_free = int(seen.num_free)
                yield self._progress(seen)
                if not (seen.status == RUNNING).any():
                    return
                state = self._secure_pages(state, seen, arrays)
                plan = build_plan(
                    _live_forest(arrays, seen),
                    batch.spec,
                    policy=batch.options.policy,
                    num_new_tokens=steps,
                    capacity=capacity,
                    cost=batch.cost,
                )
                state = self._decoding.steps(
                    self._params,
                    state,
                    plan,
                    graphdef=self._graphdef,
                    num_steps=steps,
                    implementation=batch.implementation,
                )
        finally:
            if batch.forest.pages.is_lent:
                batch.forest.pages.settle(self._num_free)

    def _progress(self, seen: _Readback) -> list[Progress]:
        return [
            Progress(
                tuple(seen.new_tokens[row, : seen.num_new[row]].tolist()),
                FINISH_REASONS[int(seen.status[row])],
            )
            for row in range(len(self._batch.requests))
        ]

    def _prefill(self) -> PrefillState:
        batch, config = self._batch, self._batch.config
        pool = KVPool.zeros(
            batch.sizes.pages,
            batch.page_shape,
            num_layers=config.num_layers,
            dtype=config.array_dtype,
        )
        hidden = np.zeros((batch.sizes.batch, config.hidden_size), config.array_dtype)
        state = PrefillState(pool, jax.device_put(hidden))
        forest_capacity, capacity = self._prefill_capacities()
        for chunk in batch.chunks:
            chunk = chunk._replace(forest=pad_forest(chunk.forest, forest_capacity))
            plan = build_plan(
                chunk.forest, batch.spec, policy=batch.options.policy, capacity=capacity
            )
            state = prefill_chunk(
                self._params,
                state,
                _prefill_inputs(chunk),
                plan,
                graphdef=self._graphdef,
                # The kernels have no causal mask: they are made for one query token a request.
                implementation="reference" if batch.implementation == "reference" else "xla",
            )
        return state

    def _prefill_capacities(self) -> tuple[ForestCapacity, PlanCapacity]:
        """Sizes that every chunk fits in, so that one program serves all."""
        batch = self._batch
        common = common_capacity(
            (chunk.forest for chunk in batch.chunks), requests=batch.options.prefill_chunk
        )
        forests = (pad_forest(chunk.forest, common) for chunk in batch.chunks)
        return common, PlanCapacity.largest(batch.plan_capacity(forest) for forest in forests)

    def _first_state(self, pool: KVPool, arrays: ForestArrays) -> DecodeState:
        batch, used = self._batch, len(self._batch.requests)
        rows = batch.sizes.batch
        lent = batch.forest.pages.lend()
        leaf = np.full(rows, arrays.parent.size, np.int32)
        leaf[arrays.request_row[:used]] = arrays.request_node[:used]
        prompt_len = np.array([len(request.prompt_ids) for request in batch.requests])

        def column(values: Sequence[int] | np.ndarray, size: int = rows, fill: int = 0) -> Array:
            padded = np.full(size, fill, np.int32)
            padded[: len(values)] = values
            return jax.device_put(padded)

        row_state = RowState(
            token=column([]),
            position=column(prompt_len - 1),
            num_new=column([]),
            max_new=column([request.sampling.max_new_tokens for request in batch.requests]),
            status=column([RUNNING] * used, fill=FULL),
            leaf=column(leaf),
            leaf_entry=column(np.append(arrays.page_lo, 0)[leaf]),
            sampling=row_sampling(batch.requests, rows),
        )
        new_tokens = np.zeros((rows, batch.sizes.new_tokens), np.int32)
        return DecodeState(
            pool=pool,
            page_list=jax.device_put(arrays.page_list),
            kv_len=jax.device_put(arrays.kv_len),
            free_pages=column(lent, batch.sizes.pages),
            num_free=jax.device_put(np.int32(lent.size)),
            rows=row_state,
            new_tokens=jax.device_put(new_tokens),
            stop_ids=jax.device_put(self._stop_ids),
        )

    def _secure_pages(
        self, state: DecodeState, seen: _Readback, arrays: ForestArrays
    ) -> DecodeState:
        """The state with enough free pages for a visit, ended rows' pages taken back if need be."""
        wanted, num_free = self._pages_wanted(seen, arrays), int(seen.num_free)
        if wanted <= num_free:
            return state
        pages = self._batch.forest.pages
        pages.settle(num_free)
        page_list = jax.device_get(state.page_list)
        for row in np.flatnonzero(seen.status[: len(self._batch.requests)] != RUNNING).tolist():
            if row not in self._reclaimed:
                pages.release(_leaf_pages(page_list, arrays, row))
                self._reclaimed.add(row)
        if wanted > pages.num_free:
            raise OutOfPagesError(wanted, pages.num_free, pages.num_pages)
        lent = pages.lend()
        self._num_free = lent.size
        stack = np.zeros(self._batch.sizes.pages, np.int32)
        stack[: lent.size] = lent
        return dataclasses.replace(
            state,
            free_pages=jax.device_put(stack),
            num_free=jax.device_put(np.int32(lent.size)),
        )

    def _pages_wanted(self, seen: _Readback, arrays: ForestArrays) -> int:
        """Pages that the running rows can pop during the next visit."""
        page_size = self._batch.options.page_size
        used = len(self._batch.requests)
        row, leaf = arrays.request_row[:used], arrays.request_node[:used]
        leaf = leaf[seen.status[row] == RUNNING]
        now = seen.kv_len[leaf]
        then = np.minimum(now + self._batch.options.steps_per_visit, arrays.max_kv_len[leaf])
        return int((-(-then // page_size) - -(-now // page_size)).sum())


def _leaf_pages(page_list: np.ndarray, arrays: ForestArrays, row: int) -> np.ndarray:
    """Pages that the device popped for a row's private leaf."""
    leaf = arrays.request_node[arrays.request_row == row][0]
    entries = page_list[arrays.page_lo[leaf] : arrays.page_lo[leaf] + arrays.num_pages[leaf]]
    return entries[entries >= 0]


def _read_back(state: DecodeState) -> _Readback:
    rows = state.rows
    return _Readback(
        *jax.device_get((rows.status, rows.num_new, state.new_tokens, state.kv_len, state.num_free))
    )


def _live_forest(arrays: ForestArrays, seen: _Readback) -> ForestArrays:
    """The forest as it stands: leaves as long as they have grown, those of ended rows empty."""
    used = int(arrays.num_requests)
    row, leaf = arrays.request_row[:used], arrays.request_node[:used]
    ended = leaf[seen.status[row] != RUNNING]
    kv_len, max_kv_len = np.array(seen.kv_len), arrays.max_kv_len.copy()
    kv_len[ended], max_kv_len[ended] = 0, 0
    return arrays._replace(kv_len=kv_len, max_kv_len=max_kv_len)


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
