"""The request table: rows, generations, padding rows, pages, and admissions that happen whole or not at all."""

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate import InvalidArgument, MemstateError, Redirect, Request, Row, StaleHandle, StateManager
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Rules, Strategy
from memstate.requests.steps import StepLog
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import RegisterFile
from tests.proof.stateful.script import ALL, Play, script
from tests.support import inside, owners
from tests.support.build import build
from tests.support.command_bench import recorded
from tests.support.scan import scan, scan_registers

LAYOUT = ms.StateLayout([ms.Plane("s", (4,), torch.float32)], layers=2)


def manager(backend: Backend, **settings) -> StateManager:  # type: ignore[no-untyped-def]
    """Returns a manager of four slots, three rows and pages; every byte of every state is NaN before any admission."""
    given = {"slots": 4, "max_requests": 3, "tracking": Redirect(every=4)} | settings
    paged = {"pages": 8, "page_size": 4, "pages_per_row": 4}
    mem = build(LAYOUT, device=backend.device, backend=backend.name, **(paged | given))
    for arena in mem.planes.arenas:
        arena.fill_(0xFF)
    mem.planes.scrub_null()
    return mem


def named(n: int, length: int = 0, **more: int) -> list[Request]:
    return [Request(f"r{i}", length=length, **more) for i in range(n)]


def picture(mem: StateManager) -> tuple[object, ...]:
    """Returns all that a refused call must not change, also the changes that wait; without counts of refusals and
    times.
    """
    file = inside.registers(mem)
    device = (file.cells.tolist(), mem.pool.allocator.bitmap.tolist(), mem.pool.allocator.counters.tolist())
    host = [array.tolist() for array in (file.held, file.labels, file.tracked, file.source)]
    rows = owners.table(mem)
    table = (rows.used.tolist(), rows.generation.tolist(), rows.confirmed.tolist(), list(rows.ids))
    numbers = (
        mem.free_slots,
        mem.free_pages,
        mem.stats().rows_used,
        owners.free(mem),
        owners.holdings(mem).evictable("snapshot"),
    )
    figures = dataclasses.asdict(mem.stats())
    moves = ("short_of_", "oldest_", "idlest_")  # these change: refusals are counted, and time goes on
    stats = {name: n for name, n in figures.items() if not name.startswith(moves)}
    return device, host, table, numbers, recorded(inside.commands(mem)), stats


@pytest.mark.parametrize("preallocated", [0, 2])
def test_B12_a_table_of_n_has_rows_1_to_n(backend: Backend, preallocated: int) -> None:
    mem = manager(backend, slots=9, preallocated=preallocated)
    rows = mem.admit(named(3 + preallocated))
    assert [row.index for row in rows] == list(range(1, 4 + preallocated))
    before = picture(mem)
    with pytest.raises(ms.OutOfRows) as refused:
        mem.admit(named(1))
    assert (refused.value.requested, refused.value.free, refused.value.rows) == (1, 0, 3 + preallocated)
    assert picture(mem) == before
    mem.end([rows[1]])
    assert [row.index for row in mem.admit(named(1))] == [2]


@script(strategy=ALL, slots=9, preallocated=1, pad=(0, -1), page_size=4)
def test_B12a_the_null_row_stays_zero_through_every_table(play: Play) -> None:
    """Batches have padding, or padding alone."""
    a, b = play.admit(None, None, length=16, snapshot_at=[8])
    for batch, tokens in (([None, a, None, b], 4), ([None, None], 1), ([None, a, b], 1)):
        play.step(batch, tokens)
    play.submit()


@script(strategy=ALL, slots=9, preallocated=2, prefix=(False, True), overlap=True)
def test_B10_B12a_reset_zeroes_everything_preallocated_rows_too(play: Play) -> None:
    rows = play.admit(*[None] * 3, length=4, snapshot_at=[4])
    play.step(rows, 4)
    snaps = play.end(rows[0], how="publish", land=False)
    play.step([None, rows[1]], run=False)
    play.claim(1)
    play.reset()
    play.drop(*snaps)
    play.step(rows)
    play.admit(None, resume=snaps[0] if snaps else None)
    play.reached("StaleHandle")


