"""Fields of a row of the comparison of implementations, and its line for people."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from codec_jax import Generation
from codec_jax.attention import stored_head_dim
from codec_jax.models import ModelConfig
from experiments.compare_config import ComparisonConfig
from experiments.logits_comparison import BOUND, BOUND_RULE, Difference
from experiments.visit_timing import Visit, decode_rate


def describe_job(
    generation: Generation, config: ComparisonConfig, exact: np.ndarray
) -> dict[str, Any]:
    """What was generated: settings, sizes, and the spread of the float32 logits."""
    lengths = [len(completion.token_ids) for completion in generation.completions()]
    statistics = generation.statistics
    return {
        "dtype": config.dtype,
        "page_size": config.page_size,
        "policy": config.policy,
        "batch_size": len(lengths),
        "num_samples": config.num_samples,
        "temperature": config.temperature,
        "seed": config.seed,
        "unique_kv_tokens": statistics.unique_kv_tokens,
        "total_kv_tokens": statistics.total_kv_tokens,
        "num_new_tokens": sum(lengths),
        "num_steps": max(lengths) - 1,
        "num_compared": exact.shape[0],
        "logits_std": _finite(float(exact.std())),
    }


def describe_widths(config: ModelConfig, implementations: Sequence[str]) -> dict[str, Any]:
    """The model's heads, and how wide each implementation stores them."""
    stored = [stored_head_dim(config.head_dim, implementation=name) for name in implementations]
    return {
        "num_layers": config.num_layers,
        "num_q_heads": config.num_q_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "stored_head_dim": stored,
    }


def describe_difference(found: Difference, yardstick: Difference) -> dict[str, Any]:
    """The difference of a pair and its bounds; null where it is not a number."""
    return {
        "max_difference": _finite(found.max),
        "max_bound": _finite(BOUND * yardstick.max),
        "rms_difference": _finite(found.rms),
        "rms_bound": _finite(BOUND * yardstick.rms),
        "bound_rule": BOUND_RULE,
        "is_within_bound": found.is_within(yardstick),
        "same_argmax": found.same_argmax,
    }


def describe_errors(errors: Sequence[Difference], yardstick: Difference) -> dict[str, Any]:
    """How far each of a pair, and XLA in the same dtype, is from XLA in float32."""
    return {
        "max_error_to_float32": [_finite(error.max) for error in errors],
        "rms_error_to_float32": [_finite(error.rms) for error in errors],
        "same_argmax_as_float32": [error.same_argmax for error in errors],
        "xla_max_error_to_float32": _finite(yardstick.max),
        "xla_rms_error_to_float32": _finite(yardstick.rms),
    }


def describe_speed(visits: Sequence[Visit]) -> dict[str, Any]:
    """Speed of the generation's decoding, visits that compiled left out where others did not."""
    rate = decode_rate(visits)
    speed: dict[str, Any] = dict.fromkeys(("tokens_per_s", "decode_step_us"))
    if rate is not None:
        speed["tokens_per_s"] = rate.num_tokens / rate.seconds
        speed["decode_step_us"] = 1e6 * rate.seconds / rate.num_steps
    return {
        **speed,
        "speed_includes_compilation": rate is not None and rate.includes_compilation,
        "prefill_s": visits[0].seconds - visits[0].compile_seconds,
        "compile_s": sum(visit.compile_seconds for visit in visits),
        "num_compilations": sum(visit.num_compilations for visit in visits),
    }


def describe_row(row: dict[str, Any]) -> str:
    """One line: who against whom, differences over bounds, equal choices, speed."""
    parts = [f"{row['model']} {' / '.join(row['implementations'])} ({row['dtype']})"]
    for name in ("max", "rms"):
        found, bound = row[f"{name}_difference"], row[f"{name}_bound"]
        parts.append(f"{name} {_short(found)} of at most {_short(bound)}")
    parts.append("within the bounds" if row["is_within_bound"] else "BEYOND THE BOUNDS")
    parts.append(f"same choice in {row['same_argmax']:.2%} of {row['num_compared']} steps")
    return ", ".join([*parts, f"{_short(row['tokens_per_s'])} tokens/s"])


def _short(number: float | None) -> str:
    return "?" if number is None else f"{number:.4g}"


def _finite(number: float) -> float | None:
    """The number, or None for what JSON cannot hold."""
    return number if math.isfinite(number) else None
