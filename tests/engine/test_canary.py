"""Debug mode finds a forward that forgets a store, or changes a slot that it may only read.

The error names the place.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import nan
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import memstate as ms
from memstate.engine.canary import Canary
from memstate.kernels.dispatch import Backend
from tests.support.build import on
from tests.support.planes import MAKERS, I, every_strategy
from tests.support.scan import scan
from tests.support.watch import Watch

KINDS = {
    "long": ((3,), torch.int64), "ssm": ((2, 4), torch.float32), "conv": ((6, 3), torch.bfloat16),
    "small": ((5,), torch.float16), "tiny": ((1,), torch.bfloat16), "double": ((2,), torch.float64),
    "pair": ((2,), torch.complex64), "eight": ((16,), torch.float8_e4m3fn), "short": ((9,), torch.int16),
    "bytes": ((2, 9), torch.int8), "flags": ((20,), torch.bool), "none": ((0, 4), torch.float32),
}  # fmt: skip
PLANES = tuple(ms.Plane(name, *kind) for name, kind in KINDS.items())
LAYOUT = ms.StateLayout(PLANES, layers=3)
WRITTEN = [name for name in KINDS if name != "none"]
Skipped = Callable[[str, str, int], bool]  # vector, plane, layer -> whether the forward forgets this store


def manager(
    backend: Backend, tracking: ms.Tracking, layout: ms.StateLayout = LAYOUT, **settings: Any
) -> ms.StateManager:
    return on(backend, layout, **{"slots": 24, "max_requests": 4, "tracking": tracking, "debug": True} | settings)


def two(mem: ms.StateManager) -> list[ms.Row]:
    return list(mem.admit([ms.Request("a"), ms.Request("b")]))


def stored(state: torch.Tensor) -> torch.Tensor:
    """Returns the new states that a forward computes: each element differs from the old one, and none is NaN."""
    if state.dtype == torch.bool:
        return ~state
    wide = state.to(torch.complex64 if state.is_complex() else torch.float64)
    return ((wide.nan_to_num(1.0) if not state.is_complex() else wide) * 0.5 + 1).to(state.dtype)


def forward(mem: ms.StateManager, step: Any, forgets: Skipped = lambda *store: False) -> None:
    """Runs one step of a model, slot by slot as a kernel does, and writes rubbish to slot 0."""
    vectors = [(name, getattr(step, name).long()) for name in ("write", "snapshot")]
    for name in mem.planes:
        for layer, plane in enumerate(mem.planes[name]):
            new = stored(plane[step.read.long().clamp(min=0)])
            for vector, slots in vectors:
                if not forgets(vector, name, layer):
                    plane[slots.clamp(min=0)] = new
            count, entries, _, slots = mem.device.marks
            if not forgets("mark", name, layer):
                plane[slots[: int(count)].long()] = new[entries[: int(count)].long()]


def forgetting(vector: str, plane: str, layer: int) -> Skipped:
    return lambda *store: store == (vector, plane, layer)


def resumed(mem: ms.StateManager, **more: Any) -> list[ms.Row]:
    """Starts two rows from one snapshot, which their first step reads directly, and returns them."""
    (row,) = mem.admit([ms.Request("first")])
    step = mem.plan([row], I)
    forward(mem, step)
    mem.settle(step)
    (snapshot,) = mem.end([row], keep="handle")
    return list(mem.admit([ms.Request(name, resume=snapshot, **more) for name in "ab"]))


def fails(
    close: Callable[[], object], vector: str, plane: str, layer: int, match: str | None = None
) -> ms.ForwardFault:
    """Calls `close`, which must raise a ForwardFault that names this vector, plane and layer; returns the fault."""
    with pytest.raises(ms.ForwardFault, match=match) as error:
        close()
    fault = error.value
    assert (fault.vector, fault.plane, fault.layer) == (vector, plane, layer)
    assert f"{plane!r}, layer {layer}" in str(fault)
    return fault


SAYS = {
    "write": r"store the new one of every plane and layer at step\.write", "snapshot": r"at step\.snapshot, too",
    "mark": r"marks=step\.marks",
}  # fmt: skip
STORES = [(name, vector) for name in MAKERS for vector in SAYS if vector != "snapshot" or name in ("ping-pong", "lazy")]


@pytest.mark.sample(30)
@pytest.mark.parametrize("plane", WRITTEN)
@pytest.mark.parametrize(("name", "vector"), STORES)
def test_a_forgotten_store_is_named(backend: Backend, name: str, vector: str, plane: str) -> None:
    """The step reads one slot and writes another, ends at a boundary and has marks.

    Whichever call closes the step reports the fault.
    """
    mem, layer = manager(backend, MAKERS[name](), direct_hits=True, page_size=2, grid=1), WRITTEN.index(plane) % 3
    rows = resumed(mem, snapshot_at=[I + 2])
    step = mem.plan([None, *rows], I)
    forward(mem, step, forgetting(vector, plane, layer))
    close = (partial(mem.plan, rows), partial(mem.settle, step), partial(mem.submit, step))[layer]
    fault = fails(close, vector, plane, layer, SAYS[vector])
    assert (fault.rows, fault.places, fault.step) == ([row.index for row in rows], 2, step.serial)
    mem.end(rows)  # a fault is reported once: later calls succeed
    mem.settle(step)
    scan(mem)


@pytest.mark.sample
@every_strategy
@pytest.mark.parametrize("order", ["layer_major", "slot_major"])
@pytest.mark.parametrize("pad", [0, -1])
def test_a_forward_that_stores_everything_passes(backend: Backend, name: str, order: Any, pad: int) -> None:
    """The steps have marks, direct hits, boundaries, chunks, padding and rows that end. None of them touches slot 0."""
    layout = replace(LAYOUT, order=order)
    mem = manager(backend, MAKERS[name](), layout, direct_hits=True, page_size=2, grid=1, pad=pad, prefix=ms.Prefix())
    null = [block[:, 0].clone() for block in mem.planes.plane_map.blocks]
    text, flying = list(range(30)), list[ms.Step]()
    rows = list(mem.admit([ms.Request("a", tokens=text, snapshot_at=[4, 10]), ms.Request("b")]))
    marked = moved = 0
    for t in range(6 * I):
        if t == 2 * I:
            mem.end(rows[:1], keep="cache", tokens=[text[: mem.info(rows[0]).length]])
            rows[0] = mem.admit([ms.Request("again", tokens=text)])[0]
            assert mem.info(rows[0]).length > 0
        ahead = mem.plan([rows[0], None, rows[1]], [3 if mem.info(rows[0]).length < len(text) - 2 else 1, 1, 1])
        at = [slot > 0 for slot in ahead.write.tolist()]
        assert at == [True, False, True]
        for block, was in zip(mem.planes.plane_map.blocks, null, strict=True):
            assert torch.equal(block[:, 0], was)  # the canary is not written to the null slot
        marked, moved = marked + ahead.marked, moved + int((ahead.read != ahead.write).sum())
        forward(mem, ahead)
        null = [block[:, 0].clone() for block in mem.planes.plane_map.blocks]
        if flying:
            mem.settle(flying.pop())
        flying.append(ahead)
    assert marked >= 1 and moved >= 1
    mem.settle(flying.pop())
    scan(mem)


@pytest.mark.parametrize("slot", ["read", "write"])
def test_an_in_place_kernel_under_redirect_is_named(backend: Backend, slot: str) -> None:
    """The kernels update one slot in place, but the manager was made without `Forward(in_place=True)`."""
    planes = ms.Plane("ssm", (2, 4), torch.float32), ms.Plane("conv", (8,), torch.bfloat16)
    mem = manager(backend, ms.Redirect(1), ms.StateLayout(planes, layers=2))
    rows = two(mem)
    for t in range(2):
        step = mem.plan(rows)
        for state in (*mem.planes["ssm"], *mem.planes["conv"]):
            at = getattr(step, slot).long()
            state[at] = state[at] * 0.5 + 1
        if not t:
            mem.settle(step)
    fault = fails(lambda: mem.settle(step), slot, "ssm", 0, r"Forward\(in_place=True\)")
    assert fault.places == 8 * (1 + (slot == "read"))  # a kernel that updates `read` stores nothing in `write`
    mem.end(rows)
    mem.settle(step)


def test_a_kernel_that_shifts_its_window_in_place_is_named(backend: Backend) -> None:
    """The kernel shifts the bytes in the slot that it writes, so a part of the canary moves to another place."""
    mem = manager(backend, ms.Redirect(1), ms.StateLayout((ms.Plane("conv", (3, 4), torch.bfloat16),), layers=1))
    rows = mem.admit([ms.Request("a")])
    for t in range(2):
        step = mem.plan(rows)
        # raw bits, so that the shift moves the canary unchanged
        state, at = mem.planes["conv"][0].view(torch.int16), step.write.long()
        state[at] = torch.cat([state[at][..., 1:], torch.ones(1, 3, 1, device=at.device, dtype=torch.int16)], -1)
        if not t:
            mem.settle(step)
    fails(lambda: mem.settle(step), "write", "conv", 0)


def test_a_snapshot_that_the_forward_changes_is_named(backend: Backend) -> None:
    """The forward stores the new state, but also changes one byte of the state that it reads."""
    mem = manager(backend, ms.Redirect(I))
    rows = resumed(mem)
    step = mem.plan(rows)
    forward(mem, step)
    block = mem.planes.of("bytes")[0].blocks[2]
    block[step.read[:1].long(), 17] ^= 1
    fault = fails(lambda: mem.settle(step), "read", "bytes", 2, r"store at step\.write, not at step\.read")
    assert fault.places == 2  # both rows read the damaged snapshot
    mem.end(rows)
    mem.settle(step)


def tailed(backend: Backend, tracking: ms.Tracking) -> tuple[ms.StateManager, list[ms.Row]]:
    """Returns a manager whose rows have tails, and two rows of I - 1 tokens, 2 of them in the tail."""
    rings = ms.StateLayout((ms.Plane("k", (8,), torch.float32),), layers=1)
    mem = manager(backend, tracking, replace(LAYOUT, rows=rings), overlap=False, tail=3)
    rows = two(mem)
    step = mem.plan(rows, I - 3)
    forward(mem, step)
    mem.settle(step)
    mem.accept(mem.plan(rows, 3, drafts=3), [2, 2])
    return mem, rows


@pytest.mark.parametrize("replays", [False, True])
def test_a_step_of_drafts_alone_stores_nothing(backend: Backend, replays: bool) -> None:
    """A row that has drafts only stores nothing. The other row stores its pending tokens in the slot of `step.read`."""
    mem, rows = tailed(backend, ms.NoTracking())
    mem.settle(mem.plan(rows[:1], 1))
    for stored, value, fault in (([1], 7, None), ([0, 1], 8, "read")):

        def store(write: torch.Tensor, stored: list[int] = stored, value: int = value) -> None:
            mem.planes["ssm"][1, write[stored].long()] = value

        step = mem.plan(rows, 3, drafts=3, replay=(lambda: store(mem.launch(2).write)) if replays else None)
        assert (step.cursor.store >= 0).tolist() == [False, not fault] and step.read.tolist() == step.write.tolist()
        if not replays:
            store(step.write)
        accept = partial(mem.accept, step, [0, 0])
        if fault:
            assert fails(accept, fault, "ssm", 1, r"nothing where step\.cursor\.store is -1").rows == [1, 2]
        accept()
    scan(mem)


@pytest.mark.parametrize("name", ["redirect", "ping-pong"])
def test_a_forward_that_does_not_store_what_it_folds_is_named(backend: Backend, name: str) -> None:
    """The step folds tokens up to a boundary; under Redirect, the step after the boundary writes another slot."""
    mem, rows = tailed(backend, MAKERS[name]())
    mem.accept(step := mem.plan(rows, 3, drafts=3), [3, 3])
    step = mem.plan(rows, 3, drafts=3)
    assert (step.label + step.cursor.store.cpu().numpy()).tolist() == [I, I]
    if name == "redirect":
        forward(mem, step)
        mem.accept(step, [1, 1])
        step = mem.plan(rows, 1)
    vector = "write" if name == "redirect" else "snapshot"
    forward(mem, step, forgetting(vector, "ssm", 2))
    close = partial(mem.settle, step) if name == "redirect" else partial(mem.accept, step, [0, 0])
    assert fails(close, vector, "ssm", 2).rows == [row.index for row in rows]
    close()
    scan(mem)


@pytest.mark.parametrize("name", ["redirect", "ping-pong"])
def test_a_replayed_step_is_looked_at(backend: Backend, name: str) -> None:
    """`launch` writes the canary, and the first call after the plan reports the fault."""
    mem = manager(backend, MAKERS[name]())
    rows, forgotten = two(mem), []

    def replay() -> None:
        forward(mem, mem.launch(2), lambda vector, plane, layer: (vector, plane, layer) in forgotten)

    for _ in range(I - (name == "ping-pong")):
        mem.settle(mem.plan(rows, replay=replay))
    forgotten.append(("write" if name == "redirect" else "snapshot", "conv", 1))
    step = mem.plan(rows, replay=replay)
    assert mem.info(rows[0]).length == step.after[0]
    assert fails(lambda: mem.settle(step), *forgotten[0]).step == step.serial
    mem.end(rows)
    mem.settle(step)
    mem.settle(mem.plan([None, None], replay=replay))
    scan(mem)


def test_a_step_is_not_looked_at_before_its_forward(backend: Backend) -> None:
    """Calls between plan and forward, such as the settle of the previous step, report no fault."""
    mem = manager(backend, ms.Redirect(1))
    rows = mem.admit([ms.Request("a")])
    before = mem.plan(rows)
    forward(mem, before)
    for _ in range(4):
        step = mem.plan(rows)
        mem.settle(before)
        mem.submit()
        mem.publish(rows)
        forward(mem, step)
        before = step
    mem.settle(before)
    scan(mem)


def test_a_graph_with_nothing_to_fill_changes_no_byte(backend: Backend) -> None:
    """The replay writes no canary: neither the null slot, which stands in padding, nor another slot changes."""
    mem = manager(backend, ms.Redirect(I), page_size=2, grid=1)
    rows = mem.admit([ms.Request("a")])
    mem.submit()
    before = [block.clone() for block in mem.planes.plane_map.blocks]
    mem.settle(mem.plan([*rows, None], replay=lambda: mem.launch(2)))
    for block, was in zip(mem.planes.plane_map.blocks, before, strict=True):
        assert torch.equal(block, was)


def test_a_state_of_any_numbers_is_a_state(backend: Backend) -> None:
    """Zeros, one repeated number, or NaN computed from NaN pass.

    NaN computed from numbers fails: it looks like NaN that was computed from the canary.
    """
    mem = manager(backend, ms.Redirect(1))
    rows = mem.admit([ms.Request("a")])
    for value, passes in ((0.0, True), (0.0, True), (-38.0, True), (nan, False), (nan, True), (1.0, True)):
        step = mem.plan(rows)
        for name, plane in mem.planes.items():
            of_nan = KINDS[name][1].is_floating_point or KINDS[name][1].is_complex
            plane[:, step.write.long()] = torch.tensor(value if of_nan or value == value else 3.0).to(plane.dtype)
        if not passes:
            fails(partial(mem.settle, step), "write", "ssm", 0, r"read the state at step\.read")
        mem.settle(step)


GIVEN_UP: dict[str, Callable[[ms.StateManager, list[ms.Row], ms.Step], object]] = {
    "end": lambda mem, rows, step: (mem.end(rows), mem.settle(step)),
    "cancel": lambda mem, rows, step: mem.cancel(step),
    "recover": lambda mem, rows, step: mem.recover(),
    "recover and keep nothing": lambda mem, rows, step: mem.recover(keep=False),
}


@pytest.mark.parametrize("how", GIVEN_UP)
def test_a_row_that_ended_before_its_forward_is_nobody_s(backend: Backend, how: str) -> None:
    """No fault is reported if the forward leaves out an aborted row, if it fails, or if the step is cancelled."""
    mem = manager(backend, ms.Redirect(I))
    rows, replay = resumed(mem), (lambda: mem.launch(2)) if how == "recover" else None  # this replay runs no forward
    GIVEN_UP[how](mem, rows, mem.plan(rows, replay=replay))
    mem.settle(mem.plan([None]))
    scan(mem)


def test_a_snapshot_published_in_the_gap_is_looked_at(backend: Backend) -> None:
    """The row has ended, but the canary still looks at the step's store: the published snapshot needs it."""
    mem = manager(backend, ms.PingPong(I), overlap=False)
    rows = mem.admit([ms.Request("a")])
    step = mem.plan(rows, I)
    (snapshot,) = mem.end(rows, keep="handle")
    forward(mem, step, forgetting("snapshot", "ssm", 0))
    fails(lambda: mem.settle(step), "snapshot", "ssm", 0)
    mem.drop([snapshot])
    mem.settle(step)
    scan(mem)


