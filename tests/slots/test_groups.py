"""Claim groups: a batch claimed up front and handed out one by one leaves no slot behind, however it ends."""

import pytest

from memstate import InvalidArgument, OutOfSlots, SlotAllocator
from memstate.kernels.dispatch import Backend
from tests.support.scan import scan_bitmap


class Interrupted(Exception):
    """The error that a test raises inside a group."""


@pytest.fixture
def allocator(backend: Backend) -> SlotAllocator:
    return SlotAllocator(10, backend)


def test_B9_exception_inside(allocator: SlotAllocator) -> None:
    with allocator.group(2) as outer:
        with pytest.raises(Interrupted), allocator.group(4):
            raise Interrupted
        outer.claim(2)
    with pytest.raises(Interrupted), allocator.group(6) as group:
        group.claim(2)
        raise Interrupted
    scan_bitmap(allocator, [1, 2, 3, 4])
    allocator.check()


def test_B9_what_a_group_cannot_give_is_refused(allocator: SlotAllocator) -> None:
    with pytest.raises(OutOfSlots, match=r"^11 slots requested, 10 free"), allocator.group(11):
        pytest.fail("opened")
    with allocator.group(4) as group:
        for n in (-1, 1.5, True, None):
            with pytest.raises(InvalidArgument, match="expected a number of slots"):
                group.claim(n)  # type: ignore[arg-type]
        assert group.left == 4
    with pytest.raises(OutOfSlots):
        group.claim(1)  # the group is closed
    group.give_back()  # a second call changes nothing
    assert allocator.open_groups == []
    scan_bitmap(allocator, [])
    allocator.check()


def test_B9_reset_inside_voids_the_group(allocator: SlotAllocator) -> None:
    """After the reset, the group's slots belong to others: the end of the group must not release them."""
    with allocator.group(6) as group:
        group.claim(1)
        allocator.reset()
        assert group.left == 0
        with pytest.raises(OutOfSlots):
            group.claim(1)
        others = allocator.claim(10).tolist()
    allocator.check()
    scan_bitmap(allocator, others)


def test_B9_direct_claim_uses_what_the_group_holds(allocator: SlotAllocator) -> None:
    with allocator.group(8) as group:
        mine = group.claim(1).tolist()
        mine += allocator.claim(2).tolist()  # free slots come first
        assert mine == [1, 9, 10]
        mine += allocator.claim(3).tolist()  # then slots of the group are taken
        mine += group.claim(4).tolist()  # then the group has its rest
        assert sorted(mine) == list(range(1, 11))
    scan_bitmap(allocator, mine)
    allocator.check()


def test_B9_double_releases_inside_do_not_feed_the_group(allocator: SlotAllocator) -> None:
    """The host believes a slot free that the device does not. A claim must not give slot 0 to the caller instead."""
    with allocator.group(8) as group:
        mine = group.claim(8).tolist()
        for _ in range(3):
            allocator.release([mine[0]])
        taken = allocator.claim(3).tolist()
        assert sorted(taken) == [1, 9, 10]
        with pytest.raises(OutOfSlots):
            allocator.claim(1)
    scan_bitmap(allocator, range(1, 11))
