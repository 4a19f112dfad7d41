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
          tensor: of the parameter's shape for one layer; matrices of layers as checkpoints have
            them, [outputs, inputs].
          layer: whose part it is; ignored outside the layers.
          place: what the tensor is called where it came from, for the message.

        Raises `ValueError` for a tensor of another shape.
        """
        in_layer = name in self._in_layer
        shape = self._in_layer[name] if in_layer else self._shapes[name]
        is_matrix_in_layer = in_layer and len(shape) == 2
        stored = shape[::-1] if is_matrix_in_layer else shape
        if tensor.shape != stored:
            raise ValueError(f"`{place}` must have shape {list(stored)}; got {list(tensor.shape)}.")
        dtype = self.config.array_dtype
        if not in_layer:
            self._params[name] = _cast(jax.device_put(tensor), dtype=dtype)
            return
        if name not in self._params:
            self._params[name] = jnp.zeros(self._shapes[name], dtype)
        stack = _write(self._params[name], tensor, np.int32(layer), transpose=is_matrix_in_layer)
        # Without this, the host would run ahead and hold many tensors at once.
        self._params[name] = jax.block_until_ready(stack)

    def finish(self) -> Decoder:
        """The decoder; every parameter must have been put."""
        return Decoder(self.config, self._params)


@partial(jax.jit, static_argnames="dtype")
def _cast(tensor: Array, *, dtype: np.dtype) -> Array:
    return tensor.astype(dtype)


@partial(jax.jit, static_argnames="transpose", donate_argnames="stack")
def _write(stack: Array, tensor: Array, layer: Array, *, transpose: bool) -> Array:
    part = (tensor.T if transpose else tensor).astype(stack.dtype)
    return jax.lax.dynamic_update_index_in_dim(stack, part, layer, axis=0)
