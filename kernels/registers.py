"""Launches the ownership changes of a packet, the resolution of registers and the audit. Knows no plane.

The phases of a packet run in one program, and pass data through memory:

    moves | releases | more moves, claims | writes | labels of copies
          ^ barrier  ^ barrier            ^ barrier ^ barrier

The host names no register twice in a phase, and records the changes of a register in the order of the phases. So two
lanes of a phase never touch the same register. But two warps can hold the same lane: a barrier separates the loads of
one from the stores of the other.

More moves: a state that leaves a row in the first phase makes room for one that comes to the row in the third.
"""

import triton
import triton.language as tl
from torch import Tensor

from memstate.kernels.bitmap import (
    BIG,
    CLAIM_SHORT,
    CLAIMED,
    FREE,
    book_releases,
    bump,
    chunk_words,
    give_back,
    note_offender,
    take_lowest,
)
from memstate.kernels.checks import check_audit, check_resolve
from memstate.kernels.kept import KeptLaunch
from memstate.kernels.tables import AUDIT_FREE, Count, Registers, Section
from memstate.kernels.warps import all_loaded, alone, warps_for

CLAIM_FULL = tl.constexpr(int(Count.CLAIM_FULL))
MOVE_FULL = tl.constexpr(int(Count.MOVE_FULL))
MOVES = tl.constexpr(int(Section.MOVES))
RELEASES = tl.constexpr(int(Section.RELEASES))
CLAIMS = tl.constexpr(int(Section.CLAIMS))
WRITES = tl.constexpr(int(Section.WRITES))
DATA = tl.constexpr(int(Section.DATA))
IS_FREE = tl.constexpr(AUDIT_FREE)
BLOCK_ENTRIES = 256
BLOCK_AUDIT = 1024


@triton.jit
def phase_barrier():
    """Separates two phases: the next phase reads what this phase wrote."""
    tl.debug_barrier()


@triton.jit
def _section(packet_ptr, section: tl.constexpr):
    """Returns (entries of a section, pointer to its first column)."""
    return tl.load(packet_ptr + section), packet_ptr + tl.load(packet_ptr + 8 + section)


@triton.jit
def _second_column(first, n):
    """Returns the pointer to the second column of a section: it follows the first, which is padded to 4 entries."""
    return first + (n + 3) // 4 * 4


@triton.jit
def _move(n, targets, slots_ptr, labels_ptr, counters_ptr, BEHIND: tl.constexpr, BLOCK: tl.constexpr):
    """Runs the moves in front of the releases or, if BEHIND, those behind them, whose targets are negative."""
    sources = _second_column(targets, n)
    refused = 0
    lowest = BIG
    for start in range(0, n, BLOCK):
        index = start + tl.arange(0, BLOCK)
        target = tl.load(targets + index, mask=index < n, other=0)
        if BEHIND:
            target = -target
        due = target > 0
        source = tl.load(sources + index, mask=due, other=0)
        slot = tl.load(slots_ptr + source, mask=due, other=0)
        label = tl.load(labels_ptr + source, mask=due, other=0)
        full = (slot != 0) & (tl.load(slots_ptr + target, mask=due, other=0) != 0)
        all_loaded()  # otherwise a late warp finds that the source is empty and the target full
        go = (slot != 0) & (full == 0)
        tl.store(slots_ptr + target, slot, mask=go)
        tl.store(labels_ptr + target, label, mask=go)
        tl.store(slots_ptr + source, 0, mask=go)
        tl.store(labels_ptr + source, 0, mask=go)
        refused += tl.sum(full.to(tl.int32), 0)
        lowest = tl.minimum(lowest, tl.min(tl.where(full, target, BIG), 0))
    bump(counters_ptr, MOVE_FULL, refused)
    note_offender(counters_ptr, MOVE_FULL, refused, lowest)


@triton.jit
def release_registers(slots_ptr, labels_ptr, bitmap_ptr, register, mask, capacity):
    """Empties registers and frees their slots.

    Its barrier separates all loads of the caller from all stores of the caller.

    Returns (whether the slot became free, whether it was free already, whether it is no slot, the slot).
    """
    slot = tl.load(slots_ptr + register, mask=mask, other=0)
    all_loaded()  # otherwise a late warp finds registers empty, and counts fewer releases
    tl.store(slots_ptr + register, 0, mask=mask & (slot != 0))
    tl.store(labels_ptr + register, 0, mask=mask & (slot != 0))
    valid = (slot > 0) & (slot <= capacity)
    double = give_back(bitmap_ptr, tl.where(valid, slot, 0), valid, capacity)
    stray = (slot != 0) & (valid == 0)
    return valid & (double == 0), double, stray, slot


