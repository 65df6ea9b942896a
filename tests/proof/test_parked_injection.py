"""Raises exceptions inside calls that park, go on and move pages.

The call is done, undone, or noticed as broken, and `recover` then leaves nothing of it. `make test` tries some points
of each call, MEMSTATE_PROOF=1 every fourth.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

import memstate as ms
from tests.proof.injection.points import Tracer
from tests.proof.injection.verdict import ERRORS, broken, fingerprint, forked
from tests.support.parked import OTHER, TEXT, Station
from tests.support.sampling import PROOF

SOME = 3  # points of a call in `make test`

pytestmark = pytest.mark.script


def rested(at: Station) -> ms.Session:
    session = at.mem.sessions.open("talk")
    (turn,) = at.admit(TEXT[:11], session=session)
    at.reach(turn)
    at.mem.end([turn], keep="cache", tokens=[at.text.pop(turn)])
    return session


def park(at: Station) -> Callable[[], object]:
    """Parks rows and a session. Pages of the first row are below already."""
    at.mem.drop(at.mem.park(at.start(TEXT[:9])))
    at.text.clear()
    handles = [rested(at), *at.start(TEXT[:9], OTHER[:6])]
    return lambda: at.mem.park(handles, [None, TEXT[:9], None])


def behind(at: Station) -> Callable[[], object]:
    """Parks a row whose state a planned forward will write."""
    rows = at.start(TEXT[:9], OTHER[:6])
    at.plan(rows, 1)
    return lambda: at.mem.park(rows[:1])


def go_on(at: Station) -> Callable[[], object]:
    """Two requests go on; one is a turn of a session, and the other has pages on the device."""
    session = rested(at)
    one, two = at.park(*at.start(TEXT[:9], OTHER[:19]))
    at.mem.poll()
    assert at.below.parked.above
    requests = [ms.Request("a", 12, resume=one, session=session, tokens=TEXT[:12]), ms.Request("b", 24, resume=two)]
    return lambda: at.mem.admit(requests)


def lower(at: Station) -> Callable[[], object]:
    """A poll copies pages, for which there is room by now."""
    one, _ = at.park(*at.start(TEXT[:19], OTHER[:9]))
    at.mem.poll()
    at.mem.drop([one])
    at.mem.submit()
    assert at.below.parked.above
    return at.mem.poll


def drop(at: Station) -> Callable[[], object]:
    parked = at.park(*at.start(TEXT[:19], OTHER[:9]))
    at.mem.poll()
    return lambda: at.mem.drop(parked)


def clear(at: Station) -> Callable[[], object]:
    drop(at)
    return at.below.clear


CALLS: dict[str, Callable[[Station], Callable[[], object]]] = {
    "park": park, "behind a forward": behind, "go on": go_on, "lower": lower, "drop": drop, "clear": clear,
}  # fmt: skip


def judged(at: Station, call: Callable[[], object], point: int, error: str, marks: tuple[Any, Any]) -> str:
    """Ends a call at a point. Returns what became of it."""
    raised = ERRORS[error]()
    tracer = Tracer(point, raised)
    came = False
    try:
        tracer.run(call)
    except BaseException as one:
        came = one is raised or isinstance(one, ms.Broken)
    if not forked(lambda: broken(at.mem)):
        here = forked(lambda: fingerprint(at.mem))
        kind = "undone" if here == marks[0] else "done" if here == marks[1] else "neither"
        assert kind != "neither", (tracer.place, [name for name in here if here[name] != marks[0][name]])
    else:
        assert came, f"{tracer.place}: swallowed"
        kind = "noticed"
    at.mem.recover()
    audit = at.mem.audit()
    assert not audit.miscounts and not audit.leaked, (tracer.place, audit)
    assert len(at.below.parked) == len(at.below.parked.above) == at.below.leaked == 0
    assert [each.cache.pool.claimed for each in at.below.host.sets] == [0, 0], tracer.place
    at.mem.recover(keep=False)
    assert (at.mem.free_slots, at.mem.free_pages) == (at.mem.planes.slots, at.kv.slots), tracer.place
    at.text.clear()
    at.resume(at.park(*at.start(TEXT[:9])))
    at.finish()
    return kind


@pytest.mark.parametrize("error", [name for name in ERRORS if name != "OutOfSlots"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_done_or_undone_or_noticed(name: str, error: str) -> None:
    at = Station({"host_pages": 6})
    call = CALLS[name](at)
    at.mem.submit()

    def counted() -> tuple[int, dict[str, Any]]:
        tracer = Tracer()
        with suppress(ms.MemstateError):
            tracer.run(call)
        return tracer.count, fingerprint(at.mem)

    before = forked(lambda: fingerprint(at.mem))
    count, after = forked(counted)
    assert before != after and count > 30
    chance = random.Random(f"{name} {error}")
    points = range(chance.randrange(1, 5), count + 1, 4) if PROOF else chance.sample(range(1, count), SOME)
    kinds = Counter(forked(lambda: judged(at, call, point, error, (before, after))) for point in points)  # noqa: B023
    assert kinds["noticed"], kinds
