"""What the main job says: who shares what, the texts, and the times."""

import re
from collections.abc import Sequence
from typing import Any

from codec_jax import draw_forest
from codec_jax.forest_drawing import MIN_WIDTH
from codec_jax.models.config import ModelConfig, num_params
from codec_jax.models.memory import as_gib, weights_bytes
from experiments.generate_job import Job
from experiments.visit_timing import DecodeRate, Visit, decode_rate

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but newline and tab


def describe_sharing(job: Job, *, width: int) -> str:
    """The prefix forest in at most `width` columns, and what runs it."""
    forest = draw_forest(
        job.generation.forest, decode=job.model.tokenizer.decode, width=max(width, MIN_WIDTH)
    )
    run = job.generation.statistics
    reason = run.reason.rstrip(".")
    policy = f"policy: {run.policy} ({run.policy_rule})"
    return f"{forest}\n{policy}\nimplementation: {run.implementation} ({reason})"


def describe_weights(name: str, config: ModelConfig) -> str:
    """How many parameters a model has and what they take, before they are there."""
    count = num_params(config) / 1e9
    return (
        f"{name}: {count:.2f} billion parameters, {as_gib(weights_bytes(config))} in {config.dtype}"
    )


def describe_samples(rows: Sequence[dict[str, Any]]) -> str:
    """Every prompt with its samples below it."""
    lines = []
    for place, row in enumerate(rows):
        if place == 0 or rows[place - 1]["prompt_index"] != row["prompt_index"]:
            lines.append(f"\nprompt {row['prompt_index']}: {_indent(row['prompt'])}")
        label = f"  sample {row['sample_index']} ({row['finish_reason']}):"
        lines.append(f"{label} …{_indent(row['text'])}")
    return "\n".join(lines)


def describe_timing(visits: Sequence[Visit]) -> str:
    """Speed of decoding, then what prefill and compilation took."""
    if not visits:
        return "nothing to time"
    prefill, rate = visits[0], decode_rate(visits)
    compile_seconds = sum(visit.compile_seconds for visit in visits)
    return "\n".join(
        [
            _describe_rate(rate) if rate else "decoding: nothing to time",
            f"prefill and first tokens: {prefill.seconds - prefill.compile_seconds:.2f} s, tracing"
            " included, without compilation",
            f"compilation by XLA: {compile_seconds:.2f} s",
            f"all: {sum(visit.num_tokens for visit in visits):,} new tokens in"
            f" {sum(visit.seconds for visit in visits):.2f} s",
        ]
    )


def _describe_rate(rate: DecodeRate) -> str:
    if rate.includes_compilation:
        scope = "including compilation"
    else:
        scope = "without the visits that compiled" if rate.num_left_out else ""
    scope = f" ({scope})" if scope else ""
    speed = rate.num_tokens / rate.seconds
    shown = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
    return (
        f"decoding: {shown} tokens/s, all rows together;"
        f" {1000 * rate.seconds / rate.num_steps:.2f} ms per output token of a row{scope}"
    )


def _indent(text: str) -> str:
    """The text with its further lines indented and its control characters written out."""
    shown = _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    return shown.replace("\n", "\n    ")