def test_B13_tables_are_sized_by_rows_not_by_slots(backend: Backend) -> None:
    """With 64 rows and 8 slots, a register of row 64 gets a slot, and a plan finds it there."""
    allocator = ms.SlotAllocator(8, backend)
    file = RegisterFile(allocator, rows=64, snapshots=0)
    buffer = CommandBuffer(file, max_batch=2)
    buffer.claim([3 * 64, 3 * 64 + 1, 3 * 64 + 2, 3])
    buffer.write(file.address("tracked", np.array([64])), [0])
    buffer.upload_step((np.array([64, 0]), np.array([3, 0])), 8)
    buffer.launch_changes()
    log = StepLog(2, 1, backend.device)
    record = log.record(2)
    for column in (*record, *log.marks):
        column.fill_(-1)
    file.plan(buffer.step, record, log.marks, Rules(Strategy.NONE, 0, 256, False))
    assert [column.tolist() for column in record] == [[64, 0], [3, 0], [1, 0], [1, 0], [0, 0]]
    file.labels[3 * 64] = 3
    assert scan_registers(file).labels[3 * 64] == 3
    mem = manager(backend, slots=8, max_requests=64, pages=0, page_size=1, pages_per_row=0)
    assert owners.table(mem).claim([f"r{i}" for i in range(64)]) == list(range(1, 65))


# what the last of three requests lacks -> (message, settings of the manager, arguments of the last request)
SHORT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "slots": ("^3 slots requested, 2 free", {"slots": 2}, {}),
    "slots for the lanes": ("^9 slots requested, 8 free", {"slots": 8, "tracking": ms.PingPong(every=4)}, {}),
    "rows": ("^3 rows requested, 2 of 2 free", {"max_requests": 2}, {}),
    "pages": ("^6 KV pages requested, 5 of 5 free", {"pages": 5}, {}),
    "width of a row": ("^17 tokens need 5 pages, a row has 4", {}, {"length": 17}),
    "a length": ("'last': length=-1: expected a whole number", {}, {"length": -1}),
    "a length that is a number": ("'last': length='8': expected a whole number", {}, {"length": "8"}),
    **{
        f"wants: {wants!r}": ("'last': snapshot_at=.*: expected lengths in tokens", {}, {"snapshot_at": wants})
        for wants in ([-4], [4.0], [2**31], "8", np.array([4, -6]), np.array([[4], [8]]))
    },
    "a snapshot": ("^3 is no snapshot: use the handles of .* park", {}, {"resume": 3}),
    "a snapshot of this manager": ("^snapshot in register 1000000", {}, {"resume": ms.Snapshot(10**6, 1, 4, ())}),
    "a snapshot that was published": ("^snapshot in register 13", {}, {"resume": ms.Snapshot(13, 1, 4, ())}),
}


@pytest.mark.parametrize("missing", SHORT)
def test_B17_an_admission_that_lacks_something_changes_nothing(backend: Backend, missing: str) -> None:
    """Two requests are good, and one asks for too much or is invalid: none of them gets anything."""
    told, settings, asked = SHORT[missing]
    mem = manager(backend, **settings)
    before = picture(mem)
    with pytest.raises(MemstateError, match=told):
        mem.admit([*named(2, length=8), Request("last", **({"length": 8} | asked))])
    assert picture(mem) == before
    scan(mem)
    assert len(mem.admit(named(2, length=8))) == 2  # without the bad one, the good requests are admitted
    scan(mem)


@script(strategy="redirect", slots=2, prefix=True)
def test_B17_a_state_that_two_requests_read_is_not_taken_over(play: Play) -> None:
    play.turn(range(4))
    play.admit(range(5), range(5))
    play.turn(range(6))
    play.reached("OutOfSlots")


@script(strategy="none", slots=2, rows=2, prefix=(False, True))
def test_B17_the_session_of_a_refused_turn_still_makes_way(play: Play) -> None:
    (talk,) = play.open("talk")
    play.turn(range(4), talk)
    (row,) = play.admit(None)
    play.admit(range(6), None, sessions=[talk, None])
    play.end(row, how="release")
    play.admit(None, None)
    play.reached("OutOfRows")


