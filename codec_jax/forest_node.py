"""One node of a prefix forest: a run of tokens and the pages that hold its keys and values."""

import dataclasses

import numpy as np
import numpy.typing as npt
from jaxtyping import Int32

NO_NODE = -1
"""The parent of a root."""

NOT_POPPED = -1
"""The page id of an entry whose physical page the device has not popped yet."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Node:
    """A live record of one node. Read it; only `Forest` writes it.

    KV token i of the run (i < kv_len) lies in page `page_ids[(first_row + i) // page_size]`, row
    `(first_row + i) % page_size`, and stands at position `position + i` of every request through
    the node. Rows outside the run belong to the other half of a split, or to nobody.

    Attributes:
      parent: node id, `NO_NODE` for a root.
      tokens: the run; empty for a private leaf, whose tokens only the device knows.
      position: absolute position of the first token, which is the length of the path above.
      kv_len: tokens whose KV the node owns.
      max_kv_len: `kv_len`, except for a private leaf: its capacity.
      first_row: row of the first token in the first page.
      page_ids: `ceil((first_row + max_kv_len) / page_size)` entries, `NOT_POPPED` where a private
        leaf has no page yet.
      children: node ids in the order of insertion, by first token; a private leaf stands under
        `-1 - node id`, which is no token.
      request_ids: requests whose path ends here, in the order of their arrival (the keys).
      is_private_leaf: whether it holds the new tokens of exactly one request.
    """

    parent: int
    tokens: Int32[np.ndarray, " kv_len"]
    position: int
    kv_len: int
    max_kv_len: int
    first_row: int
    page_ids: Int32[np.ndarray, " num_pages"]
    children: dict[int, int] = dataclasses.field(default_factory=dict)
    request_ids: dict[int, None] = dataclasses.field(default_factory=dict)
    is_private_leaf: bool = False

    @property
    def end(self) -> int:
        """Absolute position after the last token: the path's length down to here."""
        return self.position + self.kv_len

    @property
    def popped_page_ids(self) -> Int32[np.ndarray, " num_popped"]:
        """The entries of `page_ids` that have a physical page."""
        return self.page_ids[self.page_ids != NOT_POPPED]

    @classmethod
    def private_leaf(cls, *, parent: int, position: int, capacity: int, page_size: int) -> "Node":
        """An empty private leaf with page entries for `capacity` tokens, none of them popped."""
        return cls(
            parent=parent,
            tokens=np.zeros(0, np.int32),
            position=position,
            kv_len=0,
            max_kv_len=capacity,
            first_row=0,
            page_ids=np.full(ceil_div(capacity, page_size), NOT_POPPED, np.int32),
            is_private_leaf=True,
        )

    def split_off(self, offset: int, page_size: int) -> "Node":
        """A new node with the first `offset` tokens; this one keeps the rest.

        No KV moves. Where the cut falls inside a page, both halves list that page. Links to
        parent and children stay as they were in both.
        """
        cut = self.first_row + offset
        upper = dataclasses.replace(
            self,
            tokens=self.tokens[:offset],
            kv_len=offset,
            max_kv_len=offset,
            page_ids=self.page_ids[: ceil_div(cut, page_size)],
            children={},
            request_ids={},
        )
        self.tokens = self.tokens[offset:]
        self.position += offset
        self.kv_len = self.max_kv_len = self.kv_len - offset
        self.page_ids = self.page_ids[cut // page_size :]
        self.first_row = cut % page_size
        return upper

    def with_popped_pages(
        self, page_ids: npt.ArrayLike, *, num_needed: int
    ) -> Int32[np.ndarray, " num_pages"]:
        """A private leaf's page entries once `page_ids` are its pages.

        Raises ValueError unless they are at least `num_needed`, fit, and begin with those that the
        leaf has already. A trailing run of `NOT_POPPED` is ignored.
        """
        ids = np.asarray(page_ids, np.int32)
        given = ids[: np.flatnonzero(ids != NOT_POPPED).max(initial=-1) + 1]
        if not num_needed <= given.size <= self.page_ids.size:
            raise ValueError(
                f"`page_ids` must be {num_needed} to {self.page_ids.size} pages, enough for "
                f"`kv_len` and within the leaf's reservation; got {given.size}."
            )
        known = self.popped_page_ids
        if not np.array_equal(given[: known.size], known):
            raise ValueError(
                f"`page_ids` must begin with the pages recorded before, {known.tolist()}; "
                f"got {given.tolist()}."
            )
        if (given < 0).any():
            raise ValueError(
                f"`page_ids` must have -1 at the end only, for pages not popped; "
                f"got {given.tolist()}."
            )
        entries = np.full_like(self.page_ids, NOT_POPPED)
        entries[: given.size] = given
        return entries


def child_key(node_id: int, node: Node) -> int:
    """The key of a node among its parent's children."""
    return -1 - node_id if node.is_private_leaf else int(node.tokens[0])


def ceil_div(numerator: int, denominator: int) -> int:
    """`numerator / denominator`, rounded up."""
    return -(-numerator // denominator)
