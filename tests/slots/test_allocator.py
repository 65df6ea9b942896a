"""SlotAllocator: claims and releases of slots by id, refusals, counts, and misuse that breaks nothing."""

import numpy as np
import pytest
import torch

from memstate import DeviceFault, DoubleRelease, InvalidArgument, OutOfSlots, SlotAllocator
from memstate.kernels.dispatch import Backend
from tests.support.scan import scan_bitmap

SIZES = (1, 31, 32, 33, 63, 64, 1000)


def picture(allocator: SlotAllocator) -> tuple[object, ...]:
    """Returns all that a refused call must not change."""
    counts = allocator.backend.counts
    return allocator.bitmap.tolist(), allocator.counters.tolist(), allocator.free, dict(counts.launches), counts.uploads


@pytest.mark.parametrize("capacity", SIZES)
def test_B1_capacity_slots_and_not_one_more(backend: Backend, capacity: int) -> None:
    allocator = SlotAllocator(capacity, backend)
    ids = [*allocator.claim(capacity // 2).tolist(), *allocator.claim(capacity - capacity // 2).tolist()]
    assert ids == list(range(1, capacity + 1))
    allocator.release(ids[: capacity // 3])
    free = capacity // 3
    before = picture(allocator)
    with pytest.raises(OutOfSlots, match=rf"{free + 1} slots requested, {free} free") as refused:
        allocator.claim(free + 1)
    assert (refused.value.requested, refused.value.free) == (free + 1, free)
    assert picture(allocator) == before
    scan_bitmap(allocator, ids[free:])


@pytest.mark.parametrize("n", [-1, 1.0, 2.5, True, None, "3", [1], np.float32(2), torch.tensor(2.0)], ids=repr)
def test_B3_a_count_that_is_none_raises(n: object) -> None:
    allocator = SlotAllocator(4, Backend("reference"))
    before = picture(allocator)
    for misuse in (allocator.claim, allocator.group):
        with pytest.raises(InvalidArgument, match=r"^claim\(.*: expected a number of slots"):
            misuse(n)
    assert picture(allocator) == before


def test_G1_a_pool_that_cannot_be_is_refused() -> None:
    for capacity, *reserve in ((0,), (-1,), (2.5,), (True,), (4, 5), (4, -1)):
        with pytest.raises(InvalidArgument, match=r"^(slots=|reserve )[-\dT]"):
            SlotAllocator(capacity, Backend("reference"), *reserve)


def test_B5_double_releases_are_counted_and_told_once(backend: Backend) -> None:
    """Double releases come in one call, and over several calls."""
    allocator = SlotAllocator(40, backend)
    ids = allocator.claim(35)
    allocator.release(torch.cat([ids[33:35], ids[33:34], ids[33:34]]))
    with pytest.raises(DoubleRelease) as error:
        allocator.check()
    assert (error.value.count, error.value.offender) == (2, 34)
    for _ in range(3):
        allocator.release(ids[4:6])
    with pytest.raises(DoubleRelease) as error:
        allocator.check()
    assert (error.value.count, error.value.offender) == (4, 5)
    allocator.check()
    allocator.release([6, 99])
    with pytest.raises(DoubleRelease) as error:
        allocator.check()
    assert (error.value.count, error.value.offender) == (1, 6)
    assert error.value.counts == {"double_release": 1, "out_of_range": 1}
    scan_bitmap(allocator, [slot for slot in range(1, 34) if slot not in (5, 6)])


@pytest.mark.parametrize("ids", [[0], [-1], [0, 0, -7, -(2**31)], torch.tensor([-(2**60)])], ids=repr)
def test_B6_null_and_negative_ids_are_no_slots(backend: Backend, ids: object) -> None:
    allocator = SlotAllocator(3, backend)
    held = allocator.claim(3).tolist()
    allocator.release(ids)  # type: ignore[arg-type]
    with pytest.raises(OutOfSlots):
        allocator.claim(1)
    assert allocator.free == 0
    allocator.check()  # the device reports no fault either
    scan_bitmap(allocator, held)


@pytest.mark.parametrize(
    "form",
    [
        lambda ids: ids.to(torch.int64),
        lambda ids: ids.to(torch.uint8),
        lambda ids: ids.to(torch.int16),
        lambda ids: ids.cpu(),
        lambda ids: ids.cpu().numpy(),
        lambda ids: ids.tolist(),
        lambda ids: tuple(ids.tolist()),
        lambda ids: ids.view(2, 3).t(),
        lambda ids: torch.stack([ids, ids * 0], 1)[:, 0],
    ],
    ids=["int64", "uint8", "int16", "cpu", "numpy", "list", "tuple", "transposed", "strided"],
)
def test_B7_ids_in_any_integer_form_are_understood(backend: Backend, form) -> None:  # type: ignore[no-untyped-def]
    """A single id is accepted, too. Ids that are on the device already are not uploaded."""
    allocator = SlotAllocator(8, backend)
    ids = allocator.claim(8)
    allocator.release(ids[7])
    assert backend.counts.uploads == 0
    allocator.release(form(ids[:6]))
    allocator.check()
    assert scan_bitmap(allocator, [7]).free == [1, 2, 3, 4, 5, 6, 8]


@pytest.mark.parametrize(
    "ids", [[1.0], torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1j]), "12", None, [2**70]], ids=repr
)
def test_B7_ids_that_are_none_raise(backend: Backend, ids: object) -> None:
    allocator = SlotAllocator(7, backend)
    allocator.claim(3)
    before = picture(allocator)
    with pytest.raises(InvalidArgument, match=r"^slot ids .*: expected integers"):
        allocator.release(ids)  # type: ignore[arg-type]
    assert picture(allocator) == before


def test_B8_what_is_handed_out_is_the_callers_own(backend: Backend) -> None:
    allocator = SlotAllocator(9, backend)
    first, second = allocator.claim(3), allocator.claim(3)
    first.fill_(9)
    assert second.tolist() == [4, 5, 6]
    with allocator.group(3) as group:
        one, two = group.claim(1), group.claim(1)
        one.fill_(0)
        assert two.tolist() == [8]
    scan_bitmap(allocator, [1, 2, 3, 4, 5, 6, 7, 8])


def test_B1_none_instead_of_an_error(backend: Backend) -> None:
    allocator = SlotAllocator(3, backend)
    ids = allocator.claim(2, or_none=True)
    assert ids is not None and ids.tolist() == [1, 2]
    before = picture(allocator)
    assert allocator.claim(2, or_none=True) is None
    assert picture(allocator) == before
    with pytest.raises(InvalidArgument, match=r"^claim\(-1\)"):
        allocator.claim(-1, or_none=True)
    allocator.check()  # the refused call was not left in the middle


def test_B2_ids_of_64_bits(backend: Backend) -> None:
    allocator = SlotAllocator(5, backend, dtype=torch.int64)
    ids = allocator.claim(2)
    with allocator.group(2) as group:
        claims = [ids, group.held, group.claim(1), allocator.claim(0)]
    assert [(each.dtype, each.tolist()) for each in claims] == [
        (torch.int64, [1, 2]), (torch.int64, [3, 4]), (torch.int64, [3]), (torch.int64, []),
    ]  # fmt: skip
    allocator.release(ids)
    assert allocator.free_ids() == [1, 2, 4, 5]
    with pytest.raises(InvalidArgument, match="int16"):
        SlotAllocator(5, backend, dtype=torch.int16)


def test_B5_the_count_follows_the_device_without_waiting(backend: Backend) -> None:
    allocator = SlotAllocator(8, backend)
    ids = allocator.claim(4)
    allocator.follow()
    assert backend.counts.uploads == backend.counts.syncs == 0
    allocator.release([int(ids[0]), 7, 0, -1, 9])  # only the first id has an owner
    assert allocator.free == 9
    allocator.follow()
    if backend.device.type == "cuda":
        torch.cuda.synchronize()
        allocator.follow()
    assert (allocator.free, allocator.unconfirmed, backend.counts.syncs) == (5, 0, 0)
    assert allocator.claim(5).tolist() == [1, 5, 6, 7, 8]  # the claim does not wait for the device's count
    assert backend.counts.syncs == 0
    with pytest.raises(DoubleRelease):
        allocator.check()


def test_B5_claims_that_never_wait(backend: Backend) -> None:
    """After a wrong release, a later claim lacks a slot: it gets the null slot instead, not a slot that has
    an owner.
    """
    allocator = SlotAllocator(2, backend, verify=False)
    first = allocator.claim(2)
    allocator.release(first[:1])
    assert allocator.claim(1).tolist() == [1]
    allocator.release([2, 2])
    assert (allocator.claim(2).tolist(), backend.counts.syncs) == ([2, 0], 0)
    with pytest.raises(DoubleRelease):
        allocator.check()
    assert allocator.free == 0


def test_G1_a_short_claim_on_the_device_is_a_fault_that_check_raises(backend: Backend) -> None:
    """The host's count prevents short claims. Here the operation is called directly and asks for too many slots."""
    allocator = SlotAllocator(3, backend)
    assert backend.claim(allocator.bitmap, 5, allocator.counters).tolist() == [1, 2, 3, 0, 0]
    with pytest.raises(DeviceFault, match="claim short"):
        allocator.check()