@triton.jit
def _release_phase(packet_ptr, slots_ptr, labels_ptr, bitmap_ptr, counters_ptr, capacity, BLOCK: tl.constexpr):
    n, registers = _section(packet_ptr, RELEASES)
    released = 0
    doubles = 0
    strays = 0
    lowest_double = BIG
    lowest_stray = BIG
    for start in range(0, n, BLOCK):
        index = start + tl.arange(0, BLOCK)
        register = tl.load(registers + index, mask=index < n, other=0)
        good, double, stray, slot = release_registers(slots_ptr, labels_ptr, bitmap_ptr, register, index < n, capacity)
        released += tl.sum(good.to(tl.int32), 0)
        doubles += tl.sum(double.to(tl.int32), 0)
        strays += tl.sum(stray.to(tl.int32), 0)
        lowest_double = tl.minimum(lowest_double, tl.min(tl.where(double, slot, BIG), 0))
        lowest_stray = tl.minimum(lowest_stray, tl.min(tl.where(stray, slot, BIG), 0))
    book_releases(counters_ptr, released, doubles, strays, lowest_double, lowest_stray)


@triton.jit
def _claim_phase(
    packet_ptr, slots_ptr, labels_ptr, bitmap_ptr, counters_ptr, capacity, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):
    n, registers = _section(packet_ptr, CLAIMS)
    claimed = 0
    refused = 0
    short = 0
    lowest_full = BIG
    lowest_short = BIG
    for start in range(0, n, BLOCK):
        index = start + tl.arange(0, BLOCK)
        register = tl.load(registers + index, mask=index < n, other=0)
        full = (index < n) & (tl.load(slots_ptr + register, mask=index < n, other=0) != 0)
        need = ((index < n) & (full == 0)).to(tl.int32)
        wanted = tl.sum(need, 0)
        rank = tl.where(need != 0, tl.cumsum(need, 0) - need, BIG)
        # The barrier in `take_lowest` also makes sure that all warps have loaded `full` before a register changes.
        slot, taken = take_lowest(bitmap_ptr, capacity // 32 + 1, wanted, rank, CHUNK)
        tl.store(slots_ptr + register, slot, mask=(need != 0) & (slot != 0))
        tl.store(labels_ptr + register, 0, mask=(need != 0) & (slot != 0))
        claimed += taken
        refused += tl.sum(full.to(tl.int32), 0)
        short += wanted - taken
        lowest_full = tl.minimum(lowest_full, tl.min(tl.where(full, register, BIG), 0))
        lowest_short = tl.minimum(lowest_short, tl.min(tl.where((need != 0) & (slot == 0), register, BIG), 0))
    bump(counters_ptr, FREE, -claimed)
    bump(counters_ptr, CLAIMED, claimed)
    bump(counters_ptr, CLAIM_FULL, refused)
    bump(counters_ptr, CLAIM_SHORT, short)
    note_offender(counters_ptr, CLAIM_FULL, refused, lowest_full)
    note_offender(counters_ptr, CLAIM_SHORT, short, lowest_short)


@triton.jit
def _write_phase(packet_ptr, slots_ptr, labels_ptr, cells_ptr, BLOCK: tl.constexpr):
    n, addresses = _section(packet_ptr, WRITES)
    values = _second_column(addresses, n)
    for start in range(0, n, BLOCK):
        index = start + tl.arange(0, BLOCK)
        address = tl.load(addresses + index, mask=index < n, other=0)
        tl.store(cells_ptr + address, tl.load(values + index, mask=index < n, other=0), mask=index < n)
    phase_barrier()
    n, targets = _section(packet_ptr, DATA)
    sources = _second_column(targets, n)
    for start in range(0, n, BLOCK):  # a copied state has the label of its source
        index = start + tl.arange(0, BLOCK)
        target = tl.load(targets + index, mask=index < n, other=0)
        source = tl.load(sources + index, mask=index < n, other=-1)
        copied = source >= 0
        copied &= tl.load(slots_ptr + source, mask=copied, other=0) != 0
        copied &= tl.load(slots_ptr + target, mask=copied, other=0) != 0
        tl.store(labels_ptr + target, tl.load(labels_ptr + source, mask=copied, other=0), mask=copied)


@triton.jit(do_not_specialize=["capacity"])
def _ownership(
    packet_ptr, slots_ptr, labels_ptr, cells_ptr, bitmap_ptr, counters_ptr, capacity,
    BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    moves, targets = _section(packet_ptr, MOVES)
    _move(moves, targets, slots_ptr, labels_ptr, counters_ptr, False, BLOCK)
    phase_barrier()
    _release_phase(packet_ptr, slots_ptr, labels_ptr, bitmap_ptr, counters_ptr, capacity, BLOCK)
    phase_barrier()
    _move(moves, targets, slots_ptr, labels_ptr, counters_ptr, True, BLOCK)
    _claim_phase(packet_ptr, slots_ptr, labels_ptr, bitmap_ptr, counters_ptr, capacity, BLOCK, CHUNK)
    phase_barrier()
    _write_phase(packet_ptr, slots_ptr, labels_ptr, cells_ptr, BLOCK)


@triton.jit(do_not_specialize=["n", "size"])
def _resolve(slots_ptr, registers_ptr, out_ptr, n, size, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    register = tl.load(registers_ptr + index, mask=index < n, other=0)
    known = (register > 0) & (register < size)
    tl.store(out_ptr + index, tl.load(slots_ptr + register, mask=known, other=0), mask=index < n)


@triton.jit(do_not_specialize=["n", "capacity"])
def _audit(slots_ptr, bitmap_ptr, out_ptr, n, capacity, BLOCK: tl.constexpr):
    for start in range(0, capacity + 1, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + slot, 0, mask=slot <= capacity)
    phase_barrier()
    for start in range(0, n, BLOCK):
        register = start + tl.arange(0, BLOCK)
        slot = tl.load(slots_ptr + register, mask=register < n, other=0)
        inside = (slot > 0) & (slot <= capacity)
        owner = tl.where(inside, slot, 0)  # a number that is no slot counts for slot 0
        tl.atomic_add(out_ptr + owner, tl.full(owner.shape, 1, tl.int32), mask=slot != 0, sem="relaxed")
    phase_barrier()
    for start in range(0, capacity + 1, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        word = tl.load(bitmap_ptr + slot // 32, mask=slot <= capacity, other=0)
        owners = tl.load(out_ptr + slot, mask=slot <= capacity, other=0)
        free = ((word >> (slot % 32)) & 1) != 0
        tl.store(out_ptr + slot, owners + tl.where(free, IS_FREE, 0), mask=slot <= capacity)


KEPT = KeptLaunch(_ownership)


def ownership(registers: Registers, packet: Tensor) -> None:
    """Launches the op; see `memstate.kernels.reference.registers.ownership`."""
    warps = warps_for(BLOCK_ENTRIES)
    args = (
        packet, registers.slots, registers.labels, registers.cells, registers.bitmap, registers.counters,
        registers.capacity,
    )  # fmt: skip
    sizes = {"BLOCK": BLOCK_ENTRIES, "CHUNK": chunk_words(warps)}
    KEPT.launch(args, sizes, warps, packet.device, alike=registers.trusted)


def resolve(registers: Registers, wanted: Tensor, out: Tensor) -> None:
    """Launches the op; see `memstate.kernels.reference.registers.resolve`."""
    check_resolve(registers, wanted, out)
    grid = (triton.cdiv(wanted.numel(), BLOCK_ENTRIES),)
    _resolve[grid](registers.slots, wanted, out, wanted.numel(), registers.slots.numel(), BLOCK=BLOCK_ENTRIES)


def audit(registers: Registers, out: Tensor) -> None:
    """Launches the op; see `memstate.kernels.reference.registers.audit`."""
    check_audit(registers, out)
    _audit[(1,)](
        registers.slots, registers.bitmap, out, registers.slots.numel(), registers.capacity,
        BLOCK=BLOCK_AUDIT, num_warps=warps_for(BLOCK_AUDIT), **alone(),
    )  # fmt: skip
