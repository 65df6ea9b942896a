"""Parks and loads never make the work stream wait for the host, on the fake devices of `tests/support/fake_cuda.py`.

The streams that copy to host memory lag behind, and staging has room for few records.
"""

from collections.abc import Iterator
from typing import Any

import pytest

import memstate as ms
from tests.support import owners
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.parked import OTHER, TEXT, Station, refused
from tests.support.tiered_small import PAGE

DEVICE = "cuda:1"


@pytest.fixture
def poison() -> None:
    """Does nothing: poison reads the device, so that the host would wait."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr("memstate.tiers.sizing.KV_STAGING", 0)
    with fake_cuda(monkeypatch) as fake:
        yield fake


class Lagging(Station):
    """A station on a fake device, of which staging has room for `staging` states and as many pages."""

    def __init__(self, cuda: FakeCuda, staging: int, **more: Any) -> None:
        super().__init__({"staging": staging}, DEVICE, **more)
        self.cuda, self.main = cuda, cuda.current_stream(1)
        self.down = [each.transfers._streams[0] for each in self.below.host.sets]
        cuda.lag(*self.down)
        cuda.waits.clear()

    def land(self) -> None:
        """Lets all copies to host memory arrive, and the host hear of it."""
        for stream in self.down:
            self.cuda.advance(stream, 99)

    @property
    def above(self) -> list[int]:
        """Returns for each parked request, oldest first, the number of its pages on the device."""
        parked = self.below.parked
        return [sum(part in parked.above for part in parts) for parts in parked._of.values()]


def test_a_park_makes_nobody_wait_and_its_slots_may_be_used_at_once(cuda: FakeCuda) -> None:
    at = Lagging(cuda, staging=4)
    rows = at.start(TEXT[:5], OTHER[:7])
    cuda.waits.clear()
    parked = at.park(*rows)
    at.mem.submit()
    assert at.main not in cuda.waits
    at.scribble()
    assert at.below.host.backups
    at.resume(parked)  # its loads wait for the bytes that are still leaving
    at.land()
    at.finish()


def test_a_step_beside_a_park_does_not_wait(cuda: FakeCuda) -> None:
    at = Lagging(cuda, staging=4)
    rows = at.start(TEXT[:5], OTHER[:7])
    cuda.waits.clear()
    at.step(rows, 1, lambda step: at.park(rows[0]))
    at.step(rows[1:], 1)
    assert at.main not in cuda.waits and at.below.host.backups


def test_states_need_staging_at_once(cuda: FakeCuda) -> None:
    """A save behind a forward keeps its staging, so that a second one cannot have it."""
    at = Lagging(cuda, staging=2)
    rows = at.start(TEXT[:5], OTHER[:7], [9] * 6)
    refused(at.mem, ms.OutOfRecords, "3 state records requested, room for 2 of 8", lambda: at.mem.park(rows))

    def between(step: ms.Step) -> list[ms.Parked]:
        parked = at.park(*rows[:2])
        with pytest.raises(ms.OutOfRecords, match="room for 0 of 8"):
            at.mem.park(rows[2:])
        return parked

    parked = at.step(rows[:1], 1, between)
    with pytest.raises(ms.OutOfRecords, match="room for 0 of 8"):
        at.mem.park(rows[2:])
    at.land()
    parked += at.park(rows[2])
    at.land()
    at.resume(parked)
    at.finish()


def test_pages_that_find_no_staging_go_down_in_polls_oldest_first(cuda: FakeCuda) -> None:
    """Nobody waits for them, also in a step that does not write them."""
    at = Lagging(cuda, staging=2)
    free = at.mem.free_pages
    rows = at.start(TEXT[:9], OTHER[:9])
    (spare,) = at.start([9, 9])
    parked = at.park(*rows)
    assert at.above == [1, 3] and at.mem.free_pages == free - 1 - 4
    at.mem.poll()
    assert at.above == [1, 3], "staging is full"
    at.step([spare], 1, lambda step: (at.land(), at.mem.poll()))
    at.mem.audit().raise_if_leaking()
    assert at.above == [0, 2]
    at.land()
    at.mem.poll()
    assert at.above == [0, 0]
    at.land()
    assert at.mem.free_pages == free - 1 and at.main not in cuda.waits
    at.mem.poll()
    at.scribble()
    at.resume(parked)
    at.finish()


@pytest.mark.parametrize("between", [False, True])
def test_pages_on_the_device_are_shared_when_their_request_goes_on(cuda: FakeCuda, between: bool) -> None:
    at = Lagging(cuda, staging=1)
    row, other = at.start(TEXT[:9], OTHER[:9])
    (parked,) = at.park(row)
    held, free = [part.index for part in at.below.parked.above], at.mem.free_pages
    assert len(held) == 2
    at.land()
    at.text["spare"] = at.text.pop(parked)  # type: ignore[index]

    def resume(step: object = None) -> ms.Row:
        (again,) = at.mem.admit([ms.Request("again", resume=parked)])
        at.text[again] = at.text.pop("spare")  # type: ignore[call-overload]
        return again

    again = at.step([other], 1, resume) if between else resume()
    assert owners.pages_of(at.mem, again)[1:] == held and at.above == []
    assert at.mem.free_pages == free - 1
    at.look(again)
    at.finish()


@pytest.mark.parametrize("ending", ["recover", "clear", "sleep"])
def test_what_is_on_its_way_ends_well(cuda: FakeCuda, ending: str) -> None:
    """Records are on their way, and pages wait on the device. Sleep keeps both, the others lose the request."""
    at = Lagging(cuda, staging=1)
    rows = at.start(TEXT[:9])
    free = at.mem.planes.slots, at.kv.slots
    (parked,) = at.park(*rows)
    assert at.above == [2] and at.below.host.backups
    if ending == "sleep":
        at.kv.sleep()
        at.land()
        at.mem.poll()
        assert at.above == [2]
        at.kv.wake()
        at.resume([parked])
    else:
        {"recover": at.mem.recover, "clear": at.below.clear}[ending]()
        assert (at.mem.free_slots, at.mem.free_pages) == free
        assert all(each.cache.pool.claimed == 0 for each in at.below.host.sets)
    at.mem.audit().raise_if_leaking()


def test_a_load_is_waited_for_by_the_step_that_uses_it(cuda: FakeCuda) -> None:
    at = Lagging(cuda, staging=4)
    (parked,) = at.park(*at.start(TEXT[:9]))
    at.mem.submit()
    at.land()
    at.mem.poll()
    cuda.work.clear()
    cuda.waits.clear()
    (row,) = at.mem.admit([ms.Request("again", 12, resume=parked)])
    loads = cuda.given("unpack_slots")
    assert len(loads) == 2 and at.main not in cuda.waits
    at.mem.plan([row], 1)
    assert all(cuda.given("plan")[-1].behind(load) for load in loads)


@pytest.mark.parametrize("tail", [0, 2])
@pytest.mark.parametrize("length", [5, 6], ids=["plain", "boundary"])
def test_a_load_is_waited_for_by_a_step_that_uploads_nothing(cuda: FakeCuda, length: int, tail: int) -> None:
    """The batch is that of the step before, and the admission has sent all changes in front of the load."""
    at = Lagging(cuda, staging=4, tracking=ms.Redirect(PAGE), tail=tail)
    rows = at.start(TEXT[:length])
    at.step(rows, 1)
    (parked,) = at.park(*rows)
    at.mem.submit()
    at.land()
    at.mem.poll()
    cuda.work.clear()
    rows = at.mem.admit([ms.Request("again", length + 2, resume=parked)])
    uploads = at.mem.stats().uploads
    at.mem.plan(rows, 1)
    assert at.mem.stats().uploads == uploads
    assert all(cuda.given("plan")[-1].behind(load) for load in cuda.given("unpack_slots"))


def test_a_park_waits_for_what_the_same_open_step_loads(cuda: FakeCuda) -> None:
    """Behind an open step, no packet is sent between the load of a request that goes on and its next park."""
    at = Lagging(cuda, staging=4)
    row, leaving = at.start(TEXT[:9], OTHER[:7])
    parked = at.mem.park([row])
    at.land()

    def between(step: ms.Step) -> None:
        at.park(leaving)  # from now on, all changes wait for the forward
        at.mem.park(at.mem.admit([ms.Request("again", resume=parked[0])]))

    at.step([leaving], 1, between)
    *loads, state, kv = cuda.given("unpack_slots", "pack_slots")[-4:]
    assert [load.what for load in loads] == ["unpack_slots"] * 2
    assert state.behind(loads[0]) and kv.behind(loads[1])
