"""Random programs of parks, saves and loads on a fake device (`tests/support/fake_cuda.py`), whose streams lag behind.

A stream that lags runs its work when somebody waits for it, or when the program says so. Each step checks the bytes
that it reads. So a wait that is missing between two streams gives wrong bytes.
"""

import random
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations

import pytest
import torch

import memstate as ms
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.parked import OTHER, TEXT, Station
from tests.support.tiered_small import PAGE

DEVICE = "cuda:1"
TRACKING = [ms.NoTracking(), ms.Redirect(PAGE), ms.PingPong(PAGE), ms.LazyPingPong(PAGE)]


@pytest.fixture
def poison() -> None:
    """Does nothing: poison reads the device, so that the host would wait."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr("memstate.tiers.sizing.KV_STAGING", 0)
    with fake_cuda(monkeypatch) as fake:
        yield fake


class Program:
    """Makes random calls on a station while some streams lag: that of the caller, those of copies, or all of them."""

    def __init__(self, cuda: FakeCuda, rng: random.Random, tracking: ms.Tracking) -> None:
        tiers = {
            "staging": rng.choice((2, 4)),
            "host_slots": rng.choice((4, 8)),
            "write": rng.choice(("back", "through")),
        }
        self.at = Station(tiers, DEVICE, tracking=tracking, overlap=rng.random() < 0.5, pages=40)
        self.cuda, self.rng, self.mem = cuda, rng, self.at.mem
        streams = [stream for each in self.at.below.host.sets for stream in each.transfers._streams]
        self.late = rng.sample([cuda.current_stream(1), *streams], rng.randint(2, 1 + len(streams)))
        cuda.lag(*self.late)

    def some(self, kind: type) -> list:
        found = [one for one in self.at.text if isinstance(one, kind)]
        return self.rng.sample(found, self.rng.randint(min(1, len(found)), len(found)))

    def admit(self) -> None:
        self.at.admit(self.rng.choice((TEXT, OTHER))[: self.rng.randint(1, 20)])

    def step(self) -> None:
        if rows := self.some(ms.Row):
            self.at.step(rows, self.rng.randint(1, 4))

    def park(self) -> None:
        if rows := [row for row in self.some(ms.Row) if self.mem.info(row).length]:
            self.at.park(*rows, known=self.rng.random() < 0.5)

    def resume(self) -> None:
        if parked := self.some(ms.Parked):
            rows = self.mem.admit([ms.Request("again", resume=one) for one in parked])
            self.at.text.update(zip(rows, [self.at.text.pop(one) for one in parked], strict=True))

    def end(self) -> None:
        for row in self.some(ms.Row)[:1]:
            self.mem.end([row], keep="cache", tokens=[self.at.text.pop(row)])

    def evict(self) -> None:
        self.mem.prefix.evict_states(2)  # type: ignore[union-attr]
        self.mem.prefix.evict_pages(8)  # type: ignore[union-attr]

    def land(self) -> None:
        self.cuda.advance(self.rng.choice(self.late), self.rng.randint(1, 4))

    def run(self, calls: int) -> None:
        at, mem = self.at, self.mem
        ours = self.admit, self.step, self.step, self.park, self.resume, self.end, self.evict, self.land
        for call in self.rng.choices([*ours, mem.poll, at.scribble], k=calls):
            with suppress(ms.OutOfSlots, ms.OutOfRows, ms.OutOfPages, ms.OutOfRecords):
                call()
        at.look(*(one for one in at.text if isinstance(one, ms.Row)))
        at.finish()


@pytest.mark.parametrize("tracking", TRACKING, ids=repr)
def test_streams_of_any_speed_move_the_right_bytes(
    cuda: FakeCuda, generator: torch.Generator, tracking: ms.Tracking
) -> None:
    Program(cuda, random.Random(f"{generator.initial_seed()} {tracking}"), tracking).run(calls=100)


@pytest.mark.parametrize("loads_first", [False, True])
@pytest.mark.parametrize(
    "late", [late for n in (1, 2, 3) for late in combinations(("caller", "saves", "loads"), n)], ids=repr
)
def test_a_request_goes_on_at_once_whatever_streams_are_late(
    cuda: FakeCuda, late: tuple[str, ...], loads_first: bool
) -> None:
    at = Station({"staging": 4}, DEVICE)
    (row,) = at.start(TEXT[:5])
    saves, loads = zip(*(each.transfers._streams for each in at.below.host.sets), strict=True)
    streams = {"caller": [cuda.current_stream(1)], "saves": saves, "loads": loads}
    cuda.lag(*(stream for name in late for stream in streams[name]))
    (parked,) = at.park(row)
    (again,) = at.mem.admit([ms.Request("again", resume=parked)])
    at.text[again] = at.text.pop(parked)
    for stream in loads if loads_first and "loads" in late else ():
        cuda.advance(stream, 99)
    at.look(again)


def late_loads(cuda: FakeCuda, n: int, session: str = "") -> tuple[Station, ms.Row]:
    """Returns a row of `n` tokens that has gone on. Its bytes are still on their way to the device."""
    at = Station({"staging": 4}, DEVICE, tracking=ms.Redirect(PAGE))
    (row,) = at.admit(TEXT[:1])
    at.text[row] = TEXT[:n]
    at.reach(row)
    (parked,) = at.park(row)
    cuda.lag(*(each.transfers._streams[1] for each in at.below.host.sets))
    at.mem.poll()
    at.scribble()
    talk = at.mem.sessions.open(session) if session else None
    (again,) = at.mem.admit([ms.Request("again", resume=parked, session=talk)])
    at.text[again] = at.text.pop(parked)
    return at, again


def copy_kv(at: Station, pairs: list[tuple[int, int]]) -> None:
    ((new, old),) = pairs
    at.kv["kv"][:, new] = at.kv["kv"][:, old]


def test_the_page_of_a_fork_is_copied_behind_its_load(cuda: FakeCuda) -> None:
    at, row = late_loads(cuda, 10)
    fork = at.mem.fork(row, ["twin"])
    copy_kv(at, fork.page_copies)
    at.text[fork.rows[0]] = at.text[row]
    at.look(row, *fork.rows)
    at.finish()


def test_the_page_of_a_forked_session_is_copied_behind_its_load(cuda: FakeCuda) -> None:
    at, row = late_loads(cuda, 10, session="talk")
    talk = at.mem.sessions.infos()[0].session
    at.mem.end([row], keep="cache", tokens=[text := at.text.pop(row)])
    fork = at.mem.sessions.fork(talk, "twin")
    copy_kv(at, fork.page_copies)
    at.scribble()
    at.look(*at.admit([*text, 1], session=fork.session), *at.admit([*text, 2], session=talk))
    at.finish()


def test_pages_are_saved_behind_their_loads(cuda: FakeCuda) -> None:
    """The request leaves more tokens than were known when it parked. So host memory does not have their pages."""
    at, row = late_loads(cuda, 2 * PAGE)
    at.mem.end([row], keep="cache", tokens=[text := at.text.pop(row)])
    at.mem.prefix.evict_states(9)  # type: ignore[union-attr]
    at.mem.prefix.evict_pages(9)  # type: ignore[union-attr]
    at.scribble()
    (row,) = at.admit([*text, 1])
    assert at.mem.info(row).length == 2 * PAGE
    at.look(row)
    at.finish()
