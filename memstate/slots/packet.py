"""One packet of a command buffer: operations in the order of record, and their bytes in an upload.

Knows neither what is held nor what may be sent.
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
    """What is recorded in one call: a section with its two columns, and the registers that it changes."""

    section: int
    first: Longs
    second: Longs
    registers: Longs | None


class Packet:
    """Operations that are sent together.

    Args:
        registers: the register file.
        operations: those to begin with.
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
        """Adds what belongs behind everything that is there."""
        if registers is not None:
            self.latest[registers] = DATA if section == WRITES else section
        if section == DATA:
            self.reads[second[second != ZERO_SOURCE]] = True
        self.operations.append(Operation(section, first, second, registers))

    def late(self, registers: Longs, phase: int, sources: Longs | None = None) -> bool:
        """Whether the packet would carry out another operation too early, or beside one that it must follow.

        Zeros, copies and labels of one packet have no order.

        Args:
            registers: that the operation changes.
            phase: of the operation.
            sources: registers whose state it reads.
        """
        latest, reads = self.latest, self.reads
        if sources is not None and (latest[sources] == DATA).any():
            return True
        if registers.size <= FEW:
            return any(latest[r] >= phase or reads[r] for r in registers.tolist())
        return bool((latest[registers] >= phase).any() or reads[registers].any())

    def names(self, registers: Longs) -> bool:
        """Whether something here changes one of these registers, or reads its state."""
        return bool((self.latest[registers] >= 0).any() or self.reads[registers].any())

    def size(self, section: int) -> int:
        """Entries of a section."""
        return sum(len(operation.first) for operation in self.operations if operation.section == section)

    @property
    def moved(self) -> tuple[int, int]:
        """States that this copies and zeroes."""
        sources = [operation.second for operation in self.operations if operation.section == DATA]
        zeroed = sum(int((of == ZERO_SOURCE).sum()) for of in sources)
        return sum(map(len, sources)) - zeroed, zeroed

    def tail(self, operations: int) -> "Packet":
        """What comes behind the first so many operations, as a packet."""
        return Packet(self._file, self.operations[operations:])

    def split(self, operations: int) -> "tuple[Packet, Packet]":
        """The first so many operations, and the others."""
        return Packet(self._file, self.operations[:operations]), self.tail(operations)

    def encode(self, batch: tuple[Ints, Ints] | None = None) -> Ints:
        """The bytes of the packet: a header, and one or two columns a section, each padded to 16 bytes.

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
    """The last value of each cell; as they are where no cell is named twice."""
    kept, newest = np.unique(cells[::-1], return_index=True)
    return (cells, values) if len(kept) == len(cells) else (kept, values[::-1][newest])
