"""Slots held by id and slots in registers share one pool: changes of one kind do not disturb the other."""

import numpy as np
import pytest
import torch
from torch import Tensor

import memstate as ms
from memstate import OutOfSlots, Plane, Redirect, Request, StateLayout, StateManager
from memstate.engine.pool import StatePool
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Registers
from memstate.slots.allocator import SlotAllocator
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import RegisterFile
from memstate.state.planes import Planes
from tests.proof.stateful.script import Play, script
from tests.support.build import on
from tests.support.command_bench import require_unordered
from tests.support.scan import scan, scan_registers

LAYOUT = StateLayout([Plane("s", (4,), torch.float32)], layers=1)


@pytest.fixture
def mem(backend: Backend) -> StateManager:
    return on(backend, LAYOUT, slots=4, max_requests=6, tracking=Redirect(every=4))


def requests(n: int) -> list[Request]:
    return [Request(f"r{i}") for i in range(n)]


@script(strategy="redirect", slots=4, rows=6, pages=0, page_size=1, pages_per_row=0)
def test_B1_a_claim_in_hand_counts_what_is_recorded(play: Play) -> None:
    """A release is counted as soon as it is recorded, so the claim must get the slots that it frees."""
    rows = play.admit(*[None] * 4)
    play.submit()
    play.end(*rows, how="release")
    play.release(play.claim(2))
    play.admit(None, None, None)
    play.claim(1)
    play.claim(1)
    play.reached("OutOfSlots")


def test_B5_a_claim_that_reconciles_keeps_what_is_recorded(mem: StateManager) -> None:
    """The claim reads the device's count of free slots, which does not know the rows that were just admitted."""
    ids = mem.pool.claim(2)
    mem.pool.release(ids[:1])
    mem.pool.release(ids[:1])
    mem.admit(requests(2))
    with pytest.raises(OutOfSlots):
        mem.pool.claim(2)
    mine = ids[1:].tolist() + mem.pool.claim(1).tolist()
    scan(mem, mine)


@pytest.mark.parametrize("phantom", [[0], [-1, -5], [99, 98]], ids=["null", "negative", "unknown"])
def test_B6_ids_that_free_nothing_make_no_room_for_an_admission(mem: StateManager, phantom: list[int]) -> None:
    mem.pool.release(phantom)
    with pytest.raises(OutOfSlots):
        mem.admit(requests(5))
    rows = mem.admit(requests(4))
    assert len(scan(mem).slots) == len(rows)


def test_B5_a_double_release_makes_no_room_for_a_snapshot(mem: StateManager) -> None:
    """The pool is full but seems to have a free slot: the host must not count a snapshot that the device refused."""
    ids = mem.pool.claim(1)
    mem.pool.release(ids)
    mem.pool.release(ids)
    rows = mem.admit(requests(4))
    for tokens in (4, 1):
        mem.settle(mem.plan(rows, tokens))
    snapshots = mem.end(rows[:1], keep="handle") + mem.end(rows[1:])
    assert snapshots[0] is None or mem.device.read_slots(snapshots[:1]).wait().all()
    assert mem.audit().clean
    with pytest.raises(ms.DoubleRelease):
        mem.device.check()
    scan(mem)


def test_B5_the_reserve_counts_real_slots(backend: Backend) -> None:
    """Three slots are reserved. Host and device must count a release of slot 0 in the same way."""
    mem = on(backend, LAYOUT, slots=4, max_requests=2, tracking=Redirect(every=4), reserve=3)
    mem.pool.release([0, 0, 0])
    rows = mem.admit(requests(1))
    for tokens in (4, 1):
        mem.settle(mem.plan(rows, tokens))
    scan(mem)


def test_live_slots_and_lengths_are_views_by_row(backend: Backend) -> None:
    """An engine can look up the slots of its rows: the view keeps its address, and has 0 where there is no request."""
    mem = on(backend, LAYOUT, slots=6, max_requests=3, tracking=Redirect(every=2))
    at = mem.device.live_slots.data_ptr()
    rows = mem.admit([Request("a"), Request("b")])
    for _ in range(3):
        step = mem.plan(rows)
        assert torch.equal(mem.device.live_slots[step.rows], step.write)
        assert (mem.device.lengths[step.rows] - step.tokens).tolist() == step.before.tolist()
        mem.settle(step)
    assert mem.device.live_slots.tolist()[0] == 0
    mem.end(rows)
    mem.submit()
    assert (mem.device.live_slots.tolist(), mem.device.live_slots.data_ptr()) == ([0, 0, 0, 0], at)


def test_the_order_of_record_is_kept_for_many_registers_too(backend: Backend) -> None:
    """Many registers are moved twice, or copied, released and claimed again in one packet."""
    n, layout = 12, ms.StateLayout((ms.Plane("s", (4,), torch.float32),), layers=1)
    allocator, storage = SlotAllocator(3 * n, backend), Planes(layout, 3 * n, backend)
    file = RegisterFile(allocator, n, 3 * n)
    buffer, carry_out = CommandBuffer(file, StatePool(allocator, storage).run_data), backend.ownership

    def guarded(table: Registers, packet: Tensor) -> None:
        require_unordered(packet.tolist())
        carry_out(table, packet)

    backend.ownership = guarded  # type: ignore[attr-defined]
    one, two, three = ([*range(first, first + n)] for first in range(file.first_holder, file.first_holder + 3 * n, n))
    buffer.claim(one)
    buffer.submit()
    slots = file.table.slots[one].long()
    storage["s"][0, slots] = torch.arange(n, dtype=torch.float32, device=backend.device)[:, None]
    file.table.labels[one] = torch.arange(10, 10 + n, dtype=torch.int32, device=backend.device)
    file.labels[one] = np.arange(10, 10 + n)

    buffer.move(two, one)
    buffer.move(one, two[::-1])  # the registers come back in reverse order
    buffer.claim(three)
    buffer.copy(three, one)
    buffer.release(one)
    buffer.claim(two, zeroed=two)  # `two` gets the slots that were just released
    buffer.submit()

    expected = np.arange(n)[::-1]
    assert scan_registers(file).problems == []
    assert file.table.labels[three].tolist() == file.labels[three].tolist() == (expected + 10).tolist()
    assert storage["s"][0, file.table.slots[three].long(), 0].tolist() == expected.tolist()
    assert not storage["s"][0, file.table.slots[two].long()].any()
    assert not file.held[one].any() and allocator.free == n


@pytest.mark.parametrize("gone", ["nothing", "a snapshot"])
def test_slots_released_by_id_are_counted_before_the_packet_of_a_step(backend: Backend, gone: str) -> None:
    """A count that is read from the device at this moment lacks the changes in the step's own packet."""
    mem = on(backend, LAYOUT, slots=8, max_requests=4, tracking=Redirect(every=4))
    rows = mem.admit(requests(2))
    mem.settle(mem.plan(rows, 4))
    kept = mem.end(mem.admit([Request("kept", length=4)]), keep="handle") if gone == "a snapshot" else []
    held = mem.pool.claim(mem.free_slots - 1)
    mem.pool.release(held[:1])
    if gone == "a snapshot":
        mem.drop(kept)
    new = mem.admit([Request("new")])
    mem.settle(mem.plan([*rows, *new], 1))
    mem.pool.release(held[1:])
    mem.audit().raise_if_leaking()
    states = [state for state in mem.publish(rows) if state is not None]
    assert 0 not in mem.device.read_slots(states).wait().tolist()
    mem.end([*rows, *new])
    mem.drop(states)
    mem.audit().raise_if_leaking()
    assert mem.free_slots == 8