@pytest.mark.parametrize("what", [None, "r0", 3, object], ids=str)
def test_B17_something_that_is_no_request(backend: Backend, what: object) -> None:
    mem = manager(backend)
    before = picture(mem)
    with pytest.raises(InvalidArgument, match="is no Request"):
        mem.admit([*named(1), what])  # type: ignore[list-item]
    assert picture(mem) == before


def test_B19_a_row_reused_makes_old_handles_stale(backend: Backend) -> None:
    mem = manager(backend)
    (old,) = mem.admit(named(1, length=8))
    mem.settle(mem.plan([old], 4))
    mem.end([old])
    (new,) = mem.admit(named(1, length=8))
    assert (new.index, new.generation) == (old.index, old.generation + 1)
    before = picture(mem)
    uses = [mem.info, lambda row: mem.chunk(row, 1)]
    uses += [lambda row, f=f: f([row]) for f in (mem.plan, mem.end, mem.publish)]
    uses += [lambda row: mem.extend([row], [8]), lambda row: mem.snapshot_at(row, [])]
    uses += [lambda row: mem.plan([new, None, row]), lambda row: mem.end([new, row])]
    for use in uses:
        with pytest.raises(StaleHandle) as refused:
            use(old)
        assert (refused.value.generation, refused.value.now) == (old.generation, new.generation)
    assert picture(mem) == before
    scan(mem)


FORGED = [Row(4, 1), Row(999, 1), Row(-1, 1), Row(-3, 1), Row(0, 1)]  # handles of another table


@pytest.mark.parametrize("row", [*FORGED, 0, -1, 1, "r0", (1, 1)], ids=repr)
def test_B19_G1_a_handle_of_another_table_and_what_is_no_handle_raise(backend: Backend, row: object) -> None:
    mem = manager(backend)
    mem.admit(named(3))
    before = picture(mem)
    for use in (mem.info, lambda r: mem.plan([r]), lambda r: mem.end([r])):
        with pytest.raises(MemstateError if row in FORGED else InvalidArgument):
            use(row)
    assert picture(mem) == before


def test_B19_handles_of_another_manager_are_stale(backend: Backend) -> None:
    mine, other = manager(backend), manager(backend)
    rows, others = mine.admit(named(1, length=4)), other.admit(named(1, length=4))
    for mem, batch in ((mine, rows), (other, others)):
        mem.settle(mem.plan(batch, 4))
    (snapshot,), (foreign,) = mine.end(rows, keep="handle"), other.end(others, keep="handle")
    assert snapshot != foreign
    late = ms.Request("b", resume=foreign)
    for misuse in (lambda: mine.drop([foreign]), lambda: mine.admit([late]), lambda: mine.plan(others)):
        with pytest.raises(ms.StaleHandle):
            misuse()
    mine.drop([snapshot])


@pytest.mark.parametrize("kind", [float, np.int64])
def test_G1_a_forged_handle_is_not_dropped(backend: Backend, kind: type) -> None:
    mem = manager(backend)
    (row,) = mem.admit(named(1, length=4))
    mem.settle(mem.plan([row], 4))
    (snapshot,) = mem.end([row], keep="handle")
    assert snapshot
    with pytest.raises(InvalidArgument, match="is no snapshot"):
        mem.drop([replace(snapshot, register=kind(snapshot.register))])
    mem.drop([snapshot])
    scan(mem)


def test_rows_that_a_caller_has_lost_are_found_again(backend: Backend) -> None:
    mem = manager(backend)
    assert len(mem.rows) == 0
    (first,) = mem.admit(named(1, 4))
    mem.admit(named(2, 4))  # the caller loses these handles
    assert first == mem.rows[0] and [row.index for row in mem.rows] == [1, 2, 3]
    mem.end([first])
    step = mem.plan(mem.rows)
    mem.settle(step, finished=[True, False])
    assert [row.index for row in mem.rows] == [2, 3]
    mem.end(mem.rows)
    assert len(mem.rows) == 0 and mem.free_slots == 4
