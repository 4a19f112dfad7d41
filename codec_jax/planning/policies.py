"""Policies: which nodes are shared, and whether the work may be cut.

All policies run on the same divider and the same kernels, so only what is shared differs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

ShareMask = Callable[[Any], Any]
"""Maps every node's parent (-1: a root) to whether its sharers read it once: int32 to bool arrays,
NumPy to NumPy (for sizes, on the host) and JAX to JAX (in the planner)."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """A share mask over nodes and a way to cut.

    Attributes:
      name: what users write.
      rule: in words, which nodes are read once.
      share: see `ShareMask`. An unshared node is repeated for each of its sharers.
      shares_all: `share` is true everywhere, so virtual nodes are the nodes, already in order.
      cuts: whether an (item, KV head) pair may be divided among workers.
    """

    name: str
    rule: str
    share: ShareMask
    shares_all: bool = False
    cuts: bool = True


def _all_nodes(parent):
    return _like(parent).ones_like(parent, dtype=bool)


def _no_node(parent):
    return _like(parent).zeros_like(parent, dtype=bool)


def _roots(parent):
    return parent < 0


def _like(array):
    return np if isinstance(array, np.ndarray) else jnp


POLICIES = {
    policy.name: policy
    for policy in (
        Policy(
            "balanced",
            "every node is read once for all its sharers, the work cut into equal parts",
            _all_nodes,
            shares_all=True,
        ),
        Policy("flash_decoding", "every request reads its whole path by itself", _no_node),
        Policy("hydragen", "only the roots are read once for all their sharers", _roots),
        Policy(
            "one_task_per_node",
            "every node is read once for all its sharers, its work never cut",
            _all_nodes,
            shares_all=True,
            cuts=False,
        ),
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
