"""Holds one packet of a command buffer: operations in the order of record, and their bytes in an upload.

This module does not check the operations, and does not know which of them wait for a forward.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from memstate.kernels.tables import HEADER_INTS, ZERO_SOURCE, Section
from memstate.slots.registers import Ints, Longs, RegisterFile

PAIRS = (Section.MOVES, Section.WRITES, Section.DATA, Section.BATCH)
MOVES, RELEASES, CLAIMS, WRITES, DATA = (
    int(section) for section in (Section.MOVES, Section.RELEASES, Section.CLAIMS, Section.WRITES, Section.DATA)
)  # as plain numbers: an enumeration costs a microsecond a look
FEW = 8  # registers that a loop looks at sooner than numpy


class Operation(NamedTuple):
    """One recorded call: its section with two columns, and the registers that it changes."""

    section: int
    first: Longs
    second: Longs
    registers: Longs | None


class Packet:
    """Operations that are sent together.

    Args:
        registers: the register file.
        operations: the first operations.
    """

    def __init__(self, registers: RegisterFile, operations: Iterable[Operation] = ()) -> None:
        self._file = registers
        self.operations: list[Operation] = []
        self.latest = np.full(registers.count, -1, np.int8)  # the last phase that names a register
        self.reads = np.zeros(registers.count, bool)  # registers that a copy reads
        self.batch_at = 0  # where the batch of a plan lies in the upload
        for operation in operations:
            self.add(*operation)

    def add(self, section: int, first: Longs, second: Longs, registers: Longs | None) -> None:
        """Adds an operation at the end."""
        if registers is not None:
            self.latest[registers] = DATA if section == WRITES else section
        if section == DATA:
            self.reads[second[second != ZERO_SOURCE]] = True
        self.operations.append(Operation(section, first, second, registers))

    def late(self, registers: Longs, phase: int, sources: Longs | None = None) -> bool:
        """Returns whether another operation does not fit this packet, because it would run too early there.

        Zeros, copies and labels of one packet run in no fixed order, so none of them may depend on another.

        Args:
            registers: registers that the operation changes.
            phase: phase of the operation.
            sources: registers whose states the operation reads.
        """
        latest, reads = self.latest, self.reads
        if sources is not None and (latest[sources] == DATA).any():
            return True
        if registers.size <= FEW:
            return any(latest[r] >= phase or reads[r] for r in registers.tolist())
        return bool((latest[registers] >= phase).any() or reads[registers].any())

    def names(self, registers: Longs) -> bool:
        """Returns whether an operation of this packet changes one of these registers or reads its state."""
        return bool((self.latest[registers] >= 0).any() or self.reads[registers].any())

    def size(self, section: int) -> int:
        """Returns the number of entries in a section."""
        return sum(len(operation.first) for operation in self.operations if operation.section == section)

    @property
    def moved(self) -> tuple[int, int]:
        """Numbers of states (copied, zeroed)."""
        sources = [operation.second for operation in self.operations if operation.section == DATA]
        zeroed = sum(int((of == ZERO_SOURCE).sum()) for of in sources)
        return sum(map(len, sources)) - zeroed, zeroed

    def tail(self, operations: int) -> "Packet":
        """Returns a packet without the first `operations` operations."""
        return Packet(self._file, self.operations[operations:])

    def split(self, operations: int) -> "tuple[Packet, Packet]":
        """Returns a packet of the first `operations` operations, and a packet of the others."""
        return Packet(self._file, self.operations[:operations]), self.tail(operations)

    def encode(self, batch: tuple[Ints, Ints] | None = None) -> Ints:
        """Returns the packet as int32: a header, and one or two columns a section, each padded to 16 bytes.

        The layout is that of `memstate.kernels.tables.Section`.

        Args:
            batch: rows and tokens of the next plan, int32 `n` each.
        """
        header = np.zeros(HEADER_INTS, np.int32)
        parts: list[Ints] = [header]
        at = HEADER_INTS
        columns: dict[int, list[tuple[Longs, Longs]]] = {section: [] for section in Section}
        for section, first, second, _ in self.operations:
            columns[section].append((first, second))
        if batch is not None:
            columns[Section.BATCH].append((batch[0].astype(np.int64), batch[1].astype(np.int64)))
        self.batch_at = 0
        for section, entries in columns.items():
            pair: Sequence[Longs] = [np.concatenate(column) for column in zip(*entries, strict=True)]
            pair = pair or [np.zeros(0, np.int64)] * 2
            if section == WRITES:
                pair = _newest(pair[0], pair[1])
            size = len(pair[0])
            header[section], header[8 + section] = size, at
            if section == Section.BATCH:
                self.batch_at = at
            for column in pair if section in PAIRS else pair[:1]:
                padded = np.zeros((size + 3) // 4 * 4, np.int32)
                padded[:size] = column
                parts.append(padded)
                at += len(padded)
        return np.concatenate(parts)


def _newest(cells: Longs, values: Longs) -> tuple[Longs, Longs]:
    """Keeps only the last value of each cell."""
    kept, newest = np.unique(cells[::-1], return_index=True)
    return (cells, values) if len(kept) == len(cells) else (kept, values[::-1][newest])
