"""Hands out KV pages as integers on the host: lowest free page first, shared by reference count. It knows no tensor."""

import heapq
from collections.abc import Iterable, Mapping

from memstate.errors import OutOfPages
from memstate.guard import Guard


class PageAllocator:
    """Hands out page ids 1..pages. Page 0 is the null page. A page is free again when its last holder releases it.

    Args:
        pages: number of pages.
        guard: learns which pages the running call claims.

    Attributes:
        holders: number of holders of each page.
    """

    def __init__(self, pages: int, guard: Guard | None = None) -> None:
        self.pages, self._guard = pages, guard
        self.reset()

    def __repr__(self) -> str:
        return f"PageAllocator({self.free} of {self.pages} pages free)"

    @property
    def free(self) -> int:
        """Pages without a holder."""
        return len(self._free)

    def reset(self, holders: Mapping[int, int] | None = None) -> None:
        """Makes every page free.

        Args:
            holders: page -> its number of holders, for pages that are not free after it.
        """
        self.holders = [0] * (self.pages + 1)
        for page, times in (holders or {}).items():
            self.holders[page] = times
        self._free = [page for page in range(1, self.pages + 1) if not self.holders[page]]

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
        free = sorted(self._free)
        if free != [page for page in range(1, self.pages + 1) if not self.holders[page]]:
            found.append(f"{len(free)} KV pages are noted as free, and these are not the pages without a holder")
        return found

    def claim(self, n: int) -> list[int]:
        """Claims the n lowest free pages.

        Raises:
            OutOfPages: fewer are free; nothing changed.
        """
        if n > len(self._free):
            raise OutOfPages(n, self.free, self.pages)
        pages = [heapq.heappop(self._free) for _ in range(n)]
        if self._guard is not None:
            self._guard.pages += pages
        for page in pages:
            self.holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder to pages that are held."""
        holders = self.holders
        for page in pages:
            holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Removes a holder from each page."""
        holders = self.holders
        for page in pages:
            holders[page] -= 1
            if not holders[page]:
                heapq.heappush(self._free, page)
