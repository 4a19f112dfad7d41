"""What every test runs under: strict JAX, no GPU test without a GPU, repeatable hypothesis."""

import os

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the tests marked `gpu` where JAX's default backend is no GPU, for that reason only."""
    marked = [item for item in items if "gpu" in item.keywords]
    if marked and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason=f"needs a GPU; JAX runs on {jax.default_backend()}")
        for item in marked:
            item.add_marker(skip)
