"""A manager in an engine's memory: an arena of states and KV, whose other bytes never change; sleep and wake."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from tests.support.build import on
from tests.support.given import Engine
from tests.support.loops import InPlace
from tests.support.planes import LAYOUT, MAKERS, I, Loop, every_strategy
from tests.support.scan import scan

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend

SLOTS = 10


def others(engine: Engine) -> torch.Tensor:
    """All bytes of an engine that are not the planes'."""
    own = [torch.zeros(memory.shape, dtype=torch.bool) for memory in engine.memory]
    for (name, _), (memory, offset, stride) in engine.places.items():
        for slot in range(engine.slots + 1):
            own[memory][offset + slot * stride :][: engine.plane[name].nbytes] = True
    return torch.cat([memory.cpu()[~mine] for memory, mine in zip(engine.memory, own, strict=True)])


@every_strategy
@pytest.mark.parametrize("in_place", [False, True])
def test_B39_a_manager_in_an_arena_touches_its_planes_only(
    backend: Backend, generator: torch.Generator, name: str, in_place: bool
) -> None:
    engine = Engine(LAYOUT, SLOTS, backend, generator, "pages")
    before = others(engine)
    loop = (InPlace if in_place else Loop)(backend, MAKERS[name](), slots=SLOTS, tensors=engine.tensors)
    assert loop.mem.planes["long"].data_ptr() == engine.tensors["long"].data_ptr()  # type: ignore[union-attr]
    for t in range(6):
        row = loop.admit()[0]
        loop.advance([row, None], 1 + t % 3 * I)
        assert loop.holds(loop.slot(row), row, loop.mem.info(row).length)
        for snapshot in loop.mem.end([row], keep="handle"):
            if snapshot:
                assert loop.holds(loop.node(snapshot), row, snapshot.length)
                loop.mem.drop([snapshot])
    scan(loop.mem)
    assert torch.equal(others(engine), before)


def test_tensors_of_single_layers_serve_as_well(backend: Backend, generator: torch.Generator) -> None:
    engine = Engine(LAYOUT, SLOTS, backend, generator, "separate")
    before, given = others(engine), {"tracking": ms.PingPong(I), "in_place": True, "tensors": engine.tensors}
    mem = on(backend, LAYOUT, slots=SLOTS, max_requests=2, **given)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    for t in range(1, I + 1):
        step = mem.plan(rows)
        for layers in mem.planes.values():
            for layer, plane in enumerate(layers):
                plane[step.write.long()] = 10 * layer + t
        mem.settle(step)
    for slot in mem.device.read_slots(mem.publish(rows, strict=True)).wait().tolist():
        for layers in mem.planes.values():
            assert [set(plane[slot].tolist()) for plane in layers] == [{I}, {10 + I}]
    assert torch.equal(others(engine), before)


@every_strategy
def test_sleep_keeps_who_owns_what_and_the_bytes(backend: Backend, name: str) -> None:
    loop = Loop(backend, MAKERS[name]())
    rows = loop.admit(ms.Request("a"), ms.Request("b"))
    loop.advance(rows, I + 1)
    kept = [snapshot for snapshot in loop.mem.publish(rows) if snapshot]
    loop.mem.submit()
    before, infos = scan(loop.mem), loop.mem.device.buffer_infos()
    loop.mem.device.sleep()
    assert all(arena.untyped_storage().nbytes() == 0 for arena in loop.mem.planes.arenas)
    stats = loop.mem.stats()
    for call in (
        lambda: loop.mem.plan(rows),
        lambda: loop.mem.admit([ms.Request("c")]),
        lambda: loop.mem.end(rows),
        lambda: loop.mem.drop(kept),
        lambda: loop.mem.device.read_slots(rows),
        lambda: loop.mem.fork(rows[0], ["c"]),
        loop.mem.submit,
        loop.mem.device.sleep,
        loop.mem.device.scrub_null,
        lambda: loop.mem.recover(keep=False),
        loop.mem.audit,
    ):
        with pytest.raises(ms.Asleep, match="wake"):
            call()
    assert loop.mem.stats() == stats
    loop.mem.device.wake()
    with pytest.raises(ms.InvalidArgument):
        loop.mem.device.wake()
    after = scan(loop.mem)
    assert (after.free, after.slots, after.labels) == (before.free, before.slots, before.labels)
    assert [replace(i, address=0) for i in infos] == [replace(i, address=0) for i in loop.mem.device.buffer_infos()]
    for row in rows:
        assert loop.holds(loop.slot(row), row, I + 1)
    loop.advance(rows, I)
    for row in rows:
        assert loop.holds(loop.slot(row), row, 2 * I + 1)


