"""Claim groups: a batch claimed up front and handed out one by one leaves no slot behind, however it ends."""

import pytest

from memstate import InvalidArgument, OutOfSlots, SlotAllocator
from memstate.kernels.dispatch import Backend
from tests.support.scan import scan_bitmap

pytestmark = pytest.mark.sample(interpreter=0)  # the same host code on every backend


class Interrupted(Exception):
    """What goes wrong inside a group."""


@pytest.fixture
def allocator(backend: Backend) -> SlotAllocator:
    return SlotAllocator(10, backend)


def test_B9_normal_end(allocator: SlotAllocator) -> None:
    with allocator.group(6) as group:
        assert [group.claim(1).tolist(), group.claim(2).tolist()] == [[1], [2, 3]]
        assert (group.left, group.held.tolist(), allocator.free) == (3, [4, 5, 6], 4)
        assert dict(allocator.backend.counts.launches) == {"claim": 1}  # for the batch, and none for each
    assert allocator.open_groups == []
    assert scan_bitmap(allocator, [1, 2, 3]).free == [4, 5, 6, 7, 8, 9, 10]
    allocator.check()


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
        group.claim(1)  # closed
    group.give_back()  # a second time changes nothing
    assert allocator.open_groups == []
    scan_bitmap(allocator, [])
    allocator.check()


def test_B9_reset_inside_voids_the_group(allocator: SlotAllocator) -> None:
    """Its slots belong to others after the reset: the end of the group must not give them away."""
    with allocator.group(6) as group:
        group.claim(1)
        allocator.reset()
        assert group.left == 0
        with pytest.raises(OutOfSlots):
            group.claim(1)
        others = allocator.claim(10).tolist()
    allocator.check()
    scan_bitmap(allocator, others)


def test_B9_reset_inside_nested_groups(allocator: SlotAllocator) -> None:
    with allocator.group(3) as outer:
        with allocator.group(3) as inner:
            allocator.reset()
            assert (outer.left, inner.left) == (0, 0)
            others = allocator.claim(8).tolist()
        with allocator.group(2) as late:  # opened after the reset, so it counts
            assert late.claim(1).tolist() == [9]
    allocator.check()
    scan_bitmap(allocator, [*others, 9])


def test_B9_group_inside_a_group(allocator: SlotAllocator) -> None:
    with allocator.group(4) as outer:
        mine = outer.claim(1).tolist()
        with allocator.group(4) as inner:
            mine += inner.claim(2).tolist()
            scan_bitmap(allocator, [*mine, *outer.held.tolist(), *inner.held.tolist()])
        mine += outer.claim(2).tolist()
    assert sorted(mine) == [1, 2, 3, 5, 6]
    scan_bitmap(allocator, mine)
    allocator.check()


def test_B9_direct_claim_uses_what_the_group_holds(allocator: SlotAllocator) -> None:
    with allocator.group(8) as group:
        mine = group.claim(1).tolist()
        mine += allocator.claim(2).tolist()  # these were free
        assert mine == [1, 9, 10]
        mine += allocator.claim(3).tolist()  # these are the group's
        mine += group.claim(4).tolist()  # what the direct claim left
        assert sorted(mine) == list(range(1, 11))
    scan_bitmap(allocator, mine)
    allocator.check()


def test_B9_direct_claim_beyond_free_and_held_changes_nothing(allocator: SlotAllocator) -> None:
    with allocator.group(8) as group:
        group.claim(3)
        with pytest.raises(OutOfSlots) as refused:
            allocator.claim(8)
        assert (refused.value.requested, refused.value.free) == (8, 7)
        assert (group.left, allocator.free) == (5, 2)
    scan_bitmap(allocator, [1, 2, 3])


def test_B9_double_releases_inside_do_not_feed_the_group(allocator: SlotAllocator) -> None:
    """A phantom free slot on the host must not become slot 0 in someone's hand."""
    with allocator.group(8) as group:
        mine = group.claim(8).tolist()
        for _ in range(3):
            allocator.release([mine[0]])
        taken = allocator.claim(3).tolist()
        assert sorted(taken) == [1, 9, 10]
        with pytest.raises(OutOfSlots):
            allocator.claim(1)
    scan_bitmap(allocator, range(1, 11))


def test_B9_without_a_with_statement(allocator: SlotAllocator) -> None:
    group = allocator.group(4)
    assert (group.claim(1).tolist(), allocator.free) == ([1], 6)
    group.close()
    group.close()
    assert (allocator.open_groups, allocator.free, group.left) == ([], 9, 0)
    scan_bitmap(allocator, [1])
