"""A jitted function compiled ahead of time, so that what it runs can be read and not only asked."""

from collections.abc import Callable
from typing import Any

import jax

from experiments.provenance import implementation_in


class AheadOfTime:
    """Stands for a jitted function: compiles it at the first call, and runs that program only.

    Attributes:
      implementation: what the program runs, read from its HLO; None before the first call.

    A call of other shapes than the first one's is refused by JAX: nothing is compiled twice.
    """

    def __init__(self, jitted: jax.stages.Wrapped):
        self.implementation: str | None = None
        self._jitted = jitted
        self._program: Callable[..., Any] | None = None

    def __call__(self, *arrays: Any, **statics: Any) -> Any:
        """The function's result; `statics` are those of the first call."""
        if self._program is None:
            program = self._jitted.lower(*arrays, **statics).compile()
            self.implementation = implementation_in(str(program.as_text()))
            self._program = program
        return self._program(*arrays)
