"""Policies: which nodes are shared, and how the work is divided among workers.

All policies run on the same kernels, so only what is read and who reads it differs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

ShareMask = Callable[[Any], Any]
"""Maps every node's parent (-1: a root) to whether its sharers read it once: int32 to bool arrays,
NumPy to NumPy (for sizes, on the host) and JAX to JAX (in the planner)."""


Division = Literal["ranges", "whole", "longest_first"]
"""How (item, KV head) pairs are divided among workers: one line cut into equal ranges; the same,
but no pair is cut; CoDec's slices, the longest first to the least loaded worker."""

MAX_STREAM_PAGES = 8
"""Longest node that `streams_short` repeats for each tile: few enough pages to stay in cache."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """A share mask over nodes and a way to divide.

    Attributes:
      name: what users write.
      rule: in words, which nodes are read once.
      share: see `ShareMask`. An unshared node is repeated for each of its sharers.
      shares_all: `share` is true everywhere.
      streams_short: a short node that touches several tiles is repeated in each tile's stream
        where the costs say that this is cheaper than work of its own.
      division: see `Division`.
    """

    name: str
    rule: str
    share: ShareMask
    shares_all: bool = False
    streams_short: bool = False
    division: Division = "ranges"

    @property
    def repeats(self) -> bool:
        """Whether any node may become several virtual nodes."""
        return self.streams_short or not self.shares_all

    def most_cuts(self, num_workers: int) -> int:
        """Most places at which the line of all pairs is cut.

        W ranges have W - 1 borders. A whole slice of CoDec's costs more than half of the makespan
        c >= (total work) / W that it was cut for, so there are at most 2 W.
        """
        return 2 * num_workers if self.division == "longest_first" else num_workers - 1


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
            division="whole",
        ),
        Policy(
            "codec",
            "every node is read once for all its sharers, its work divided and scheduled by CoDec",
            _all_nodes,
            shares_all=True,
            division="longest_first",
        ),
        Policy(
            "auto",
            "every node is read once, or once for each tile of sharers where that costs less",
            _all_nodes,
            shares_all=True,
            streams_short=True,
        ),
    )
}


DEFAULT_POLICY = "auto"
"""Never behind the better of the others by more than noise: see `experiments.planner_ablation`."""


def policy_named(name: str) -> Policy:
    """The policy of that name.

    Raises:
      ValueError: there is none; the message lists the names.
    """
    if name not in POLICIES:
        raise ValueError(f"`policy` must be one of {', '.join(POLICIES)}; got {name!r}.")
    return POLICIES[name]
