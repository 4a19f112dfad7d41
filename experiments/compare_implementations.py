"""Teacher-forced logits of two implementations through the main job's decode loop.

    python -m experiments.compare_implementations --output generate.jsonl     # on an NVIDIA H200
    python -m experiments.compare_implementations --smoke                     # on any device

The first implementation generates, several samples of prompts that share prefixes. Then every
implementation is fed these very tokens, and the float32 logits of every decode step are compared
with those of the others, and with XLA's in float32, which gives the bound (`logits_comparison`).
Fields of a row: see `compare_report`; the speed is that of "generated_by". In the HLO "reference"
is "xla" too, since both are plain XLA operations.

Expected: differences below the bound, and an equal most likely token in more than 97% of the steps.
Exit status: 0 all differences are within their bounds, 1 one is not, 2 wrong use.
"""

import itertools
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from codec_jax import Generation, load_model
from codec_jax.decode import Decoding, decode_steps, draw_first
from codec_jax.decode_forced import forced_steps
from codec_jax.generate_forced import forced_logits
from codec_jax.models import LoadedModel
from codec_jax.models.llama import cast
from experiments.ahead_of_time import AheadOfTime
from experiments.cli import FAILED, OK, exit_status, parse_flags, say, set_up_process, usage_errors
from experiments.compare_config import PROMPTS, ComparisonConfig, config_from_flags, define_flags
from experiments.compare_report import (
    describe_difference,
    describe_errors,
    describe_job,
    describe_row,
    describe_speed,
    describe_widths,
)
from experiments.json_lines import check_writable, write_json_lines
from experiments.logits_comparison import decode_steps_of, difference
from experiments.provenance import provenance
from experiments.visit_timing import timed_visits


class Case(NamedTuple):
    """One model, checked; nothing has run yet."""

    config: ComparisonConfig
    model: LoadedModel
    generation: Generation
    steps: AheadOfTime


class Run(NamedTuple):
    """An implementation's logits of all decode steps, and what the program was, by its HLO."""

    logits: np.ndarray
    implementation_in_hlo: str


def run(config: ComparisonConfig) -> list[dict[str, Any]]:
    """A row for each model and pair of implementations, also written to `config.output`."""
    return _run(prepare(config), config)


def _run(cases: Sequence[Case], config: ComparisonConfig) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        for row in compare(case):
            rows.append(row)
            say(describe_row(row))
    if config.output is not None:
        write_json_lines(config.output, rows)
    return rows


def prepare(config: ComparisonConfig) -> list[Case]:
    """The cases of these settings; everything that can be refused is refused here.

    Raises:
      OSError: the output file cannot be written.
      ValueError: settings that cannot be.
      NotImplementedError: an implementation cannot run a model.
    """
    if config.output is not None:
        check_writable(config.output)
    config = config.sized()
    return [_prepare(name, config) for name in config.models]


def _prepare(name: str, config: ComparisonConfig) -> Case:
    model, steps = load_model(name, dtype=config.dtype), AheadOfTime(decode_steps)
    generations = [
        Generation(
            model,
            PROMPTS,
            sampling=config.sampling,
            options=config.options(implementation),
            decoding=Decoding(draw_first, steps),
        )
        for implementation in config.implementations
    ]
    return Case(config, model, generations[0], steps)


def compare(case: Case) -> list[dict[str, Any]]:
    """Runs a case: a row for each pair of implementations."""
    config, model = case.config, case.model
    visits = [visit for _, visit in timed_visits(case.generation)]
    runs = {name: _force(case, model, name) for name in config.implementations}
    xla = runs["xla"] if "xla" in runs else _force(case, model, "xla")
    # The same parameters: only the arithmetic is wider.
    wide = LoadedModel(cast(model.decoder, "float32"), model.tokenizer, model.name)
    exact = _force(case, wide, "xla")
    yardstick = difference(xla.logits, exact.logits)
    rows = []
    for pair in itertools.combinations(config.implementations, 2):
        first, second = (runs[name] for name in pair)
        row = {"model": model.name, "implementations": list(pair)}
        row["implementations_in_hlo"] = [first.implementation_in_hlo, second.implementation_in_hlo]
        row |= describe_job(case.generation, config, exact.logits)
        row |= describe_widths(model.decoder.config, pair)
        row |= describe_difference(difference(first.logits, second.logits), yardstick)
        errors = [difference(run.logits, exact.logits) for run in (first, second)]
        row |= describe_errors(errors, yardstick)
        row |= {"generated_by": config.implementations[0]}
        row |= {"generated_by_in_hlo": case.steps.implementation, **describe_speed(visits)}
        rows.append({**row, **provenance(config.commit)})
    return rows


def _force(case: Case, model: LoadedModel, implementation: str) -> Run:
    """Feeds the generated tokens, on an equal forest, through one implementation."""
    steps, completions = AheadOfTime(forced_steps), case.generation.completions()
    rows = forced_logits(
        model,
        [completion.prompt for completion in completions],
        [completion.token_ids for completion in completions],
        options=case.config.options(implementation),
        steps=steps,
    )
    return Run(decode_steps_of(rows), str(steps.implementation))


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    values = flags.FlagValues()
    define_flags(values)

    def command() -> int:
        parse_flags(argv, values)
        with usage_errors():
            config = config_from_flags(values)
            cases = prepare(config)
        rows = _run(cases, config)
        return OK if all(row["is_within_bound"] for row in rows) else FAILED

    return exit_status(command)


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
