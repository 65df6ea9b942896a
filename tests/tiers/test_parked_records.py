"""Records and pages of parked requests: which are copied, pinned, shared, and wait on the device."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import memstate as ms
from tests.support import owners
from tests.support.build import on
from tests.support.parked import OTHER, TEXT, Station, refused, tailed
from tests.support.tiered_small import CPU, PAGE


def test_room_for_states_comes_first_and_too_little_is_back_pressure() -> None:
    """Records that nobody needs make way. Those of parked requests stay."""
    at = Station({"host_slots": 2})
    rows = at.start(TEXT[:9], OTHER[:9], [9] * 9)
    refused(at.mem, ms.OutOfRecords, "3 state records requested, room for 2 of 2: .*", lambda: at.mem.park(rows))
    parked = at.park(*rows[:2])
    refused(at.mem, ms.OutOfRecords, "room for 0 of 2: poll .*, or let parked", lambda: at.mem.park(rows[2:]))
    at.mem.drop(parked[:1])
    at.mem.poll()
    parked += at.park(rows[2])
    at.resume(parked[1:])
    at.finish()


def test_rows_of_which_the_last_has_no_record_are_all_refused() -> None:
    mem = tailed(tracking=ms.Redirect(PAGE))
    rows = mem.admit([ms.Request(n, 40) for n in range(3)])
    mem.settle(mem.plan(rows, 3))
    mem.settle(mem.plan(rows, 1, defer=4))
    pool = mem.tiers.host.of_rows.cache.pool
    taken = pool.claim(2)
    with pytest.raises(ms.OutOfRecords, match="3 row records requested, room for 2 of 4"):
        mem.park(rows)
    assert mem.tiers.host.states.pool.claimed == 0 and len(mem.tiers.parked) == 0
    pool.release(taken)
    mem.drop(mem.park(rows))
    mem.audit().raise_if_leaking()


def test_B84_a_page_that_is_below_is_pinned_and_not_copied() -> None:
    """Only the state and the partly filled page are copied. The same goes for a second request with these tokens."""
    at = Station({"write": "through"}, tracking=ms.Redirect(PAGE))
    rows = at.start(TEXT[: 4 * PAGE + 2])
    at.mem.publish(rows, keep="cache", tokens=[at.text[rows[0]]])
    at.mem.poll()
    states, _, pages, _ = at.below.host.moved
    assert pages == 4
    (parked,) = at.park(*rows, known=True)
    at.mem.submit()
    assert at.below.host.moved[::2] == (states + 1, pages + 1)
    at.mem.poll()
    cache = at.below.host.kv
    assert cache.evict(99) == 0 and cache.pool.claimed == 5, "all are pinned"
    at.mem.prefix.clear()
    at.mem.drop([parked])
    assert cache.pool.claimed == 4 and cache.evict(99) == 4
    at.finish()


def test_whole_pages_of_known_tokens_are_found_by_prompts() -> None:
    """The second of two parked requests with the same tokens copies only what it has alone."""
    at = Station(tracking=ms.Redirect(PAGE))
    rows = at.start(TEXT[:9], TEXT[:11])
    parked = at.park(*rows, known=True)
    at.mem.submit()
    assert at.below.host.moved[2] == 2 + 1 + 1
    at.mem.drop(parked[:1])
    at.scribble()
    at.resume(parked[1:])
    at.finish()


def test_a_page_that_is_not_full_is_nobody_elses() -> None:
    """The prompt knows the tokens of a whole page, of which only half is computed."""
    at = Station()
    half, full = at.admit(TEXT[:12], TEXT[:12])
    at.reach(half, 6)
    at.reach(full)
    parked = [*at.park(half), *at.park(full)]
    at.mem.submit()
    assert at.below.host.moved[2] == 2 + 2
    at.mem.drop(parked[:1])
    at.scribble()
    at.resume(parked[1:])
    at.finish()


def test_other_tenants_and_unknown_tokens_share_no_record() -> None:
    at = Station()
    for salt in ("a", "b"):
        (row,) = at.admit(TEXT[:9], salt=salt)
        at.reach(row)
        at.park(row, known=True)
    (row,) = at.start(TEXT[:9])
    at.text[row][1] = 99  # not what the prompt said
    at.mem.park([row])
    del at.text[row]
    at.mem.submit()
    assert at.below.host.moved[2] == 9
    at.mem.recover(keep=False)
    at.finish()


def test_pages_without_room_stay_with_the_handle_and_are_shared_when_it_goes_on() -> None:
    """Host memory has 3 pages, for 2 requests of 3 pages each. The free pages of the device show who has which."""
    at = Station({"host_pages": 3})
    free = at.mem.free_pages
    rows = at.start(TEXT[:9], OTHER[:9])
    one, two = at.park(*rows)
    at.mem.poll()
    assert at.mem.free_pages == free - 3 and len(at.below.parked.above) == 3
    at.mem.audit().raise_if_leaking()
    held = [part.index for part in at.below.parked.above]
    (row,) = at.resume([two])
    assert owners.pages_of(at.mem, row)[:3] == held and at.mem.free_pages == free - 3
    (two,) = at.park(row)
    at.mem.drop([one])
    at.mem.submit()
    at.mem.poll()
    assert (at.mem.free_pages, len(at.below.parked.above)) == (free, 0)
    at.scribble()
    at.resume([two])
    at.finish()


def test_pages_on_the_device_are_freed_by_drop_and_lost_by_recover() -> None:
    at = Station({"host_pages": 1})
    free = at.mem.free_pages
    for end in (at.mem.drop, lambda parked: at.mem.recover()):
        parked = at.park(*at.start(TEXT[:9]))
        assert at.mem.free_pages == free - 2
        end(parked)
        assert (at.mem.free_pages, len(at.below.parked.above)) == (free, 0)
    at.finish()


# -- counts ----------------------------------------------------------------------------------------


def spent(mem: ms.StateManager, call: Callable[[], Any]) -> tuple[Any, dict[str, int], int]:
    """Returns what a call returns, its launches by name, and its uploads. It must not wait for the device."""
    counts = mem.backend.counts
    counts.reset()
    answer = call()
    assert counts.syncs == 0
    return answer, dict(counts.launches), counts.uploads


def batches(records: int, staging: int) -> int:
    return -(-records // staging)


@pytest.fixture
def poison() -> None:
    """Does nothing: poison would count as work of the device."""


@pytest.mark.parametrize(("n", "staging"), [(1, 1), (1, 8), (4, 1), (4, 3), (4, 8)])
def test_B84_a_park_is_a_launch_for_each_kind_and_filling_and_an_admit_one_more(
    monkeypatch: pytest.MonkeyPatch, n: int, staging: int
) -> None:
    """Here, states and pages have records of one size, so that staging has room for as many of each."""
    monkeypatch.setattr("memstate.tiers.sizing.KV_STAGING", 0)
    at = Station({"staging": staging})
    rows = at.start(*([i] * (PAGE + 1) for i in range(n)))
    at.mem.submit()
    packs = batches(n, staging) + batches(2 * n, staging)
    parked, launches, uploads = spent(at.mem, lambda: at.park(*rows))
    assert (launches, uploads) == ({"pack_slots": packs}, packs)
    assert spent(at.mem, at.mem.submit)[1:] == ({"ownership": 1}, 1)
    again = lambda: at.mem.admit([ms.Request(i, resume=one) for i, one in enumerate(parked)])  # noqa: E731
    _, launches, uploads = spent(at.mem, again)
    assert launches == {"ownership": 1, "unpack_slots": packs} and uploads == 1 + 2


def test_memory_of_rows_is_a_launch_more() -> None:
    mem = tailed(tracking=ms.Redirect(PAGE))
    rows = mem.admit([ms.Request(n, 40) for n in range(3)])
    mem.settle(mem.plan(rows, 3))
    mem.settle(mem.plan(rows[1:], 1, defer=4))
    mem.submit()
    parked, launches, uploads = spent(mem, lambda: mem.park(rows[:2]))
    assert (launches, uploads) == ({"pack_slots": 2}, 2)
    assert [each.cache.pool.claimed for each in mem.tiers.host.sets] == [2, 1]
    mem.submit()
    _, launches, uploads = spent(
        mem, lambda: mem.admit([ms.Request(i, 40, resume=one) for i, one in enumerate(parked)])
    )
    assert launches.pop("unpack_slots") == 2 and launches.pop("ownership") == 1


@pytest.mark.parametrize("between", [False, True])
def test_B84_a_step_of_other_rows_costs_what_it_costs_beside_an_end(between: bool) -> None:
    """The packs come on top. What frees slots and pages goes with the next packet."""
    costs = []
    for leave in (Station.park, lambda at, row: at.mem.end([row])):
        at = Station()
        row, other = at.start(TEXT[:5], OTHER[:5])
        at.mem.submit()

        def work(at: Station = at, row: ms.Row = row, other: ms.Row = other, leave: Any = leave) -> None:
            if not between:
                leave(at, row)
            at.step([other], 1, (lambda step: leave(at, row)) if between else None)

        costs.append(spent(at.mem, work)[1:])
    (launches, uploads), end = costs
    assert launches.pop("pack_slots") == 2
    assert (launches, uploads - 2) == end


def test_B84_bytes_are_those_of_the_states_and_pages() -> None:
    """Of states and pages of real size, headers and padding are below 1 %. A page that is below moves nothing."""
    planes = (ms.Plane("ssm", (4, 64, 64), torch.float32), ms.Plane("conv", (3, 1024), torch.bfloat16))
    kv = ms.Planes(ms.StateLayout([ms.Plane("k", (16, 2, 64), torch.bfloat16)], layers=4), 12, ms.Backend("reference"))
    mem = on(
        CPU, layout := ms.StateLayout(planes, layers=2), slots=4, max_requests=2, prefix=ms.Prefix(), pages=12,
        page_size=16, pages_per_row=6, tiers=ms.Tiers("toy", host_slots=4, kv=kv, write="back"),
    )  # fmt: skip
    rows = mem.admit([ms.Request(n, tokens=range(41)) for n in range(2)])
    mem.settle(mem.plan(rows, 41))
    host = mem.tiers.host
    mem.park(rows)
    mem.submit()
    states, _, pages, _ = host.moved
    assert (states, pages) == (2, 2 + 2), "two whole pages are the same, and each has a page of its own"
    moved = states * host.states.form.body_bytes + pages * host.kv.form.body_bytes
    assert moved <= 1.01 * (2 * layout.payload_bytes_per_slot + 4 * kv.layout.payload_bytes_per_slot)
