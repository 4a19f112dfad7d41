"""The KV pool, one array for all layers, and a batch's view of it."""

import dataclasses
import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from codec_jax.forest_arrays import ForestArrays, check_page_size


class TokenSlots(NamedTuple):
    """Where new tokens' keys and values go; a page past the pool's last one drops the token.

    Attributes:
      page: physical page within a layer.
      row: row within the page.
    """

    page: Int32[Array, " tokens"]
    row: Int32[Array, " tokens"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("k_pages", "v_pages"),
    meta_fields=("num_layers",),
)
@dataclasses.dataclass(frozen=True)
class KVPool:
    """Keys and values of all layers in pages.

    Layer l owns pages [l * num_pages, (l + 1) * num_pages). A layer is an offset on the page ids,
    so that a scan over layers neither slices nor copies.
    """

    k_pages: Float[Array, "layers_pages num_kv_heads page_size head_dim"]
    v_pages: Float[Array, "layers_pages num_kv_heads page_size head_dim"]
    num_layers: int = 1

    @property
    def num_pages(self) -> int:
        """Pages of one layer."""
        return self.k_pages.shape[0] // self.num_layers

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """(num_kv_heads, page_size, head_dim)."""
        _, num_kv_heads, page_size, head_dim = self.k_pages.shape
        return num_kv_heads, page_size, head_dim

    @property
    def head_dim(self) -> int:
        """Width of a stored head: the model's, or more where the kernels want padding."""
        return self.k_pages.shape[3]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.k_pages.shape[2]

    @classmethod
    def zeros(
        cls,
        num_pages: int,
        shape: tuple[int, int, int],
        *,
        num_layers: int = 1,
        dtype: Any = "float32",
    ) -> Self:
        """A zeroed pool.

        Args:
          num_pages: pages of each layer.
          shape: (num_kv_heads, page_size, head_dim).
          num_layers: layers.
          dtype: of keys and values.

        Raises:
          ValueError: a size is not positive, or num_layers * num_pages * num_kv_heads >= 2**31.
        """
        check_pool(num_pages, shape, num_layers=num_layers)
        full = (num_layers * num_pages, *shape)
        k_pages, v_pages = _zeros(shape=full, dtype=jnp.dtype(dtype))
        return cls(k_pages, v_pages, num_layers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """A batch's view of a pool: which pages its nodes own, and how many tokens live in each.

    Attributes:
      pool: keys and values.
      page_list: physical page of each page entry (see `ForestArrays`); -1 where none is owned yet.
      kv_len: live tokens of each node, in depth-first order.
    """

    pool: KVPool
    page_list: Int32[Array, " page_entries"]
    kv_len: Int32[Array, " nodes"]


def fill_cache(
    forest: ForestArrays,
    k: Float[Array, "tokens num_kv_heads head_dim"],
    v: Float[Array, "tokens num_kv_heads head_dim"],
    *,
    page_size: int,
) -> KVCache:
    """A one-layer cache that holds the keys and values of a forest's tokens.

    Args:
      forest: the forest's arrays, with a physical page for each entry in use.
      k, v: of every node's tokens, one node after the other in preorder (`node_order`).
      page_size: tokens of a page, as in the forest.

    Raises:
      ValueError: `k` and `v` differ in shape, or do not hold one row for each token; the forest
        has another page size, or a token without a page.
    """
    check_page_size(forest, page_size)
    num_tokens = int(np.sum(forest.kv_len))
    if k.shape != v.shape or k.ndim != 3 or k.shape[0] != num_tokens:
        raise ValueError(
            f"`k` and `v` must both be [{num_tokens}, num_kv_heads, head_dim], a row for each token"
            f" of the forest; got {k.shape} and {v.shape}."
        )
    node = np.repeat(np.arange(forest.kv_len.size), forest.kv_len)
    offset = np.arange(num_tokens) - (np.cumsum(forest.kv_len) - forest.kv_len)[node]
    place = forest.first_row[node] + offset
    page = forest.page_list[forest.page_lo[node] + place // page_size]
    if (page < 0).any():
        raise ValueError(
            f"`forest` must have a page for each token; node {node[page < 0][0]} has none yet."
        )
    shape = (k.shape[1], page_size, k.shape[2])
    pool = KVPool.zeros(int(page.max(initial=0)) + 1, shape, dtype=k.dtype)
    slots = TokenSlots(page, (place % page_size).astype(np.int32))
    pool = jax.jit(append, donate_argnums=0)(pool, np.int32(0), slots, k, v)
    return KVCache(pool, jnp.asarray(forest.page_list), jnp.asarray(forest.kv_len))


def check_pool(num_pages: int, shape: tuple[int, int, int], *, num_layers: int) -> None:
    """Raises ValueError for sizes that no pool can have."""
    num_kv_heads, page_size, head_dim = shape
    sizes = {
        "num_pages": num_pages,
        "num_layers": num_layers,
        "num_kv_heads": num_kv_heads,
        "page_size": page_size,
        "head_dim": head_dim,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"`{name}` must be positive; got {size}.")
    runs = num_layers * num_pages * num_kv_heads
    if runs >= 2**31:
        raise ValueError(
            "`num_layers * num_pages * num_kv_heads` must be below 2**31 (page ids are 32-bit);"
            f" got {runs}. Use a larger `page_size` or fewer pages."
        )


def append(
    pool: KVPool,
    layer: Int32[Array, ""],
    slots: TokenSlots,
    k: Float[Array, "tokens num_kv_heads head_dim"],
    v: Float[Array, "tokens num_kv_heads head_dim"],
) -> KVPool:
    """The pool with the tokens' keys and values written (in place when the pool is donated).

    No two tokens that are written may have the same page and row.

    Raises:
      ValueError: `slots`, `k` and `v` are not of the same tokens, or `k` or `v` has other heads
        than the pool, or wider ones.
    """
    check_values(pool, slots, k, v)
    inside = (slots.page >= 0) & (slots.page < pool.num_pages)
    page = jnp.where(inside, slots.page + layer * pool.num_pages, pool.k_pages.shape[0])

    padding = ((0, 0), (0, 0), (0, pool.head_dim - k.shape[-1]))

    def write(pages, values):
        values = jnp.pad(values, padding)
        return pages.at[page, :, slots.row].set(values.astype(pages.dtype), mode="drop")

    return dataclasses.replace(pool, k_pages=write(pool.k_pages, k), v_pages=write(pool.v_pages, v))


def check_values(pool: KVPool, slots: TokenSlots, k: Array, v: Array) -> None:
    """Raises ValueError unless the tokens' keys and values fit the pool and their slots.

    What broadcasts would be written without a word, and a kernel would read past the end.
    """
    num_tokens, num_kv_heads = slots.page.shape[0], pool.page_shape[0]
    if slots.row.shape != slots.page.shape:
        raise ValueError(
            "`slots` must have a page and a row for each token; got shapes"
            f" {slots.page.shape} and {slots.row.shape}."
        )
    for name, values in (("k", k), ("v", v)):
        fits = values.ndim == 3 and values.shape[:2] == (num_tokens, num_kv_heads)
        if not fits or values.shape[2] > pool.head_dim:
            raise ValueError(
                f"`{name}` must be [{num_tokens}, {num_kv_heads}, at most {pool.head_dim}]: a row"
                f" for each token and KV head of the pool; got {values.shape}."
            )


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _zeros(*, shape, dtype):
    return jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)
