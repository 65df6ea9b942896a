"""Keeps the KV pages of each row: page ids on the host, and recorded writes of the device's page table.

This file knows no slot and no plane.
"""

from array import array
from collections.abc import Mapping, Sequence
from math import lcm
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from memstate.errors import InvalidArgument, OutOfPages
from memstate.requests.pages import MANY, NO_PAGES, Ids, PageAllocator
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import Longs

Lengths = TypeVar("Lengths", int, Longs)


class PageTable:
    """Gives rows their KV pages. With `pages=0` the caller manages KV, and no request needs pages.

    Args:
        pages: number of pages.
        page_size: tokens of a page.
        commands: records the changes of the device's table.
        grid: states can be kept at multiples of this number of tokens.

    Attributes:
        allocator: the free pages.
        unit: the length of a kept state is a multiple of this number of tokens: whole pages, and the grid.
        room: number of tokens that the pages of each row have room for, int64 `row`.
    """

    def __init__(self, pages: int, page_size: int, commands: CommandBuffer, grid: int = 1) -> None:
        self.allocator = PageAllocator(pages, commands.guard)
        self.page_size, self.grid, self.unit = page_size, grid, lcm(page_size, grid)
        self._commands = commands
        self._width = commands.registers.pages_per_row
        self._rows: list[Ids] = []
        self.reset()

    def reset(self, holders: Mapping[int, int] | None = None) -> None:
        """Takes all pages away from all rows. The register file, not this call, zeroes the device's table.

        Args:
            holders: page -> its number of holders, for the pages that stay in use.
        """
        self.allocator.reset(holders)
        self._rows = [NO_PAGES] * (self._commands.registers.rows + 1)
        self.room = np.zeros(len(self._rows), np.int64)

    def count(self, length: int) -> int:
        """Returns the number of pages that `length` tokens need.

        Raises:
            InvalidArgument: the number is larger than a row can have.
        """
        if not self.allocator.pages:
            return 0
        n = -(-int(length) // self.page_size)
        if n > self._width:
            raise InvalidArgument(f"{length} tokens need {n} pages, a row has {self._width}: raise Pages(per_row=)")
        return n

    def floor(self, length: Lengths) -> Lengths:
        """Returns the longest length up to `length` that fills whole pages."""
        return length // self.page_size * self.page_size

    def short_of(self, n: int) -> OutOfPages | None:
        """Returns the error to raise if fewer than n pages are free; otherwise None."""
        return OutOfPages(n, self.allocator.free, self.allocator.pages) if n > self.allocator.free else None

    def start(self, rows: Sequence[int], shared: Sequence[Sequence[int]], fresh: Sequence[int]) -> None:
        """Gives pages to rows that have none: first the shared pages, then new ones, which must be free.

        Args:
            rows: numbers of the rows.
            shared: for each row, the pages that it shares with a snapshot or the prefix cache; 0 for a new page there.
            fresh: for each row, the number of new pages behind them.
        """
        if not self.allocator.pages:
            return
        for row, prefix, n in zip(rows, shared, fresh, strict=True):
            pages = array("q", prefix)
            self.allocator.share(pages if all(pages) else array("q", filter(None, pages)))
            if missing := pages.count(0):
                new = iter(self.allocator.claim(missing))
                pages = array("q", [page or next(new) for page in pages])
            self._rows[row] = pages = pages + self.allocator.claim(n)
            self.room[row] = len(pages) * self.page_size
        self._write([(row, 0, self._rows[row]) for row in rows])

    def missing(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        """Returns how many more pages must become free, so that each row can get pages for its length.

        Raises:
            InvalidArgument: a length needs more pages than a row can have.
        """
        if not self.allocator.pages:
            return 0
        return max(0, sum(self._lacking(rows, lengths)) - self.allocator.free)

    def _lacking(self, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Returns for each row the number of pages that it lacks for its length."""
        return [max(0, self.count(length) - len(self._rows[row])) for row, length in zip(rows, lengths, strict=True)]

    def extend(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Gives each row the pages that it lacks for its length. Call it only where `missing` returns 0.

        Raises:
            InvalidArgument: a length needs more pages than a row can have; nothing changed.
        """
        if not self.allocator.pages:
            return
        added = []
        for row, n in zip(rows, self._lacking(rows, lengths), strict=True):
            pages = self.allocator.claim(n)
            added.append((row, len(self._rows[row]), pages))
            self._rows[row] = self._rows[row] + pages
            self.room[row] += n * self.page_size
        self._write([entry for entry in added if entry[2]])

    def end(self, rows: Sequence[int]) -> None:
        """Gives back the pages of rows."""
        if not self.allocator.pages:
            return
        self._write([(row, 0, array("q", [0]) * len(self._rows[row])) for row in rows])
        for row in rows:
            self.allocator.release(self._rows[row])
            self._rows[row] = NO_PAGES
            self.room[row] = 0

    @property
    def held(self) -> dict[int, Ids]:
        """Row -> its pages, for the rows that have pages."""
        return {row: pages for row, pages in enumerate(self._rows) if pages}

    def of(self, row: int, most: int | None = None) -> Ids:
        """Returns the row's pages, in order; only the first `most` pages, if `most` is given."""
        return self._rows[row][:most]

    def share(self, row: int, length: int) -> Ids:
        """Adds one holder to each page that the row's first `length` tokens fill, and returns these pages."""
        if not self.allocator.pages:
            return NO_PAGES
        pages = self._rows[row][: length // self.page_size]
        self.allocator.share(pages)
        return pages

    def own_partial(self, row: int, length: int) -> bool:
        """Returns whether a row may write KV behind its first `length` tokens.

        The row may not if these tokens fill their last page in part, and this page has another holder.
        """
        page = length // self.page_size
        partial = self.allocator.pages and length % self.page_size
        return not partial or self.allocator.holders[self._rows[row][page]] == 1

    def require_room(self, rows: Sequence[int] | Longs, lengths: Longs) -> None:
        """Raises an error unless each row has pages for its length.

        Raises:
            InvalidArgument: a row has too few pages for its length. The error names the first such row.
        """
        if not self.allocator.pages:
            return
        left = self.room[rows] - lengths
        if left.size and left[left.argmin()] < 0:
            first = int((left < 0).argmax())
            row, length = int(rows[first]), int(lengths[first])
            raise InvalidArgument(
                f"row {row}: {length} tokens, pages for {self.room[row]}: call extend([row], [length]) first"
            )

    def miscounts(self, device: NDArray[np.int32]) -> list[str]:
        """Returns a sentence for each entry of `room` and of the device's page table that does not fit the rows' pages.

        Args:
            device: the device's page table, `row page`.
        """
        expected = np.zeros_like(device)
        for row, pages in self.held.items():
            expected[row, : len(pages)] = pages
        room = np.array([len(pages) * self.page_size for pages in self._rows], np.int64)
        return [
            f"row {row}: pages for {room[row]} tokens, {self.room[row]} are noted"
            for row in np.flatnonzero(room != self.room).tolist()
        ] + [
            f"row {row}: KV page {at} is page {expected[row, at]} for the host, page {device[row, at]} for the device"
            for row, at in np.argwhere(expected != device).tolist()
        ]

    def _write(self, added: Sequence[tuple[int, int, Ids]]) -> None:
        """Records writes of pages to the device's table. Each entry of `added` is (row, first column, pages)."""
        start = self._commands.registers.starts["pages"]
        cells, values = array("i"), array("i")
        for row, at, pages in added:
            first = start + row * self._width + at
            last = first + len(pages)
            if len(pages) < MANY:
                cells.extend(range(first, last))
                values.fromlist(pages.tolist())
            else:
                cells.frombytes(np.arange(first, last, dtype=np.int32).tobytes())
                values.frombytes(np.asarray(pages, np.int32).tobytes())
        self._commands.write(cells, values)
