"""Changes ownership, resolves registers and audits, in plain numpy.

Tests compare `memstate.kernels.registers` with this reference, which replaces the kernels where Triton is missing.
"""

import numpy as np
from torch import Tensor

from memstate.kernels.checks import check_audit, check_resolve
from memstate.kernels.reference.bitmap import give_back, note_offenders, take_lowest
from memstate.kernels.reference.host import Ints, on_host
from memstate.kernels.tables import AUDIT_FREE, Count, Registers, Section


def column(packet: Ints, section: Section, second: bool = False) -> list[int]:
    """Returns a column of a packet's section; the second column follows the first, which is padded to 4 entries."""
    n, start = int(packet[section]), int(packet[8 + section])
    start += (n + 3) // 4 * 4 if second else 0
    return list(map(int, packet[start : start + n]))


def ownership(registers: Registers, packet: Tensor) -> None:
    """Carries out the moves, releases, more moves, claims, writes and label copies of a packet, in that order.

    A move or a claim into a register that holds a slot changes nothing, and is counted as a fault. The release of an
    empty register does nothing.

    Args:
        registers: the register file. Changed: registers, bitmap and counters.
        packet: int32, laid out as `memstate.kernels.tables.Section` says.

    Syncs: no.
    """
    r = registers
    with on_host(r.cells, r.bitmap, r.counters, packet) as (cells, bitmap, counters, commands):
        size = r.slots.numel()
        slots, labels = _column(cells, r, r.slots), _column(cells, r, r.labels)
        _move(commands, slots, labels, counters, behind=False)
        released = [register for register in column(commands, Section.RELEASES) if slots[register]]
        give_back(bitmap, counters, [int(slots[register]) for register in released], r.capacity)
        slots[released] = labels[released] = 0
        _move(commands, slots, labels, counters, behind=True)
        _claim(commands, slots, labels, bitmap, counters)
        for address, value in zip(
            column(commands, Section.WRITES), column(commands, Section.WRITES, True), strict=True
        ):
            cells[address] = value
        for target, source in zip(column(commands, Section.DATA), column(commands, Section.DATA, True), strict=True):
            if 0 <= source < size and slots[source] and slots[target]:
                labels[target] = labels[source]


def _column(cells: Ints, registers: Registers, view: Tensor) -> Ints:
    start = view.storage_offset() - registers.cells.storage_offset()
    return cells[start : start + view.numel()]


def _move(commands: Ints, slots: Ints, labels: Ints, counters: Ints, behind: bool) -> None:
    refused = []
    for target, source in zip(column(commands, Section.MOVES), column(commands, Section.MOVES, True), strict=True):
        to = -target if behind else target
        if to <= 0 or not slots[source]:
            continue
        if slots[to]:
            refused.append(to)
        else:
            slots[to], labels[to] = slots[source], labels[source]
            slots[source] = labels[source] = 0
    note_offenders(counters, Count.MOVE_FULL, refused)


def _claim(commands: Ints, slots: Ints, labels: Ints, bitmap: Ints, counters: Ints) -> None:
    wanted = column(commands, Section.CLAIMS)
    empty = [register for register in wanted if not slots[register]]
    taken = take_lowest(bitmap, len(empty))
    slots[empty[: len(taken)]] = taken
    labels[empty[: len(taken)]] = 0
    counters[Count.FREE] -= len(taken)
    counters[Count.CLAIMED] += len(taken)
    note_offenders(counters, Count.CLAIM_FULL, [register for register in wanted if register not in set(empty)])
    note_offenders(counters, Count.CLAIM_SHORT, empty[len(taken) :])


def resolve(registers: Registers, wanted: Tensor, out: Tensor) -> None:
    """Looks up the slots of registers.

    Args:
        registers: the register file.
        wanted: int32 `n`, register numbers; 0, negative and unknown numbers give 0.
        out: int32 `n`, slots. Changed.

    Raises:
        ValueError: a column does not fit.

    Syncs: no.
    """
    check_resolve(registers, wanted, out)
    with on_host(registers.slots, wanted, out) as (slots, numbers, resolved):
        known = (numbers > 0) & (numbers < slots.size)
        resolved[:] = np.where(known, slots[np.where(known, numbers, 0)], 0)


def audit(registers: Registers, out: Tensor) -> None:
    """Counts the owners of every slot.

    Args:
        registers: the register file.
        out: int32 `capacity+1`. Cell s: the number of registers that hold slot s, plus AUDIT_FREE if the bitmap says
            that s is free. Cell 0: the number of registers that hold a number which is no slot of this pool. Changed.

    Raises:
        ValueError: `out` does not fit.

    Syncs: no.
    """
    check_audit(registers, out)
    with on_host(registers.slots, registers.bitmap, out) as (slots, bitmap, owners):
        held = slots[slots != 0]
        owner = np.where((held > 0) & (held <= registers.capacity), held, 0)
        free = np.unpackbits(bitmap.view(np.uint8), bitorder="little")[: registers.capacity + 1]
        owners[:] = np.bincount(owner, minlength=registers.capacity + 1) + free.astype(np.int32) * AUDIT_FREE
