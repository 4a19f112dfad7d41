"""A progress bar on standard error, where that is a terminal."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence

from codec_jax import Generation
from codec_jax.generate import Delta

Update = Callable[[Sequence[Delta]], None]


@contextlib.contextmanager
def progress(generation: Generation) -> Iterator[Update]:
    """A function to call with each list of deltas; it does nothing where nobody would see it."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich"):
        with _rich_progress(generation) as update:
            yield update
    else:
        yield lambda deltas: None


@contextlib.contextmanager
def _rich_progress(generation: Generation) -> Iterator[Update]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    num_rows, num_ended = len(generation.requests), 0
    room = {
        (request.prompt_index, request.sample_index): request.sampling.max_new_tokens
        for request in generation.requests
    }
    columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compiling, prefill", total=sum(room.values()))

        def update(deltas: Sequence[Delta]) -> None:
            nonlocal num_ended
            for delta in deltas:
                row = (delta.prompt_index, delta.sample_index)
                num_passed = room[row] if delta.finish_reason else len(delta.token_ids)
                room[row] -= num_passed
                bar.advance(task, num_passed)
            num_ended += sum(delta.finish_reason is not None for delta in deltas)
            bar.update(task, description=f"{num_ended} of {num_rows} samples ended")

        yield update
