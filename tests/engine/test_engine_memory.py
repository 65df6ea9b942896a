"""A manager in an engine's memory: bytes beside its planes never change; sleep and wake."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from tests.engine.calls import CALLS
from tests.support.build import on
from tests.support.given import Engine
from tests.support.loops import InPlace
from tests.support.planes import LAYOUT, MAKERS, I, Loop, every_strategy
from tests.support.scan import scan

SLOTS = 10


def others(engine: Engine) -> torch.Tensor:
    """Returns all bytes of an engine's memory that belong to no plane."""
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
    for call in CALLS.keys() - {"close", "device.wake", "info", "pool.release", "pool.check"}:  # these work asleep
        if not call.startswith(("prefix", "tiers", "match")):  # this manager lacks these parts
            with pytest.raises(ms.Asleep, match="wake"):
                CALLS[call](loop.mem, rows, None, kept)
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
    scan(loop.mem)


PLAIN = StateLayout((Plane("ssm", (4,), torch.float32),), layers=1)


def test_memory_is_touched_only_when_it_is_taken(backend: Backend) -> None:
    """A construction that succeeds sets slot 0 of an engine's tensors to zero; a refused one changes nothing."""
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
