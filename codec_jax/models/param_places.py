"""Where the tensors of a checkpoint belong: by name, nothing missing and nothing left over."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from codec_jax.models.config import ModelConfig, layer_param_shapes, param_shapes

_MAX_NAMES = 5


class Place(NamedTuple):
    """Where a tensor belongs: a parameter, and the layer of it."""

    param: str
    layer: int = 0


def param_places(
    config: ModelConfig, outside: Mapping[str, str], in_layer: Mapping[str, str]
) -> dict[str, Place]:
    """Where each tensor of a checkpoint of `config` belongs, by the tensor's name.

    `outside` and `in_layer` are a format's names of the parameters; those of layers hold `{layer}`.
    """
    layer_params = layer_param_shapes(config)
    outer_params = [name for name in param_shapes(config) if name not in layer_params]
    return {outside[name]: Place(name) for name in outer_params} | {
        in_layer[name].format(layer=layer): Place(name, layer)
        for layer in range(config.num_layers)
        for name in layer_params
    }


def check_names(
    places: Mapping[str, Place],
    found: Iterable[str],
    origin: Path,
    *,
    may_be_left: Callable[[str], bool],
) -> None:
    """Raises `ValueError` that names missing tensors, and left-over ones that may not be left."""
    found = set(found)
    missing = sorted(places.keys() - found)
    if missing:
        raise ValueError(
            f"`{origin}` must hold the tensors of its config; got no {join_names(missing)}."
        )
    unused = sorted(name for name in found - places.keys() if not may_be_left(name))
    if unused:
        raise ValueError(
            f"`{origin}` must hold no tensor that its config has no use for; got"
            f" {join_names(unused)}."
        )


def check_shapes(
    places: Mapping[str, Place],
    shapes: Mapping[str, tuple[int, ...]],
    config: ModelConfig,
    origin: Path,
) -> None:
    """Raises `ValueError` that names a tensor of another shape than its place has.

    Matrices of layers lie transposed in checkpoints: [outputs, inputs].
    """
    in_layer = layer_param_shapes(config)
    expected = param_shapes(config) | {name: shape[::-1] for name, shape in in_layer.items()}
    for name, shape in shapes.items():
        if name in places and shape != expected[places[name].param]:
            raise ValueError(
                f"`{name}` in {origin} must have shape {list(expected[places[name].param])}; got"
                f" {list(shape)}."
            )


def join_names(names: list[str]) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(names[:_MAX_NAMES])
    rest = len(names) - _MAX_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
