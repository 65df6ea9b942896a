"""Holds one packet of a command buffer: its operations, in the order of the calls, and its bytes in an upload.

This module does not check the operations, and does not know which of them wait for a forward. Registers and cells are
plain integers in lists: most packets have only a few, for which lists are faster than numpy.
"""

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from memstate.kernels.tables import DEFER_CELL, HEADER_INTS, LIMIT_CELL, ZERO_SOURCE, Section
from memstate.slots.registers import Ints, Longs

# The sections as plain integers, because an access to a member of an enumeration takes 1 us.
MOVES, RELEASES, CLAIMS, WRITES, DATA, BATCH, MARKS = map(int, Section)
PAIRS = (MOVES, WRITES, DATA)  # sections with two columns
FILLING = [array("i", [0] * n) for n in range(4)]
NO_SECTIONS = array("i", [0] * 8 + [HEADER_INTS] * BATCH + [0] * (8 - BATCH))  # header of an empty packet
# (section, first column, second column, registers that change)
Operation = tuple[int, Sequence[int], Sequence[int], Sequence[int]]
Room = Callable[[int], Ints]  # number of int32 -> the memory for a packet of this size


def _zeros(ints: int) -> Ints:
    return np.zeros(ints, np.int32)


class Packet:
    """Operations that are sent together.

    Args:
        operations: the first operations.

    Attributes:
        operations: the operations, in the order of the calls.
        named: phase -> registers that an operation of this phase changes.
        reads: registers that a copy reads.
        copied: number of entries of DATA that copy a state.
        zeroed: number of entries of DATA that fill a state with zeros, or with the fills of its planes.
        rows: number of entries of DATA that name rows, not registers.
    """

    def __init__(self, operations: Iterable[Operation] = ()) -> None:
        self.operations: list[Operation] = []
        self.named: dict[int, set[int]] = {}
        self.reads: set[int] = set()
        self.copied = self.zeroed = self.rows = 0
        for operation in operations:
            self.add(*operation)

    def add(self, section: int, first: Sequence[int], second: Sequence[int], registers: Sequence[int]) -> None:
        """Adds an operation at the end."""
        if registers:
            phase = DATA if section == WRITES else section
            if section == MOVES and first[0] < 0:  # it runs with the claims
                phase = CLAIMS
            if phase in self.named:
                self.named[phase].update(registers)
            else:
                self.named[phase] = {*registers}
        if section == DATA:
            zeroed = second.count(ZERO_SOURCE)
            if first[0] < 0:
                self.rows += len(first)
            else:
                self.zeroed += zeroed
                self.copied += len(first) - zeroed
            if zeroed < len(second):
                self.reads.update(second)
                self.reads.discard(ZERO_SOURCE)
        self.operations.append((section, first, second, registers))

    def size(self, section: int) -> int:
        """Returns the number of entries of a section."""
        entries = 0
        for kind, first, _, _ in self.operations:
            if kind == section:
                entries += len(first)
        return entries

    def last(self, registers: Sequence[int], sources: Sequence[int] = ()) -> int:
        """Returns the last phase of this packet that a new operation must follow, -1 for none.

        The zeros and copies of a packet run in no fixed order, after the labels. So no zero or copy may change a
        register that another zero or copy of the same packet changes or reads.

        Args:
            registers: registers that the operation changes.
            sources: registers whose states the operation reads.
        """
        last = -1 if self.reads.isdisjoint(registers) else DATA
        for phase, changed in self.named.items():
            if (phase > last and not changed.isdisjoint(registers)) or (
                phase == DATA and not changed.isdisjoint(sources)
            ):
                last = phase
        return last

    def names(self, registers: Iterable[int]) -> bool:
        """Returns whether an operation of this packet changes one of these registers or reads its state."""
        return not all(named.isdisjoint(registers) for named in (self.reads, *self.named.values()))

    def tail(self, operations: int) -> "Packet":
        """Returns a packet without the first `operations` operations."""
        return Packet(self.operations[operations:])

    def split(self, operations: int) -> "tuple[Packet, Packet]":
        """Returns a packet of the first `operations` operations, and a packet of the others."""
        return Packet(self.operations[:operations]), self.tail(operations)

    def encode(
        self, batch: Sequence[Longs] = (), limit: int = 0, marks: Sequence[Longs] = (),
        room: Room = _zeros, defer: int = 0,
    ) -> Ints:  # fmt: skip
        """Returns the packet as int32: a header, the batch, its marks, then one or two columns for each other section.

        Each column is padded to 16 bytes. `memstate.kernels.tables.Section` has the layout.

        Args:
            batch: the columns that the next plan reads, axis `n`.
            limit: largest number of claims of that plan.
            marks: entries of the batch, offsets and registers, axis `mark`; ascending by entry, then by offset.
            room: returns the memory for a packet, given its number of int32.
            defer: if a tail has fewer tokens than this, those of the step included, none of them is added to the state.
        """
        header, body, at = NO_SECTIONS[:], array("i"), HEADER_INTS
        header[LIMIT_CELL], header[DEFER_CELL] = limit, defer
        for section, longs in ((BATCH, batch), (MARKS, marks)):
            if longs:
                size = header[section] = len(longs[0])
                header[8 + section] = at
                at += len(longs) * (size + -size % 4)
        columns: dict[int, tuple[Any, Any]] = {}  # of lists; of arrays for writes, which can be whole page tables
        for section, first, second, _ in self.operations:
            if section not in columns:
                columns[section] = (array("i"), array("i")) if section == WRITES else ([], [])
            left, right = columns[section]
            left.extend(first)
            right.extend(second)
        for section in sorted(columns):
            left, right = columns[section] if section != WRITES else _newest(*columns[section])
            add: Callable[[Any], None] = body.extend if section == WRITES else body.fromlist
            size = len(left)
            header[section], header[8 + section] = size, at + len(body)
            add(left)
            body.extend(FILLING[-size % 4])
            if section in PAIRS:
                add(right)
                body.extend(FILLING[-size % 4])
        sent = room(at + len(body))
        to, start = sent.data, HEADER_INTS
        to[:HEADER_INTS] = header
        to[at:] = body
        for values in (*batch, *marks):
            end = start + len(values)
            sent[start:end] = values
            start = end
            if gap := -end % 4:
                start += gap
                sent[end:start] = 0
        return sent


def _newest(cells: "array[int]", values: "array[int]") -> "tuple[array[int], array[int]]":
    """Returns cells and values with only the last value of each cell."""
    if len(cells) < 64:  # for few cells, a dict is faster than numpy
        newest = dict(zip(cells, values, strict=True))
        return (cells, values) if len(newest) == len(cells) else (array("i", newest), array("i", newest.values()))
    named, order = np.frombuffer(cells, np.int32), np.arange(len(cells), dtype=np.int32)
    latest = np.zeros(int(named.max()) + 1, np.int32)
    np.maximum.at(latest, named, order)
    kept = latest[named] == order
    return array("i", named[kept].tobytes()), array("i", np.frombuffer(values, np.int32)[kept].tobytes())
