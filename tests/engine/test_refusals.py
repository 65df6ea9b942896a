"""What cannot be meant is refused by name, and changes nothing: arguments, windows, memory, files, threads."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels import tuned
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from tests.support.build import build
from tests.support.loops import Speculator
from tests.support.planes import Loop
from tests.support.scan import scan

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend

I = 4  # noqa: E741
PLAIN = StateLayout((Plane("ssm", (4,), torch.float32),), layers=1)


def state_of(mem: ms.StateManager) -> list[Any]:
    """Everything that a refused call must leave alone."""
    file = mem._registers
    device = [file.cells.tolist(), mem._allocator.bitmap.tolist(), mem._allocator.counters.tolist()]
    host = [array.tolist() for array in (file.held, file.labels, file.tracked, file.snapshot_at, file.source)]
    table = [mem._table.used.tolist(), mem._table.unsettled.tolist(), mem._table.confirmed.tolist()]
    blocks = [block.numpy(force=True).tobytes() for block in mem.planes.plane_map.blocks]
    return [device, host, table, blocks, len(mem._log.unsettled), mem.free_slots, mem.free_pages]


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
    assert loop.mem.length(row) == 3
    scan(loop.mem)


CALLS: dict[str, Callable[[ms.StateManager, ms.Row, ms.Step, ms.Snapshot], object]] = {
    "plan(row)": lambda mem, row, step, snap: mem.plan(row),  # type: ignore[arg-type]
    "plan(None)": lambda mem, row, step, snap: mem.plan(None),  # type: ignore[arg-type]
    "plan(generator)": lambda mem, row, step, snap: mem.plan(r for r in [row]),  # type: ignore[arg-type]
    "plan(text)": lambda mem, row, step, snap: mem.plan("row"),
    "plan(forged)": lambda mem, row, step, snap: mem.plan([ms.Row(1.0, row.generation)]),  # type: ignore[arg-type]
    "plan(True)": lambda mem, row, step, snap: mem.plan([ms.Row(True, row.generation)]),
    "abort(row)": lambda mem, row, step, snap: mem.abort(row),  # type: ignore[arg-type]
    "release(None)": lambda mem, row, step, snap: mem.release(None),  # type: ignore[arg-type]
    "publish(row)": lambda mem, row, step, snap: mem.publish(row),  # type: ignore[arg-type]
    "extend(row)": lambda mem, row, step, snap: mem.extend(row, [4]),  # type: ignore[arg-type]
    "arrived(row)": lambda mem, row, step, snap: mem.arrived(row, [4]),  # type: ignore[arg-type]
    "read_slots(row)": lambda mem, row, step, snap: mem.read_slots(row),  # type: ignore[arg-type]
    "read_slots(generator)": lambda mem, row, step, snap: mem.read_slots(r for r in [row]),  # type: ignore[arg-type]
    "admit(request)": lambda mem, row, step, snap: mem.admit(ms.Request("x")),  # type: ignore[arg-type]
    "fork(row, text)": lambda mem, row, step, snap: mem.fork(row, "ab"),
    "drop(snapshot)": lambda mem, row, step, snap: mem.drop(snap),  # type: ignore[arg-type]
    "drop(None)": lambda mem, row, step, snap: mem.drop(None),  # type: ignore[arg-type]
    "drop(generator)": lambda mem, row, step, snap: mem.drop(s for s in [snap]),  # type: ignore[arg-type]
    "settle(None)": lambda mem, row, step, snap: mem.settle(None),  # type: ignore[arg-type]
    "settle([step])": lambda mem, row, step, snap: mem.settle([step]),  # type: ignore[arg-type]
    "cancel(None)": lambda mem, row, step, snap: mem.cancel(None),  # type: ignore[arg-type]
    "accept(None)": lambda mem, row, step, snap: mem.accept(None, [1], {}),  # type: ignore[arg-type]
    "finished ragged": lambda mem, row, step, snap: mem.settle(step, [[True], [True, False]]),  # type: ignore[list-item]
    "finished elsewhere": lambda mem, row, step, snap: mem.settle(step, torch.ones(1, device="meta")),  # type: ignore[arg-type]
    "finished words": lambda mem, row, step, snap: mem.settle(step, ["False"]),  # type: ignore[list-item]
    "finished numbers": lambda mem, row, step, snap: mem.settle(step, [0.5]),  # type: ignore[list-item]
    "finished rows": lambda mem, row, step, snap: mem.settle(step, [row]),  # type: ignore[list-item]
    "finished of two": lambda mem, row, step, snap: mem.settle(step, [True, False]),
}


@pytest.mark.parametrize("call", CALLS)
def test_arguments_of_the_wrong_kind_are_refused_by_name(backend: Backend, call: str) -> None:
    loop = Loop(backend, ms.PingPong(I), pages=8, page_size=2, pages_per_row=4)
    old, row = loop.admit(ms.Request("old", length=8), ms.Request("a", length=8))
    loop.advance([old], I)
    (snapshot,) = loop.mem.release([old], publish=True)
    assert snapshot
    step = loop.step([row])
    loop.mem.submit()
    before = state_of(loop.mem)
    with pytest.raises(ms.InvalidArgument):
        CALLS[call](loop.mem, row, step, snapshot)
    assert state_of(loop.mem) == before
    loop.mem.settle(step, np.array([True]))


def test_a_state_does_not_arrive_in_a_finished_row(backend: Backend) -> None:
    loop = Speculator(backend, ms.Redirect(I))
    (row,) = loop.admit()
    loop.window([row], [0], [True])
    with pytest.raises(ms.InvalidArgument, match="not finished"):
        loop.mem.arrived([row], [5])
    assert loop.mem.release([row], publish=True) == [None]


def test_what_sleeps_gives_no_plane_and_no_slot(backend: Backend) -> None:
    loop = Loop(backend, ms.Redirect(I))
    loop.mem.sleep()
    free = loop.mem.free_slots
    for call in (lambda: loop.mem.pool.claim(3), lambda: next(iter(loop.mem.planes.values()))):
        with pytest.raises(ms.Asleep):
            call()
    loop.mem.wake()
    assert loop.mem.free_slots == free and len(loop.mem.pool.claim(3)) == 3


def test_generations_wrap_around(backend: Backend) -> None:
    """A row reused 2^31 times: its generation starts anew at 0, and the handle of before is stale."""
    loop = Loop(backend, ms.Redirect(I))
    mem = loop.mem
    mem._table.generation[:] = 2**31 - 2
    mem._snapshots.generation[:] = 2**31 - 1
    mem.reset()
    assert mem._table.generation.max() == 2**31 - 1 and mem._snapshots.generation.max() == 0
    for _ in range(2):
        (row,) = loop.admit()
        loop.advance([row], I)
        (snapshot,) = mem.release([row], publish=True)
        assert snapshot
        mem.drop([snapshot])
        for stale in (lambda row=row: mem.length(row), lambda snapshot=snapshot: mem.drop([snapshot])):
            with pytest.raises(ms.StaleHandle):
                stale()
    assert mem._table.generation[1] == 1
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


def test_a_tuned_file_that_cannot_be_read_is_found_at_construction(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in the first launch, when the packet with its zeros has been taken and would be lost."""
    (tmp_path / tuned.file_name(tuned.device_name(backend.device))).write_text("{")
    monkeypatch.setenv("MEMSTATE_TUNED", str(tmp_path))
    tuned.forget()
    try:
        if backend.name == "reference":
            Loop(backend, ms.Redirect(I))  # launches nothing that could be tuned
        else:
            with pytest.raises(ValueError, match=str(tmp_path)):
                Loop(backend, ms.Redirect(I))
    finally:
        monkeypatch.undo()
        tuned.forget()


def test_another_thread_may_not_wake_a_manager(backend: Backend) -> None:
    mem = Loop(backend, ms.Redirect(I), debug=True).mem
    mem.sleep()
    errors: list[BaseException] = []

    def wake() -> None:
        try:
            mem.wake()
        except ms.MemstateError as error:
            errors.append(error)

    other = threading.Thread(target=wake)
    other.start()
    other.join()
    assert len(errors) == 1 and "one thread" in str(errors[0])
    mem.wake()


def test_ops_of_a_backend_are_found_by_name() -> None:
    ops = ms.Backend("reference")
    assert "gated_delta_step" in dir(ops) and "state: one layer, `slot head key value`" in (
        ops.gated_delta_step.__doc__ or ""
    )
    with pytest.raises(AttributeError, match="nonsense"):
        _ = ops.nonsense  # type: ignore[attr-defined]
