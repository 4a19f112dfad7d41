"""Physical KV pages: reference counts and a stack of free ids.

Host only, NumPy. Knows page ids; knows neither tokens nor nodes nor the arrays on the device.
"""

import numpy as np
import numpy.typing as npt
from jaxtyping import Int32


class OutOfPagesError(RuntimeError):
    """A pool holds fewer free pages than were wanted.

    Attributes:
      num_wanted: pages that the caller asked for.
      num_free: pages that were free.
      num_pages: pages in the pool.
    """

    def __init__(self, num_wanted: int, num_free: int, num_pages: int):
        super().__init__(
            f"{num_wanted} pages wanted, {num_free} of {num_pages} are free. "
            "Remove requests, or give the pool more pages (`num_pages`)."
        )
        self.num_wanted = num_wanted
        self.num_free = num_free
        self.num_pages = num_pages


class PagePool:
    """Reference-counted page ids `0 .. num_pages - 1`.

    The free ids form a stack with one owner at a time: the host, or, between `lend` and `settle`,
    the decode loop on the device.

    Invariants: `num_free + num_used == num_pages`; an id is either free or used, and a free id is
    on the stack once. Ids are handed out lowest first, so `num_pages_touched` is at once the
    largest number of pages ever used together and the bound on the ids ever handed out.

    Args:
      num_pages: size of the pool; None for one that grows whenever it runs out (for planning:
        `num_pages_touched` then tells the size that a real pool needs).
    """

    def __init__(self, num_pages: int | None = None):
        if num_pages is not None and num_pages < 0:
            raise ValueError(f"`num_pages` must be >= 0; got {num_pages}. Use None for no bound.")
        self._is_bounded = num_pages is not None
        self._num_pages = num_pages or 0
        self._num_free = self._num_pages
        self._num_touched = 0
        self._is_lent = False
        # Both arrays may be longer than the pool: an unbounded one grows by doubling.
        self._refcounts = np.zeros(self._num_pages, np.int32)
        self._free = np.arange(self._num_pages, dtype=np.int32)[::-1].copy()

    @property
    def num_pages(self) -> int:
        """Pages in the pool; without a bound, the pages made so far."""
        return self._num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody references."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Pages with at least one reference."""
        return self._num_pages - self._num_free

    @property
    def num_pages_touched(self) -> int:
        """The most pages ever used at the same time: the pool size that was needed."""
        return self._num_touched

    @property
    def is_lent(self) -> bool:
        """Whether the device owns the free stack (between `lend` and `settle`)."""
        return self._is_lent

    def bound(self, num_pages: int) -> None:
        """Make this the whole pool: it grows no more, and can be lent.

        Raises ValueError when more pages were made already.
        """
        self._check_not_lent()
        if num_pages < self._num_pages:
            raise ValueError(
                f"`num_pages` must be at least the {self._num_pages} pages made so far; "
                f"got {num_pages}."
            )
        self._grow(num_pages - self._num_pages)
        self._is_bounded = True

    def refcounts(self, page_ids: npt.ArrayLike) -> Int32[np.ndarray, " num_ids"]:
        """References to each page of `page_ids`; 0 for a free page."""
        return self._refcounts[self._as_ids(page_ids)]

    def allocate(self, num_wanted: int) -> Int32[np.ndarray, " num_wanted"]:
        """Ids of `num_wanted` pages that were free, each now with one reference.

        All or nothing: raises `OutOfPagesError` and changes nothing when too few are free.
        """
        self._check_not_lent()
        if num_wanted < 0:
            raise ValueError(f"`num_wanted` must be >= 0; got {num_wanted}.")
        if num_wanted > self._num_free:
            if self._is_bounded:
                raise OutOfPagesError(num_wanted, self._num_free, self._num_pages)
            self._grow(num_wanted - self._num_free)
        return self._pop(self._num_free - num_wanted)

    def retain(self, page_ids: npt.ArrayLike) -> None:
        """Add one reference for each entry of `page_ids`; all of them must be in use."""
        self._check_not_lent()
        ids = self._as_ids(page_ids)
        self._check_references(ids, self._refcounts[ids] == 0)
        np.add.at(self._refcounts, ids, 1)

    def release(self, page_ids: npt.ArrayLike) -> None:
        """Drop one reference for each entry of `page_ids`; pages without any become free.

        All or nothing: raises ValueError when an entry has no reference left to drop.
        """
        self._check_not_lent()
        ids, num_drops = np.unique(self._as_ids(page_ids), return_counts=True)
        self._check_references(ids, self._refcounts[ids] < num_drops)
        self._refcounts[ids] -= num_drops.astype(np.int32)
        freed = ids[self._refcounts[ids] == 0][::-1]
        self._free[self._num_free : self._num_free + freed.size] = freed
        self._num_free += freed.size

    def lend(self) -> Int32[np.ndarray, " num_free"]:
        """The stack of free ids, for the device loop to pop from the END of it.

        Until `settle`, `allocate`, `retain` and `release` raise RuntimeError.
        """
        self._check_not_lent()
        if not self._is_bounded:
            raise ValueError(
                "a pool without a bound cannot be lent: the device cannot grow it. "
                "Build it with `num_pages`."
            )
        self._is_lent = True
        return self._free[: self._num_free].copy()

    def settle(self, num_left: int) -> Int32[np.ndarray, " num_popped"]:
        """Ids that the device popped, in the order it popped them, each now with one reference.

        Ends the loan.

        Args:
          num_left: ids that the device left on the stack.
        """
        if not self._is_lent:
            raise RuntimeError("nothing to settle: the free pages are not lent. Call `lend` first.")
        if not 0 <= num_left <= self._num_free:
            raise ValueError(
                f"`num_left` must be 0 to {self._num_free}, the number of pages lent; "
                f"got {num_left}."
            )
        self._is_lent = False
        return self._pop(num_left)

    def _pop(self, num_left: int) -> Int32[np.ndarray, " num_popped"]:
        popped = self._free[num_left : self._num_free][::-1].copy()
        self._refcounts[popped] = 1
        self._num_free = num_left
        self._num_touched = max(self._num_touched, self.num_used)
        return popped

    def _grow(self, num_new: int) -> None:
        # Old free ids end up above the new ones, so that they are popped first.
        new_ids = np.arange(self._num_pages, self._num_pages + num_new, dtype=np.int32)[::-1]
        stack = np.concatenate([new_ids, self._free[: self._num_free]])
        self._num_pages += num_new
        if self._num_pages > self._refcounts.size:
            spare = np.zeros(2 * self._num_pages - self._refcounts.size, np.int32)
            self._refcounts = np.concatenate([self._refcounts, spare])
            self._free = np.zeros(2 * self._num_pages, np.int32)
        self._free[: stack.size] = stack
        self._num_free = stack.size

    def _as_ids(self, page_ids: npt.ArrayLike) -> Int32[np.ndarray, " num_ids"]:
        ids = np.atleast_1d(np.asarray(page_ids))
        if ids.ndim > 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
            raise ValueError(
                f"`page_ids` must be one list of integers; got {ids.dtype}{list(ids.shape)}."
            )
        outside = (ids < 0) | (ids >= self._num_pages)
        if outside.any():
            raise ValueError(
                f"`page_ids` must be 0 to {self._num_pages - 1}; got {ids[outside][0]}."
            )
        return ids.astype(np.int32)

    def _check_references(
        self, ids: Int32[np.ndarray, " num_ids"], is_missing: npt.NDArray[np.bool_]
    ) -> None:
        if is_missing.any():
            page = ids[is_missing][0]
            raise ValueError(
                f"`page_ids` must have a reference for each entry; page {page} has "
                f"{self._refcounts[page]}. It was released too often, or never allocated."
            )

    def _check_not_lent(self) -> None:
        if self._is_lent:
            raise RuntimeError(
                "the free pages are lent to the device loop: a pool has one owner at a time. "
                "Call `settle` first."
            )
