"""Copies slots, and fills slots with their initial pattern, one by one, in plain torch.

Tests compare `memstate.kernels.copy` with this reference, which replaces the kernels where Triton is missing.
"""

import torch
from torch import Tensor

from memstate.kernels.checks import check_columns
from memstate.kernels.reference.host import Ints, on_host
from memstate.kernels.reference.registers import column
from memstate.kernels.tables import ROW_CODE, ZERO_SOURCE, PlaneMap, Section


def copy_slots(planes: PlaneMap, dst: Tensor, src: Tensor) -> None:
    """Copies slots src[i] to dst[i] over all planes and layers, bit for bit, padding included.

    An entry with dst == src, or with an id outside 1..capacity, is skipped. No slot may be the destination of two
    entries, or the destination of one and the source of another: the order of copies is not defined.

    Args:
        planes: bytes of all slots, see `PlaneMap`. Changed.
        dst: destination slot of each copy, int32 or int64 `n`.
        src: source slot of each copy, int32 or int64 `n`.

    Raises:
        ValueError: the ids are not contiguous, not on the device of the planes, or not of one length.

    Syncs: no (the reference: yes, off the CPU).
    """
    check_columns(planes.tiles.device, None, dst=dst, src=src)
    for to, of in zip(dst.tolist(), src.tolist(), strict=True):
        if _exists(planes, to) and _exists(planes, of) and to != of:
            _copy(planes, to, of)


def zero_slots(planes: PlaneMap, ids: Tensor) -> None:
    """Fills slots over all planes and layers, padding included: with zeros, or with the pattern of the plane.

    Args:
        planes: bytes of all slots, see `PlaneMap`. Changed.
        ids: slots to fill, int32 or int64 `n`; ids outside 1..capacity are skipped.

    Raises:
        ValueError: the ids are not contiguous, or not on the device of the planes.

    Syncs: no (the reference: yes, off the CPU).
    """
    check_columns(planes.tiles.device, None, ids=ids)
    for slot in ids.tolist():
        if _exists(planes, slot):
            _zero(planes, slot)


def run_data(planes: PlaneMap, slots: Tensor, packet: Tensor) -> None:
    """Carries out the data section of a packet: copies slots from register to register, or fills slots.

    An entry is (dst register, src register) for a copy, or (dst register, ZERO_SOURCE) to fill the slot of dst as
    `zero_slots` does. An entry is skipped if one of its registers holds no slot, or if both hold the same slot.
    Overlaps are forbidden as in `copy_slots`.

    Args:
        planes: bytes of all slots, see `PlaneMap`. Changed.
        slots: int32 `register`, the slot of each register.
        packet: int32, laid out as `memstate.kernels.tables.Section` says.

    Syncs: no (the reference: yes, off the CPU).
    """
    with on_host(slots, packet) as (held, commands):
        targets = [_held(held, register) for register in column(commands, Section.DATA)]
        sources = [
            None if register == ZERO_SOURCE else _held(held, register)
            for register in column(commands, Section.DATA, second=True)
        ]
    for to, of in zip(targets, sources, strict=True):
        if _exists(planes, to) and of is None:
            _zero(planes, to)
        elif _exists(planes, to) and of is not None and _exists(planes, of) and to != of:
            _copy(planes, to, of)


def run_rows(planes: PlaneMap, packet: Tensor) -> None:
    """Carries out the entries of a packet's data section that name rows: copies from row to row, or fills rows.

    An entry is (ROW_CODE - dst, ROW_CODE - src) for a copy, or (ROW_CODE - dst, ZERO_SOURCE) to fill row dst as
    `zero_slots` fills a slot. Entries that name registers are skipped.

    Args:
        planes: bytes of all rows, see `PlaneMap`. Changed.
        packet: int32, laid out as `memstate.kernels.tables.Section` says.

    Syncs: no (the reference: yes, off the CPU).
    """
    with on_host(packet) as (commands,):
        columns = column(commands, Section.DATA), column(commands, Section.DATA, second=True)
    for to, of in zip(*([ROW_CODE - int(code) for code in codes] for codes in columns), strict=True):
        if _exists(planes, to) and to != of:
            _copy(planes, to, of) if _exists(planes, of) else _zero(planes, to)


def _held(slots: Ints, register: int) -> int:
    return int(slots[register]) if register > 0 else 0


def _exists(planes: PlaneMap, slot: int) -> bool:
    return 0 < slot < planes.blocks[0].shape[1]


def _copy(planes: PlaneMap, to: int, of: int) -> None:
    for block in planes.blocks:
        block[:, to].copy_(block[:, of])


def _zero(planes: PlaneMap, slot: int) -> None:
    for at, block in enumerate(planes.blocks):
        pattern = planes.patterns[at] if planes.patterns else 0
        if pattern:
            block[:, slot] = repeated(pattern, block.shape[2]).to(block.device)
        elif pattern is not None:
            block[:, slot].zero_()


def repeated(pattern: int, nbytes: int) -> Tensor:
    """Returns `nbytes` bytes, uint8 `byte`, filled with the 64 bits of `pattern` again and again."""
    return torch.tensor([pattern], dtype=torch.int64, device="cpu").repeat(-(-nbytes // 8)).view(torch.uint8)[:nbytes]
