"""Tests the allocator of slot ids for SGLang, without SGLang."""

import random
import re
from pathlib import Path

import pytest
import torch

from memstate import DeviceFault, DoubleRelease, InvalidArgument
from memstate.integrations.sglang import VERSIONS, MambaSlotAllocator
from memstate.integrations.sglang.track import TrackBuffer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def slots() -> MambaSlotAllocator:
    return MambaSlotAllocator(5, "cpu")


def ids(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_all_slots_and_not_one_more(slots: MambaSlotAllocator) -> None:
    claims = [slots.alloc(1), slots.alloc(2), slots.alloc(0), slots.alloc(2)]
    assert [each.tolist() for each in claims if each is not None] == [[1], [2, 3], [], [4, 5]]
    assert all(each is not None and each.dtype == torch.int64 for each in claims)
    assert (slots.alloc(1), slots.alloc(3), slots.available_size()) == (None, None, 0)
    with pytest.raises(InvalidArgument):
        slots.alloc(-1)


def test_one_claim_for_many_that_want_one() -> None:
    slots = MambaSlotAllocator(100, "cpu")
    counts = slots.slots.backend.counts
    claims = [slots.alloc(1) for _ in range(32)]
    assert sorted(int(each) for each in claims if each is not None) == list(range(1, 33))
    assert dict(counts.launches) == {"claim": 1}
    for each in claims[:20]:
        assert each is not None
        slots.free(each)
    assert (slots.available_size(), dict(counts.launches), counts.syncs) == (88, {"claim": 1, "release": 1}, 0)


@pytest.mark.parametrize("copy", [True, False])
def test_what_is_freed_may_be_overwritten(copy: bool) -> None:
    """With copy=True the caller may overwrite a freed tensor; with copy=False the slots in it are lost."""
    slots = MambaSlotAllocator(4, "cpu", copy=copy)
    first = slots.alloc(2)
    assert first is not None
    mine = first.clone()
    slots.free(mine)
    mine.fill_(0)
    assert slots.free_slots.tolist() == ([1, 2, 3, 4] if copy else [3, 4])


def test_wrong_frees_change_nothing_and_are_found(slots: MambaSlotAllocator) -> None:
    owned = slots.alloc(3)
    assert owned is not None
    for wrong in (ids(0), ids(-1), ids(99), ids(4), ids()):  # slot 4 was never claimed
        slots.free(wrong)
        assert slots.available_size() == 2
    with pytest.raises(DeviceFault, match="out_of_range"):
        slots.check()
    slots.free(owned[:1])
    slots.free(owned[:1])
    assert (slots.available_size(), sorted(slots.free_slots.tolist())) == (3, [1, 4, 5])
    one = slots.alloc(1)  # this call moves all free slots to the stock
    assert one is not None
    slots.free(ids(5))  # slot 5 is in the stock
    assert (slots.available_size(), slots.alloc(3)) == (2, None)
    with pytest.raises(DoubleRelease):
        slots.check()
    for misuse in (torch.tensor([1.0]), torch.tensor([True]), [1], None):
        with pytest.raises(InvalidArgument):
            slots.free(misuse)  # type: ignore[arg-type]
    slots.check()


def test_a_claim_after_a_wrong_free_gets_no_null_slot(slots: MambaSlotAllocator) -> None:
    owned = slots.alloc(4)
    slots.free(ids(99))
    assert slots.free_slots.tolist() == [5]  # reading free_slots applies the wrong free
    assert owned is not None and slots.alloc(2) is None


@pytest.mark.parametrize("grouped", [False, True], ids=["stock", "group"])
def test_a_second_free_of_a_slot_that_waits_to_be_handed_out(slots: MambaSlotAllocator, grouped: bool) -> None:
    """If nobody has claimed a slot since it was freed, a second free of it changes nothing."""
    first = slots.alloc(3)
    assert first is not None
    slots.free(first)
    assert slots.available_size() == 5
    if grouped:
        slots.alloc_group_begin(3)
    owned = [slots.alloc(1)]
    slots.free(first[1:2])  # a second free: the slot is in the stock or the group
    owned += [slots.alloc(1) for _ in range(2)]
    slots.free(first[1:2])  # a right free: the slot was claimed again
    slots.alloc_group_end()
    owned[1] = slots.alloc(1)
    owned += [slots.alloc(1) for _ in range(3)]
    assert sorted(int(each) for each in owned if each is not None) == [1, 2, 3, 4, 5]
    assert slots.available_size() == 0
    with pytest.raises(DeviceFault, match="the first on 7"):
        slots.check()


@pytest.mark.parametrize("kind", [torch.int8, torch.int32, torch.uint8, torch.uint16, torch.uint64])
def test_ids_of_other_kinds(slots: MambaSlotAllocator, kind: torch.dtype) -> None:
    owned = slots.alloc(4)
    assert owned is not None
    slots.free(owned[::2].to(kind))
    slots.free(owned[1])
    assert (slots.available_size(), slots.free_slots.tolist()) == (4, [1, 2, 3, 5])


@pytest.mark.parametrize("wrong", [torch.empty(2, dtype=torch.int64, device="meta"), torch.tensor([1j])])
def test_what_is_refused_loses_nothing(slots: MambaSlotAllocator, wrong: torch.Tensor) -> None:
    owned = slots.alloc(1)
    assert owned is not None
    with pytest.raises(InvalidArgument):
        slots.free(wrong)
    for number in (None, -1, "1"):
        with pytest.raises(InvalidArgument):
            slots.alloc_group_begin(number)  # type: ignore[arg-type]
    slots.free(owned)
    assert (slots.available_size(), len(slots.free_slots)) == (5, 5)


def test_groups(slots: MambaSlotAllocator) -> None:
    slots.alloc_group_begin(3)
    assert (slots.available_size(), slots.schedulable_available_size()) == (2, 5)
    first = slots.alloc(1)
    assert first is not None and first.tolist() == [1]
    slots.alloc_group_begin(2)  # SGLang drops the rest of the first group
    assert (slots.available_size(), slots.schedulable_available_size()) == (2, 4)
    slots.alloc_group_end()
    slots.alloc_group_end()
    assert slots.available_size() == 4
    slots.alloc_group_begin(5)  # too many slots, so no group begins
    assert (slots.available_size(), slots.schedulable_available_size()) == (4, 4)
    slots.alloc_group_begin(2)
    slots.clear()  # SGLang itself would still hand out the group's slots
    assert (slots.available_size(), slots.schedulable_available_size()) == (5, 5)
    assert sorted(int(slots.alloc(1)) for _ in range(5)) == [1, 2, 3, 4, 5]  # type: ignore[arg-type]


def test_B9c_a_claim_can_have_the_slots_of_an_open_group(slots: MambaSlotAllocator) -> None:
    slots.alloc_group_begin(3)
    assert slots.alloc(6) is None and slots.schedulable_available_size() == 5
    first = slots.alloc(1)
    many = slots.alloc(3)  # two free slots, and one of the group
    assert first is not None and many is not None and len({*first.tolist(), *many.tolist()}) == 4
    assert slots.schedulable_available_size() == 1
    slots.alloc_group_end()
    assert slots.available_size() == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_no_slot_has_two_owners(seed: int) -> None:
    rng, size = random.Random(seed), 40
    slots, owned = MambaSlotAllocator(size, "cpu"), []
    for _ in range(150):
        match rng.randrange(6):
            case 0:
                slots.alloc_group_begin(rng.randrange(12))
            case 1:
                slots.alloc_group_end()
            case 2 | 3 if owned:
                cut = rng.randrange(1, 4)
                slots.free(ids(*owned[:cut]))
                owned = owned[cut:]
            case _:
                n = rng.choice((1, 1, 1, 2, 5))
                got, there = slots.alloc(n), slots.schedulable_available_size()
                assert got is not None or there < n, (seed, n, there)
                owned += [] if got is None else got.tolist()
        rng.shuffle(owned)
        assert len(set(owned)) == len(owned) and set(owned) <= set(range(1, size + 1)), seed
        assert slots.schedulable_available_size() == size - len(owned), seed
    slots.check()


@pytest.mark.parametrize("mask", [False, True], ids=["0.5.21", "0.5.22"])
def test_track_buffer_is_freed(slots: MambaSlotAllocator, mask: bool) -> None:
    """SGLang frees the track buffer of a session; entries without a slot free nothing."""
    none = ids(-1)
    claimed = slots.alloc(4)
    assert claimed is not None
    full, half = TrackBuffer(claimed, 1, 2, 2, none), TrackBuffer(claimed, 3, 1, 2, none)
    for buffer in (full, half):
        slots.free(buffer[buffer != -1] if mask else buffer)
    assert slots.available_size() == 4
    assert sorted(slots.free_slots.tolist()) == [2, 3, 4, 5]
    slots.check()


def test_versions() -> None:
    """docs/sglang.md has a line for each version of SGLang, the newest first; the engine proof runs the newest."""
    page = (ROOT / "docs" / "sglang.md").read_text()
    assert tuple(re.findall(r"^\| (\d+\.\d+\.\d+) \|", page, re.MULTILINE)) == VERSIONS[::-1]
    assert f"sglang=={VERSIONS[-1]}" in (ROOT / "tests/proof/engines/sglang/pins.txt").read_text().split()
