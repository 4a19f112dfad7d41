"""An interceptor on a Linen attention class: its projections, this library's attention."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax.core.tracers import current_trace

from codec_jax.flax.carrier import Carrier, check_layers
from codec_jax.models import AttentionFn


@dataclasses.dataclass(frozen=True)
class LinenHook:
    """Which modules of a Linen decoder attend, and what a call of one does.

    Attributes:
      attention_class: the class, or its qualified name. Subclasses are not meant: they may attend
        in another way.
      forward: `forward(attn, attend, *args, **kwargs)` does what a call of the bound module `attn`
        does, with `attend(q, k, v, logits_scale=None) -> out` in place of its scores, softmax and
        cache.
    """

    attention_class: type[nn.Module] | str
    forward: Callable[..., Any]

    @property
    def class_name(self) -> str:
        """Qualified name of the class."""
        meant = self.attention_class
        return meant if isinstance(meant, str) else f"{meant.__module__}.{meant.__qualname__}"


@contextlib.contextmanager
def linen_attending(
    attention: AttentionFn, pool: Any, *, hook: LinenHook, num_layers: int
) -> Iterator[Carrier]:
    """Inside, one call of a Linen model attends with `attention`; `pool` of what it yields follows.

    It belongs into the function that is traced, around `model.apply`. An `nn.jit` of the model or
    of a module in it is traced anew: flax would take a trace from its cache that knows no hook.

    Raises:
      ValueError: the pool is for another number of layers.
      RuntimeError: afterwards, where the hook did not run once for each layer; inside, where a
        transformation of the model (scan, remat, ...) traces a layer by itself.
    """
    check_layers(pool, num_layers=num_layers)
    carrier = Carrier(attention, pool, num_layers=num_layers)
    with linen_carried(carrier, hook):
        yield carrier
    carrier.finish()


@contextlib.contextmanager
def linen_carried(carrier: Carrier, hook: LinenHook) -> Iterator[None]:
    """Inside, the modules that `hook` means attend by `carrier`."""
    name, trace = hook.class_name, current_trace()

    def intercept(call, args, kwargs, context):
        module = context.module
        if context.method_name != "__call__" or _class_name(module) != name:
            if not module.path:
                args, kwargs = _device_arrays((args, kwargs))
            return call(*args, **kwargs)
        if current_trace() != trace:
            raise RuntimeError(
                f"{'/'.join(module.path)} ({name}) is traced by itself, by a transformation inside"
                " the model such as nn.scan or nn.remat; the pool must go from layer to layer in"
                " one trace. Build the model without it."
            )
        attend = functools.partial(_attend, carrier)
        return hook.forward(module, attend, *args, **kwargs)

    # Without jit, an nn.jit at any depth of the model calls its function and not its cache.
    with jax.disable_jit(), nn.intercept_methods(intercept):
        yield


def _attend(carrier: Carrier, q: Any, k: Any, v: Any, *, logits_scale: float | None = None) -> Any:
    with jax.disable_jit(False):
        return carrier.attend(carrier.next_layer, q, k, v, logits_scale=logits_scale)


def _device_arrays(arguments: Any) -> Any:
    """The arguments of a model as its own jit would have given them on."""

    def convert(x):
        return jnp.asarray(x) if isinstance(x, np.ndarray) else x

    return jax.tree.map(convert, arguments)


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
