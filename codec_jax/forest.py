"""The prefix forest of a batch: who shares which tokens, and in which pages their KV lies.

Host only, NumPy. A radix forest over token ids, as in CoDec (arXiv 2505.17694) with any number of
roots. Knows pages as ids; `export_arrays` exports it for the planner and the device. No walk is
recursive, so depth is bounded by memory alone.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from jaxtyping import Int32

from codec_jax.forest_node import (
    NO_NODE,
    Node,
    ceil_div,
    child_key,
)
from codec_jax.forest_tokens import TokenIds, as_token_run, common_prefix_len
from codec_jax.pages import PagePool


class Forest:
    """A radix forest; a request is a path from a root to a node, inner nodes included.

    Invariants:
      - Children of one node differ in their first token (private leaves have none).
      - A node id names the END of its run for as long as the node lives: a split gives the new id
        to the upper part. Ids are never used twice.
      - A new run starts on fresh pages at row 0. A split inside a page copies nothing: both halves
        reference that page. Each page has as many references as nodes that list it.
      - A call that raises has changed nothing (`add_requests`: nothing of the prompt that raised).

    Args:
      page_size: tokens per page.
      pages: where pages come from; by default a pool without a bound.
    """

    def __init__(self, *, page_size: int = 64, pages: PagePool | None = None):
        if not isinstance(page_size, int | np.integer) or page_size < 1:
            raise ValueError(f"`page_size` must be >= 1 token, whole; got {page_size!r}.")
        self.page_size = page_size
        self.pages = PagePool() if pages is None else pages
        self._nodes: dict[int, Node] = {}
        self._roots: dict[int, int] = {}
        self._end_nodes: dict[int, int] = {}
        self._next_node_id = 0
        self._next_request_id = 0

    @classmethod
    def from_token_lists(
        cls, token_lists: Iterable[TokenIds], *, page_size: int = 64, max_new_tokens: int = 0
    ) -> "Forest":
        """A forest of one request per token list, on a pool without a bound."""
        forest = cls(page_size=page_size)
        forest.add_requests(token_lists, max_new_tokens=max_new_tokens)
        return forest

    def insert(self, tokens: TokenIds, *, parent: int | None = None) -> int:
        """Node id at which `tokens` end, after matching what is there and adding the rest.

        Args:
          tokens: token ids, integers >= 0 and < 2**31.
          parent: node below whose end the tokens continue; None to begin at a root. Only with a
            parent may `tokens` be empty.

        Raises:
          ValueError: bad tokens, or a parent that is unknown or a private leaf.
          OutOfPagesError: the rest needs more pages than are free.
        """
        run = as_token_run(tokens)
        above = NO_NODE if parent is None else self._check_parent(parent)
        if parent is None and not run.size:
            raise ValueError("`tokens` must not be empty without a `parent`; got no token.")
        node_id, offset, num_matched = self._match(run, above)
        rest = run[num_matched:].copy()  # not a view, which would keep the whole prompt alive
        rest.setflags(write=False)
        page_ids = self.pages.allocate(ceil_div(rest.size, self.page_size))
        if node_id != NO_NODE and offset < self._nodes[node_id].kv_len:
            node_id = self._split(node_id, offset)
        return self._append_run(node_id, rest, page_ids) if rest.size else node_id

    def add_request(
        self, tokens: TokenIds, *, parent: int | None = None, max_new_tokens: int = 0
    ) -> int:
        """Request id, in call order from 0 (the batch row), of a request with this prompt.

        With `max_new_tokens` the request ends in a private leaf of that capacity: empty, without
        physical pages, a child of the node where the prompt ends. Without, it ends at that node.
        Equal prompts and prompts that are a prefix of another are fine. Arguments and errors
        otherwise as for `insert`.
        """
        is_whole = isinstance(max_new_tokens, int | np.integer)
        if not is_whole or not 0 <= max_new_tokens < 2**30:
            raise ValueError(
                f"`max_new_tokens` must be >= 0 and < 2**30, whole; got {max_new_tokens!r}."
            )
        node_id = self.insert(tokens, parent=parent)
        if max_new_tokens:
            leaf = Node.private_leaf(
                parent=node_id,
                position=self._nodes[node_id].end,
                capacity=max_new_tokens,
                page_size=self.page_size,
            )
            node_id = self._add_node(leaf)
        request = self._next_request_id
        self._next_request_id += 1
        self._nodes[node_id].request_ids[request] = None
        self._end_nodes[request] = node_id
        return request

    def add_requests(
        self, token_lists: Iterable[TokenIds], *, max_new_tokens: int = 0
    ) -> list[int]:
        """Request ids, one per prompt; when a prompt raises, those before it stay."""
        return [self.add_request(tokens, max_new_tokens=max_new_tokens) for tokens in token_lists]

    def remove_request(self, request: int) -> None:
        """Drop a request, and the nodes on its path that end no request and have no child.

        Their pages are released. Chains of single children are not merged again.
        """
        end_node = self.end_node(request)
        unused = self._nodes_only_for(request)
        if unused:
            pages = [self._nodes[node_id].popped_page_ids for node_id in unused]
            self.pages.release(np.concatenate(pages))
            top = self._nodes[unused[-1]]
            del self._children(top.parent)[child_key(unused[-1], top)]
        else:
            del self._nodes[end_node].request_ids[request]
        for node_id in unused:
            del self._nodes[node_id]
        del self._end_nodes[request]

    def set_leaf_progress(self, request: int, *, kv_len: int, page_ids: npt.ArrayLike) -> None:
        """Record how far the device has filled a request's private leaf.

        Args:
          request: a request with a private leaf.
          kv_len: tokens in the leaf now; never fewer than before.
          page_ids: its pages so far, in order, from `PagePool.settle`; those recorded before come
            first. A trailing run of -1 is ignored, so a slice of the device's page list will do.
        """
        leaf = self._nodes[self.end_node(request)]
        if not leaf.is_private_leaf:
            raise ValueError(
                f"`request` must have a private leaf; got {request}. "
                "Add it with `max_new_tokens` > 0."
            )
        if not leaf.kv_len <= kv_len <= leaf.max_kv_len:
            raise ValueError(
                f"`kv_len` must be {leaf.kv_len} (before) to {leaf.max_kv_len} (`max_new_tokens`) "
                f"for request {request}; got {kv_len}."
            )
        num_needed = ceil_div(kv_len, self.page_size)
        entries = leaf.with_popped_pages(page_ids, num_needed=num_needed)
        self._check_unshared(entries[entries != leaf.page_ids])
        leaf.kv_len, leaf.page_ids = kv_len, entries

    def node(self, node_id: int) -> Node:
        """The live record of a node, to be read only."""
        if node_id not in self._nodes:
            raise ValueError(
                f"`node_id` must be a live node; got {node_id}. It was never made, or pruned "
                "with its last request."
            )
        return self._nodes[node_id]

    def end_node(self, request: int) -> int:
        """Id of a request's last node: its private leaf, or the node where its prompt ends."""
        if request not in self._end_nodes:
            raise ValueError(
                f"`request` must be a live request; got {request}. It was never added, or removed."
            )
        return self._end_nodes[request]

    def path(self, node_id: int) -> list[int]:
        """Node ids from the root down to `node_id`, both included."""
        path = [node_id]
        while (parent := self.node(path[-1]).parent) != NO_NODE:
            path.append(parent)
        return path[::-1]

    def depth(self, node_id: int) -> int:
        """Number of nodes above `node_id`; 0 for a root."""
        return len(self.path(node_id)) - 1

    def num_sharers(self, node_id: int) -> int:
        """Requests whose path contains the node (walks the nodes below it)."""
        self.node(node_id)
        return sum(len(self._nodes[below].request_ids) for below in self._walk([node_id]))

    def preorder(self) -> list[int]:
        """Ids of all nodes, parents before children, children in the order of insertion."""
        return self._walk(self._roots.values())

    @property
    def num_nodes(self) -> int:
        """Live nodes, private leaves included."""
        return len(self._nodes)

    @property
    def num_requests(self) -> int:
        """Live requests."""
        return len(self._end_nodes)

    @property
    def unique_tokens(self) -> int:
        """KV tokens that the nodes hold: what one step reads if everything is shared."""
        return sum(node.kv_len for node in self._nodes.values())

    @property
    def total_tokens(self) -> int:
        """KV tokens summed over the requests: what one step reads if nothing is shared."""
        return sum(self._nodes[node_id].end for node_id in self._end_nodes.values())

    def _match(self, run: Int32[np.ndarray, " num_tokens"], above: int) -> tuple[int, int, int]:
        """The deepest place that `run` leads to below `above`: (node, offset in it, matched)."""
        node_id, num_matched = above, 0
        while num_matched < run.size:
            child = self._children(node_id).get(int(run[num_matched]))
            if child is None:
                break
            node_id, node = child, self._nodes[child]
            num_common = common_prefix_len(node.tokens, run[num_matched:])
            num_matched += num_common
            if num_common < node.kv_len:
                return node_id, num_common, num_matched
        offset = 0 if node_id == NO_NODE else self._nodes[node_id].kv_len
        return node_id, offset, num_matched

    def _split(self, node_id: int, offset: int) -> int:
        """Id of the new upper part; `node_id` keeps the lower one."""
        lower = self._nodes[node_id]
        upper = lower.split_off(offset, self.page_size)
        if lower.first_row:
            self.pages.retain(lower.page_ids[:1])
        upper_id = self._add_node(upper)
        upper.children[child_key(node_id, lower)] = node_id
        lower.parent = upper_id
        return upper_id

    def _append_run(
        self,
        parent: int,
        tokens: Int32[np.ndarray, " kv_len"],
        page_ids: Int32[np.ndarray, " num_pages"],
    ) -> int:
        return self._add_node(
            Node(
                parent=parent,
                tokens=tokens,
                position=0 if parent == NO_NODE else self._nodes[parent].end,
                kv_len=tokens.size,
                max_kv_len=tokens.size,
                first_row=0,
                page_ids=page_ids,
            )
        )

    def _add_node(self, node: Node) -> int:
        node_id = self._next_node_id
        self._next_node_id += 1
        self._nodes[node_id] = node
        # An upper part takes over the key, and with it the place, of the node that it was cut from.
        self._children(node.parent)[child_key(node_id, node)] = node_id
        return node_id

    def _nodes_only_for(self, request: int) -> list[int]:
        """Nodes that go with `request`, from its last node upwards."""
        unused: list[int] = []
        node_id = self._end_nodes[request]
        while node_id != NO_NODE:
            node = self._nodes[node_id]
            num_children = len(node.children) - bool(unused)
            num_others = len(node.request_ids) - (request in node.request_ids)
            if num_children or num_others:
                break
            unused.append(node_id)
            node_id = node.parent
        return unused

    def _walk(self, starts: Iterable[int]) -> list[int]:
        order, stack = [], list(starts)[::-1]
        while stack:
            order.append(stack.pop())
            stack.extend(reversed(self._nodes[order[-1]].children.values()))
        return order

    def _children(self, node_id: int) -> dict[int, int]:
        return self._roots if node_id == NO_NODE else self._nodes[node_id].children

    def _check_unshared(self, page_ids: Int32[np.ndarray, " num_ids"]) -> None:
        is_repeated = np.unique(page_ids).size < page_ids.size
        if is_repeated or (self.pages.refcounts(page_ids) != 1).any():
            raise ValueError(
                "`page_ids` must be in use and belong to this leaf alone; got "
                f"{page_ids.tolist()}. Call `settle` on the pool first, and pass each page once."
            )

    def _check_parent(self, parent: int) -> int:
        if parent not in self._nodes:
            raise ValueError(f"`parent` must be a live node, or None for a root; got {parent}.")
        if self._nodes[parent].is_private_leaf:
            raise ValueError(
                f"`parent` must not be a private leaf, which one request fills; got {parent}. "
                "Continue below its parent."
            )
        return parent
