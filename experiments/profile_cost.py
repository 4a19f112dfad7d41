"""What steps, segments, partial results and bytes cost the kernels: a profile for the planner.

    python -m experiments.profile_cost --points_output profile_points.jsonl   # on an NVIDIA H200
    python -m experiments.profile_cost --points profile_points.jsonl          # the fit again
    python -m experiments.profile_cost --smoke                                # on a CPU, untimed

All workers do the same, point by point (`profile_cost_grid`); no whole plan and no shape of
workloads.json is measured. The costs are fitted to three quarters of the points and judged by the
others. The profile is replaced after every combination, so that an interrupted run leaves what it
has. Expected on an H200, bfloat16, head_dim 128, pages of 64: a step 0.65 us, a wide one 1.25 us, a
segment 2 us, a call 7 us, 4.1 TB/s; held-out points within 5% at the median; under 20 s for each
combination and 30 s of compilation for all.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags

from codec_jax.attention import default_num_workers
from codec_jax.planning.device import device_slug
from codec_jax.planning.profiles import FOLDER, load_profiles
from experiments.cli import OK, exit_status, parse_flags, say, set_up_process, usage_errors
from experiments.json_lines import (
    check_writable,
    read_json_lines,
    write_json_lines,
    write_text,
)
from experiments.processes import Stages, run_jobs
from experiments.profile_cost_config import (
    ProfileConfig,
    Signature,
    config_from_flags,
    define_flags,
)
from experiments.profile_cost_fit import fit_profile, held_out_error
from experiments.profile_cost_points import Bench, Timer, measure, samples_of
from experiments.profile_cost_report import report
from experiments.provenance import provenance
from experiments.timing import time_each

_SMOKE_WORKERS = 4
_PROVENANCE = ("device", "jax", "commit", "tree_hash", "date")


class Measured(NamedTuple):
    """The points of a signature, and the row of its profile where they have times."""

    points: list[dict[str, Any]]
    profile: dict[str, Any] | None


def run(config: ProfileConfig, *, timer: Timer | None = time_each) -> list[dict[str, Any]]:
    """The rows of all profiles, also written to the profile's file; none without times."""
    if config.points is not None:
        return _fit_again(config)
    benches = [
        Bench(
            signature=signature,
            num_workers=_SMOKE_WORKERS if config.smoke else default_num_workers(),
            implementation="xla" if config.smoke else "mosaic_gpu",
            smoke=config.smoke,
        )
        for signature in config.signatures
    ]
    stages = Stages(_prepare, functools.partial(_measure, config=config, timer=timer))
    profiles: list[dict[str, Any]] = []
    for found in run_jobs(benches, stages, num_processes=config.num_processes):
        if config.points_output is not None:
            write_json_lines(config.points_output, [row for each in found for row in each.points])
        profiles = [each.profile for each in found if each.profile is not None]
        if profiles:
            _write_profiles(_profile_path(config, profiles[0]["device"]), profiles)
    return profiles


def _prepare(bench: Bench) -> tuple[Bench, Any]:
    return bench, bench.compile()


def _measure(ready: tuple[Bench, Any], *, config: ProfileConfig, timer: Timer | None) -> Measured:
    bench, program = ready
    points = measure(
        bench, program, group_sizes=config.group_sizes, num_runs=config.num_runs, timer=timer
    )
    origin = provenance(config.commit)
    points = [point | origin for point in points]
    say(f"{_name(bench.signature)}: {len(points)} points")
    return Measured(points, None if timer is None else _fit(bench.signature, points))


def _fit_again(config: ProfileConfig) -> list[dict[str, Any]]:
    rows = read_points(str(config.points))
    profiles = [_fit(signature, signature.of(rows)) for signature in _signatures_in(rows)]
    _write_profiles(_profile_path(config, profiles[0]["device"]), profiles)
    return profiles


def read_points(path: str) -> list[dict[str, Any]]:
    """The points of a file that `run` wrote.

    Raises:
      OSError: the file cannot be read.
      ValueError: it holds other rows, or points without times.
    """
    rows = read_json_lines(path)
    if not rows or not all(row.get("axis") and row.get("time_us") for row in rows):
        raise ValueError(
            f"`points` must be a file of timed points, see --points_output; got {path}."
        )
    return rows


def _signatures_in(rows: Sequence[dict[str, Any]]) -> list[Signature]:
    names = [field.name for field in dataclasses.fields(Signature)]
    return list(dict.fromkeys(Signature(**{name: row[name] for name in names}) for row in rows))


def _profile_path(config: ProfileConfig, device: str) -> Path:
    return FOLDER / f"{device}.json" if config.output is None else Path(config.output)


def _fit(signature: Signature, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of one profile."""
    samples = samples_of(rows, signature)
    fitted = fit_profile(
        samples, num_workers=rows[0]["num_workers"], **dataclasses.asdict(signature)
    )
    for line in report(samples, fitted.profile):
        say(line)
    return {
        **dataclasses.asdict(fitted.profile),
        "held_out": held_out_error(samples, fitted.profile),
        **{name: rows[0][name] for name in _PROVENANCE},
    }


def _write_profiles(path: Path, profiles: Sequence[dict[str, Any]]) -> None:
    """Replaces the profiles of the same combinations, and keeps the others."""
    names = [field.name for field in dataclasses.fields(Signature)]
    new = {tuple(row[name] for name in names): row for row in profiles}
    old = json.loads(path.read_text(encoding="utf-8"))["profiles"] if path.exists() else []
    kept = {tuple(row[name] for name in names): row for row in old}
    path.parent.mkdir(exist_ok=True)  # the package's folder, before its first profile
    content = {"profiles": list((kept | new).values())}
    write_text(path, [json.dumps(content, indent=1, allow_nan=False) + "\n"])


def _name(signature: Signature) -> str:
    return f"{signature.dtype}, head_dim {signature.head_dim}, page {signature.page_size}"


def check(config: ProfileConfig) -> None:
    """Raises unless the settings can be run here and their results written, before any work."""
    device = device_slug()
    if config.points is not None:
        device = read_points(config.points)[0]["device"]
    elif not config.smoke:
        config.check_device()
    path = _profile_path(config, device)
    if path.exists() and not config.smoke:
        load_profiles(path)
    for output in (config.output, config.points_output):
        if output is not None:
            check_writable(output)


def main(argv: Sequence[str]) -> int:
    """The exit status of a command line."""
    values = flags.FlagValues()
    define_flags(values)

    def command() -> int:
        parse_flags(argv, values)
        with usage_errors():
            config = config_from_flags(values)
            check(config)
        run(config, timer=None if config.smoke else time_each)
        return OK

    return exit_status(command)


if __name__ == "__main__":
    set_up_process()
    sys.exit(main(sys.argv))
