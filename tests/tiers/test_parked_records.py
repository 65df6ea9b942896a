"""Records and pages of parked requests: which are copied, pinned, shared, and wait on the device."""

import pytest

import memstate as ms
from tests.support import owners
from tests.support.parked import OTHER, TEXT, Station, refused, tailed
from tests.support.tiered_small import PAGE


def test_room_for_states_comes_first_and_too_little_is_back_pressure() -> None:
    """Records that nobody needs make way. Those of parked requests stay."""
    at = Station({"host_slots": 2})
    rows = at.start(TEXT[:9], OTHER[:9], [9] * 9)
    refused(at.mem, ms.OutOfRecords, "3 state records requested, room for 2 of 2: .*", lambda: at.mem.park(rows))
    parked = at.park(*rows[:2])
    refused(at.mem, ms.OutOfRecords, "1 state records requested, room for 0 of 2", lambda: at.mem.park(rows[2:]))
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


def test_a_page_that_is_below_is_pinned_and_not_copied() -> None:
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
    assert at.mem.free_pages == free - 3 and at.below.parked.above == 3
    at.mem.audit().raise_if_leaking()
    held = [*at.below.parked.on_device()][1]
    (row,) = at.resume([two])
    assert owners.pages_of(at.mem, row)[:3] == held and at.mem.free_pages == free - 3
    (two,) = at.park(row)
    at.mem.drop([one])
    at.mem.submit()
    at.mem.poll()
    assert (at.mem.free_pages, at.below.parked.above) == (free, 0)
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
        assert (at.mem.free_pages, at.below.parked.above) == (free, 0)
    at.finish()
