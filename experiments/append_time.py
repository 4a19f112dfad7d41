"""Writing a decode step's keys and values into the pool: one kernel against two scatters.

    python -m experiments.append_time --output append_time.jsonl     # on an NVIDIA H200
    python -m experiments.append_time --smoke                        # on any device, untimed

One layer of bfloat16 pages of 64 tokens, 8 KV heads, head_dim 128; the pool is donated, as in the
decode loop. Fields of a row: batch_size, implementation (by the compiled HLO), num_kernels,
time_us, p10_us, p90_us (the span of the call), kernels (each one's own time), device, jax, commit,
tree_hash, date. The call of the kernel holds another small one, which makes the layer's offset: a
decode step shares it with attention. Expected: about 2 us for the kernel, 3 us for each of XLA's
scatters; about 2 s a row.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from codec_jax.attention_layer import append_in_one_launch
from codec_jax.kv_cache import KVPool, TokenSlots, append
from experiments.cli import OK, exit_status, parse_flags, say, set_up_process, usage_errors
from experiments.json_lines import check_writable, write_json_lines
from experiments.provenance import implementation_in, provenance
from experiments.timing import time_calls

BATCHES = (1, 16, 64, 256, 512)
NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM = 8, 64, 128


def compile_append(write: Callable[..., KVPool], batch_size: int) -> tuple[Any, Callable[[], Any]]:
    """The compiled program of `write` and a call of it; the pool goes from call to call."""
    rng = np.random.default_rng(0)
    num_pages = 2 * batch_size
    pool = KVPool.zeros(num_pages, (NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM), dtype="bfloat16")
    slots = TokenSlots(
        jnp.asarray(rng.permutation(num_pages)[:batch_size], jnp.int32),
        jnp.asarray(rng.integers(0, PAGE_SIZE, batch_size), jnp.int32),
    )
    shape = batch_size, NUM_KV_HEADS, HEAD_DIM
    k, v = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for _ in range(2))
    arguments = (jnp.int32(0), slots, k, v)
    program = jax.jit(write, donate_argnums=0).lower(pool, *arguments).compile()
    carried = [pool]

    def call():
        carried[0] = program(carried[0], *arguments)
        return carried[0]

    return program, call


def measure(batch_size: int, write: Callable[..., KVPool], *, smoke: bool) -> dict[str, Any]:
    """A row without its provenance; without times if `smoke`."""
    program, call = compile_append(write, batch_size)
    row = {"batch_size": batch_size, "implementation": implementation_in(program.as_text())}
    if smoke:
        jax.block_until_ready(call())
        return row
    timing = time_calls(call)
    times = {"time_us": timing.median_us, "p10_us": timing.p10_us, "p90_us": timing.p90_us}
    times = {name: round(us, 2) for name, us in times.items()}
    kernels = [[name, round(us, 2)] for name, us in timing.kernels]
    return {**row, "num_kernels": len(kernels), **times, "kernels": kernels}


def run(*, smoke: bool = False, commit: str | None = None) -> list[dict[str, Any]]:
    """A row for each batch and way of writing."""
    writes = [append] if smoke else [append, append_in_one_launch]
    source, rows = provenance(commit), []
    for batch_size in BATCHES:
        for write in writes:
            rows.append({**measure(batch_size, write, smoke=smoke), **source})
            say(" ".join(f"{name} {rows[-1].get(name)}" for name in _SHOWN))
    return rows


_SHOWN = ("batch_size", "implementation", "time_us", "kernels")


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    values = flags.FlagValues()
    flags.DEFINE_bool("smoke", False, "scatters alone, no times, any device", flag_values=values)
    flags.DEFINE_string("commit", None, "of a tree without repository", flag_values=values)
    flags.DEFINE_string("output", None, "JSON lines file", flag_values=values)

    def command() -> int:
        parse_flags(argv, values)
        output, commit = values["output"].value, values["commit"].value
        smoke = bool(values["smoke"].value)
        with usage_errors():
            if output is not None:
                check_writable(output)
            if not smoke and jax.default_backend() != "gpu":
                raise ValueError("timing needs a GPU; `--smoke` runs anywhere.")
        rows = run(smoke=smoke, commit=commit)
        if output is not None:
            write_json_lines(output, rows)
        return OK

    return exit_status(command)


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
