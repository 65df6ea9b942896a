"""The last slot and the largest id: where an off-by-one shows."""

import pytest
import torch

from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import AUDIT_FREE, Count
from memstate.slots.allocator import SlotAllocator
from memstate.slots.registers import RegisterFile


def test_B10_an_audit_counts_up_to_a_last_slot_that_nobody_holds(backend: Backend) -> None:
    file = RegisterFile(SlotAllocator(40, backend), rows=2, snapshots=0)
    assert file.owners().tolist() == [0, *[AUDIT_FREE] * 40]


@pytest.mark.parametrize("ids", [[2**31 - 1], [2**31], [2**40, 2**33]])
def test_G1_an_id_of_64_bits_is_the_offender_as_far_as_32_go(backend: Backend, ids: list[int]) -> None:
    allocator = SlotAllocator(40, backend)
    given = torch.tensor(ids, dtype=torch.int64, device=backend.device)
    backend.release(allocator.bitmap, given, allocator.capacity, allocator.counters)
    found = allocator.counters.tolist()
    assert (found[Count.OUT_OF_RANGE], found[Count.FREE]) == (len(ids), 40)
    assert (found[Count.OFFENDER_KIND], found[Count.OFFENDER]) == (Count.OUT_OF_RANGE, 2**31 - 1)
