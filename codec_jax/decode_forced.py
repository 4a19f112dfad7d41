"""Teacher forcing: the steps of the decode loop on given tokens, and the logits of each step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from codec_jax.attention import prepare_plan
from codec_jax.decode import DecodeState, record_tokens, step_logits
from codec_jax.planning.plan import Plan
from codec_jax.planning.scans import iota


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="state")
def force_first(
    params: nnx.State,
    state: DecodeState,
    last_hidden: Float[Array, "batch hidden"],
    forced: Int32[Array, "batch max_new_tokens"],
    *,
    graphdef: nnx.GraphDef,
) -> tuple[DecodeState, Float32[Array, "batch vocab"]]:
    """The state after each running row took its first forced token, and the logits before it.

    From here on no token stops a row: it ends with its last forced one.
    """
    logits = nnx.merge(graphdef, params).logits(last_hidden)
    state = dataclasses.replace(state, stop_ids=jnp.full_like(state.stop_ids, -1))
    return _force(state, forced), logits


@functools.partial(
    jax.jit,
    static_argnames=("graphdef", "num_steps", "implementation"),
    donate_argnames="state",
)
def forced_steps(
    params: nnx.State,
    state: DecodeState,
    plan: Plan,
    forced: Int32[Array, "batch max_new_tokens"],
    *,
    graphdef: nnx.GraphDef,
    num_steps: int,
    implementation: str,
) -> tuple[DecodeState, Float32[Array, "steps batch vocab"]]:
    """`decode_steps` that takes its tokens from `forced`, and the logits of every step.

    Column i of `forced` is the i-th new token. Logits of rows that have ended have no meaning.
    """
    decoder = nnx.merge(graphdef, params)
    prepared = prepare_plan(plan, implementation=implementation)

    def step(state, _):
        state, logits = step_logits(decoder, state, prepared, implementation=implementation)
        return _force(state, forced), logits

    return lax.scan(step, state, length=num_steps)


def _force(state: DecodeState, forced: Int32[Array, "batch max_new_tokens"]) -> DecodeState:
    batch, width = forced.shape
    column = jnp.minimum(state.rows.num_new, width - 1)
    return record_tokens(state, forced[iota(batch), column])
