"""The last slot, the first row that is none, and the largest id: where an off-by-one shows."""

import pytest
import torch

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import AUDIT_FREE, Count, Rules, Strategy
from memstate.slots.allocator import SlotAllocator
from memstate.slots.registers import RegisterFile
from tests.kernels.test_plan_kernel import NO_LIMIT, batch_packet, copy_of, same, stale_marks, stale_record


def test_B10_an_audit_counts_up_to_a_last_slot_that_nobody_holds(backend: Backend) -> None:
    file = RegisterFile(SlotAllocator(40, backend), rows=2, snapshots=0)
    assert file.owners().tolist() == [0, *[AUDIT_FREE] * 40]


def test_B14_the_first_row_beyond_the_table_is_padding(backend: Backend) -> None:
    table = RegisterFile(SlotAllocator(40, backend), rows=2, snapshots=0).table
    before, like = copy_of(table), table.cells
    packet, record = batch_packet(([3], [1]), NO_LIMIT, like), stale_record(1, like)
    backend.plan(table, packet, record, stale_marks(1, like), Rules(Strategy.NONE, 0, 4, False))
    assert same(before, table) and not any(column.any() for column in record)


@pytest.mark.parametrize("ids", [[2**31 - 1], [2**31], [2**40, 2**33]])
def test_G1_an_id_of_64_bits_is_the_offender_as_far_as_32_go(backend: Backend, ids: list[int]) -> None:
    allocator = SlotAllocator(40, backend)
    given = torch.tensor(ids, dtype=torch.int64, device=backend.device)
    backend.release(allocator.bitmap, given, allocator.capacity, allocator.counters)
    found = allocator.counters.tolist()
    assert (found[Count.OUT_OF_RANGE], found[Count.FREE]) == (len(ids), 40)
    assert (found[Count.OFFENDER_KIND], found[Count.OFFENDER]) == (Count.OUT_OF_RANGE, 2**31 - 1)
