"""Tests planes in an engine's memory with any strides: foreign bytes stay, and tensors that do not fit are refused."""

import ctypes

import pytest
import torch
from torch import Tensor

from memstate.errors import InvalidArgument, LayoutMismatch
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate.state.regions import BufferInfo, _overlap, require_apart
from tests.kernels.test_copy import SMALL
from tests.support.decode_case import vast
from tests.support.given import FORMS, ORDERS, Engine

each_form = pytest.mark.parametrize("form", FORMS)
every_form = pytest.mark.parametrize("form", (*ORDERS, *FORMS))
MIXED = StateLayout([Plane("conv", (3, 4), torch.bfloat16), Plane("ssm", (2, 3), torch.float32)], 3)


@each_form
@pytest.mark.parametrize("unit", [16, 8, 4, 2, 1])
def test_B37_words_are_as_wide_as_addresses_strides_and_lengths_allow(backend, generator, form, unit):
    planes = [Plane("a", (unit * 3,), torch.int8), Plane("b", (5 * unit,), torch.uint8), Plane("c", (0,), torch.int8)]
    engine = Engine(StateLayout(planes, 2), 3, backend, generator, form, unit=unit)
    storage = engine.storage()
    assert storage.plane_map.unit == unit
    assert all(value % unit == 0 for tile in storage.plane_map.tiles.tolist() for value in tile)
    storage.copy(engine.ids(3, 2), engine.ids(1, 0))
    engine.expect(3, 1)
    storage.zero(engine.ids(2))
    engine.expect_all((2, None))


def test_B38_slots_beyond_2_31_bytes_are_right(backend):
    stride = 2**31 + 16
    memory = vast(3 * stride + 64, backend.device)
    for start, unit in ((0, 16), (3, 1)):
        plane = memory.as_strided((1, 4, 32), (0, stride, 1), start).view(torch.int8)
        storage = Planes.from_tensors(StateLayout([Plane("a", (32,), torch.int8)], 1), {"a": plane}, backend)
        assert storage.plane_map.unit == unit
        plane[0, 1], plane[0, 2] = 7, 9
        storage.copy(torch.tensor([3], device=backend.device), torch.tensor([1], device=backend.device))
        storage.zero(torch.tensor([2], device=backend.device))
        assert [set(plane[0, slot].tolist()) for slot in range(4)] == [{0}, {7}, {0}, {7}]


