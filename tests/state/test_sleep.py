"""Tests sleep and wake: memory is released, and comes back bit for bit wherever it is allocated then."""

import gc
import weakref

import pytest
import torch

from memstate import LazyPingPong, NoTracking, Redirect, Request, StateManager
from memstate.errors import Asleep, InvalidArgument, LayoutMismatch
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from tests.kernels.test_copy import LAYOUTS, ORDERS, SMALL, packet_of
from tests.support.given import FORMS, Engine
from tests.support.packed import filled

each_order = pytest.mark.parametrize("order", ORDERS)
each_form = pytest.mark.parametrize("form", FORMS)


def ids(storage: Planes, *slots: int) -> torch.Tensor:
    return torch.tensor(slots, device=storage.device)


def contents(storage: Planes) -> dict[str, torch.Tensor]:
    """Returns the bytes of every plane, `layer slot byte`, on the host."""
    return {
        name: torch.stack([layer.reshape(storage.slots + 1, -1).view(torch.uint8) for layer in plane]).cpu()
        for name, plane in storage.items()
        if plane[0].numel()
    }


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@each_order
@pytest.mark.parametrize("planes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_B37_bytes_come_back_and_memory_is_released_in_between(backend, generator, planes, order):
    storage = filled(StateLayout(planes, 2, order), 4, backend, generator)
    before, views, table = contents(storage), dict(storage), storage.plane_map.tiles
    rows, first = table.clone(), storage.table_of([planes[0].name]).map
    storage.sleep()
    assert [arena.untyped_storage().nbytes() for arena in storage.arenas] == [0] * len(storage.arenas)
    assert storage.asleep and storage.nbytes == 5 * storage.layout.bytes_per_slot
    table.zero_()  # a use of the old addresses would fail
    first.tiles.zero_()
    storage.wake()
    assert not storage.asleep and same(contents(storage), before)
    assert all(storage[name] is view for name, view in views.items()) and storage.plane_map.tiles is table
    assert torch.equal(table[:, 1:], rows[:, 1:])

    storage.copy(ids(storage, 3), ids(storage, 1))
    storage.copy(ids(storage, 4), ids(storage, 2), planes=[planes[0].name])
    storage.zero(ids(storage, 1))
    fresh = {plane.name: torch.full(plane.shape, plane.fill, dtype=plane.dtype) for plane in planes}
    for name, plane in before.items():
        plane[:, 3] = plane[:, 1]
        plane[:, 1] = fresh[name].flatten().view(torch.uint8)
        if name == planes[0].name:
            plane[:, 4] = plane[:, 2]
    assert same(contents(storage), before)


@each_order
def test_without_keeping_only_the_null_slot_is_defined(backend, generator, order):
    storage = filled(StateLayout(SMALL, 2, order), 4, backend, generator)
    for _ in range(2):
        storage.sleep(keep=False)
        assert sum(arena.untyped_storage().nbytes() for arena in storage.arenas) == 0
        storage.plane_map.tiles.zero_()
        storage.wake()
        assert not any(bool(plane[:, 0].any()) for plane in contents(storage).values())
        for arena in storage.arenas:
            arena.fill_(5)
        storage.scrub_null()
        storage.zero(ids(storage, 2))
        storage.copy(ids(storage, 4), ids(storage, 2))
        for plane in contents(storage).values():
            assert [set(plane[:, slot].flatten().tolist()) for slot in range(5)] == [{0}, {5}, {0}, {5}, {0}]


@each_form
@pytest.mark.parametrize("keep", [True, False])
def test_given_memory_is_released_and_brought_back_by_the_engine(backend, generator, form, keep):
    planes = [Plane("conv", (3, 5), torch.bfloat16), Plane("ssm", (2, 3), torch.float32), Plane("no", (0,), torch.int8)]
    engine = Engine(StateLayout(planes, 2), 4, backend, generator, form, unit=4)
    storage = engine.storage()
    part, tiles = storage.table_of(["ssm"]).map, storage.plane_map.tiles.clone()
    engine.check()
    storage.sleep(keep=keep)
    for whole in engine.memory:
        assert whole.untyped_storage().nbytes() == whole.nbytes  # memstate does not release an engine's memory
        was = whole.data_ptr()
        whole.untyped_storage().resize_(whole.nbytes + 64)  # the old memory still exists, so the address changes
        assert whole.data_ptr() != was
        whole.copy_(torch.randint(0, 256, whole.shape, dtype=torch.uint8, generator=generator))
    fresh = [whole.to("cpu", copy=True) for whole in engine.memory]
    storage.wake()
    kept, engine.expected = engine.expected, fresh
    if keep:
        for name, layer in engine.places:
            for slot in range(5):
                memory, offset, stride = engine.places[name, layer]
                place = slice(offset + slot * stride, offset + slot * stride + engine.plane[name].nbytes)
                fresh[memory][place] = kept[memory][place]
    engine.expect_all((0, None))  # wake changes no foreign byte
    assert not torch.equal(storage.plane_map.tiles[:, 0], tiles[:, 0])
    storage.copy(engine.ids(2), engine.ids(3))
    storage.copy(engine.ids(4), engine.ids(1), planes=["ssm"])
    engine.expect_all((2, 3), (4, 1, ("ssm",)))
    assert part is storage.table_of(["ssm"]).map
    for info in storage.buffer_infos():
        memory, offset, _ = engine.places[info.plane, info.layer]
        assert info.address == engine.memory[memory].data_ptr() + offset


@pytest.mark.parametrize("keep", [True, False])
def test_an_engine_that_has_not_brought_its_memory_back_is_told_which(backend, generator, keep):
    engine = Engine(StateLayout(SMALL, 2), 3, backend, generator, "separate")
    storage = engine.storage()
    storage.sleep(keep=keep)
    sizes = [whole.nbytes for whole in engine.memory]
    for whole in engine.memory:
        whole.untyped_storage().resize_(0)
    for whole, size in zip(engine.memory[:3], sizes, strict=False):
        whole.untyped_storage().resize_(size)
    for _ in range(2):
        with pytest.raises(Asleep, match=rf"wake: the memory of plane ssm, layer 1 is 0 of {sizes[3]} bytes: bring"):
            storage.wake()
        assert storage.asleep
    engine.memory[3].untyped_storage().resize_(sizes[3])
    storage.wake()
    if keep:
        for name, layer in engine.places:
            stored = engine.tensors[name][layer].reshape(4, -1).view(torch.uint8).cpu()
            assert torch.equal(stored, torch.stack([engine.bytes_of(name, layer, slot) for slot in range(4)]))


def test_memory_that_comes_back_with_a_worse_alignment_is_refused(backend, generator):
    """Launches are compiled for a word size. With memory of a smaller alignment, they would move wrong bytes."""
    engine = Engine(StateLayout(SMALL, 1), 3, backend, generator, "separate")
    storage = engine.storage()
    storage.sleep()
    spans = storage.whole.spans
    honest = spans[0]
    spans[0] = honest._replace(start=honest.start + 1)
    with pytest.raises(LayoutMismatch, match=r"address 0x.* expected a multiple of 2 bytes"):
        storage.wake()
    assert storage.asleep and storage.plane_map.unit == 2
    spans[0] = honest
    storage.wake()
    engine.check()


@pytest.mark.parametrize("given", [False, True])
def test_everything_that_touches_bytes_is_refused_while_asleep(backend, generator, given):
    layout = StateLayout(SMALL, 2)
    storage = Engine(layout, 3, backend, generator, "pages").storage() if given else Planes(layout, 3, backend)
    backend.counts.reset()
    storage.sleep()
    assert backend.counts.syncs == 1
    some, batch = ids(storage, 1), torch.zeros(2, 1, 2, 3, device=backend.device)
    calls = {
        "copy": lambda: storage.copy(some, some), "zero": lambda: storage.zero(some),
        "run_data": lambda: storage.run_data(some, packet_of([(0, 0)], backend.device)),
        "scrub_null": storage.scrub_null, "gather": lambda: storage.gather("ssm", some),
        "scatter": lambda: storage.scatter("ssm", some, batch),
        "planes": lambda: storage.table_of(["ssm"]).map, "buffer_infos": storage.buffer_infos, "sleep": storage.sleep,
    }  # fmt: skip
    for name, call in calls.items():
        with pytest.raises(Asleep, match=rf"^{name}: the states sleep: call wake\(\) first$"):
            call()
    assert backend.counts.launches == {} and storage.traffic.copied == 0
    storage.wake()
    with pytest.raises(InvalidArgument, match="awake already"):
        storage.wake()
    calls["copy"]()
    assert backend.counts.launches == {"copy_slots": 1}


def test_memory_that_numpy_shares_is_not_released_in_part(generator):
    """torch cannot release memory that numpy shares. `sleep` checks all arenas before it releases the first."""
    layout = StateLayout([Plane("a", (4,), torch.float32), Plane("b", (4,), torch.float32)], 1)
    storage = Planes(layout, 3, Backend("reference"))
    storage["a"].copy_(torch.rand(1, 4, 4, generator=generator))
    before = storage["a"].clone()
    view = storage["b"].numpy()
    with pytest.raises(InvalidArgument, match="numpy"):
        storage.sleep()
    assert not storage.asleep and torch.equal(storage["a"], before) and view.size


@pytest.mark.parametrize("tracking", [NoTracking(4), LazyPingPong(4), Redirect(4)], ids=repr)
def test_a_manager_that_is_given_up_gives_its_memory_back_at_once(backend, tracking):
    """States fill most of a device's memory, so its release must not wait for a garbage collection."""
    layout = StateLayout([Plane("a", (4,), torch.float32)], 1)
    gc.disable()
    try:
        given = {"tracking": tracking, "device": backend.device, "backend": backend.name}
        mem = StateManager(layout, slots=4, max_requests=1, **given)
        mem.settle(mem.plan(mem.admit([Request("a")])))
        arena = weakref.ref(mem.planes.arenas[0])
        assert arena() is not None
        del mem
        assert arena() is None
    finally:
        gc.enable()
