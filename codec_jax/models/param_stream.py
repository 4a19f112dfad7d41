"""Parameters that arrive one tensor at a time and go straight to the device."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from codec_jax.models.config import ModelConfig, layer_param_shapes, param_shapes
from codec_jax.models.llama import Decoder


class ParamStream:
    """Collects a decoder's parameters; the host holds one tensor at a time.

    A parameter of layers is one array for all of them; each layer's tensor is written into it in
    place. One compilation for each shape of such an array.
    """

    def __init__(self, config: ModelConfig):
        self.config = config
        self._shapes = param_shapes(config)
        self._in_layer = layer_param_shapes(config)
        self._params: dict[str, Array] = {}

    def put(self, name: str, tensor: np.ndarray, *, layer: int = 0, place: str) -> None:
        """Puts a parameter, or one layer's part of it, on the device in the decoder's dtype.

        Args:
          name: as in `param_shapes`; each name (and layer) once.
          tensor: of the shape that `param_places.check_shapes` asks for.
          layer: whose part it is; ignored outside the layers.
          place: what the tensor is called where it came from, for the message.

        Raises `ValueError` for a tensor with NaN or infinity in the decoder's dtype.
        """
        dtype = self.config.array_dtype
        if name not in self._in_layer:
            put, is_finite = _cast(jax.device_put(tensor), dtype=dtype)
        else:
            stack = self._params.pop(name, None)
            stack = jnp.zeros(self._shapes[name], dtype) if stack is None else stack
            transpose = len(self._in_layer[name]) == 2
            put, is_finite = _write(stack, tensor, np.int32(layer), transpose=transpose)
        # Asking waits; without that, the host would run ahead and hold many tensors at once.
        if not is_finite:
            raise ValueError(
                f"{place} must hold finite numbers in {self.config.dtype}; got NaN or infinity."
            )
        self._params[name] = put

    def finish(self) -> Decoder:
        """The decoder; every parameter must have been put."""
        return Decoder(self.config, self._params)


@partial(jax.jit, static_argnames="dtype")
def _cast(tensor: Array, *, dtype: np.dtype) -> tuple[Array, Array]:
    cast = tensor.astype(dtype)
    return cast, _is_finite(cast)


def _is_finite(tensor: Array) -> Array:
    # XLA would store `jnp.isfinite` of each element; 0 * NaN and 0 * infinity are NaN, too.
    return jnp.sum(0 * tensor) == 0


@partial(jax.jit, static_argnames="transpose", donate_argnames="stack")
def _write(stack: Array, tensor: Array, layer: Array, *, transpose: bool) -> tuple[Array, Array]:
    part = tensor.astype(stack.dtype)
    laid = part.T if transpose else part
    return jax.lax.dynamic_update_index_in_dim(stack, laid, layer, axis=0), _is_finite(part)