def test_blocks_that_touch_are_one_run_within_one_allocation(backend):
    """A slot without gaps is copied as one piece (tile). Blocks of two allocations stay two, as wake may part them."""
    planes = [Plane("a", (16,), torch.int8), Plane("b", (4,), torch.float32)]
    memory = torch.zeros(3 * 64, dtype=torch.uint8, device=backend.device)
    a = [memory.view(torch.int8).as_strided((3, 16), (64, 1), at) for at in (0, 32)]
    b = [memory.view(torch.float32).as_strided((3, 4), (16, 1), at // 4) for at in (16, 48)]
    whole = Planes.from_tensors(StateLayout(planes, 2), {"a": a, "b": b}, backend)
    assert whole.plane_map.tiles.tolist() == [[memory.data_ptr(), 64, 64]]
    assert [tile[2] for tile in whole.table_of(["b"]).map.tiles.tolist()] == [16, 16]
    if backend.device.type == "cpu":
        raw = bytearray(3 * 32)
        one = torch.frombuffer(raw, dtype=torch.int8).as_strided((1, 3, 16), (0, 32, 1))
        two = torch.frombuffer(raw, dtype=torch.float32, offset=16).as_strided((1, 3, 4), (0, 8, 1))
        apart = Planes.from_tensors(StateLayout(planes, 1), {"a": one, "b": two}, backend)
        assert [tile[2] for tile in apart.plane_map.tiles.tolist()] == [16, 16]


@every_form
def test_B37_some_planes_are_copied_alone_and_counted_exactly(backend, generator, form):
    engine = Engine(MIXED, 4, backend, generator, form)
    storage, size = engine.storage(), engine.room
    storage.copy(engine.ids(1, 2), engine.ids(3, 0), planes=["conv"], due=1)
    engine.expect_all((1, 3, ("conv",)))
    assert storage.traffic.copied == 3 * size["conv"]
    storage.copy(engine.ids(2), engine.ids(4), planes=("ssm", "conv"), due=1)
    engine.expect_all((2, 4))
    assert storage.traffic.copied == 3 * size["conv"] + 3 * sum(size.values())
    assert backend.counts.launches["copy_slots"] == 2
    assert (
        storage.table_of({"conv"}).map is storage.table_of(["conv"]).map
        and storage.table_of(["ssm", "conv"]).map is storage.plane_map
    )


@every_form
def test_buffer_infos_say_where_every_slot_lies(backend, generator, form):
    layout = StateLayout([*MIXED.planes, Plane("none", (0, 3), torch.float32)], 3)
    engine = Engine(layout, 4, backend, generator, form)
    infos = engine.storage().buffer_infos()
    assert sorted((info.plane, info.layer) for info in infos) == [(n, i) for n in ("conv", "ssm") for i in range(3)]
    for info in infos:
        memory, offset, stride = engine.places[info.plane, info.layer]
        assert info.address == engine.memory[memory].data_ptr() + offset
        assert (info.slot_stride, info.nbytes, info.slots) == (stride, engine.plane[info.plane].nbytes, 4)
        for slot in range(5) if backend.device.type == "cpu" else ():
            stored = ctypes.string_at(info.address + slot * info.slot_stride, info.nbytes)
            assert stored == bytes(engine.bytes_of(info.plane, info.layer, slot)[: info.nbytes].tolist())


@every_form
def test_slots_are_gathered_and_scattered_layer_by_layer(backend, generator, form):
    engine = Engine(MIXED, 5, backend, generator, form)
    storage = engine.storage()
    ids = [4, 0, 1, 4, 9]
    for plane in MIXED.planes:
        batch = storage.gather(plane.name, engine.ids(*ids))
        assert batch.shape == (3, 5, *plane.shape) and batch.dtype == plane.dtype
        for layer in range(3):
            for entry, slot in enumerate(ids):
                expected = engine.bytes_of(plane.name, layer, slot if slot < 6 else 0)[: plane.nbytes]
                assert torch.equal(batch[layer, entry].reshape(-1).view(torch.uint8).cpu(), expected)
        assert backend.counts.launches["gather_slots"] == (3 if form in ("slots", "separate") else 1)
        backend.counts.reset()
        storage.scatter(plane.name, engine.ids(2, 0, 3, -1, 7), batch)
        for dst, src, layer in ((2, 4, 0), (2, 4, 1), (2, 4, 2), (3, 1, 0), (3, 1, 1), (3, 1, 2)):
            held = engine.bytes_of(plane.name, layer, src)[: plane.nbytes]
            engine.bytes_of(plane.name, layer, dst)[: plane.nbytes] = held
        engine.check()


def spoil(layers: list[Tensor], layer: int, one: Tensor) -> list[Tensor]:
    return [*layers[:layer], one, *layers[layer + 1 :]]


BAD = {
    r"tensors of planes \['conv'\].*\['conv', 'ssm'\]": lambda c, s: {"conv": c},
    r"tensors of planes \['conv', 'ssm', 'x'\]": lambda c, s: {"conv": c, "ssm": s, "x": s},
    "plane ssm: tensors of 2 layers, the layout has 3": lambda c, s: {"conv": c, "ssm": s[:2]},
    r"plane ssm, layers 0 to 2: .* \(2, 5, 2, 3\), expected": lambda c, s: {"conv": c, "ssm": torch.stack(s[:2])},
    r"plane ssm, layer 1: .* \(1, 5, 3, 2\), expected": lambda c, s: {"conv": c, "ssm": spoil(s, 1, s[1].mT)},
    r"plane ssm, layer 0: .* \(1,\), expected": lambda c, s: {"conv": c, "ssm": spoil(s, 0, s[0][0, 0, 0])},
    r"plane conv, layer 2: torch.float16 .* torch.bfloat16": lambda c, s: {"conv": spoil(c, 2, c[2].half()), "ssm": s},
    "plane conv, layer 0: on meta": lambda c, s: {"conv": spoil(c, 0, c[0].to("meta")), "ssm": s},
    r"plane ssm, layer 2: .* with strides \(\d+, 6, 1, 2\)": lambda c, s: {
        "conv": c, "ssm": spoil(s, 2, s[2].mT.contiguous().mT),
    },
    "plane conv, layer 0: 1 slots": lambda c, s: {"conv": [one[:1] for one in c], "ssm": [one[:1] for one in s]},
    "plane ssm, layer 1: 4 slots with the null slot on .*, plane conv, layer 0 has 5": lambda c, s: {
        "conv": c, "ssm": spoil(s, 1, s[1][:4]),
    },
    "plane ssm, layer 0: slots of 24 bytes, 0 bytes apart": lambda c, s: {
        "conv": c, "ssm": spoil(s, 0, s[0][:1].expand(5, 2, 3)),
    },
    "plane ssm, layer 1 and plane ssm, layer 2 share bytes: 24 from 0x": lambda c, s: {
        "conv": c, "ssm": spoil(s, 2, s[1]),
    },
}  # fmt: skip


@pytest.mark.parametrize("named", BAD)
def test_tensors_that_do_not_fit_are_refused_and_stay_as_they_were(backend, named):
    layers = range(3)
    conv = [torch.ones(5, 3, 4, dtype=torch.bfloat16, device=backend.device) for _ in layers]
    ssm = [torch.ones(5, 2, 3, device=backend.device) for _ in layers]
    with pytest.raises(LayoutMismatch, match=named):
        Planes.from_tensors(MIXED, BAD[named](conv, ssm), backend)
    assert all(bool((one == 1).all()) for one in (*conv, *ssm))
    Planes.from_tensors(MIXED, {"conv": conv, "ssm": ssm}, backend)


def test_names_that_no_plane_has_are_refused(backend):
    storage = Planes(StateLayout(SMALL, 1), 3, backend)
    some = torch.tensor([1], device=backend.device)
    for call in (
        lambda: storage.table_of([]).map,
        lambda: storage.copy(some, some, planes=["conv", "kv"]),
        lambda: storage.gather("kv", some),
        lambda: storage.scatter("kv", some, some),
    ):
        with pytest.raises(InvalidArgument, match=r"expected one .*\['conv', 'ssm'\]"):
            call()
    assert backend.counts.launches == {}


def test_overlap_is_exact_for_any_strides(generator):
    """Compares the check with sets of bytes. About a third of the pairs of tensors overlap."""
    outcomes = []
    for _ in range(1500):
        count, address, same, gap, wide, other = torch.randint(0, 24, (6,), generator=generator).tolist()
        count, wide, other = 1 + count % 5, 1 + wide % 8, 1 + other % 8
        strides = (wide + gap, wide + gap if same % 2 and other <= wide + gap else other + same)
        low = BufferInfo("a", 0, 1000, strides[0], wide, count)
        high = BufferInfo("b", 0, 1000 + address, strides[1], other, count)
        used = [
            {info.address + slot * info.slot_stride + at for slot in range(count + 1) for at in range(info.nbytes)}
            for info in (low, high)
        ]
        assert _overlap(low, high) == bool(used[0] & used[1]), (low, high)
        outcomes.append(bool(used[0] & used[1]))
        if outcomes[-1]:
            with pytest.raises(LayoutMismatch, match="plane a, layer 0 and plane b, layer 0 share bytes"):
                require_apart([low, high])
        else:
            require_apart([high, low])
    assert 0.1 < sum(outcomes) / len(outcomes) < 0.9
