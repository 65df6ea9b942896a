"""A manager in an engine's memory: an arena of states and KV, whose other bytes never change; sleep and wake."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from tests.support.build import build, on
from tests.support.loops import InPlace
from tests.support.planes import LAYOUT, MAKERS, I, Loop, every_strategy
from tests.support.scan import scan

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend

SLOTS = 10
RUBBISH = 0xA5


class Arena:
    """One block of bytes: for every slot its planes, layer by layer, between bytes that are the engine's KV."""

    def __init__(self, device: torch.device, per_layer: bool) -> None:
        gap, sizes = 48, [-(-plane.nbytes // 16) * 16 for plane in LAYOUT.planes]
        stride = LAYOUT.layers * (sum(sizes) + gap * len(sizes))
        self.bytes = torch.full(((SLOTS + 1) * stride + gap,), RUBBISH, dtype=torch.uint8, device=device)
        self.tensors: dict[str, torch.Tensor | Sequence[torch.Tensor]] = {}
        self.mine = torch.zeros(self.bytes.shape, dtype=torch.bool, device=device)
        at = gap
        for plane, size in zip(LAYOUT.planes, sizes, strict=True):
            start, item = at // plane.dtype.itemsize, plane.dtype.itemsize
            shape = (LAYOUT.layers, SLOTS + 1, *plane.shape)
            strides = (stride // LAYOUT.layers // item, stride // item, 1)
            whole = self.bytes.view(plane.dtype).as_strided(shape, strides, start)
            self.tensors[plane.name] = list(whole) if per_layer else whole
            owned = self.mine.as_strided((*shape[:2], plane.nbytes), (stride // LAYOUT.layers, stride, 1), at)
            owned[:] = True
            at += size + gap

    def check(self) -> None:
        """Nobody wrote where the engine's other bytes are."""
        assert bool((self.bytes[~self.mine] == RUBBISH).all())


@every_strategy
@pytest.mark.parametrize("in_place", [False, True])
def test_B39_a_manager_in_an_arena_touches_its_planes_only(backend: Backend, name: str, in_place: bool) -> None:
    arena = Arena(backend.device, per_layer=False)
    loop = (InPlace if in_place else Loop)(backend, MAKERS[name](), slots=SLOTS, tensors=arena.tensors)
    assert loop.mem.planes["long"].data_ptr() == arena.tensors["long"].data_ptr()  # type: ignore[union-attr]
    for t in range(6):
        row = loop.admit()[0]
        loop.advance([row, None], 1 + t % 3 * I)
        assert loop.holds(loop.slot(row), row, loop.mem.length(row))
        for snapshot in loop.mem.release([row], publish=True):
            if snapshot:
                assert loop.holds(loop.node(snapshot), row, snapshot.length)
                loop.mem.drop([snapshot])
    scan(loop.mem)
    arena.check()


def test_tensors_of_single_layers_serve_as_well(backend: Backend) -> None:
    arena = Arena(backend.device, per_layer=True)
    given = {"tracking": ms.PingPong(I), "in_place": True, "tensors": arena.tensors}
    mem = on(backend, LAYOUT, slots=SLOTS, max_requests=2, **given)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    for t in range(1, I + 1):
        step = mem.plan(rows)
        for layers in mem.planes.values():
            for layer, plane in enumerate(layers):
                plane[step.write.long()] = 10 * layer + t
        mem.settle(step)
    for slot in mem.read_slots(mem.publish(rows, strict=True)).wait().tolist():
        for layers in mem.planes.values():
            assert [set(plane[slot].tolist()) for plane in layers] == [{I}, {10 + I}]
    arena.check()


@every_strategy
def test_sleep_keeps_who_owns_what_and_the_bytes(backend: Backend, name: str) -> None:
    loop = Loop(backend, MAKERS[name]())
    rows = loop.admit(ms.Request("a"), ms.Request("b"))
    loop.advance(rows, I + 1)
    kept = [snapshot for snapshot in loop.mem.publish(rows) if snapshot]
    loop.mem.submit()
    before, infos = scan(loop.mem), loop.mem.buffer_infos()
    loop.mem.sleep()
    assert all(arena.untyped_storage().nbytes() == 0 for arena in loop.mem.planes.arenas)
    stats = loop.mem.stats()
    for call in (
        lambda: loop.mem.plan(rows),
        lambda: loop.mem.admit([ms.Request("c")]),
        lambda: loop.mem.abort(rows),
        lambda: loop.mem.drop(kept),
        lambda: loop.mem.read_slots(rows),
        lambda: loop.mem.fork(rows[0], ["c"]),
        loop.mem.submit,
        loop.mem.sleep,
        loop.mem.scrub_null,
        loop.mem.reset,
        loop.mem.audit,
    ):
        with pytest.raises(ms.Asleep, match="wake"):
            call()
    assert loop.mem.stats() == stats
    loop.mem.wake()
    with pytest.raises(ms.InvalidArgument):
        loop.mem.wake()
    after = scan(loop.mem)
    assert (after.free, after.slots, after.labels) == (before.free, before.slots, before.labels)
    assert [replace(i, address=0) for i in infos] == [replace(i, address=0) for i in loop.mem.buffer_infos()]
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
        loop.mem.sleep(keep=False)
    assert loop.holds(loop.slot(row), row, 2)
    loop.mem.abort([row])
    loop.mem.sleep(keep=False)
    loop.mem.wake()
    loop.planes.poison(range(1, 17))
    (row,) = loop.admit()
    loop.advance([row], 2)
    assert loop.holds(loop.slot(row), row, 2)
    scan(loop.mem)


PLAIN = StateLayout((Plane("ssm", (4,), torch.float32),), layers=1)


def test_what_sleeps_gives_no_plane_and_no_slot(backend: Backend) -> None:
    loop = Loop(backend, ms.Redirect(I))
    loop.mem.sleep()
    free = loop.mem.free_slots
    for call in (lambda: loop.mem.pool.claim(3), lambda: next(iter(loop.mem.planes.values()))):
        with pytest.raises(ms.Asleep):
            call()
    loop.mem.wake()
    assert loop.mem.free_slots == free and len(loop.mem.pool.claim(3)) == 3


def test_memory_is_touched_only_when_it_is_taken(backend: Backend) -> None:
    """Slot 0 of an engine's tensors becomes zero with a construction that succeeds, not with one that is refused."""
    tensor = torch.full((1, 5, 4), 7.0, device=backend.device)
    settings: dict[str, Any] = {"max_requests": 1, "backend": backend.name, "device": backend.device}
    with pytest.raises(ms.LayoutMismatch, match=r"5 entries .* expected 10: the null slot and 9 slots"):
        build(PLAIN, slots=9, tensors={"ssm": tensor}, **settings)
    assert (tensor == 7).all()
    build(PLAIN, slots=4, tensors={"ssm": tensor}, **settings)
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
