"""Checks every byte of poisoned memory after slots are packed into records and unpacked."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from memstate.kernels import pack, pack_int8
from memstate.kernels.configs import ENTRIES
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import RecordMap, RecordPiece
from tests.conftest import CUDA
from tests.kernels import test_pack_int8
from tests.kernels.test_gather import GUARD, Poisoned, strided
from tests.support.decode_case import vast

SLOTS, RECORDS, LAYERS = 7, 6, 2  # slots include the null slot
OPS = ("pack_slots", "unpack_slots")
UNITS = (16, 8, 4, 2, 1)

INT8 = ("pack_int8", "unpack_int8")
KERNEL = {"lots": (pack, "_move_records"), "int8": (pack_int8, "_move_int8")}  # end of an op's name -> kernel

each_op = pytest.mark.parametrize("op", OPS)
every_op = pytest.mark.parametrize("op", OPS + INT8)


class Memory:
    """Planes and records of random bytes, the expected bytes, and the tiles that the kernel moves.

    unit: bytes of one access. sizes: units of a slot in each plane, without the gaps between slots. tile: units of a
    tile. host: whether records lie in host memory.
    """

    def __init__(
        self, backend: Backend, generator: torch.Generator, unit: int = 16, sizes: tuple[int, ...] = (10, 3),
        tile: int = 4, host: bool = False,
    ) -> None:  # fmt: skip
        self.backend, device, self.planes, body = backend, backend.device, list[Poisoned](), 0
        for plane, size in enumerate(sizes):
            slot = unit * (size + 3 + plane)
            shape, strides = (LAYERS, SLOTS, unit * size), (SLOTS * slot + 5 * unit, slot, 1)
            self.planes.append(strided(backend, generator, torch.uint8, shape, strides, unit))
        self.pieces: list[RecordPiece] = []
        for layer, (plane, size) in product(range(LAYERS), enumerate(sizes)):
            for at in range(0, unit * size, unit * tile):
                length = min(tile * unit, size * unit - at)
                self.pieces.append(RecordPiece(plane, layer, at, length, body + at))
            body += -(-unit * size // 16) * 16
        whole = torch.empty(2 * GUARD + RECORDS * (body + 32), dtype=torch.uint8, device="cpu" if host else device)
        whole = whole.pin_memory() if host and device.type == "cuda" else whole
        self.record = Poisoned(whole, whole[GUARD:].as_strided((RECORDS, body), (body + 32, 1)), generator)
        self.held = self.record.tensor
        tensors = tuple(plane.tensor for plane in self.planes)
        tiles = [
            (tensors[p.block][p.layer, 0].data_ptr() + p.start, tensors[p.block].stride(1), p.length, p.offset)
            for p in self.pieces
        ]
        table = torch.tensor(tiles, dtype=torch.int64).to(device)
        self.records = RecordMap(table, tensors, tuple(self.pieces), body, unit)

    def ints(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.backend.device)

    def expect(self, op: str, place: int, slot: int, first: int = 0, count: int | None = None) -> None:
        """Notes the bytes expected after `op` moves these tiles between a slot and the record at `place`; slot 0 stands
        for zeros.
        """
        for piece in self.pieces[first : None if count is None else first + count]:
            plane = self.planes[piece.block]
            start, at = (
                plane.block(piece.layer, slot).start + piece.start,
                self.record.block(place).start + piece.offset,
            )
            block, record = plane.expected[start:][: piece.length], self.record.expected[at:][: piece.length]
            if op == "unpack_slots":
                block[:] = record
            else:
                record[:] = block if slot else 0

    def expect_all(self, op: str, slot_of: dict[int, int]) -> None:
        """Checks all bytes after a move between each place and its slot.

        Slot 0 is read as zeros, and is never written.
        """
        for place, slot in slot_of.items():
            if slot or op == "pack_slots":
                self.expect(op, place, slot)
        self.check()

    def run(self, op: str, slots: Tensor | None, index: Tensor, places: Tensor) -> None:
        getattr(self.backend, op)(self.records, slots, index, places, self.held)

    def check(self) -> None:
        for part in (*self.planes, self.record):
            part.check()


def made(op: str, backend: Backend, generator: torch.Generator) -> Any:
    """Returns memory for an op: with records of plain bytes, or with one plane whose int8 records are packed."""
    if op not in INT8:
        return Memory(backend, generator, host=True)
    return test_pack_int8.packed(backend, generator)


@each_op
@pytest.mark.parametrize(("unit", "host"), [*((unit, False) for unit in UNITS), (16, True)])
def test_b66_bytes_of_every_width_move(backend: Backend, generator: torch.Generator, op: str, unit: int, host: bool):
    memory = Memory(backend, generator, unit, host=host)
    memory.run(op, None, memory.ints([4, 6, 1]), memory.ints([5, 0, 2]))
    memory.expect_all(op, {5: 4, 0: 6, 2: 1})
    assert backend.counts.launches == {op: 1}


# For each case: the slots in registers, or None; the registers to pack, or without registers the slots; the places of
# the records; the dtype of both; and which slot belongs to which place (0: zeros).
MANY = 2 * ENTRIES + 90  # more entries than a program reads at once
COLUMNS: dict[str, tuple[list[int] | None, list[int], list[int], torch.dtype, dict[int, int]]] = {
    "registers": (  # register 0, missing and empty registers, and registers with invalid slots count as zeros
        [3, 2, 0, 99, -4, 4], [1, 0, 2, 3, -1, 2**31 - 1, 5, 5], [3, 0, -1, 1, 99, -7, 2, 2**31 - 1], torch.int32,
        {3: 2, 0: 0, 1: 0, 2: 4},
    ),
    "ids and places that are none": (
        None, [0, -3, 99, 2**31 - 1, 1, 2, 3, 4], [0, 1, 2, 3, -1, 99, 2**31 - 1, -(2**31)], torch.int32,
        dict.fromkeys(range(4), 0),
    ),
    "64 bits": (None, [2**32 + 1, 2, 1, -(2**32) + 2], [0, 2**32 + 1, 3, 2], torch.int64, {3: 1, 0: 0, 2: 0}),
    "registers in 64 bits": (
        [0, 2, 3], [2**32 + 1, 2, 1, -(2**32) + 2], [0, 2**32 + 1, 3, 2], torch.int64, {3: 2, 0: 0, 2: 0},
    ),
    "none among hundreds": (None, [1] * MANY, [-1] * MANY, torch.int32, {}),
    "few among hundreds": (
        None, [4, *[1] * 254, 3, 2, *[1] * (MANY - 258), 1], [0, *[-1] * 254, 1, 2, *[-1] * (MANY - 258), 3],
        torch.int32, {0: 4, 1: 3, 2: 2, 3: 1},
    ),
}  # fmt: skip


@every_op
@pytest.mark.parametrize("case", COLUMNS)
def test_b66_B39_what_columns_name_moves_and_nothing_else(
    backend: Backend, generator: torch.Generator, op: str, case: str
) -> None:
    registers, index, places, dtype, slot_of = COLUMNS[case]
    memory = made(op, backend, generator)
    slots = None if registers is None else memory.ints(registers)
    memory.run(op, slots, memory.ints(index, dtype), memory.ints(places, dtype))
    memory.expect_all(op, slot_of)


def test_b66_a_slot_to_many_records_and_a_record_to_many_slots(backend: Backend, generator: torch.Generator) -> None:
    memory = Memory(backend, generator)
    memory.run("pack_slots", None, memory.ints([2, 2, 5, 2]), memory.ints([0, 3, 1, 5]))
    memory.expect_all("pack_slots", {0: 2, 3: 2, 5: 2, 1: 5})
    memory.run("unpack_slots", None, memory.ints([1, 3, 6]), memory.ints([4, 4, 4]))
    for slot in (1, 3, 6):
        memory.expect("unpack_slots", 4, slot)
    memory.check()


@each_op
@pytest.mark.parametrize("far", ["records", "slots"])
def test_B38_records_and_slots_beyond_2_31_bytes(backend: Backend, op: str, far: str) -> None:
    """Records or slots are 2**32 + 16 bytes apart; with 32-bit arithmetic they would seem 16 bytes apart."""
    stride = 2**32 + 16
    memory = vast(2 * stride + 32, backend.device)
    near = torch.arange(48, dtype=torch.uint8, device=backend.device)
    memory[:48] = 99
    if far == "records":
        held, plane = memory.as_strided((2, 16), (stride, 1)), near.view(1, 3, 16)
        held[1] = 7
    else:
        held, plane = near.view(3, 16)[:2], memory.as_strided((1, 3, 16), (16, stride, 1))
        plane[0, 2] = 7
    tiles = torch.tensor([[plane.data_ptr(), plane.stride(1), 16, 0]], dtype=torch.int64, device=backend.device)
    records = RecordMap(tiles, (plane,), (RecordPiece(0, 0, 0, 16, 0),), 16)
    column = torch.tensor([1], device=backend.device)
    expected = (plane[0, 2] if op == "pack_slots" else held[1]).tolist()
    getattr(backend, op)(records, None, column + 1, column, held)
    assert memory[:48].tolist() == [99] * 48
    assert plane[0, 2].tolist() == held[1].tolist() == expected


@every_op
@pytest.mark.parametrize("what", ["entries", "records"])
def test_B39_nothing_to_move_launches_nothing(
    backend: Backend, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch, op: str, what: str
) -> None:
    memory = made(op, backend, generator)
    monkeypatch.setattr(*KERNEL[op[-4:]], None)
    column = memory.ints([] if what == "entries" else [1])
    if what == "records":
        memory.held = memory.held[:0]
    memory.run(op, None, column, column)
    memory.check()


def test_a_kernel_that_reaches_into_host_memory_has_few_programs() -> None:
    cuda, other, cpu = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")
    for tuned, planes, held, expected in (
        (528, cuda, cuda, 528),
        (528, cuda, cpu, pack.HOST_PROGRAMS),
        (16, cuda, cpu, 16),
        (528, other, cpu, 32),
        (2, cpu, cpu, 2),
        (64, cpu, cpu, 64),
    ):
        assert pack.programs_of(tuned, planes, held) == expected


# -- checks ------------------------------------------------------------------------------------------------------------


@every_op
def test_records_of_other_bytes_or_too_few_are_named(backend: Backend, generator: torch.Generator, op: str) -> None:
    memory = made(op, backend, generator)
    held, column = memory.held, memory.ints([1])
    for wrong in (held.view(torch.int8), held[:, :-16], torch.cat([held, held], 1)):
        memory.held = wrong
        with pytest.raises(ValueError, match=r"^(out|source)\b"):
            memory.run(op, None, column, column)
    memory.check()


@every_op
def test_records_lie_outside_of_planes(backend: Backend, generator: torch.Generator, op: str) -> None:
    memory = made(op, backend, generator)
    plane, nbytes = memory.planes[0] if op in OPS else memory.planes, memory.held.shape[1]
    for start in (GUARD, GUARD + 16):
        memory.held = plane.whole.as_strided((1, nbytes), (nbytes, 1), start)
        with pytest.raises(ValueError, match=r"^(out|source): record 0 shares bytes with a plane"):
            memory.run(op, None, memory.ints([2]), memory.ints([0]))
    memory.check()


def test_records_that_share_bytes_are_read(backend: Backend, generator: torch.Generator) -> None:
    memory = Memory(backend, generator)
    memory.held = memory.held.as_strided((RECORDS, memory.records.nbytes), (0, 1))
    memory.run("unpack_slots", None, memory.ints([3, 4]), memory.ints([0, 1]))
    for slot in (3, 4):
        memory.expect("unpack_slots", 0, slot)
    memory.check()


def test_records_in_gaps_between_slots_are_fine(backend: Backend) -> None:
    memory = torch.arange(128, dtype=torch.uint8, device=backend.device)
    plane, gaps = memory.as_strided((1, 4, 16), (16, 32, 1)), memory.as_strided((4, 16), (32, 1), 16)
    tiles = torch.tensor([[plane.data_ptr(), 32, 16, 0]], dtype=torch.int64, device=backend.device)
    column = torch.tensor([3], device=backend.device)
    backend.pack_slots(RecordMap(tiles, (plane,), (RecordPiece(0, 0, 0, 16, 0),), 16), None, column, column - 3, gaps)
    assert memory.tolist() == [*range(16), *range(96, 112), *range(32, 128)]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="on a CPU all memory is the host's")
@each_op
def test_host_memory_that_is_not_pinned_is_refused(backend: Backend, generator: torch.Generator, op: str) -> None:
    memory = Memory(backend, generator)
    memory.held = memory.held.cpu()
    with pytest.raises(ValueError, match=r"host memory .* pin_memory"):
        memory.run(op, None, memory.ints([1]), memory.ints([1]))
    memory.check()
