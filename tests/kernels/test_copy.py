"""Checks every byte of poisoned memory after copies, zeroing and data sections of packets, on every layout."""

import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import ROW_CODE, TILE_BYTES, ZERO_SOURCE, PlaneMap
from memstate.state.layout import Plane, StateLayout
from tests.support.decode_case import vast
from tests.support.given import FORMS, ORDERS, Engine
from tests.support.kernel_runs import not_interpreted
from tests.support.packets import Packet

LAYOUTS = {
    "fp32 and bf16, odd shapes": [Plane("conv", (3, 5), torch.bfloat16), Plane("ssm", (2, 3, 5), torch.float32)],
    "fp16, width first": [Plane("conv", (3, 9), torch.float16), Plane("ssm", (2, 2, 2), torch.float16)],
    "fp16, channels first": [Plane("conv", (9, 3), torch.float16), Plane("ssm", (2, 2, 2), torch.float16)],
    "int8 and fp8": [
        Plane("conv", (7,), torch.int8),
        Plane("ssm", (5, 5), torch.float8_e4m3fn),
        Plane("scale", (5,), torch.float32),
    ],
    "empty ssm": [Plane("conv", (4, 2), torch.bfloat16), Plane("ssm", (0,), torch.float32)],
    "no conv": [Plane("ssm", (3, 3), torch.float32)],
    "two convs": [
        Plane("conv_q", (3, 4), torch.bfloat16),
        Plane("conv_k", (3, 6), torch.bfloat16),
        Plane("ssm", (4,), torch.float32),
    ],
    "fills, and layers of their own": [
        Plane("score", (3, 5), torch.float32, fill=-float("inf")),
        Plane("ids", (3,), torch.int32, layers=1, fill=2**30 + 7),
        Plane("small", (7,), torch.int8, layers=3, fill=-3),
        Plane("half", (5,), torch.bfloat16, fill=-float("inf")),
        Plane("ssm", (2, 3), torch.float32),
    ],
    "several tiles, filled": [
        Plane("score", (TILE_BYTES // 2 + 9,), torch.int16, fill=-2),
        Plane("x", (3,), torch.int8),
    ],
    "several tiles": [Plane("conv", (3,), torch.int8), Plane("ssm", (TILE_BYTES // 4 + 9,), torch.float32)],
}
SMALL = [Plane("conv", (3, 3), torch.bfloat16), Plane("ssm", (2, 3), torch.float32)]


def moved(
    backend: Backend, generator: torch.Generator, planes: list[Plane], slots: int, form: str, layers: int = 1
) -> tuple[Engine, PlaneMap]:
    """Returns memory of random bytes, and the map of its planes, an argument of copies."""
    engine = Engine(StateLayout(planes, layers), slots, backend, generator, form, unit=4)
    return engine, engine.storage().plane_map


def packet_of(entries: list[tuple[int, int]], device: torch.device) -> Tensor:
    """Returns a command packet whose data section follows a section of moves."""
    return Packet(moves=[(11, 12)], data=entries).pack(device)


@pytest.mark.sample
@pytest.mark.parametrize("form", (*ORDERS, *FORMS))
@pytest.mark.parametrize("planes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_B37_copies_and_zeros_are_exact_in_memory_of_every_form(backend, generator, planes, form):
    engine, plane_map = moved(backend, generator, planes, 5, form, layers=2)
    backend.copy_slots(plane_map, engine.ids(5, 1, 0), engine.ids(2, 4, 3))
    engine.expect_all((5, 2), (1, 4))
    backend.zero_slots(plane_map, engine.ids(3, 0))
    engine.expect_all((3, None))
    backend.run_data(plane_map, engine.ids(0, 1, 5, 2), packet_of([(1, 2), (3, ZERO_SOURCE)], backend.device))
    engine.expect_all((1, 5), (2, None))


def test_B38_slot_strides_beyond_2_31_elements_are_right(backend):
    stride = 2**32 + 16  # with 32-bit arithmetic, slot 1 would seem to begin 16 bytes after slot 0
    memory = vast(2 * stride + 16, backend.device)
    blocks = memory.as_strided((1, 3, 16), (16, stride, 1))
    tiles = torch.tensor([[memory.data_ptr(), stride, 16]], dtype=torch.int64, device=backend.device)
    planes = PlaneMap(tiles, (blocks,))
    memory[:48] = 1
    blocks[0, 1] = 7
    backend.copy_slots(planes, torch.tensor([2], device=backend.device), torch.tensor([1], device=backend.device))
    assert blocks[0, 2].tolist() == [7] * 16
    backend.zero_slots(planes, torch.tensor([1], device=backend.device))
    assert blocks[0, 1].tolist() == [0] * 16 and memory[:48].tolist() == [1] * 48


@pytest.mark.parametrize(
    ("n", "due"),
    [(0, ()), (257, ()), (2, (0, 1)), (257, range(257)), (5000, (0, 255, 256, 257, 511, 2049, 4863, 4864, 4999))],
    ids=["no entries", "none", "two", "all", "few among thousands"],
)
def test_B39_what_is_due_moves_and_nothing_else(backend, generator, n, due):
    half = max(len(due), 1)
    engine, plane_map = moved(backend, generator, SMALL, 2 * half, "layer_major")
    slots = (torch.randperm(2 * half, generator=generator) + 1).tolist()
    pairs = list(zip(due, slots, slots[half:], strict=False))
    dst, src, entries = [0] * n, [1] * n, [(0, 1)] * n
    for number, (at, to, of) in enumerate(pairs):
        dst[at], src[at] = to, of
        entries[at] = number + 1, ZERO_SOURCE if number % 3 == 2 else number + 1 + half
    backend.copy_slots(plane_map, engine.ids(*dst), engine.ids(*src).long())
    engine.expect_all(*((to, of) for _, to, of in pairs))
    backend.zero_slots(plane_map, engine.ids(*dst))
    engine.expect_all(*((to, None) for _, to, _ in pairs))
    backend.run_data(plane_map, engine.ids(0, *slots), packet_of(entries, backend.device))  # entries name registers
    engine.expect_all(*((to, None if number % 3 == 2 else of) for number, (_, to, of) in enumerate(pairs)))
    assert not n or backend.counts.launches == {"copy_slots": 1, "zero_slots": 1, "run_data": 1}


@pytest.mark.parametrize("order", ORDERS)
def test_B40_null_negative_unknown_and_identical_ids_move_nothing(backend, generator, order):
    """Besides the entries that move nothing, two entries copy one source to two destinations."""
    engine, plane_map = moved(backend, generator, SMALL, 6, order, layers=2)
    dst = engine.ids(0, 1, -1, 2, 3, 7, 4, 2**31 - 1, 5, 2)
    backend.copy_slots(plane_map, dst, engine.ids(1, 0, 2, -5, 3, 4, 7, 6, 6, 6))
    engine.expect_all((5, 6), (2, 6))
    backend.zero_slots(plane_map, torch.tensor([0, -3, 7, 2**40, 2**32 + 1, 2], device=backend.device))
    engine.expect_all((2, None))


@pytest.mark.parametrize("order", ORDERS)
def test_B40_a_packet_names_registers_and_skips_empty_ones(backend, generator, order):
    engine, plane_map = moved(backend, generator, SMALL, 8, order, layers=2)
    slots = engine.ids(1, 5, 6, 0, 7, 5, 2, 99)  # slot 1 stands in register 0, and must not be used
    # Copies: slot 6 to slot 5; to an empty register; from an empty register; slot 5 to itself; to register 0; from
    # register 0; negative numbers. Then zeros: in slot 2; in an empty register; in a slot 99 that does not exist.
    entries = [(1, 2), (3, 2), (4, 3), (1, 5), (0, 4), (4, 0), (-2, 4), (4, -2)]
    entries += [(6, ZERO_SOURCE), (3, ZERO_SOURCE), (7, 4)]
    backend.run_data(plane_map, slots, packet_of(entries, backend.device))
    engine.expect_all((5, 6), (2, None))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("planes", [SMALL, LAYOUTS["fills, and layers of their own"]], ids=["zeros", "fills"])
def test_entries_of_rows_move_rows_and_those_of_registers_do_not(backend, generator, planes, order):
    engine, plane_map = moved(backend, generator, planes, 6, order, layers=2)
    entries = [(1, 2), (5, 1), (ROW_CODE - 3, ZERO_SOURCE), (3, ZERO_SOURCE), (ROW_CODE - 1, ROW_CODE - 4), (0, 0)]
    entries += [(ROW_CODE - 2, ROW_CODE - 4), (ROW_CODE, ZERO_SOURCE), (ROW_CODE - 7, ZERO_SOURCE)]
    packet = packet_of(entries, backend.device)
    backend.run_rows(plane_map, packet)
    engine.expect_all((3, None), (1, 4), (2, 4))
    backend.run_data(plane_map, engine.ids(0, 1, 5, 2, 0, 0), packet)
    engine.expect_all((1, 5), (2, None))


def test_narrow_words_compile_as_wide_as_they_may_be():
    """`memstate compile` leaves out kernels of narrow words, because it requires accesses of 16 bytes."""
    program = (
        "import json\n"
        "from memstate_tools.calls import all_calls, launch_of\n"
        "from memstate_tools.compile.build import build\n"
        "known = {call.name: call for call in all_calls(every_shape=True)}\n"
        "calls = [(unit, known[f'{op}, {unit} bytes']) for unit in (8, 4, 2, 1)\n"
        "         for op in ('copy_slots', 'pack_slots', 'unpack_slots')]\n"
        "tables = [(launch_of(call, 'sm_90').arguments['tiles'],) for _, call in calls]\n"
        "made = [(unit, build(call._replace(planes=table), target))\n"
        "        for (unit, call), table in zip(calls, tables) for target in ('sm_90', 'gfx942')]\n"
        "print(json.dumps([(unit, one.narrowest_bulk_access_bits, one.spill_bytes) for unit, one in made]))\n"
    )
    assert not_interpreted("-c", program) == [[unit, 8 * unit, 0] for unit in (8, 4, 2, 1) for _ in range(6)]
