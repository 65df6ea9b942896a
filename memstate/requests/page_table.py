"""Keeps the KV pages of rows: page ids on the host, and the device's page table through the command buffer.

It knows no slot and no plane.
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
    """Gives rows their pages. With `pages=0` the caller manages KV elsewhere, and every request needs 0 pages.

    Args:
        pages: number of pages.
        page_size: tokens of a page.
        commands: records the changes of the device's table.
        grid: tokens at whose multiples a state can be kept.

    Attributes:
        allocator: the free pages.
        unit: tokens of which the length of a kept state is a multiple: whole pages, and the grid.
        room: tokens that the pages of each row hold, int64 `row`.
    """

    def __init__(self, pages: int, page_size: int, commands: CommandBuffer, grid: int = 1) -> None:
        self.allocator = PageAllocator(pages, commands.guard)
        self.page_size, self.grid, self.unit = page_size, grid, lcm(page_size, grid)
        self._commands = commands
        self._width = commands.registers.pages_per_row
        self._rows: list[Ids] = []
        self.reset()

    def reset(self, holders: Mapping[int, int] | None = None) -> None:
        """Takes the pages of all rows. The register file zeroes the device's table.

        Args:
            holders: page -> its number of holders, for pages that are not free after it.
        """
        self.allocator.reset(holders)
        self._rows = [NO_PAGES] * (self._commands.registers.rows + 1)
        self.room = np.zeros(len(self._rows), np.int64)

    def count(self, length: int) -> int:
        """Returns the pages that `length` tokens need.

        Raises:
            InvalidArgument: they are more than a row can have.
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
        """Returns what to raise if fewer than n pages are free; otherwise None."""
        return OutOfPages(n, self.allocator.free, self.allocator.pages) if n > self.allocator.free else None

    def start(self, rows: Sequence[int], shared: Sequence[Sequence[int]], fresh: Sequence[int]) -> None:
        """Fills rows that have no pages: first with shared pages, then with new ones, which must be free.

        Args:
            rows: the rows.
            shared: pages of each row that a snapshot or the cache has too.
            fresh: number of new pages of each row.
        """
        if not self.allocator.pages:
            return
        for row, prefix, n in zip(rows, shared, fresh, strict=True):
            pages = array("q", prefix)
            self.allocator.share(pages)
            self._rows[row] = pages = pages + self.allocator.claim(n)
            self.room[row] = len(pages) * self.page_size
        self._write([(row, 0, self._rows[row]) for row in rows])

    def missing(self, rows: Sequence[int], lengths: Sequence[int]) -> int:
        """Returns the pages that rows lack for their lengths, beyond those that are free.

        Raises:
            InvalidArgument: a length needs more pages than a row can have.
        """
        if not self.allocator.pages:
            return 0
        return max(0, sum(self._lacking(rows, lengths)) - self.allocator.free)

    def _lacking(self, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Returns the pages that each row lacks for its length."""
        return [max(0, self.count(length) - len(self._rows[row])) for row, length in zip(rows, lengths, strict=True)]

    def extend(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Gives each row pages for its length. Call it only where so many are free, as `missing` says.

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
        """Rows with pages, and these pages."""
        return {row: pages for row, pages in enumerate(self._rows) if pages}

    def of(self, row: int, most: int | None = None) -> Ids:
        """Returns the row's pages, in order; only the first `most`, if that is given."""
        return self._rows[row][:most]

    def share(self, row: int, length: int) -> Ids:
        """Returns the row's pages for its first `length` tokens, with one more holder."""
        if not self.allocator.pages:
            return NO_PAGES
        pages = self._rows[row][: length // self.page_size]
        self.allocator.share(pages)
        return pages

    def own_partial(self, row: int, length: int) -> bool:
        """Returns whether a row may continue to write behind its first `length` tokens.

        It may not if the last page is filled in part and has another holder: a snapshot shares it since.
        """
        page = length // self.page_size
        partial = self.allocator.pages and length % self.page_size
        return not partial or self.allocator.holders[self._rows[row][page]] == 1

    def require_room(self, rows: Sequence[int] | Longs, lengths: Longs) -> None:
        """Requires pages for each row's length.

        Raises:
            InvalidArgument: the pages of a row do not reach to its length; the first such row is named.
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
        """Returns what the device's page table, and the column `room`, have other than the rows.

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
        """Notes pages in the device's table: (row, first column, pages) each."""
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
