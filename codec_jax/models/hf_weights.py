"""From the safetensors of a checkpoint in the Hugging Face layout to a decoder."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from codec_jax.models.config import ModelConfig, layer_param_shapes, param_shapes
from codec_jax.models.hf_files import open_tensors, read_tensor, tensor_files
from codec_jax.models.llama import Decoder
from codec_jax.models.param_stream import ParamStream

EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_OUTSIDE = {"embedding": EMBEDDING, "final_norm": "model.norm.weight", "lm_head": _HEAD}
_IN_LAYER = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    **{f"{x}_proj": f"self_attn.{x}_proj.weight" for x in "qkvo"},
    **{f"{x}_bias": f"self_attn.{x}_proj.bias" for x in "qkvo"},
    **{f"{x}_proj": f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")},
    **{f"{x}_bias": f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")},
}
_DERIVED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_MAX_NAMES = 5


class _Place(NamedTuple):
    """Where a tensor belongs: a parameter, and the layer of it."""

    param: str
    layer: int = 0


def load_weights(folder: Path, config: ModelConfig) -> Decoder:
    """The decoder with the weights of a folder, tensor by tensor on the device.

    In the dtype of `config`; where that is the stored one, bit for bit. A tied head may be stored
    too if it equals the embedding.

    Raises:
      ValueError: tensors are missing, left over, or of another shape or dtype, or a file is
        corrupt; the message names them.
    """
    files = tensor_files(folder)
    names = {path: _tensor_names(path, counted) for path, counted in files.items()}
    places = _places(config)
    _check_names(places, [name for found in names.values() for name in found], folder)
    stream = ParamStream(config)
    for path, found in names.items():
        with open_tensors(path) as tensors:
            for name in found:
                if name in places:
                    tensor = read_tensor(tensors, name, path)
                    param, layer = places[name]
                    stream.put(param, tensor, layer=layer, place=f"{name} in {path}")
    decoder = stream.finish()
    if config.tie_embeddings:
        _check_tied_head(names, decoder)
    return decoder


def stored_dtype_of(folder: Path, name: str) -> str | None:
    """The safetensors dtype of a tensor of the folder ("BF16"), or None where it has none."""
    for path, counted in tensor_files(folder).items():
        if counted is None or name in counted:
            with open_tensors(path) as tensors:
                if name in tensors.keys():  # noqa: SIM118 (no mapping)
                    return tensors.get_slice(name).get_dtype()
    return None


def _tensor_names(path: Path, counted: frozenset[str] | None) -> list[str]:
    """The tensors of a file that count, in the order of the file."""
    with open_tensors(path) as tensors:
        names = list(tensors.offset_keys())
    if counted is None:
        return names
    absent = sorted(counted - set(names))
    if absent:
        raise ValueError(f"`{path}` must hold {_join(absent)}: the index says so; got none.")
    return [name for name in names if name in counted]


def _places(config: ModelConfig) -> dict[str, _Place]:
    """Where each tensor of the checkpoint belongs."""
    in_layer = layer_param_shapes(config)
    outside = [name for name in param_shapes(config) if name not in in_layer]
    return {_OUTSIDE[name]: _Place(name) for name in outside} | {
        f"model.layers.{layer}.{_IN_LAYER[name]}": _Place(name, layer)
        for layer in range(config.num_layers)
        for name in in_layer
    }


def _check_names(places: dict[str, _Place], found: Iterable[str], folder: Path) -> None:
    """Refuses missing and left-over tensors; a tied head and tables of RoPE may be left over."""
    found = set(found)
    missing = sorted(places.keys() - found)
    if missing:
        raise ValueError(
            f"`{folder}` must hold the tensors of its config; got no {_join(missing)}."
        )
    unused = sorted(
        name for name in found - places.keys() if name != _HEAD and not _DERIVED.search(name)
    )
    if unused:
        raise ValueError(
            f"`{folder}` must hold no tensor that its config has no use for; got {_join(unused)}."
        )


def _check_tied_head(names: dict[Path, list[str]], decoder: Decoder) -> None:
    for path, found in names.items():
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


@jax.jit
def _are_equal(embedding: jax.Array, head: np.ndarray) -> jax.Array:
    return jnp.array_equal(embedding, head, equal_nan=True)


def _join(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES])
    rest = len(names) - _MAX_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
