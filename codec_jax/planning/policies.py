"""Policies: which nodes are shared, and whether the work may be cut.

All policies run on the same divider and the same kernels, so only what is shared differs.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

ShareMask = Callable[[Int32[Array, " nodes"] | np.ndarray], Bool[Array, " nodes"] | np.ndarray]
"""Maps every node's parent (-1: a root) to whether its sharers read it once. NumPy in, NumPy out."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """A share mask over nodes and a way to cut.

    Attributes:
      name: what users write.
      share: see `ShareMask`. An unshared node is repeated for each of its sharers.
      shares_all: `share` is true everywhere, so virtual nodes are the nodes, already in order.
      cuts: whether an (item, KV head) pair may be divided among workers.
    """

    name: str
    share: ShareMask
    shares_all: bool = False
    cuts: bool = True


def _all_nodes(parent):
    return _like(parent).ones_like(parent, dtype=bool)


def _no_node(parent):
    return _like(parent).zeros_like(parent, dtype=bool)


def _like(array):
    return np if isinstance(array, np.ndarray) else jnp


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("balanced", _all_nodes, shares_all=True),
        Policy("flash_decoding", _no_node),
    )
}


def policy_named(name: str) -> Policy:
    """The policy of that name.

    Raises:
      ValueError: there is none; the message lists the names.
    """
    if name not in POLICIES:
        raise ValueError(f"`policy` must be one of {', '.join(POLICIES)}; got {name!r}.")
    return POLICIES[name]
