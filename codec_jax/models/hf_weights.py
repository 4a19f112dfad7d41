"""From the safetensors of a checkpoint in the Hugging Face layout to a decoder."""

import re
from collections.abc import Container, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from codec_jax.models.config import ModelConfig
from codec_jax.models.hf_files import open_tensors, read_tensor, tensor_files
from codec_jax.models.llama import Decoder
from codec_jax.models.param_places import check_names, check_shapes, join_names, param_places
from codec_jax.models.param_stream import ParamStream

EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_OUTSIDE = {"embedding": EMBEDDING, "final_norm": "model.norm.weight", "lm_head": _HEAD}
_LAYER = "model.layers.{layer}"
_IN_LAYER = {
    "attention_norm": f"{_LAYER}.input_layernorm.weight",
    "mlp_norm": f"{_LAYER}.post_attention_layernorm.weight",
    "q_norm": f"{_LAYER}.self_attn.q_norm.weight",
    "k_norm": f"{_LAYER}.self_attn.k_norm.weight",
    **{f"{x}_proj": f"{_LAYER}.self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"{x}_bias": f"{_LAYER}.self_attn.{x}_proj.bias" for x in "qkvo"},
    **{f"{x}_proj": f"{_LAYER}.mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    **{f"{x}_bias": f"{_LAYER}.mlp.{x}_proj.bias" for x in ("gate", "up", "down")},
}
_DERIVED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


def load_weights(folder: Path, config: ModelConfig) -> Decoder:
    """The decoder with the weights of a folder, tensor by tensor on the device.

    In the dtype of `config`; where that is the stored one, bit for bit. A tied head may be stored
    too if it equals the embedding.

    Raises:
      ValueError: tensors are missing, left over, or of another shape or dtype, or a file is
        corrupt; the message names them.
    """
    files = tensor_files(folder)
    shapes = {path: _tensor_shapes(path, counted) for path, counted in files.items()}
    places = param_places(config, _OUTSIDE, _IN_LAYER)
    names = [name for found in shapes.values() for name in found]
    check_names(places, names, folder, may_be_left=_may_be_left)
    for path, found in shapes.items():
        check_shapes(places, found, config, path)
    stream = ParamStream(config)
    for path, found in shapes.items():
        with open_tensors(path) as tensors:
            for name in found:
                if name in places:
                    tensor = read_tensor(tensors, name, path)
                    param, layer = places[name]
                    stream.put(param, tensor, layer=layer, place=f"`{name}` in {path}")
    decoder = stream.finish()
    if config.tie_embeddings:
        _check_tied_head(shapes, decoder)
    return decoder


def stored_dtype_of(folder: Path, name: str) -> str | None:
    """The safetensors dtype of a tensor of the folder ("BF16"), or None where it has none."""
    for path, counted in tensor_files(folder).items():
        if counted is None or name in counted:
            with open_tensors(path) as tensors:
                if name in tensors.keys():  # noqa: SIM118 (no mapping)
                    return tensors.get_slice(name).get_dtype()
    return None


def _tensor_shapes(path: Path, counted: frozenset[str] | None) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of a file that count, in the order of the file."""
    with open_tensors(path) as tensors:
        names = list(tensors.offset_keys())
        absent = sorted((counted or set()) - set(names))
        if absent:
            raise ValueError(
                f"`{path}` must hold {join_names(absent)}: the index says so; got none."
            )
        kept = [name for name in names if counted is None or name in counted]
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in kept}


def _check_tied_head(shapes: Mapping[Path, Container[str]], decoder: Decoder) -> None:
    for path, found in shapes.items():
        if _HEAD not in found:
            continue
        with open_tensors(path) as tensors:
            head = read_tensor(tensors, _HEAD, path)
        embedding = decoder.embedding[...]
        same_shape = head.shape == embedding.shape
        if not same_shape or not _are_equal(embedding, head.astype(embedding.dtype)):
            raise ValueError(
                f"`{_HEAD}` in {path} must equal {EMBEDDING}: the config says"
                " `tie_word_embeddings`; got another tensor."
            )


def _may_be_left(name: str) -> bool:
    """Whether it is a tied head, which is compared, or a table of RoPE."""
    return name == _HEAD or _DERIVED.search(name) is not None


@jax.jit
def _are_equal(embedding: jax.Array, head: np.ndarray) -> jax.Array:
    return jnp.array_equal(embedding, head, equal_nan=True)
