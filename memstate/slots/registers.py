"""Holds slot ids in registers on the device, and launches the kernels that change them.

    cells   [ slots | labels | tracked | source | page table | pending | newest ]    one int32 arena

Each column starts at a multiple of 256 bytes. Registers of row r are 3r (live), 3r+1 and 3r+2 (lanes); row 0 is the
null row. The registers of the rows come first. The holders follow: the registers of published snapshots and of
sessions.

The host keeps a copy (the *mirror*) of the labels, and of which registers hold a slot. It computes this copy by the
same rules as the device, and reads nothing back. This module does not know planes or requests.
"""

from collections.abc import Iterable, Mapping
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate import lasting
from memstate.checks import NotCopied
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import REGISTERS_PER_ROW, Registers, Rules, StepMarks, StepRecord, TailRecord
from memstate.slots.allocator import SlotAllocator

ALIGN = 64  # int32 in 256 bytes
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


def register_count(rows: int, snapshots: int) -> int:
    """Returns the number of registers: those of all rows, the null row included, and the holders."""
    return REGISTERS_PER_ROW * (rows + 1) + snapshots


def cell_starts(rows: int, snapshots: int, pages_per_row: int, tails: bool = False) -> list[int]:
    """Returns the first cell of each column, and as the last entry the number of all cells.

    Args:
        rows: number of request rows, without the null row.
        snapshots: number of holders.
        pages_per_row: width of the page table.
        tails: whether rows have tails.
    """
    sizes = _column_sizes(rows, snapshots, pages_per_row, tails)
    return list(accumulate((-(-size // ALIGN) * ALIGN for size in sizes), initial=0))


def _column_sizes(rows: int, snapshots: int, pages_per_row: int, tails: bool) -> list[int]:
    of_rows = 1, 1, pages_per_row, int(tails), int(tails)
    return [*[register_count(rows, snapshots)] * 2, *((rows + 1) * width for width in of_rows)]


class RegisterFile(NotCopied):
    """Registers, request columns and the page table on the device, with the host's mirror.

    Args:
        allocator: the allocator of the slots.
        rows: number of request rows, without the null row.
        snapshots: number of holders.
        pages_per_row: width of the page table.
        tails: whether rows have tails.

    Attributes:
        held: mirror of which registers hold a slot, bool `register`.
        labels: mirror of each register's label, int64 `register`.
        tracked: mirror of the length of each row up to which no snapshot is due, int32 `row`.
        source: mirror of the register that each row's next step reads instead of the live one, 0 for none, int32 `row`.
        pending: mirror of the number of real tokens in each row's tail, int64 `row`. On the device, the next plan adds
            the accepted tokens of the newest step.
        newest: mirror of the number of tokens of each row's newest step in its tail, int64 `row`.
        held_at, label_at, tracked_at, source_at, pending_at, newest_at: memoryviews of these arrays. Reading one entry
            takes half of the time that an array takes, and gives a plain number.
        undecided: rows whose newest plan has made decisions that the host does not know yet; see `Late`.
        starts: first cell of each column.
        longest: upper bound of the tokens that any state stands for.
    """

    def __init__(
        self, allocator: SlotAllocator, rows: int, snapshots: int, pages_per_row: int = 0, tails: bool = False
    ) -> None:
        self.allocator, self.rows, self.holders, self.pages_per_row = allocator, rows, snapshots, pages_per_row
        self.backend: Backend = allocator.backend
        self.first_holder = REGISTERS_PER_ROW * (rows + 1)
        self.count = register_count(rows, snapshots)
        sizes = _column_sizes(rows, snapshots, pages_per_row, tails)
        starts = cell_starts(rows, snapshots, pages_per_row, tails)
        self.cells = lasting.zeros(starts[-1], torch.int32, self.backend.device)
        columns = [self.cells[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        slots, labels, tracked, source, pages, pending, newest = columns
        self.table = Registers(
            slots, labels, tracked, source,
            self.cells, allocator.bitmap, allocator.counters, allocator.capacity, trusted=True,
            pending=pending if tails else None, newest=newest if tails else None,
        )  # fmt: skip
        self.page_table = pages.view(rows + 1, pages_per_row)
        names = *Registers._fields[:4], "pages", "pending", "newest"
        self.starts = dict(zip(names, starts, strict=False))
        self.held = np.zeros(self.count, bool)
        self.labels: Longs = np.zeros(self.count, np.int64)
        self.tracked: Ints = np.zeros(rows + 1, np.int32)
        self.source: Ints = np.zeros(rows + 1, np.int32)
        self.pending: Longs = np.zeros(rows + 1, np.int64)
        self.newest: Longs = np.zeros(rows + 1, np.int64)
        self.tails = tails
        self.undecided: frozenset[int] = frozenset()
        self.longest = 0
        self.held_at, self.label_at = self.held.data, self.labels.data
        self.tracked_at, self.source_at, self.pending_at = self.tracked.data, self.source.data, self.pending.data
        self.newest_at = self.newest.data

    @property
    def nbytes(self) -> int:
        """Device bytes of registers, columns, page table, bitmap and counters."""
        return self.cells.nbytes + self.allocator.bitmap.nbytes + self.allocator.counters.nbytes

    def address(self, column: str, index: Iterable[int]) -> list[int]:
        """Returns cell numbers of a column.

        Args:
            column: "slots", "labels", "tracked", "source" or "pages".
            index: numbers of registers or rows; for "pages" the flat row-major index.
        """
        start = self.starts[column]
        return [start + at for at in index]

    def origin(self, row: int) -> int:
        """Returns the register of a row's state; see `origins`."""
        return self.source_at[row] or row * REGISTERS_PER_ROW

    def length(self, row: int) -> int:
        """Returns the length of a row: the tokens of its state, and the real tokens in its tail."""
        return int(self.label_at[self.origin(row)] + self.pending_at[row])

    def lengths(self, rows: Longs) -> Longs:
        """Returns the length of each row."""
        labels: Longs = self.labels[self.origins(rows)]
        return labels + self.pending[rows] if self.tails else labels

    def origins(self, rows: Longs) -> Longs:
        """Returns the register of each row's state.

        This is the live register or, if the next step of the row reads a snapshot directly, the snapshot's register.
        """
        source = self.source[rows].astype(np.int64)
        return np.where(source > 0, source, rows * REGISTERS_PER_ROW)

    def reset(self, kept: Mapping[int, tuple[int, int]] | None = None) -> None:
        """Empties every register, column and mirror. Does not reset the allocator.

        Args:
            kept: register -> (slot, label), for the registers that keep their slots.

        Syncs: yes.
        """
        cells = torch.zeros(self.cells.numel(), dtype=torch.int32, device="cpu")
        registers = list(kept or {})
        pairs = np.array(list((kept or {}).values()), np.int32).reshape(-1, 2)
        for column, values in zip(("slots", "labels"), pairs.T, strict=True):
            cells[torch.tensor(registers, dtype=torch.int64, device="cpu") + self.starts[column]] = torch.from_numpy(
                values.copy()
            )
        self.cells.copy_(cells)
        self.undecided = frozenset()
        for mirror in (self.held, self.labels, self.tracked, self.source, self.pending, self.newest):
            mirror[:] = 0
        self.held[registers], self.labels[registers] = True, pairs[:, 1]

    def on_host(self) -> "RegisterFile":
        """Returns a copy in host memory, without the mirror, on which changes can be tried.

        Syncs: yes.
        """
        file = RegisterFile(
            SlotAllocator(self.allocator.capacity, Backend("reference")), self.rows, self.holders, self.pages_per_row,
            self.tails,
        )  # fmt: skip
        file.cells.copy_(self.cells)
        file.allocator.bitmap.copy_(self.allocator.bitmap)
        file.allocator.counters.copy_(self.allocator.counters)
        return file

    def ownership(self, packet: Tensor) -> None:
        """Carries out the ownership phases of a packet in one launch.

        Syncs: no.
        """
        self.backend.ownership(self.table, packet)

    def plan(
        self, packet: Tensor, record: StepRecord, marks: StepMarks, rules: Rules, tails: TailRecord | None = None
    ) -> None:  # fmt: skip
        """Fills a step record and its marks in one launch; see `Backend.plan`.

        Syncs: no.
        """
        self.backend.plan(self.table, packet, record, marks, rules, tails)

    def resolve(self, registers: Tensor) -> Tensor:
        """Returns the slots of registers on the device: int32 tensor, axis `n`.

        Syncs: no.
        """
        out = torch.empty_like(registers)
        self.backend.resolve(self.table, registers, out)
        return out

    def owners(self) -> Tensor:
        """Returns the number of owners and the free flag of every slot, as `Backend.audit` writes them.

        The result is an int32 tensor with `capacity` + 1 entries.

        Syncs: no.
        """
        out = torch.empty(self.allocator.capacity + 1, dtype=torch.int32, device=self.backend.device)
        self.backend.audit(self.table, out)
        return out
