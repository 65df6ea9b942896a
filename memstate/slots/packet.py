"""Holds one packet of a command buffer: its operations, in the order of the calls, and its bytes in an upload.

This module does not check the operations, and does not know which of them wait for a forward.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from memstate.kernels.tables import HEADER_INTS, LIMIT_CELL, ZERO_SOURCE, Section
from memstate.slots.registers import Ints, Longs, RegisterFile

PAIRS = (Section.MOVES, Section.WRITES, Section.DATA)
MOVES, RELEASES, CLAIMS, WRITES, DATA, BATCH, MARKS = map(
    int, Section
)  # plain ints: each access to an enumeration costs 1 us
FEW = 8  # up to this number of registers, a Python loop is faster than numpy


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
        self.latest = np.empty(registers.count, np.int8)  # the last phase that names a register
        self.latest.fill(-1)
        self.reads = np.zeros(registers.count, bool)  # registers that a copy reads
        self.sizes = [0] * len(Section)  # number of entries of each section
        self.zeroed = 0  # number of entries of DATA that zero a state
        for operation in operations:
            self.add(*operation)

    def add(self, section: int, first: Longs, second: Longs, registers: Longs | None) -> None:
        """Adds an operation at the end."""
        if registers is not None:
            self.latest[registers] = DATA if section == WRITES else section
        if section == DATA:
            self.reads[second[second != ZERO_SOURCE]] = True
            self.zeroed += int(np.count_nonzero(second == ZERO_SOURCE))
        self.sizes[section] += len(first)
        self.operations.append(Operation(section, first, second, registers))

    def late(self, registers: Longs, phase: int, sources: Longs | None = None) -> bool:
        """Returns True if a new operation must start another packet, because it would run too early in this one.

        Zeros and copies of one packet run in no fixed order, and after its labels. So none of them may change a
        register that another one of the same packet changes or reads.

        Args:
            registers: registers that the operation changes.
            phase: phase of the operation.
            sources: registers whose states the operation reads.
        """
        if not self.operations:
            return False
        latest, reads = self.latest, self.reads
        if sources is not None and (latest[sources] == DATA).any():
            return True
        if registers.size <= FEW:
            return any(latest[r] >= phase or reads[r] for r in registers.tolist())
        return bool((latest[registers] >= phase).any() or reads[registers].any())

    def names(self, registers: Longs) -> bool:
        """Returns whether an operation of this packet changes one of these registers or reads its state."""
        return bool((self.latest[registers] >= 0).any() or self.reads[registers].any())

    def tail(self, operations: int) -> "Packet":
        """Returns a packet without the first `operations` operations."""
        return Packet(self._file, self.operations[operations:])

    def split(self, operations: int) -> "tuple[Packet, Packet]":
        """Returns a packet of the first `operations` operations, and a packet of the others."""
        return Packet(self._file, self.operations[:operations]), self.tail(operations)

    def encode(self, batch: Sequence[Longs] = (), limit: int = 0, marks: Sequence[Longs] = ()) -> Ints:
        """Returns the packet as int32: a header, the batch, its marks, then one or two columns for each other section.

        Each column is padded to 16 bytes. `memstate.kernels.tables.Section` has the layout.

        Args:
            batch: the columns that the next plan or accept reads, axis `n`.
            limit: number of optional claims of that plan or accept.
            marks: entries of the batch, offsets and registers, axis `mark`; ascending by entry, then by offset.
        """
        columns: list[tuple[int, Sequence[Longs]]] = [(BATCH, batch)] if batch else []
        if marks:
            columns.append((MARKS, marks))
        by_section: dict[int, list[Operation]] = {}
        for operation in self.operations:
            by_section.setdefault(operation.section, []).append(operation)
        columns += [(section, _columns(section, by_section[section])) for section in sorted(by_section)]
        ends = [HEADER_INTS]
        for _, pair in columns:
            ends.append(ends[-1] + len(pair) * (-(-len(pair[0]) // 4) * 4))
        sent = np.zeros(ends[-1], np.int32)
        sent[LIMIT_CELL] = limit
        sent[8 : 8 + BATCH] = HEADER_INTS
        for (section, pair), at in zip(columns, ends, strict=False):
            size = sent[section] = len(pair[0])
            sent[8 + section] = at
            for column in pair:
                sent[at : at + size] = column
                at += -(-size // 4) * 4
        return sent


def _columns(section: int, operations: Sequence[Operation]) -> tuple[Longs, ...]:
    """Returns the column, or both columns, of the operations of one section."""
    if len(operations) == 1:
        (_, first, second, _) = operations[0]
    else:
        first, second = (np.concatenate([operation[at] for operation in operations]) for at in (1, 2))
    if section == WRITES:
        return _newest(first, second)
    return (first, second) if section in PAIRS else (first,)


def _newest(cells: Longs, values: Longs) -> tuple[Longs, Longs]:
    """Keeps only the last value of each cell."""
    if (cells[1:] > cells[:-1]).all():
        return cells, values
    kept, newest = np.unique(cells[::-1], return_index=True)
    return (cells, values) if len(kept) == len(cells) else (kept, values[::-1][newest])
