"""Audits name what is wrong and nothing else, while requests run; an independent scan of the tensors agrees."""

from collections.abc import Callable

import pytest
import torch

import memstate as ms
from memstate import LeakFound, Plane, Redirect, Request
from memstate.kernels.dispatch import Backend
from memstate.slots.allocator import SlotAllocator
from memstate.slots.audit import AuditReport, audit
from memstate.slots.inspect import inspect
from memstate.slots.registers import RegisterFile
from tests.support import inside
from tests.support.build import build
from tests.support.scan import scan_registers

LAYOUT = ms.StateLayout([Plane("s", (4,), torch.float32)], layers=1)


def manager(backend: Backend, slots: int = 20, **more) -> ms.StateManager:  # type: ignore[no-untyped-def]
    where = {"device": backend.device, "backend": backend.name}
    return build(LAYOUT, slots=slots, max_requests=4, **({"tracking": Redirect(every=4)} | where | more))


def busy(mem: ms.StateManager) -> None:
    """Runs Alice in row 1 and Carol in row 3, each with a snapshot, Carol's published; row 2 is free again."""
    rows = mem.admit([Request("alice"), Request("bob"), Request("carol")])
    for tokens in (4, 1):
        mem.settle(mem.plan(rows, tokens))
    mem.publish(rows[2:])
    mem.end(rows[1:2])
    mem.submit()


def problems(mem: ms.StateManager) -> list[str]:
    return scan_registers(inside.registers(mem), assert_clean=False).problems


def nothing_but(report: AuditReport, **faults: object) -> None:
    """Requires that a report has these faults and no others."""
    empty = {"leaked": [], "double_owned": {}, "owned_but_free": {}, "foreign": [], "lost": [], "null_slot_free": False}
    assert {name: getattr(report, name) for name in empty} == empty | faults
    assert report.clean is (not faults)
    if faults:
        with pytest.raises(LeakFound):
            report.raise_if_leaking()
    else:
        report.raise_if_leaking()


def test_B77_open_groups_are_no_leaks(backend: Backend) -> None:
    mem = manager(backend)
    busy(mem)
    with mem.pool.allocator.group(3), mem.pool.allocator.group(2) as inner:
        report = mem.audit()
        nothing_but(report)
        assert report.owned_by_kind["group"] == 5
        inner.give_back()
        nothing_but(mem.audit())
        mem.recover(keep=False)
        nothing_but(mem.audit())
    nothing_but(mem.audit())


def test_G3_a_slot_where_the_host_believes_there_is_none_is_lost_to_everyone(backend: Backend) -> None:
    """The slot has one owner, so it is neither leaked nor shared.

    But the host does not know it and will never release it.
    """
    mem = manager(backend)
    busy(mem)
    inside.registers(mem).table.slots[13] = mem.pool.claim(1)[0]
    assert any("register 13" in problem for problem in problems(mem))
    report = mem.audit()
    assert not report.clean
    assert "register 13" in str(report)


ALICE, LANE, CAROL = "row 1 (request 'alice') live", "row 1 (request 'alice') lane 0", "row 3 (request 'carol') live"


def free_in_the_bitmap(mem: ms.StateManager) -> None:
    mem.pool.allocator.bitmap[:1].bitwise_or_(1)


# name -> (register -> the slot that is written to it, or a call; what the audit reports). Alice has slots 4 and 1 in
# registers 3 and 4, Carol slot 6 in register 9, and the snapshot slot 3 in register 15.
FAULTS: dict[str, tuple[dict[int, int] | Callable[[ms.StateManager], None], dict[str, object]]] = {
    "emptied": ({3: 0}, {"leaked": [4], "lost": [ALICE]}),  # `memstate demo --plant-leak` plants this fault
    "in two registers": ({4: 6}, {"leaked": [1], "double_owned": {6: [LANE, CAROL]}}),
    "row and snapshot": ({3: 3}, {"leaked": [4], "double_owned": {3: [ALICE, "snapshot 15 of 4 tokens"]}}),
    "believed empty": ({13: 4}, {"double_owned": {4: [ALICE, "register 13"]}}),
    "owned and free": (lambda mem: mem.pool.release([1]), {"owned_but_free": {1: LANE}}),
    "null slot free": (free_in_the_bitmap, {"null_slot_free": True}),
    "beyond the pool": ({3: 21}, {"foreign": [ALICE], "leaked": [4]}),
    "negative": ({3: -1}, {"foreign": [ALICE], "leaked": [4]}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_B75_B76_what_is_wrong_is_named_with_its_owners_and_nothing_else(backend: Backend, fault: str) -> None:
    mem = manager(backend)
    busy(mem)
    act, faults = FAULTS[fault]
    if callable(act):
        act(mem)
    else:
        for register, slot in act.items():
            inside.registers(mem).table.slots[register] = slot
    nothing_but(mem.audit(), **faults)
    assert problems(mem) != []


@pytest.mark.sample(interpreter=1)
def test_reference_and_kernel_see_the_same_picture(backend: Backend) -> None:
    """Reference and kernel read the same planted faults."""
    pictures = []
    for name, device in ((backend.name, backend.device), ("reference", torch.device("cpu"))):
        mem = manager(Backend(name, device))
        busy(mem)
        mem.pool.claim(3)
        slots = inside.registers(mem).table.slots
        slots[13], slots[14], slots[12], slots[1] = int(slots[3]), 21, -5, 2
        mem.pool.release([1])
        pictures.append((inspect(inside.registers(mem), {}), str(mem.audit())))
    assert pictures[0] == pictures[1]


def test_an_audit_is_one_launch_after_one_submit(backend: Backend) -> None:
    mem = manager(backend)
    mem.admit([Request("a")])
    mem.backend.counts.reset()
    mem.audit()
    counts = mem.backend.counts
    assert (dict(counts.launches), counts.syncs) == ({"ownership": 1, "run_data": 1, "audit": 1}, 1)
    mem.audit()
    assert counts.launches["audit"] == 2
    assert counts.total_launches == 4


def test_a_wrong_summary_is_named(backend: Backend) -> None:
    """A bitmap of 3000 slots has words 0 to 93. Words 94 to 96 are its summary: they say which of these are not 0."""
    file = RegisterFile(SlotAllocator(3_000, backend), rows=1, snapshots=0)
    assert audit(inspect(file, {})).clean
    file.allocator.bitmap[[94, 96]] = torch.tensor([0, 1], dtype=torch.int32, device=backend.device)
    seen = inspect(file, {})
    report = audit(seen)
    assert seen.summary == [94, 96] and report.summary == [(1, 0, 1023), (1, 2048, 3000)] and not report.clean
    assert str(report).splitlines()[1:] == [
        "level 1 of the bitmap's summary is wrong for slots 0..1023",
        "level 1 of the bitmap's summary is wrong for slots 2048..3000",
    ]
    file.allocator.reset([7, 2_500])
    assert inspect(file, {}).summary == []