@every_strategy
@pytest.mark.parametrize("grid", [None, 1])
def test_what_launch_fills_waits_for_nothing(backend: Backend, name: str, grid: int | None) -> None:
    """A CUDA graph can contain the launches that write the canary: no shape and no branch depends on values on the
    device.
    """
    mem, watch = manager(backend, MAKERS[name](), direct_hits=True, page_size=2, grid=grid), Watch()
    rows = resumed(mem)
    waits = {"nonzero", "_local_scalar_dense", "masked_select", "unique", "bincount", "equal", "item"}

    def replay() -> None:
        with watch:
            vectors = mem.launch(2)
        forward(mem, vectors)

    mem.settle(mem.plan(rows, replay=replay))
    assert watch.seen["index_put_"] >= 3 * len(WRITTEN) and not watch.seen.keys() & waits


@every_strategy
def test_without_debug_there_is_no_canary(backend: Backend, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without debug, no code of the canary runs; with debug, a step has no further launch, and waits at most once."""
    counts: list[Mapping[str, int]] = []
    for debug in (True, False):
        if not debug:
            for method in ("__init__", "forget", "planned", "fill", "fault"):
                monkeypatch.setattr(Canary, method, Mock(side_effect=AssertionError))
        mem = manager(backend, MAKERS[name](), debug=debug)
        rows = two(mem)
        mem.backend.counts.reset()
        for _ in range(2 * I + 1):
            step = mem.plan(rows)
            forward(mem, step)
            mem.settle(step)
        counted = mem.backend.counts
        assert counted.syncs <= debug * (2 * I + 1)
        counts.append({**counted.launches, "uploads": counted.uploads})
    assert counts[0] == counts[1]
