"""Hyperparameters of a Llama-family decoder."""

import dataclasses
import math
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np

from codec_jax.models.number_checks import MAX_INT32, check_positive, check_positive_integer
from codec_jax.models.rope_scaling import RopeScaling, rope_frequencies

RopePairing = Literal["interleaved", "halves"]
DTypeName = Literal["float32", "bfloat16", "float16"]

_MAX_SIZES = {"num_layers": 2**16, "head_dim": 2**16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shapes and numerics of a decoder; hashable, so it can be a static argument of a jit.

    `max_context` and `vocab_size` are in tokens. `intermediate_size` is the width of the SwiGLU
    layer. `rope_pairing` says which elements of a head rotate together: (2i, 2i + 1) for
    "interleaved", (i, i + head_dim / 2) for "halves". `qkv_bias`, `o_bias` and `mlp_bias` say which
    projections have biases; `qk_norm` normalises each head of q and k (RMSNorm) before RoPE.
    `dtype` is the dtype of the parameters and of the residual stream.

    Raises `ValueError` for values that no decoder can have.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    rope_theta: float = 10000.0
    rope_pairing: RopePairing = "halves"
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: DTypeName = "float32"

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type is int:
                most = _MAX_SIZES.get(field.name, MAX_INT32)
                check_positive_integer(field.name, getattr(self, field.name), most=most)
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_q_heads` must be a multiple of `num_kv_heads`; got {self.num_q_heads} and "
                f"{self.num_kv_heads}. Grouped-query attention shares each KV head evenly."
            )
        if self.head_dim % 2:
            raise ValueError(
                f"`head_dim` must be even; got {self.head_dim}. RoPE rotates pairs of elements."
            )
        check_positive("rope_theta", self.rope_theta)
        check_positive("rms_norm_eps", self.rms_norm_eps)
        _check_choice("rope_pairing", self.rope_pairing, get_args(RopePairing))
        _check_choice("dtype", self.dtype, get_args(DTypeName))
        _check_frequencies(self)

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def array_dtype(self) -> jnp.dtype:
        """`dtype` as an array dtype."""
        return jnp.dtype(self.dtype)


def layer_param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of one layer, by name; matrices are [inputs, outputs]."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size = config.num_q_heads * config.head_dim
    kv_size = config.num_kv_heads * config.head_dim
    shapes = {
        "attention_norm": (hidden,),
        "q_proj": (hidden, q_size),
        "k_proj": (hidden, kv_size),
        "v_proj": (hidden, kv_size),
        "o_proj": (q_size, hidden),
        "mlp_norm": (hidden,),
        "gate_proj": (hidden, intermediate),
        "up_proj": (hidden, intermediate),
        "down_proj": (intermediate, hidden),
    }
    if config.qkv_bias:
        shapes |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
    if config.o_bias:
        shapes |= {"o_bias": (hidden,)}
    if config.mlp_bias:
        shapes |= {"gate_bias": (intermediate,), "up_bias": (intermediate,), "down_bias": (hidden,)}
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    return shapes


def param_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter of the decoder, by name.

    Parameters of layers are stacked on a leading axis; `embedding` and `lm_head` are
    [vocab_size, hidden_size]; a tied decoder has no `lm_head`.
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    layers = {
        name: (config.num_layers, *shape) for name, shape in layer_param_shapes(config).items()
    }
    head = {} if config.tie_embeddings else {"lm_head": vocabulary}
    return {"embedding": vocabulary, **layers, "final_norm": (config.hidden_size,), **head}


def num_params(config: ModelConfig) -> int:
    """Number of parameters of the decoder."""
    return sum(math.prod(shape) for shape in param_shapes(config).values())


def _check_frequencies(config: ModelConfig) -> None:
    """Raises `ValueError` where RoPE's frequencies would not be float32."""
    scaling, of_head = config.rope_scaling, (config.head_dim, config.rope_theta)
    try:
        with np.errstate(over="ignore"):
            given = scaling.frequencies(*of_head) if scaling else rope_frequencies(*of_head)
            is_finite = np.isfinite(given.astype(np.float32)).all()
    except ArithmeticError:
        is_finite = False
    if not is_finite:
        raise ValueError(
            f"`rope_scaling` must give finite frequencies with `rope_theta` {config.rope_theta};"
            f" got {scaling}."
        )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(choices)}; got {value!r}.")
