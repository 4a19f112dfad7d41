"""Prefill: the keys and values of every prompt token, each node's computed once."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int32

from codec_jax.attention import prepare_plan, resolve_plan
from codec_jax.attention_layer import layer_attention
from codec_jax.kv_cache import KVPool, TokenSlots
from codec_jax.planning.plan import Plan


class PrefillState(NamedTuple):
    """The pool, and the hidden state of each request's last prompt token once it is computed."""

    pool: KVPool
    last_hidden: Float[Array, "batch hidden"]


class PrefillInputs(NamedTuple):
    """A `PrefillChunk` as arrays.

    Attributes:
      token_ids, position, page, row, last_row: as in `PrefillChunk`.
      page_list, kv_len, node_position: of the chunk's forest.
    """

    token_ids: Int32[Array, " chunk"]
    position: Int32[Array, " chunk"]
    page: Int32[Array, " chunk"]
    row: Int32[Array, " chunk"]
    last_row: Int32[Array, " batch"]
    page_list: Int32[Array, " page_entries"]
    kv_len: Int32[Array, " nodes"]
    node_position: Int32[Array, " nodes"]


@functools.partial(jax.jit, static_argnames=("graphdef", "implementation"), donate_argnames="state")
def prefill_chunk(
    params: nnx.State,
    state: PrefillState,
    inputs: PrefillInputs,
    plan: Plan,
    *,
    graphdef: nnx.GraphDef,
    implementation: str,
) -> PrefillState:
    """The state after one chunk of token rows; each layer writes its rows before it attends.

    A row attends to the rows of its path up to its own position. `plan` is made for the chunk's
    forest. The pool is donated and updated in place.
    """
    decoder = nnx.merge(graphdef, params)
    resolved = resolve_plan(
        prepare_plan(plan, implementation=implementation),
        inputs.page_list,
        inputs.kv_len,
        page_size=state.pool.page_size,
        causal=(inputs.node_position, inputs.position),
    )
    slots = TokenSlots(inputs.page, inputs.row)
    attention = layer_attention(resolved, slots, implementation=implementation)
    hidden, pool = decoder(inputs.token_ids, inputs.position, state.pool, attention)
    is_here = (inputs.last_row >= 0)[:, None]
    last_hidden = jnp.where(is_here, hidden[inputs.last_row], state.last_hidden)
    return PrefillState(pool, last_hidden)
