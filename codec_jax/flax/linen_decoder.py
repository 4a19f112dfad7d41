"""A Linen model with its variables as a decoder for `generate`."""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from flax import nnx

from codec_jax.flax.carrier import Carrier
from codec_jax.flax.decoder import ForeignDecoder
from codec_jax.flax.linen_attention import LinenHook, linen_carried
from codec_jax.models import ModelConfig


class LinenDecoder(ForeignDecoder):
    """A decoder around a Linen model, which stays as it is.

    Args:
      model: the model; hashable, as Linen modules with hashable attributes are.
      variables: what `model.apply` takes: parameters, and other collections where it has them.
      config: its sizes.
      hook: how its attention is taken over.
      run: `run(model, token_ids, positions)` gives the hidden states after the final norm,
        [tokens, 1, hidden], of the bound model.
      head: `head(model, hidden)` gives the scores of the next token, [tokens, 1, vocab].

    Nothing runs on the device, but the model is traced once, so that what cannot work is refused
    here.

    Raises:
      RuntimeError: the hook did not run once for each layer.
      ValueError: the results have not the sizes or the dtype of `config`.
    """

    def __init__(
        self,
        model: nn.Module,
        variables: Any,
        config: ModelConfig,
        *,
        hook: LinenHook,
        run: Callable[..., Any],
        head: Callable[..., Any],
    ):
        self.model = model
        self.variables = nnx.data(jax.tree.map(nnx.Param, variables))
        self.config = config
        self._hook, self._run, self._head = hook, run, head
        self.check_sizes()

    def run(self, token_ids: Any, positions: Any, carrier: Carrier) -> Any:
        """Hidden states after the final norm."""
        with linen_carried(carrier, self._hook):
            return self.model.apply(self.arrays(), token_ids, positions, method=self._run)

    def head(self, hidden: Any) -> Any:
        """Scores of the next token."""
        return self.model.apply(self.arrays(), hidden, method=self._head)

    def arrays(self) -> Any:
        """The model's variables."""
        return nnx.as_pure(self.variables)
