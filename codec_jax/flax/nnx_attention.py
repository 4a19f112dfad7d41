"""An NNX attention module around an existing one: its projections, this library's attention."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from flax import nnx

from codec_jax.flax.carrier import Carrier, check_layers
from codec_jax.flax.tunix import tunix_forward
from codec_jax.models import AttentionFn


class SharedPool(nnx.Variable):
    """The pool (a `KVPool`) that all layers of a model hold and update in place.

    `nnx.split(model, SharedPool, ...)` parts it from the parameters, so that it can be donated.
    """


class Shared(nnx.Module):
    """An attention module that projects, rotates and norms as `attn`, and attends by a plan.

    It takes and returns what `attn` does: `layer.attn = Shared(layer.attn, pool, layer=i)`.

    Args:
      attn: the module to stand in for; it keeps its parameters.
      pool: the one variable of all layers.
      layer: which layer this is, from 0.
      forward: `forward(attn, attend, *args, **kwargs)` does what a call of `attn` does, with
        `attend(q, k, v, logits_scale=None) -> out` in place of its scores, softmax and cache. Known
        for the modules of `tunix.FORWARDS` when None.

    Raises:
      ValueError: no `forward` is known for such a module, `attn` is shared already, or `pool` is no
        `SharedPool`.
    """

    def __init__(
        self,
        attn: nnx.Module,
        pool: SharedPool,
        *,
        layer: int,
        forward: Callable[..., Any] | None = None,
    ):
        if isinstance(attn, Shared):
            raise ValueError("`attn` must be the model's own module; got one that is shared.")
        if not isinstance(pool, SharedPool):
            raise ValueError(
                f"`pool` must be a SharedPool, one for all layers; got {type(pool).__name__}."
            )
        self.attn = attn
        self.pool = pool
        self.layer = layer
        self.carrier: Carrier | None = None
        self._forward = tunix_forward(attn) if forward is None else forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `attn` returns. Raises RuntimeError outside `attending`."""
        if self.carrier is None:
            raise RuntimeError("A shared layer must run inside `attending(model, attention)`.")
        self.carrier.pool = self.pool.get_value()
        attend = functools.partial(self.carrier.attend, self.layer)
        result = self._forward(self.attn, attend, *args, **kwargs)
        self.pool.set_value(self.carrier.pool)
        return result


@contextlib.contextmanager
def attending(model: nnx.Module, attention: AttentionFn) -> Iterator[None]:
    """Inside, the shared layers of `model` attend with `attention`, in one call of the model.

    It belongs into the traced function, around a call of the model that was merged there.

    Raises:
      ValueError: the model has no shared layer, they have several pools, or they are not as many as
        the layers of their pool.
      RuntimeError: afterwards, where the shared layers did not run once each, in order.
    """
    pool, count = shared_pool(model).get_value(), len(shared_layers(model))
    if pool is None:
        raise ValueError("`SharedPool` must hold a pool in a loop of one's own; got None.")
    check_layers(pool, num_layers=count)
    carrier = Carrier(attention, num_layers=count)
    with carried(model, carrier):
        yield
    carrier.finish()


@contextlib.contextmanager
def carried(model: nnx.Module, carrier: Carrier) -> Iterator[None]:
    """Inside, the shared layers of `model` attend by `carrier`."""
    layers = shared_layers(model)
    for layer in layers:
        layer.carrier = carrier
    try:
        yield
    finally:
        for layer in layers:
            layer.carrier = None


def shared_layers(model: nnx.Module) -> list[Shared]:
    """The shared layers of a model."""
    return [module for _, module in nnx.iter_modules(model) if isinstance(module, Shared)]


def shared_pool(model: nnx.Module) -> SharedPool:
    """The one pool of a model's shared layers.

    Raises:
      ValueError: there is none, or more than one.
    """
    pools = {id(layer.pool): layer.pool for layer in shared_layers(model)}
    if len(pools) != 1:
        raise ValueError(
            "`model` must have `Shared` layers with one `SharedPool` in all of them; its layers"
            f" have {len(pools)} pools."
        )
    return next(iter(pools.values()))
