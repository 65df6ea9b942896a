"""Hands out KV pages as integers on the host: lowest free page first, shared by reference count. It knows no tensor."""

from collections.abc import Iterable, Mapping

import numpy as np

from memstate.errors import OutOfPages
from memstate.guard import Guard


class PageAllocator:
    """Hands out page ids 1..pages. Page 0 is the null page. A page is free again when its last holder releases it.

    Args:
        pages: number of pages.
        guard: learns which pages the running call claims.

    Attributes:
        holders: number of holders of each page.
        free: number of pages without a holder.
    """

    def __init__(self, pages: int, guard: Guard | None = None) -> None:
        self.pages, self._guard = pages, guard
        self.reset()

    def __repr__(self) -> str:
        return f"PageAllocator({self.free} of {self.pages} pages free)"

    def reset(self, holders: Mapping[int, int] | None = None) -> None:
        """Makes every page free.

        Args:
            holders: page -> its number of holders, for pages that are not free after it.
        """
        self.holders = [0] * (self.pages + 1)
        for page, times in (holders or {}).items():
            self.holders[page] = times
        self._is_free = bytearray([0, *(not times for times in self.holders[1:])])
        self.free = self._is_free.count(1)
        self._low = 0  # neither this page is free nor a lower one

    def miscounts(self, holders: Mapping[int, int]) -> list[str]:
        """Returns what is wrong with counts and free pages, given who holds pages.

        Args:
            holders: page -> its number of holders, counted at the holders.
        """
        noted = {page: times for page, times in enumerate(self.holders) if times}
        found = [
            f"page {page} is counted for {noted.get(page, 0)} holders and has {holders.get(page, 0)}"
            for page in (sorted(noted.keys() | holders.keys()) if noted != dict(holders) else ())
            if noted.get(page, 0) != holders.get(page, 0)
        ]
        free = bytes([0, *(not times for times in self.holders[1:])])
        if self._is_free != free or self.free != free.count(1) or 1 in free[: self._low + 1]:
            found.append(f"{self.free} KV pages are noted as free, and these are not the pages without a holder")
        return found

    def claim(self, n: int) -> list[int]:
        """Claims the n lowest free pages.

        Raises:
            OutOfPages: fewer are free; nothing changed.
        """
        if n > self.free:
            raise OutOfPages(n, self.free, self.pages)
        is_free, holders, low = self._is_free, self.holders, self._low
        if n < 64 or 512 * n < self.pages:
            pages = []
            for _ in range(n):
                low = is_free.find(1, low + 1)
                pages.append(low)
                is_free[low] = 0
        else:  # numpy looks at all pages
            pages = np.flatnonzero(np.frombuffer(is_free, np.bool_))[:n].tolist()
            low = pages[-1]
            is_free[: low + 1] = bytes(low + 1)
        self._low = low
        self.free -= n
        for page in pages:
            holders[page] = 1
        if self._guard is not None:
            self._guard.pages += pages
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that are held."""
        holders = self.holders
        for page in pages:
            holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Removes a holder from each page."""
        holders, is_free, gone = self.holders, self._is_free, list[int]()
        for page in pages:
            holders[page] = left = holders[page] - 1
            if not left:
                is_free[page] = 1
                gone.append(page)
        if gone:
            self.free += len(gone)
            self._low = min(self._low, min(gone) - 1)
