"""The decode loop: one state pytree, one pure step, k steps for each visit of the host."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from codec_jax.attention import PreparedPlan, prepare_plan, resolve_plan
from codec_jax.attention_layer import layer_attention
from codec_jax.kv_cache import KVPool, TokenSlots
from codec_jax.models import Decoder
from codec_jax.planning.plan import Plan
from codec_jax.planning.scans import exclusive_sum, iota
from codec_jax.sampling import RowSampling, sample

RUNNING, STOPPED, FULL = 0, 1, 2
"""Row status: still decoding, ended by a stop token, ended by its token limit (or padding)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowState:
    """What each batch row is doing; rows without a request are FULL from the start.

    Attributes:
      token: last token drawn, the next step's input.
      position: its absolute position.
      num_new: tokens drawn so far.
      max_new: most tokens to draw.
      status: RUNNING, STOPPED or FULL.
      leaf: the row's private leaf, a node in preorder.
      leaf_entry: that leaf's first page entry.
      sampling: how the row draws.
    """

    token: Int32[Array, " batch"]
    position: Int32[Array, " batch"]
    num_new: Int32[Array, " batch"]
    max_new: Int32[Array, " batch"]
    status: Int32[Array, " batch"]
    leaf: Int32[Array, " batch"]
    leaf_entry: Int32[Array, " batch"]
    sampling: RowSampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Everything that a decode step changes.

    Attributes:
      pool: keys and values of all layers.
      page_list, kv_len: the batch's view of the pool, see `KVCache`.
      free_pages: stack of free page ids; entry num_free - 1 is popped next.
      num_free: pages left on the stack.
      rows: per batch row.
      new_tokens: tokens drawn so far; columns from num_new on are 0.
      stop_ids: tokens that end a row; -1 in padding.
    """

    pool: KVPool
    page_list: Int32[Array, " page_entries"]
    kv_len: Int32[Array, " nodes"]
    free_pages: Int32[Array, " free_pages"]
    num_free: Int32[Array, ""]
    rows: RowState
    new_tokens: Int32[Array, "batch max_new_tokens"]
    stop_ids: Int32[Array, " stop_ids"]


class Decoding(NamedTuple):
    """The two device programs of a run.

    Attributes:
      first: called as `draw_first`, once.
      steps: called as `decode_steps`, once for each visit of the host.
    """

    first: Callable[..., DecodeState]
    steps: Callable[..., DecodeState]


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="state")
def draw_first(
    params: nnx.State,
    state: DecodeState,
    last_hidden: Float[Array, "batch hidden"],
    *,
    graphdef: nnx.GraphDef,
) -> DecodeState:
    """The state after each running row drew its first token from its prompt's hidden state."""
    logits = nnx.merge(graphdef, params).logits(last_hidden)
    return _draw(state, logits)


@functools.partial(
    jax.jit,
    static_argnames=("graphdef", "num_steps", "implementation"),
    donate_argnames="state",
)
def decode_steps(
    params: nnx.State,
    state: DecodeState,
    plan: Plan,
    *,
    graphdef: nnx.GraphDef,
    num_steps: int,
    implementation: str,
) -> DecodeState:
    """The state after `num_steps` steps under one plan; the pool is updated in place."""
    decoder = nnx.merge(graphdef, params)
    prepared = prepare_plan(plan, implementation=implementation)

    def step(_, state):
        return decode_step(decoder, state, prepared, implementation=implementation)

    return lax.fori_loop(0, num_steps, step, state)


def decode_step(
    decoder: Decoder, state: DecodeState, prepared: PreparedPlan, *, implementation: str
) -> DecodeState:
    """The state after one token for every running row; pure, no host work.

    The plan must reach one token past the lengths of the private leaves, and the stack must hold a
    page for each leaf whose last page is full.
    """
    return _draw(*step_logits(decoder, state, prepared, implementation=implementation))


def step_logits(
    decoder: Decoder, state: DecodeState, prepared: PreparedPlan, *, implementation: str
) -> tuple[DecodeState, Float32[Array, "batch vocab"]]:
    """The state with every running row's last token in the pool, and the logits of its next one.

    A row that has ended has logits of no meaning. `record_tokens` completes the step.
    """
    state, slots = _make_room(state)
    rows = state.rows
    page_size = state.pool.page_size
    resolved = resolve_plan(prepared, state.page_list, state.kv_len, page_size=page_size)
    attention = layer_attention(resolved, slots, implementation=implementation)
    token = jnp.where(rows.status == RUNNING, rows.token, 0)
    hidden, pool = decoder(token, rows.position, state.pool, attention)
    return dataclasses.replace(state, pool=pool), decoder.logits(hidden)


def record_tokens(state: DecodeState, token: Int32[Array, " batch"]) -> DecodeState:
    """The state with a token added to each running row, and the rows ended that it ends."""
    rows = state.rows
    is_running = rows.status == RUNNING
    batch, width = state.new_tokens.shape
    column = jnp.where(is_running, rows.num_new, width)
    new_tokens = state.new_tokens.at[iota(batch), column].set(token, mode="drop")
    num_new = rows.num_new + is_running.astype(jnp.int32)
    is_stop = jnp.any(token[:, None] == state.stop_ids[None, :], axis=1)
    status = jnp.where(is_stop, STOPPED, jnp.where(num_new >= rows.max_new, FULL, RUNNING))
    rows = dataclasses.replace(
        rows,
        token=jnp.where(is_running, token, rows.token),
        position=rows.position + is_running.astype(jnp.int32),
        num_new=num_new,
        status=jnp.where(is_running, status, rows.status),
    )
    return dataclasses.replace(state, rows=rows, new_tokens=new_tokens)


def _make_room(state: DecodeState) -> tuple[DecodeState, TokenSlots]:
    """Each running row's slot for its next key and value, with pages popped where one is full."""
    rows, page_size = state.rows, state.pool.page_size
    is_running = rows.status == RUNNING
    length = state.kv_len.at[rows.leaf].get(mode="fill", fill_value=0)
    entry = rows.leaf_entry + length // page_size
    needs_page = is_running & (length % page_size == 0)
    order = exclusive_sum(needs_page.astype(jnp.int32))
    popped = state.free_pages[jnp.maximum(state.num_free - 1 - order, 0)]
    dropped = state.page_list.shape[0]
    page_list = state.page_list.at[jnp.where(needs_page, entry, dropped)].set(popped, mode="drop")
    page = jnp.where(is_running, page_list[jnp.minimum(entry, dropped - 1)], -1)
    grown = jnp.where(is_running, rows.leaf, state.kv_len.shape[0])
    state = dataclasses.replace(
        state,
        page_list=page_list,
        kv_len=state.kv_len.at[grown].add(1, mode="drop"),
        num_free=state.num_free - jnp.sum(needs_page, dtype=jnp.int32),
    )
    return state, TokenSlots(page, length % page_size)


def _draw(state: DecodeState, logits: Float[Array, "batch vocab"]) -> DecodeState:
    """The state after a token was drawn for each running row."""
    return record_tokens(state, sample(logits, state.rows.sampling, state.rows.num_new))
