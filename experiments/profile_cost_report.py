"""What a fit found, in lines: the costs, how well they explain which points, and the worst."""

from collections.abc import Iterator, Sequence

import numpy as np

from codec_jax.planning.profiles import CostProfile
from experiments.profile_cost_fit import Sample, predicted_us, relative_errors

COSTS = {
    "step_us": "a page for one tile",
    "wide_step_us": "a page for two tiles",
    "masked_us": "more for a tile that the rows do not fill",
    "partial_us": "more for a tile where the page is partly live",
    "short_us": "a page for one tile with few live tokens",
    "segment_us": "a segment besides its steps",
    "slot_us": "a partial result to merge",
    "tile_us": "a tile of a KV head that the merge writes",
    "launch_us": "a call",
}
NUM_WORST = 5


def report(samples: Sequence[Sample], profile: CostProfile) -> Iterator[str]:
    """The lines."""
    yield f"{profile.dtype}, head_dim {profile.head_dim}, page {profile.page_size}:"
    for name, text in COSTS.items():
        yield f"  {name:14} {getattr(profile, name):9.4f} us  {text}"
    yield f"  {'memory':14} {profile.bytes_per_us / 1e6:9.3f} TB/s"
    yield f"  {'products':14} {profile.flops_per_us / 1e6:9.1f} TFLOP/s, the most that was reached"
    yield f"  {'cache':14} {profile.cache_bytes / 2**20:9.1f} MiB"
    yield from _by_class(samples, profile)
    yield from _worst(samples, profile)


def _by_class(samples: Sequence[Sample], profile: CostProfile) -> Iterator[str]:
    """Errors of the points of each axis and regime, the group's size and the held-out ones."""
    errors = relative_errors(samples, profile)
    classes: dict[str, list[float]] = {}
    for sample, error in zip(samples, errors, strict=True):
        row, tiles = sample.row, "wide" if sample.row["rows"] > 64 else "narrow"
        names = [f"{row['axis']}, {row['regime']}, {tiles}", f"group {row['group_size']}"]
        names += ["held out"] if row["held_out"] else []
        for name in names:
            classes.setdefault(name, []).append(error)
    yield f"  {'predicted / measured - 1':28} points   mean  |median|   |max|"
    for name in sorted(classes):
        found = np.array(classes[name])
        size = np.abs(found)
        numbers = f"{found.mean():+6.1%}  {np.median(size):8.1%}  {size.max():6.1%}"
        yield f"  {name:28} {found.size:6}  {numbers}"


def _worst(samples: Sequence[Sample], profile: CostProfile) -> Iterator[str]:
    errors = relative_errors(samples, profile)
    for i in np.argsort(-np.abs(errors))[:NUM_WORST].tolist():
        row = samples[i].row
        work = f"{row['num_segments']} x {row['num_steps']} steps, {row['rows']} rows"
        work += f", {row['slots_per_tile']} slots a tile, {row['num_pages']} pages"
        work += f", {row['dead_tokens']} dead tokens" if row["dead_tokens"] else ""
        found = f"{predicted_us(samples[i].work, profile):.1f} us for {samples[i].time_us:.1f}"
        yield f"  worst: {errors[i]:+.1%}, {found}: {row['axis']}, {row['regime']}, {work}"
