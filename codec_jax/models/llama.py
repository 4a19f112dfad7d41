"""Llama-family decoder in Flax NNX whose attention is injected by the caller.

Arrays are flat over tokens: there is no batch dimension, and the decoder knows nothing of
requests, pages or masks. All layers run in one `jax.lax.scan`, so the cache is threaded through
as a carry and a donated KV pool is updated in place.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from codec_jax.models.config import DTypeName, ModelConfig, layer_param_shapes, param_shapes
from codec_jax.models.rope import apply_rope, rope_angles

Cache = Any
"""Any pytree; its structure, shapes and dtypes must survive a call of the attention."""

Params = Mapping[str, Array]

_DRAWN_ELEMENTS = 2**20

AttentionFn = Callable[
    [
        Int32[Array, ""],
        Float[Array, "tokens num_q_heads head_dim"],
        Float[Array, "tokens num_kv_heads head_dim"],
        Float[Array, "tokens num_kv_heads head_dim"],
        Cache,
    ],
    tuple[Float[Array, "tokens num_q_heads head_dim"], Cache],
]
"""`attention(layer, q, k, v, cache) -> (out, cache)`: stores k and v in the cache, attends with q.

`layer` is a scalar array; `q` and `k` are rotated already. The scale of the logits
(`head_dim ** -0.5` in this family) and the mask are the function's business.
"""


class Layer(nnx.Module):
    """One pre-norm layer: attention, then SwiGLU, each added to the residual stream.

    A decoder with biases has `q_bias` and so on too, see `layer_param_shapes`.
    """

    attention_norm: nnx.Param
    q_proj: nnx.Param
    k_proj: nnx.Param
    v_proj: nnx.Param
    o_proj: nnx.Param
    mlp_norm: nnx.Param
    gate_proj: nnx.Param
    up_proj: nnx.Param
    down_proj: nnx.Param
    q_norm: nnx.Param
    k_norm: nnx.Param

    def __init__(self, config: ModelConfig, params: Params):
        self.config = config
        for name in layer_param_shapes(config):
            setattr(self, name, nnx.Param(params[name]))

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        rotation: tuple[Array, Array],
        layer: Int32[Array, ""],
        cache: Cache,
        attention: AttentionFn,
    ) -> tuple[Float[Array, "tokens hidden"], Cache]:
        """The residual stream after the layer, and the cache that `attention` returned."""
        q, k, v = self._project_qkv(x, rotation)
        out, cache = attention(layer, q, k, v, cache)
        if out.shape != q.shape:
            raise ValueError(
                f"`attention` must return an output of the shape of `q`, {q.shape}; got "
                f"{out.shape}."
            )
        out = out.astype(x.dtype).reshape(x.shape[0], -1)
        x = _add(x, self._linear(out, "o"))
        return _add(x, self._swiglu(x)), cache

    def _project_qkv(self, x: Array, rotation: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        config = self.config
        normed = _rms_norm(x, self.attention_norm[...], config.rms_norm_eps)
        q, k, v = (
            self._linear(normed, name).reshape(x.shape[0], -1, config.head_dim) for name in "qkv"
        )
        if config.qk_norm:
            q = _rms_norm(q, self.q_norm[...], config.rms_norm_eps)
            k = _rms_norm(k, self.k_norm[...], config.rms_norm_eps)
        rotate = partial(apply_rope, cos=rotation[0], sin=rotation[1], pairing=config.rope_pairing)
        return rotate(q).astype(x.dtype), rotate(k).astype(x.dtype), v.astype(x.dtype)

    def _swiglu(self, x: Array) -> Float32[Array, "tokens hidden"]:
        normed = _rms_norm(x, self.mlp_norm[...], self.config.rms_norm_eps)
        gated = jax.nn.silu(self._linear(normed, "gate")) * self._linear(normed, "up")
        return self._linear(gated.astype(x.dtype), "down")

    def _linear(self, x: Array, name: str) -> Float32[Array, "tokens outputs"]:
        """`x` times the named matrix, plus its bias where the decoder has one."""
        product = _project(x, getattr(self, f"{name}_proj")[...])
        bias = getattr(self, f"{name}_bias", None)
        return product if bias is None else product + bias[...].astype(jnp.float32)[None, :]


class Decoder(nnx.Module):
    """Decoder with RMSNorm, RoPE by absolute position, grouped-query attention and SwiGLU.

    Inside a jit: `graphdef, params = nnx.split(decoder)` outside it, `nnx.merge(graphdef, params)`
    inside. `layers` holds the parameters of all layers, stacked on a leading axis.
    """

    def __init__(self, config: ModelConfig, params: Params):
        """Takes `params` as they are; `from_arrays` checks them."""
        self.config = config
        self.embedding = nnx.Param(params["embedding"])
        self.layers = Layer(config, params)
        self.final_norm = nnx.Param(params["final_norm"])
        self.lm_head = None if config.tie_embeddings else nnx.Param(params["lm_head"])

    @classmethod
    def from_arrays(cls, config: ModelConfig, arrays: Mapping[str, np.ndarray]) -> "Decoder":
        """A decoder with these weights, cast to `config.dtype` and put on the default device.

        Nothing is compiled. Raises `ValueError` if names or shapes differ from `param_shapes`.
        """
        shapes = param_shapes(config)
        if arrays.keys() != shapes.keys():
            raise ValueError(
                f"`arrays` must have the names {sorted(shapes)}; got {sorted(arrays)}. See "
                f"`param_shapes`."
            )
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise ValueError(
                    f"`arrays[{name!r}]` must have shape {shape}; got {arrays[name].shape}."
                )
        dtype = config.array_dtype
        host = {name: np.array(arrays[name], dtype=dtype, order="C") for name in shapes}
        return cls(config, jax.device_put(host))

    def arrays(self) -> dict[str, Array]:
        """Every parameter by name, as `param_shapes` names them."""
        names = param_shapes(self.config)
        in_layer = layer_param_shapes(self.config)
        return {
            name: getattr(self.layers if name in in_layer else self, name)[...] for name in names
        }

    def __call__(
        self,
        token_ids: Int32[Array, " tokens"],
        positions: Int32[Array, " tokens"],
        cache: Cache,
        attention: AttentionFn,
    ) -> tuple[Float[Array, "tokens hidden"], Cache]:
        """Hidden states after the final norm, and the cache after all layers.

        `positions` are absolute, from 0. Token ids must be in [0, vocab_size); a row with any other
        id is NaN.
        """
        _check_tokens(token_ids, positions)
        config = self.config
        x = jnp.take(self.embedding[...], token_ids, axis=0)
        rotation = rope_angles(
            positions,
            head_dim=config.head_dim,
            theta=config.rope_theta,
            scaling=config.rope_scaling,
        )
        graphdef, stacked = nnx.split(self.layers)

        def run_layer(carry, layer_and_params):
            layer, params = layer_and_params
            x, cache = carry
            return nnx.merge(graphdef, params)(x, rotation, layer, cache, attention), None

        layer_ids = jnp.arange(config.num_layers, dtype=jnp.int32)
        (x, cache), _ = jax.lax.scan(run_layer, (x, cache), (layer_ids, stacked))
        return _rms_norm(x, self.final_norm[...], config.rms_norm_eps), cache

    def logits(self, hidden: Float[Array, "tokens hidden"]) -> Float32[Array, "tokens vocab"]:
        """Scores of the next token, in float32, for hidden states that `__call__` returned."""
        head = (self.embedding if self.lm_head is None else self.lm_head)[...]
        # On a CPU, either form makes XLA copy a bfloat16 head to float32 where the other does not.
        if len(hidden) == 1:
            return _project(hidden, head.T)
        return _project(hidden, head, contracted=1)


def init_decoder(config: ModelConfig, *, seed: int = 0) -> Decoder:
    """A decoder with random weights that keep activations at unit scale; one compilation.

    Drawn layer by layer and some rows at a time, in float32, and stored in `config.dtype`: beside
    the parameters themselves the device holds some MiB of temporaries.
    """
    return Decoder(config, _init_params(np.uint32(seed), config=config))


def cast(decoder: Decoder, dtype: DTypeName) -> Decoder:
    """The same decoder with all its parameters, and its arithmetic, in `dtype`; one compilation."""
    config = replace(decoder.config, dtype=dtype)
    return Decoder(config, _cast_params(decoder.arrays(), dtype=dtype))


@partial(jax.jit, static_argnames="config")
def _init_params(seed: Array, *, config: ModelConfig) -> dict[str, Array]:
    in_layer = layer_param_shapes(config)
    outside = {name: shape for name, shape in param_shapes(config).items() if name not in in_layer}
    key, *layer_keys = jax.random.split(jax.random.key(seed), config.num_layers + 1)
    layers = jax.lax.map(
        partial(_draw_params, shapes=in_layer, config=config), jnp.stack(layer_keys)
    )
    return layers | _draw_params(key, shapes=outside, config=config)


def _draw_params(
    key: Array, *, shapes: Mapping[str, tuple[int, ...]], config: ModelConfig
) -> dict[str, Array]:
    params = {}
    for name, shape in shapes.items():
        key, subkey = jax.random.split(key)
        if name.endswith("_norm"):
            params[name] = jnp.ones(shape, config.array_dtype)
        else:
            fan_in = shape[0] if name.endswith("_proj") else config.hidden_size
            params[name] = _draw_normal(subkey, shape, fan_in**-0.5, config.array_dtype)
    return params


def _draw_normal(key: Array, shape: tuple[int, ...], std: float, dtype: jnp.dtype) -> Array:
    """Normal numbers, drawn in float32 some rows at a time."""
    width = math.prod(shape[1:])
    block = (min(shape[0], max(1, _DRAWN_ELEMENTS // width)), *shape[1:])

    def draw(index: Array, drawn: Array) -> Array:
        normal = jax.random.normal(jax.random.fold_in(key, index), block, jnp.float32)
        # The last block begins earlier where it would end behind the matrix.
        rows = (normal * std).astype(dtype)
        return jax.lax.dynamic_update_slice_in_dim(drawn, rows, index * block[0], axis=0)

    # Matrices that began with the same numbers would begin as one, and be copied.
    begin = jnp.full(shape, jax.random.normal(key, (), dtype))
    return jax.lax.fori_loop(0, -(-shape[0] // block[0]), draw, begin)


@partial(jax.jit, static_argnames="dtype")
def _cast_params(params: dict[str, Array], *, dtype: DTypeName) -> dict[str, Array]:
    return {name: param.astype(dtype) for name, param in params.items()}


def _rms_norm(x: Array, weight: Array, eps: float) -> Array:
    x_f32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x_f32 * x_f32, axis=-1, keepdims=True) + eps)
    weight = jnp.expand_dims(weight.astype(jnp.float32), range(x.ndim - 1))
    return (x_f32 * scale * weight).astype(x.dtype)


def _project(x: Array, weight: Array, *, contracted: int = 0) -> Float32[Array, "tokens outputs"]:
    """`x` times `weight`, whose axis `contracted` is that of the inputs."""
    # Default precision lets a GPU round float32 operands to TF32.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((1,), (contracted,)), ((), ()))
    return jax.lax.dot_general(
        x, weight, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _add(x: Array, update: Float32[Array, "tokens hidden"]) -> Array:
    return (x.astype(jnp.float32) + update).astype(x.dtype)


def _check_tokens(token_ids: Array, positions: Array) -> None:
    if token_ids.ndim != 1:
        raise ValueError(
            f"`token_ids` must be one-dimensional; got shape {token_ids.shape}. Flatten the batch: "
            f"requests are told apart by `attention`."
        )
    if positions.shape != token_ids.shape:
        raise ValueError(
            f"`positions` must have the shape of `token_ids`, {token_ids.shape}; got "
            f"{positions.shape}."
        )
