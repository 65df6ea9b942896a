"""Marks from the host to the forward: sent with the batch in one upload, also for slots that the same packet claims."""

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import HEADER_INTS, LIMIT_CELL, Rules, Section, Strategy
from memstate.requests.steps import StepLog
from memstate.slots import commands
from memstate.slots.commands import STEP_MARKS, CommandBuffer, step_ints
from memstate.slots.packet import Packet
from memstate.slots.registers import RegisterFile

EVERY = 4


class Host:
    """Four rows with a slot, six holders, and the launches of a step of the first two rows."""

    def __init__(self, backend: Backend) -> None:
        self.file = RegisterFile(ms.SlotAllocator(20, backend), rows=4, snapshots=6)
        self.buffer = CommandBuffer(self.file, max_batch=2)
        self.log = StepLog(2, 1, backend.device, marks=6)
        self.first = self.file.first_holder
        self.buffer.claim([3, 6, 9, 12])
        self.buffer.submit()

    def step(self, *marks: tuple[int, int, int]) -> list[list[int]]:
        """Sends the changes and the marks, plans, and returns (entry, offset, slot) of each mark on the device."""
        given = tuple(np.array(column, np.int64) for column in zip(*marks, strict=True))
        self.buffer.upload_step((np.array([1, 2]), np.array([9, 3])), 8, given)
        self.buffer.launch_changes()
        rules = Rules(Strategy.NONE, 0, EVERY, False)
        self.file.plan(self.buffer.step, self.log.record(2), self.log.marks, rules)
        columns = torch.stack(self.log.marks[1:], 1)[: int(self.log.marks.count)]
        return [list(map(int, mark)) for mark in columns.tolist()]

    def slot(self, holder: int) -> int:
        return int(self.file.table.slots[self.first + holder])


@pytest.mark.sample(interpreter=1)
def test_marks_get_the_slots_that_their_packet_claims(backend: Backend) -> None:
    host = Host(backend)
    holders = [host.first, host.first + 1, host.first + 4]
    host.buffer.claim(holders)
    marks = host.step((0, 4, holders[0]), (0, 8, holders[1]), (1, 3, holders[2]))
    assert marks == [[0, 4, host.slot(0)], [0, 8, host.slot(1)], [1, 3, host.slot(4)]]
    assert len({slot for *_, slot in marks} - {0}) == 3
    addresses = [column.data_ptr() for column in host.log.marks]
    assert host.step() == [] and host.step((1, 2, holders[0]), (1, 3, host.first + 5)) == [
        [1, 2, marks[0][2]],
        [1, 3, 0],
    ]
    assert [column.data_ptr() for column in host.log.marks] == addresses


def test_changes_that_do_not_fit_beside_marks_go_before_them(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "STEP_ROOM", HEADER_INTS + 12)
    host = Host(backend)
    host.buffer.claim([host.first, host.first + 1])
    host.buffer.write(host.file.address("pages", []), [])
    host.buffer.write(host.file.address("tracked", range(1, 5)), [1, 2, 3, 4])
    uploads = host.file.backend.counts.uploads
    assert host.step((0, 4, host.first), (1, 1, host.first + 1)) == [[0, 4, host.slot(0)], [1, 1, host.slot(1)]]
    assert host.file.backend.counts.uploads == uploads + 2 and host.slot(1)


def test_a_packet_has_its_marks_behind_the_batch() -> None:
    packet = Packet()
    marks = tuple(np.array(column) for column in ([0, 0, 1], [1, 2, 1], [15, 16, 17]))
    sent = packet.encode((np.array([1, 2]), np.array([5, 6])), 7, marks).tolist()
    assert sent[LIMIT_CELL] == 7 and sent[Section.MARKS] == 3 and sent[8 + Section.MARKS] == HEADER_INTS + 8
    assert sent[HEADER_INTS + 8 :] == [0, 0, 1, 0, 1, 2, 1, 0, 15, 16, 17, 0]
    assert packet.encode((np.array([1]), np.array([5])), 7)[Section.MARKS] == 0
    for batch in (1, 4096):
        assert step_ints(batch) >= HEADER_INTS + 2 * (batch + 3) + 3 * (STEP_MARKS + 3)
