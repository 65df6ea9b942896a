"""Holds one packet of a command buffer: its operations, in the order of the calls, and its bytes in an upload.

This module does not check the operations, and does not know which of them wait for a forward.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from memstate.kernels.tables import HEADER_INTS, LIMIT_CELL, ZERO_SOURCE, Section
from memstate.slots.registers import Ints, Longs, RegisterFile

PAIRS = (Section.MOVES, Section.WRITES, Section.DATA)
MOVES, RELEASES, CLAIMS, WRITES, DATA, BATCH = map(int, Section)  # plain ints: each access to an enumeration costs 1 us
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
        self.latest = np.full(registers.count, -1, np.int8)  # the last phase that names a register
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

    def encode(self, batch: Sequence[Longs] = (), limit: int = 0) -> Ints:
        """Returns the packet as int32: a header, the batch, then one or two columns for each other section.

        Each column is padded to 16 bytes. `memstate.kernels.tables.Section` has the layout.

        Args:
            batch: the columns that the next plan or accept reads, axis `n`.
            limit: number of optional claims of that plan or accept.
        """
        header = np.zeros(HEADER_INTS, np.int32)
        header[LIMIT_CELL] = limit
        parts: list[Ints] = [header]
        at = HEADER_INTS
        if batch:
            header[BATCH], header[8 + BATCH] = len(batch[0]), at
            parts += map(_padded, batch)
            at += sum(map(len, parts[1:]))
        firsts: list[list[Longs]] = [[] for _ in range(BATCH)]
        seconds: list[list[Longs]] = [[] for _ in range(BATCH)]
        for section, first, second, _ in self.operations:
            firsts[section].append(first)
            seconds[section].append(second)
        for section, (first_columns, second_columns) in enumerate(zip(firsts, seconds, strict=True)):
            header[8 + section] = at
            if not first_columns:
                continue
            pair = np.concatenate(first_columns), np.concatenate(second_columns)
            if section == WRITES:
                pair = _newest(*pair)
            for column in pair if section in PAIRS else pair[:1]:
                header[section] = len(column)
                parts.append(padded := _padded(column))
                at += len(padded)
        return np.concatenate(parts)


def _padded(column: Longs) -> Ints:
    padded = np.zeros((len(column) + 3) // 4 * 4, np.int32)
    padded[: len(column)] = column
    return padded


def _newest(cells: Longs, values: Longs) -> tuple[Longs, Longs]:
    """Keeps only the last value of each cell."""
    if (cells[1:] > cells[:-1]).all():
        return cells, values
    kept, newest = np.unique(cells[::-1], return_index=True)
    return (cells, values) if len(kept) == len(cells) else (kept, values[::-1][newest])
