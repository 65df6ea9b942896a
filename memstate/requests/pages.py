"""Hands out the ids of KV pages, lowest free page first, and counts the holders of each. This file knows no tensor."""

from array import array
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from memstate.errors import OutOfPages
from memstate.guard import Guard

MANY: Final = 24  # from this number of ids on, numpy is faster than a loop
Ids: TypeAlias = "array[int]"  # page ids, 64 bits each
NO_PAGES: Final[Ids] = array("q")  # all rows without pages share this array: nobody appends to it


class PageAllocator:
    """Hands out page ids 1..pages. Page 0 is the null page. A page is free again when its last holder releases it.

    Args:
        pages: number of pages.
        guard: notes the pages that the running call claims.

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
            holders: page -> its number of holders, for the pages that stay in use.
        """
        self.holders = array("Q", [0]) * (self.pages + 1)  # "Q" is the type whose entries are set fastest
        for page, times in (holders or {}).items():
            self.holders[page] = times
        self._counts = np.frombuffer(self.holders, np.int64)
        self._is_free = bytearray([0, *(not times for times in self.holders[1:])])
        self._free_at = np.frombuffer(self._is_free, np.bool_)
        self.free = self._is_free.count(1)
        self._low = 0  # no page up to this one is free

    def miscounts(self, holders: Mapping[int, int]) -> list[str]:
        """Returns a sentence for each error in the counts of holders and in the free pages.

        Args:
            holders: page -> its number of holders, as the owners of pages report it.
        """
        noted = {page: times for page, times in enumerate(self.holders) if times}
        faults = [
            f"page {page} is counted for {noted.get(page, 0)} holders and has {holders.get(page, 0)}"
            for page in (sorted(noted.keys() | holders.keys()) if noted != dict(holders) else ())
            if noted.get(page, 0) != holders.get(page, 0)
        ]
        free = bytes([0, *(not times for times in self.holders[1:])])
        if self._is_free != free or self.free != free.count(1) or 1 in free[: self._low + 1]:
            faults.append(f"{self.free} KV pages are noted as free, and these are not the pages without a holder")
        return faults

    def claim(self, n: int) -> Ids:
        """Claims the n lowest free pages.

        Raises:
            OutOfPages: fewer than n pages are free; nothing changed.
        """
        if n > self.free:
            raise OutOfPages(n, self.free, self.pages)
        is_free, holders, low = self._is_free, self.holders, self._low
        if n < MANY or 512 * n < self.pages:
            pages = array("q")
            for _ in range(n):
                low = is_free.find(1, low + 1)
                pages.append(low)
                is_free[low], holders[low] = 0, 1
        else:  # this way scans all pages, so it is faster than the loop only for a large n
            ids = np.flatnonzero(self._free_at)[:n]
            pages = array("q", ids.tobytes())
            self._free_at[ids], self._counts[ids], low = False, 1, pages[-1]
        self._low = low
        self.free -= n
        if self._guard is not None:
            self._guard.pages.append(pages)
        return pages

    def alone(self, pages: Sequence[int]) -> int:
        """Returns how many of these pages have exactly one holder."""
        if len(pages) < MANY:
            return [*map(self.holders.__getitem__, pages)].count(1)
        return int(np.count_nonzero(self._counts[np.asarray(pages, np.intp)] == 1))

    def share(self, pages: Sequence[int]) -> None:
        """Adds a holder to each page. Every page has a holder already, and no page comes twice."""
        if len(pages) >= MANY:
            np.add.at(self._counts, np.asarray(pages, np.intp), 1)
        else:
            holders = self.holders
            for page in pages:
                holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes a holder from each page. No page comes twice."""
        holders, is_free, low, gone = self.holders, self._is_free, self._low, 0
        if len(pages) < MANY:
            for page in pages:
                holders[page] = left = holders[page] - 1
                if not left:
                    is_free[page] = 1
                    gone += 1
                    if page <= low:
                        low = page - 1
        else:
            ids = np.asarray(pages, np.intp)
            np.subtract.at(self._counts, ids, 1)
            freed = ids[self._counts[ids] == 0]
            self._free_at[freed], gone = True, freed.size
            low = int(freed.min(initial=low + 1)) - 1
        self.free, self._low = self.free + gone, low
