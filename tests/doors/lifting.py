"""Lifts the tests' strictness for foreign code, in place, and sets it again inside."""

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax


@contextlib.contextmanager
def lifted() -> Iterator[None]:
    """Inside, dtypes and ranks promote as JAX does by itself, and warnings are ignored."""
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Inside, all is as in any other test."""
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        yield


def inside(context: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, always called inside a new `context()`."""

    @functools.wraps(function)
    def called(*args, **kwargs):
        with context():
            return function(*args, **kwargs)

    return called
