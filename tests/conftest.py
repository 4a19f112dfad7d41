"""What every test runs under: strict JAX, no GPU test without a GPU, repeatable hypothesis."""

import os
from pathlib import Path

import hypothesis
import jax
import pytest

# JAX promotes dtypes and ranks silently by default; both have hidden wrong shapes and precisions.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Two processes that each reserve most of the GPU's memory cannot both start.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# A first example compiles, so a deadline would measure the compiler.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


MAPPINGS = Path("/proc/self/maps")
MAX_MAPPINGS = 20_000


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Keeps a process that runs many modules below Linux's 65,530 memory mappings.

    XLA holds several for every program that it has compiled, and crashes where there are no more.
    """
    yield
    if MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MAX_MAPPINGS:
        jax.clear_caches()


CHAT_MODEL_VARIABLE = "CODEC_JAX_CHAT_MODEL"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked `gpu` where JAX's default backend is no GPU, for that reason only.

    Those marked `model` are skipped where nobody names their file: `make test-model` does.
    """
    if CHAT_MODEL_VARIABLE not in os.environ:
        for item in items:
            if item.get_closest_marker("model") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a fetched file: make test-model"))
    marked = [item for item in items if "gpu" in item.keywords]
    if marked and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason=f"needs a GPU; JAX runs on {jax.default_backend()}")
        for item in marked:
            item.add_marker(skip)
