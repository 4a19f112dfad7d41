"""One layer's attention as it is measured: packed rows in, the kernels alone, packed rows out."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from codec_jax.attention import (
    ResolvedPlan,
    attend_packed,
    prepare_plan,
    resolve_plan,
    run_kernels,
)
from codec_jax.kv_cache import KVPool
from codec_jax.partial import Partial
from codec_jax.planning.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class BareAttention:
    """What is compiled once for all plans of one shape.

    Attributes:
      dtype, head_dim, page_size: of keys and values; head_dim as stored.
      implementation: "mosaic_gpu" or "xla".
    """

    dtype: str
    head_dim: int
    page_size: int
    implementation: str

    def __call__(self, rows, pool: KVPool, resolved: ResolvedPlan) -> Partial:
        """Bare: in a decode step, what else `attend_packed` does is fused into the unpacking."""
        layer, scale = jnp.int32(0), self.head_dim**-0.5
        if self.implementation == "mosaic_gpu":
            return run_kernels(rows, pool, resolved, layer, logits_scale=scale)
        return attend_packed(
            rows, pool, resolved, layer, logits_scale=scale, implementation=self.implementation
        )

    def resolve(self, plan: Plan, page_list: np.ndarray, kv_len: np.ndarray) -> ResolvedPlan:
        """The plan as the implementation takes it, on the device."""
        # Nothing that is measured looks at it, and its shape would need programs of their own.
        plan = dataclasses.replace(plan, packed_row=np.zeros((0, 1), np.int32))
        return _resolve(
            plan,
            page_list,
            kv_len,
            page_size=self.page_size,
            implementation=self.implementation,
        )

    def compile(self, *shapes: Any) -> Any:
        """The program for arguments of these shapes; needs no arrays yet."""
        return jax.jit(self.__call__).lower(*shapes).compile()

    def shapes(
        self, resolved: Any, *, num_kv_heads: int, num_rows: int, num_pages: int
    ) -> tuple[Any, Any, Any]:
        """Shapes of the arguments, given those of the resolved plan."""
        rows: Any = jax.ShapeDtypeStruct((num_kv_heads, num_rows, self.head_dim), self.dtype)
        shape = (num_pages, num_kv_heads, self.page_size, self.head_dim)
        pages: Any = jax.ShapeDtypeStruct(shape, self.dtype)
        return rows, KVPool(pages, pages), resolved


def random_arrays(shapes: Any, *, seed: int = 0) -> Any:
    """Normal numbers of these shapes: zeros would draw less power than real keys and values."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    arrays = [
        _normal(key, shape=x.shape, dtype=x.dtype) for key, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


@functools.partial(jax.jit, static_argnames=("page_size", "implementation"))
def _resolve(plan, page_list, kv_len, *, page_size: int, implementation: str) -> ResolvedPlan:
    prepared = prepare_plan(plan, implementation=implementation)
    return resolve_plan(prepared, page_list, kv_len, page_size=page_size)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key, *, shape, dtype):
    return jax.random.normal(key, shape, dtype)
