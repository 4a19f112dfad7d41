"""An NNX model with shared layers as a decoder for `generate`."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from codec_jax.flax.carrier import Carrier
from codec_jax.flax.decoder import ForeignDecoder
from codec_jax.flax.nnx_attention import carried, shared_pool
from codec_jax.models import ModelConfig


class _Structure:
    """A model's graph definition, equal to itself only: a foreign one need not be hashable."""

    def __init__(self, graphdef: nnx.GraphDef):
        self.graphdef = graphdef


class NNXDecoder(ForeignDecoder):
    """A decoder around an NNX model whose layers are `Shared`.

    It holds the model's own variables: parameters that are updated there are used here. Programs
    are compiled once for each decoder, so make one and keep it.

    Args:
      model: the model, with one empty `SharedPool(None)` in all its layers.
      config: its sizes.
      run: `run(model, token_ids, positions)` gives the hidden states after the final norm,
        [tokens, 1, hidden]; it may change `model`, which is a copy.
      head: `head(model, hidden)` gives the scores of the next token, [tokens, 1, vocab].

    Nothing runs on the device, but the model is traced once, so that what cannot work is refused
    here.

    Raises:
      RuntimeError: the shared layers did not run once each, in order.
      ValueError: the model has no shared layer, several pools, or one that is not empty; its sizes
        or its dtype are not those of `config`.
    """

    def __init__(
        self,
        model: nnx.Module,
        config: ModelConfig,
        *,
        run: Callable[..., Any],
        head: Callable[..., Any],
    ):
        if shared_pool(model).get_value() is not None:
            raise ValueError("`model` must have an empty `SharedPool(None)`; got one with a value.")
        graphdef, variables = nnx.split(model)
        self.config = config
        self.variables = nnx.data(variables)
        self._structure = _Structure(graphdef)
        self._run, self._head = run, head
        self.check_sizes()

    def run(self, token_ids: Any, positions: Any, carrier: Carrier) -> Any:
        """Hidden states after the final norm."""
        model = self._copy()
        pool = shared_pool(model)
        pool.set_value(carrier.pool)
        with carried(model, carrier):
            hidden = self._run(model, token_ids, positions)
        carrier.pool = pool.get_value()
        return hidden

    def head(self, hidden: Any) -> Any:
        """Scores of the next token."""
        return self._head(self._copy(), hidden)

    def arrays(self) -> nnx.State:
        """Every variable of the model."""
        return self.variables

    def _copy(self) -> nnx.Module:
        # A variable cannot be changed inside a loop that it was made outside of.
        return nnx.merge(self._structure.graphdef, self.variables, copy=True)
