"""O24: how many programs generation compiles, counted in a process of its own."""

import json
import os
import subprocess
import sys

import pytest
from generate_cases import compilations, stories

from codec_jax.generate import Options, generate
from codec_jax.sampling import Sampling

SCRIPT = "import test_generate_compilations as t; t.print_counts()"


def prompt_of(length, seed=0):
    return [1, *(3 + (i * 7 + seed) % 500 for i in range(length - 1))]


def run(prompts, **settings):
    sampling = Sampling(max_new_tokens=2, **settings)
    generate(stories(), prompts, sampling=sampling, options=Options(steps_per_visit=2))


def every_length():
    for length in range(1, 201):
        run([prompt_of(length)])


def batches_of(sizes):
    """Batches whose prompts share a trunk, share nothing, are equal, and fork in the middle."""
    for size in sizes:
        trunk = prompt_of(40)
        run([[*trunk, *prompt_of(5 + i, seed=i)] for i in range(size)])
        run([prompt_of(9 + i, seed=i * 31)[1:] for i in range(size)])
        run([trunk] * size)
        run([[*trunk[: 10 * (i % 4) + 1], *prompt_of(3, seed=i)] for i in range(size)])
        run([trunk], num_samples=size, temperature=0.5 * (size % 2))


def count(work, *arguments):
    with compilations() as events:
        work(*arguments)
    return len(events)


def print_counts():
    """What the subprocess says: compilations of each part, in order."""
    stories()
    counts = {
        "lengths": count(every_length),
        "lengths again": count(every_length),
        "eight rows": count(batches_of, [8]),
        "fewer rows": count(batches_of, range(7, 0, -1)),
        "more steps": count(run, [prompt_of(5)] * 3),
        "another visit length": count(
            lambda: generate(stories(), [[5]], options=Options(steps_per_visit=3))
        ),
    }
    sys.stdout.write(json.dumps(counts))


@pytest.fixture(scope="module")
def counts():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_o24_prompts_of_1_to_200_tokens_need_at_most_six_programs(counts):
    assert 1 <= counts["lengths"] <= 6
    assert counts["lengths again"] == 0


@pytest.mark.slow
def test_o24_smaller_batches_and_other_trees_compile_nothing(counts):
    assert counts["fewer rows"] == 0
    assert counts["more steps"] == 0


@pytest.mark.slow
def test_compilations_are_counted(counts):
    assert counts["another visit length"] >= 1
