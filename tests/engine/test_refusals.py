"""What cannot be meant is refused by name, and changes nothing: arguments, windows, memory, files, threads."""

import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels import tuned
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from tests.support import inside, owners
from tests.support.build import build
from tests.support.loops import Speculator
from tests.support.planes import Loop
from tests.support.scan import scan

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend

I = 4  # noqa: E741
PLAIN = StateLayout((Plane("ssm", (4,), torch.float32),), layers=1)


def state_of(mem: ms.StateManager) -> list[Any]:
    """Everything that a refused call must leave alone."""
    file = inside.registers(mem)
    device = [file.cells.tolist(), mem.pool.allocator.bitmap.tolist(), mem.pool.allocator.counters.tolist()]
    host = [array.tolist() for array in (file.held, file.labels, file.tracked, file.source)]
    rows = owners.table(mem)
    table = [each.tolist() for each in (rows.used, mem._parts.log.times(rows), rows.confirmed)]
    blocks = [block.numpy(force=True).tobytes() for block in mem.planes.plane_map.blocks]
    return [device, host, table, blocks, len(mem._parts.log.unsettled), mem.free_slots, mem.free_pages]


BAD_WINDOWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "elsewhere": lambda window: window.to("meta"),
    "none": lambda window: None,
    "numpy": lambda window: window.numpy(force=True),
    "a list": lambda window: [window],
}


@pytest.mark.parametrize("bad", BAD_WINDOWS)
def test_a_window_that_cannot_be_read_leaves_the_step_open(backend: Backend, bad: str) -> None:
    loop = Speculator(backend, ms.PingPong(I))
    (row,) = loop.admit()
    loop.window([row], [3])
    step = loop.mem.plan([row], 3, window=True)
    windows = {
        name: torch.zeros(plane.shape[0], 1, 3, *plane.shape[2:], dtype=plane.dtype, device=plane.device)
        for name, plane in loop.mem.planes.items()
    }
    last = list(windows)[-1]
    before = state_of(loop.mem)
    with pytest.raises(ms.InvalidArgument, match=f"window of plane {last} on"):
        loop.mem.accept(step, [2], windows | {last: BAD_WINDOWS[bad](windows[last])})
    with pytest.raises(ms.InvalidArgument, match="expected a mapping"):
        loop.mem.accept(step, [2], None)  # type: ignore[arg-type]
    assert state_of(loop.mem) == before
    loop.mem.accept(step, [0], windows)
    assert loop.mem.info(row).length == 3
    scan(loop.mem)


def test_what_sleeps_gives_no_plane_and_no_slot(backend: Backend) -> None:
    loop = Loop(backend, ms.Redirect(I))
    loop.mem.device.sleep()
    free = loop.mem.free_slots
    for call in (lambda: loop.mem.pool.claim(3), lambda: next(iter(loop.mem.planes.values()))):
        with pytest.raises(ms.Asleep):
            call()
    loop.mem.device.wake()
    assert loop.mem.free_slots == free and len(loop.mem.pool.claim(3)) == 3


def test_generations_wrap_around(backend: Backend) -> None:
    """A row reused 2^31 times: its generation starts anew at 0, and the handle of before is stale."""
    loop = Loop(backend, ms.Redirect(I))
    mem = loop.mem
    owners.table(mem).generation[:] = 2**31 - 2
    owners.holdings(mem).generation[:] = 2**31 - 1
    mem.recover(keep=False)
    assert owners.table(mem).generation.max() == 2**31 - 1 and owners.holdings(mem).generation.max() == 0
    for _ in range(2):
        (row,) = loop.admit()
        loop.advance([row], I)
        (snapshot,) = mem.end([row], keep="handle")
        assert snapshot
        mem.drop([snapshot])
        for stale in (lambda row=row: mem.info(row).length, lambda snapshot=snapshot: mem.drop([snapshot])):
            with pytest.raises(ms.StaleHandle):
                stale()
    assert owners.table(mem).generation[1] == 1
    scan(mem)


def test_memory_is_touched_only_when_it_is_taken(backend: Backend) -> None:
    """Slot 0 of an engine's tensors becomes zero with a construction that succeeds, not with one that is refused."""
    tensor = torch.full((1, 5, 4), 7.0, device=backend.device)
    settings: dict[str, Any] = {"max_requests": 1, "backend": backend.name, "device": backend.device}
    with pytest.raises(ms.LayoutMismatch, match=r"5 entries .* expected 10: the null slot and 9 slots"):
        build(PLAIN, slots=9, tensors={"ssm": tensor}, **settings)
    assert (tensor == 7).all()
    build(PLAIN, slots=4, tensors={"ssm": tensor}, **settings)
    assert (tensor[:, 0] == 0).all() and (tensor[:, 1:] == 7).all()


