"""Several completions of several prompts that share prefixes: the main job.

    python -m experiments.generate
    python -m experiments.generate --prompt "Once upon a time" --num_samples 8 --output out.jsonl
    python -m experiments.generate --prompts_file prompts.txt --temperature 0

Without flags, a demonstration with a small model: the prefix forest of four prompts, three samples
of each, and the speed; under 30 seconds on 2 CPU cores, nearly all of it compilation. Results are
on standard output, everything else on standard error. Exit status: 0 done, 1 the results could not
be written, 2 wrong use, 130 after Ctrl-C, which keeps the completions that have ended.
"""

import shutil
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags

from codec_jax.models import model_config
from codec_jax.models.memory import weights_bytes
from codec_jax.models.registry import check_model_name
from experiments.cli import (
    FAILED,
    INTERRUPTED,
    OK,
    exit_status,
    explain_os_error,
    parse_flags,
    say,
    set_up_process,
    usage_errors,
)
from experiments.generate_config import GenerateConfig
from experiments.generate_flags import config_from_flags, define_flags, flags_help
from experiments.generate_job import Job, prepare
from experiments.generate_progress import progress
from experiments.generate_report import (
    describe_samples,
    describe_sharing,
    describe_timing,
    describe_weights,
)
from experiments.json_lines import write_json_lines
from experiments.versions import describe_versions
from experiments.visit_timing import Visit, timed_visits

_DEMONSTRATION = GenerateConfig()
_LARGE_BYTES = 2**28


def run(config: GenerateConfig = _DEMONSTRATION) -> list[dict[str, Any]]:
    """The result rows of a job, see `Job.rows`; also written to `config.output` if that is set.

    Prints nothing and reads no flags. Raises what `prepare` raises.
    """
    job = prepare(config)
    job.generation.finish()
    rows = job.rows()
    if config.output is not None:
        write_json_lines(config.output, rows)
    return rows


def main(argv: Sequence[str], flag_values: flags.FlagValues | None = None) -> int:
    """The exit status of the command line `argv`, whose first item is the program.

    The flags are defined on `flag_values`, on new ones by default.
    """
    values = flags.FlagValues() if flag_values is None else flag_values
    return exit_status(lambda: _main(argv, values))


def _main(argv: Sequence[str], flag_values: flags.FlagValues) -> int:
    define_flags(flag_values)
    parse_flags(argv, flag_values)
    if flag_values["help"].value:
        print(__doc__, flags_help(flag_values), sep="\n")
        return OK
    with usage_errors():
        config = config_from_flags(flag_values)
        check_model_name(config.model, argument="--model")
        if flag_values["version"].value:
            print(_describe_versions(config))
            return OK
        _announce_large_weights(config)
        job = prepare(config)
    return _execute(job)


def _announce_large_weights(config: GenerateConfig) -> None:
    """Says what will be allocated where that takes long enough to wonder."""
    sizes = model_config(config.model, dtype=config.dtype)
    if weights_bytes(sizes) >= _LARGE_BYTES:
        say(describe_weights(config.model, sizes))


def _execute(job: Job) -> int:
    """Runs the job and says so."""
    print(describe_sharing(job, width=shutil.get_terminal_size().columns), flush=True)
    say(f"memory: {job.generation.memory}")
    visits: list[Visit] = []
    status = OK
    try:
        _run_visits(job, visits)
    except KeyboardInterrupt:
        status = INTERRUPTED
    rows = job.rows()
    try:
        print(describe_samples(rows))
        print(f"\n{describe_timing(visits)}", flush=True)
    finally:  # standard output may be closed
        is_saved = _save(job, rows)
    if status == INTERRUPTED:
        say(f"interrupted: {len(rows)} of {len(job.generation.requests)} samples have ended")
    return status if is_saved or status else FAILED


def _run_visits(job: Job, visits: list[Visit]) -> None:
    """Runs the generation to its end; the visits so far are in the list after any exception too."""
    with progress(job.generation) as update:
        for deltas, visit in timed_visits(job.generation):
            visits.append(visit)
            update(deltas)


def _save(job: Job, rows: list[dict[str, Any]]) -> bool:
    """Whether the rows are where the settings want them; with none to show, an old file stays."""
    if job.config.output is None or (job.generation.requests and not rows):
        return True
    try:
        write_json_lines(job.config.output, rows)
    except OSError as error:
        say(f"error: the results are not written: {explain_os_error(error)}")
        return False
    return True


def _describe_versions(config: GenerateConfig) -> str:
    sizes = model_config(config.model, dtype=config.dtype)
    return describe_versions(
        config.model, sizes, page_size=config.page_size, implementation=config.implementation
    )


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv, flags.FLAGS))