def test_sleep_that_would_lose_a_state_is_refused(backend: Backend) -> None:
    loop = Loop(backend, ms.Redirect(I))
    (row,) = loop.admit()
    loop.advance([row], 2)
    with pytest.raises(ms.InvalidArgument, match="1 slots are held"):
        loop.mem.device.sleep(keep=False)
    assert loop.holds(loop.slot(row), row, 2)
    loop.mem.end([row])
    loop.mem.device.sleep(keep=False)
    loop.mem.device.wake()
    loop.planes.poison(range(1, 17))
    (row,) = loop.admit()
    loop.advance([row], 2)
    assert loop.holds(loop.slot(row), row, 2)
    scan(loop.mem)


PLAIN = StateLayout((Plane("ssm", (4,), torch.float32),), layers=1)


def test_what_sleeps_gives_no_plane_and_no_slot(backend: Backend) -> None:
    loop = Loop(backend, ms.Redirect(I))
    loop.mem.device.sleep()
    free = loop.mem.free_slots
    for call in (lambda: loop.mem.pool.claim(3), lambda: next(iter(loop.mem.planes.values()))):
        with pytest.raises(ms.Asleep):
            call()
    loop.mem.device.wake()
    assert loop.mem.free_slots == free and len(loop.mem.pool.claim(3)) == 3


def test_memory_is_touched_only_when_it_is_taken(backend: Backend) -> None:
    """Slot 0 of an engine's tensors becomes zero with a construction that succeeds, not with one that is refused."""
    tensor = torch.full((1, 5, 4), 7.0, device=backend.device)
    with pytest.raises(ms.LayoutMismatch, match=r"5 entries .* expected 10: the null slot and 9 slots"):
        on(backend, PLAIN, slots=9, max_requests=1, tensors={"ssm": tensor})
    assert (tensor == 7).all()
    on(backend, PLAIN, slots=4, max_requests=1, tensors={"ssm": tensor})
    assert (tensor[:, 0] == 0).all() and (tensor[:, 1:] == 7).all()


def test_memory_that_is_no_tensor_is_refused(backend: Backend) -> None:
    tensor = torch.zeros(1, 5, 4)
    for given in (None, 3, [None], (x for x in ()), np.zeros((1, 5, 4), np.float32)):
        with pytest.raises(ms.LayoutMismatch, match=r"plane ssm: .* expected a tensor"):
            ms.Planes.from_tensors(PLAIN, {"ssm": given}, backend)  # type: ignore[dict-item]
    with pytest.raises(ms.LayoutMismatch, match="expected a mapping"):
        ms.Planes.from_tensors(PLAIN, [tensor], backend)  # type: ignore[arg-type]
    with pytest.raises(ms.InvalidArgument, match="expected a Backend"):
        ms.Planes.from_tensors(PLAIN, {"ssm": tensor}, "reference")  # type: ignore[arg-type]


def test_arenas_that_share_bytes_are_refused(backend: Backend) -> None:
    layout = StateLayout((Plane("a", (4,), torch.float32), Plane("b", (4,), torch.float32)), layers=1)
    whole = torch.empty(1024, dtype=torch.uint8, device=backend.device)
    with pytest.raises(ms.LayoutMismatch, match="share bytes"):
        ms.Planes(layout, 4, backend, allocate=lambda n: whole[:n])