@pytest.mark.parametrize("given", [None, 3, [None], (x for x in ()), np.zeros((1, 5, 4), np.float32)])
def test_memory_that_is_no_tensor_is_refused(backend: Backend, given: object) -> None:
    with pytest.raises(ms.LayoutMismatch, match=r"plane ssm: .* expected a tensor"):
        ms.Planes.from_tensors(PLAIN, {"ssm": given}, backend)  # type: ignore[dict-item]
    with pytest.raises(ms.LayoutMismatch, match="expected a mapping"):
        ms.Planes.from_tensors(PLAIN, [given], backend)  # type: ignore[arg-type]
    with pytest.raises(ms.InvalidArgument, match="expected a Backend"):
        ms.Planes.from_tensors(PLAIN, {"ssm": torch.zeros(1, 5, 4)}, "reference")  # type: ignore[arg-type]


def test_arenas_that_share_bytes_are_refused(backend: Backend) -> None:
    layout = StateLayout((Plane("a", (4,), torch.float32), Plane("b", (4,), torch.float32)), layers=1)
    whole = torch.empty(1024, dtype=torch.uint8, device=backend.device)
    with pytest.raises(ms.LayoutMismatch, match="share bytes"):
        ms.Planes(layout, 4, backend, allocate=lambda n: whole[:n])


@pytest.mark.parametrize(
    "settings",
    [
        {"slots": "8"}, {"slots": None}, {"slots": True}, {"layout": None}, {"device": "nonsense"}, {"device": 1.5},
        {"overlap": np.array([True, False])}, {"overlap": 1.0}, {"speculation": "yes"}, {"in_place": None},
        {"debug": 0}, {"direct_hits": "no"}, {"tracking": ms.PingPong(I, lane_count=1.0), "overlap": False},
    ],
)  # fmt: skip
def test_settings_of_the_wrong_kind_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ms.ConfigurationError, match=next(iter(settings)) if "tracking" not in settings else "lane"):
        build(**({"layout": PLAIN, "slots": 8, "max_requests": 2, "backend": "reference"} | settings))


@pytest.mark.sample(interpreter=1)
def test_a_tuned_file_that_cannot_be_read_is_found_at_construction(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the first launch, when the packet with its zeros has been taken and would be lost."""
    (tmp_path / tuned.file_name(tuned.device_name(backend.device))).write_text("{")
    monkeypatch.setenv("MEMSTATE_TUNED", str(tmp_path))
    tuned.forget()
    launches = backend.name != "reference"  # which could be tuned
    with pytest.raises(ValueError, match=str(tmp_path)) if launches else nullcontext():
        Loop(backend, ms.Redirect(I))
    monkeypatch.undo()
    tuned.forget()


def test_another_thread_may_not_wake_a_manager(backend: Backend) -> None:
    mem = Loop(backend, ms.Redirect(I), debug=True).mem
    mem.device.sleep()
    with ThreadPoolExecutor(1) as other, pytest.raises(ms.MemstateError, match="one thread"):
        other.submit(mem.device.wake).result()
    mem.device.wake()


def test_ops_of_a_backend_are_found_by_name() -> None:
    ops = ms.Backend("reference")
    assert "gated_delta_step" in dir(ops)
    assert "state: one layer, `slot head key value`" in (ops.gated_delta_step.__doc__ or "")
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ops.nonsense  # type: ignore[attr-defined]


@pytest.mark.parametrize("window", [np.bool_(False), None, 0])
def test_what_is_not_true_plans_no_window(window: Any) -> None:
    loop = Loop(Backend("reference"), ms.NoTracking(4))
    (row,) = loop.admit()
    step = loop.mem.plan([row], window=window)
    assert step.window is False
    loop.mem.settle(step)
    assert loop.mem.info(row).length == 1


def test_handles_and_steps_can_be_keys_of_a_weak_dictionary() -> None:
    loop = Loop(Backend("reference"), ms.PingPong(1))
    (row,) = loop.admit()
    step = loop.mem.plan([row])
    loop.mem.settle(step)
    (snapshot,) = loop.mem.publish([row])
    assert [ref() for ref in map(weakref.ref, (row, step, snapshot))] == [row, step, snapshot]
