"""Copy, zero and the data section: every byte of poisoned memory accounted for, on every layout."""

import pytest
import torch
from torch import Tensor

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import HEADER_INTS, TILE_BYTES, ZERO_SOURCE, PlaneMap, Section
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from tests.support.decode_case import vast
from tests.support.given import FORMS, ORDERS, Engine
from tests.support.kernel_runs import not_interpreted

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
    "several tiles": [Plane("conv", (3,), torch.int8), Plane("ssm", (TILE_BYTES // 4 + 9,), torch.float32)],
}
SMALL = [Plane("conv", (3, 3), torch.bfloat16), Plane("ssm", (2, 3), torch.float32)]


def moved(
    backend: Backend, generator: torch.Generator, planes: list[Plane], slots: int, form: str, layers: int = 1
) -> tuple[Engine, PlaneMap]:
    """Memory of random bytes, and the planes in it."""
    engine = Engine(StateLayout(planes, layers), slots, backend, generator, form, unit=4)
    return engine, engine.storage().plane_map


def packet_of(entries: list[tuple[int, int]], device: torch.device) -> Tensor:
    """A command packet whose data section stands behind a section of moves."""
    moves = [11, 0, 0, 0, 12, 0, 0, 0]
    padding = [0] * (-len(entries) % 4)
    header = [0] * HEADER_INTS
    header[Section.MOVES], header[8 + Section.MOVES] = 1, HEADER_INTS
    header[Section.DATA], header[8 + Section.DATA] = len(entries), HEADER_INTS + len(moves)
    columns = [e[0] for e in entries] + padding + [e[1] for e in entries] + padding
    return torch.tensor(header + moves + columns, dtype=torch.int32, device=device)


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


@pytest.mark.parametrize(
    ("dtype", "bits", "patterns"),
    [
        (torch.float32, torch.int32, [0x7F800001, 0x7FC12345, -0x7FFFFF, -0x80000000]),
        (torch.bfloat16, torch.int16, [0x7F81, 0x7FFF, -0x7F, -0x8000]),
        (torch.float16, torch.int16, [0x7C01, 0x7E55, -0x3FF, -0x8000]),
        (torch.float8_e4m3fn, torch.int8, [0x7F, -1, -128, 1]),
    ],
)
def test_B37_nan_payloads_and_signed_zeros_survive(backend, dtype, bits, patterns):
    storage = Planes(StateLayout([Plane("ssm", (4,), dtype)], 1), 2, backend)
    payload = torch.tensor(patterns, dtype=bits, device=backend.device)
    storage["ssm"].view(bits)[0, 1] = payload
    storage.copy(torch.tensor([2], device=backend.device), torch.tensor([1], device=backend.device))
    assert torch.equal(storage["ssm"].view(bits)[0, 2], payload)


@pytest.mark.parametrize("order", ORDERS)
def test_B38_offsets_beyond_2_31_elements_are_right(backend, order):
    slots, layers = 2**28 + 8, 2
    layout = StateLayout([Plane("ssm", (16,), torch.int8)], layers, order)
    storage = Planes(layout, slots, backend, lambda nbytes: vast(nbytes, backend.device))
    plane = storage["ssm"]
    far, near = 2**28 + 3, 3  # 2^32 bytes apart in a layer: the same slot to 32-bit arithmetic
    for layer in range(layers):
        plane[layer, near] = 1 + layer
        plane[layer, 5] = 7 + layer
    storage.copy(torch.tensor([far], device=backend.device), torch.tensor([5], device=backend.device))
    assert plane[:, far, 0].tolist() == [7, 8] and plane[:, near, 15].tolist() == [1, 2]
    storage.copy(torch.tensor([6], device=backend.device), torch.tensor([far], device=backend.device))
    assert plane[:, 6, 15].tolist() == [7, 8]
    storage.zero(torch.tensor([far], device=backend.device))
    assert not plane[:, far].any() and plane[:, near, 0].tolist() == [1, 2] and plane[:, 6, 0].tolist() == [7, 8]


def test_B38_slot_strides_beyond_2_31_elements_are_right(backend):
    stride = 2**32 + 16  # slot 1 is 16 bytes from slot 0 to 32-bit arithmetic
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


def test_B39_everything_due(backend, generator):
    n = 257
    engine, plane_map = moved(backend, generator, SMALL, 2 * n, "layer_major")
    shuffled = (torch.randperm(2 * n, generator=generator) + 1).tolist()
    dst, src = shuffled[:n], shuffled[n:]
    backend.copy_slots(plane_map, engine.ids(*dst), engine.ids(*src).long())
    engine.expect_all(*zip(dst, src, strict=True))
    backend.zero_slots(plane_map, engine.ids(*dst))
    engine.expect_all(*((slot, None) for slot in dst))


@pytest.mark.parametrize("n", [0, 257])
def test_B39_nothing_due(backend, generator, n):
    engine, plane_map = moved(backend, generator, SMALL, 5, "layer_major")
    backend.copy_slots(plane_map, engine.ids(*[0] * n), engine.ids(*[3] * n))
    backend.zero_slots(plane_map, engine.ids(*[0] * n))
    backend.run_data(plane_map, engine.ids(0, 4, 5), packet_of([(0, 1)] * n, backend.device))
    engine.check()


def test_B39_few_due_among_thousands(backend, generator):
    engine, plane_map = moved(backend, generator, SMALL, 30, "layer_major", layers=2)
    n = 5000
    dst, src = [0] * n, [1] * n
    for at, to in zip((0, 255, 256, 257, 511, 2049, 4863, 4864, 4999), range(2, 11), strict=True):
        dst[at], src[at] = to, to + 20
    backend.copy_slots(plane_map, engine.ids(*dst), engine.ids(*src))
    engine.expect_all(*((to, to + 20) for to in range(2, 11)))


@pytest.mark.parametrize("order", ORDERS)
def test_B40_null_negative_unknown_and_identical_ids_move_nothing(backend, generator, order):
    """Beside them one source serves two destinations."""
    engine, plane_map = moved(backend, generator, SMALL, 6, order, layers=2)
    dst = engine.ids(0, 1, -1, 2, 3, 7, 4, 2**31 - 1, 5, 2)
    backend.copy_slots(plane_map, dst, engine.ids(1, 0, 2, -5, 3, 4, 7, 6, 6, 6))
    engine.expect_all((5, 6), (2, 6))
    backend.zero_slots(plane_map, torch.tensor([0, -3, 7, 2**40, 2**32 + 1, 2], device=backend.device))
    engine.expect_all((2, None))


@pytest.mark.parametrize("order", ORDERS)
def test_B40_a_packet_names_registers_and_skips_empty_ones(backend, generator, order):
    engine, plane_map = moved(backend, generator, SMALL, 8, order, layers=2)
    slots = engine.ids(1, 5, 6, 0, 7, 5, 2, 99)  # what register 0 says must not matter
    # Slot 6 to slot 5; an empty destination or source; both hold slot 5; rows that are none; slot 2, and an empty
    # register; a register that holds no slot of this storage.
    entries = [(1, 2), (3, 2), (4, 3), (1, 5), (0, 4), (4, 0), (-2, 4), (4, -2)]
    entries += [(6, ZERO_SOURCE), (3, ZERO_SOURCE), (7, 4)]
    backend.run_data(plane_map, slots, packet_of(entries, backend.device))
    engine.expect_all((5, 6), (2, None))


@pytest.mark.parametrize("n", [2, 257])
def test_B39_a_packet_of_copies_and_zeros(backend, generator, n):
    engine, plane_map = moved(backend, generator, SMALL, 2 * n, "layer_major")
    held = [0, *(torch.randperm(2 * n, generator=generator) + 1).tolist()]
    entries = [(i, ZERO_SOURCE if i % 3 == 2 else i + n) for i in range(1, n + 1)]
    backend.run_data(plane_map, engine.ids(*held), packet_of(entries, backend.device))
    engine.expect_all(*((held[to], None if of == ZERO_SOURCE else held[of]) for to, of in entries))
    assert backend.counts.launches == {"run_data": 1}


def test_narrow_words_compile_as_wide_as_they_may_be():
    """`memstate compile` asks for 16 bytes and leaves them out; where kernels are interpreted, none compiles."""
    program = (
        "import json\n"
        "from memstate.cli.compile.build import build\n"
        "from memstate.kernels import copy, pack\n"
        "cases = [(unit, case) for unit in (8, 4, 2, 1)\n"
        "         for case in (copy.compile_cases(unit)[0], *pack.compile_cases(unit)[::2])]\n"
        "made = [(unit, build(case, target)) for unit, case in cases for target in ('sm_90', 'gfx942')]\n"
        "print(json.dumps([(unit, one.narrowest_bulk_access_bits, one.spill_bytes) for unit, one in made]))\n"
    )
    assert not_interpreted("-c", program) == [[unit, 8 * unit, 0] for unit in (8, 4, 2, 1) for _ in range(6)]
