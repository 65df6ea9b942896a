"""What parks and goes on no further: refused calls, which change nothing, and handles that end."""

import gc
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.errors import Asleep, LeakFound
from memstate.requests.handles import Session
from tests.support.build import on
from tests.support.parked import OTHER, TEXT, Station, refused, resume, tailed, whole
from tests.support.planes import LAYOUT
from tests.support.tiered_small import CPU, PAGE
from tests.support.tiered_small import whole as prompt
from tests.support.virtual import MemoryStore


class Refusing:
    """A manager with one of everything that can be named in a call of `park`."""

    def __init__(self) -> None:
        self.at = at = Station()
        mem = self.mem = at.mem
        self.row, self.done, self.gone = at.start(TEXT[:5], OTHER[:6], [9, 9])
        step = mem.plan([self.done], 1)
        mem.settle(step, [True])
        self.idle, self.bare, self.busy, self.closed = (mem.sessions.open(name) for name in "ibxc")
        (turn,) = at.admit(prompt(2), session=self.idle)
        at.reach(turn)
        mem.end([turn], keep="cache", tokens=[at.text.pop(turn)])
        mem.end([self.gone])
        del at.text[self.gone]
        (self.turn,) = at.admit(prompt(3), session=self.busy)
        mem.sessions.close(self.closed)


NAMED: list[tuple[type[Exception], str, Callable[[Refusing], object]]] = [
    (ms.StaleHandle, "row", lambda w: w.mem.park([w.row, w.gone])),
    (ms.StaleHandle, "session", lambda w: w.mem.park([w.row, w.closed])),
    (ms.InvalidArgument, "twice", lambda w: w.mem.park([w.row, w.row])),
    (ms.InvalidArgument, "twice", lambda w: w.mem.park([w.idle, w.row, w.idle])),
    (ms.InvalidArgument, "are finished", lambda w: w.mem.park([w.row, w.done])),
    (ms.InvalidArgument, "are turns", lambda w: w.mem.park([w.row, w.turn])),
    (ms.InvalidArgument, "keeps no state", lambda w: w.mem.park([w.row, w.bare])),
    (ms.InvalidArgument, "has a turn running", lambda w: w.mem.park([w.row, w.busy])),
    (ms.InvalidArgument, "expected one for each", lambda w: w.mem.park([w.row], [None, None])),
    (ms.InvalidArgument, "one for each, user in bytes", lambda w: w.mem.park([w.row], user=["text"])),
    (ms.InvalidArgument, "a session knows its tokens", lambda w: w.mem.park([w.idle], [TEXT])),
    (ms.InvalidArgument, "tokens", lambda w: w.mem.park([w.row], [OTHER])),
    (ms.InvalidArgument, "rows or sessions", lambda w: w.mem.park(w.row)),
    (ms.InvalidArgument, "3", lambda w: w.mem.park([3])),
    (ms.InvalidArgument, "session", lambda w: w.mem.park([w.row, Session([1], 0)])),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("error", "says", "call"), NAMED)
def test_what_cannot_be_parked_is_refused(error: type[Exception], says: str, call: Callable[[Any], object]) -> None:
    world = Refusing()
    refused(world.mem, error, says, lambda: call(world))
    world.at.look(world.row)


GOING: list[tuple[type[Exception], str, Callable[[ms.StateManager, ms.Parked], object]]] = [
    (ms.InvalidArgument, "come first", lambda mem, one: resume(mem, one, tokens=OTHER)),
    (ms.InvalidArgument, "come first", lambda mem, one: resume(mem, one, tokens=TEXT[:9])),
    (ms.InvalidArgument, "come first", lambda mem, one: resume(mem, one, salt="b")),
    (ms.InvalidArgument, "come first", lambda mem, one: resume(mem, one, tokens=TEXT, salt="b")),
    (ms.InvalidArgument, "named twice",
     lambda mem, one: mem.admit([ms.Request("r", resume=one), ms.Request("s", resume=one)])),
    (ms.InvalidArgument, "named twice", lambda mem, one: mem.drop([one, one])),
    (ms.OutOfPages, "31 KV pages", lambda mem, one: resume(mem, one, length=31 * PAGE)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "says", "call"), GOING)
def test_what_cannot_go_on_is_refused_and_stays_parked(
    error: type[Exception], says: str, call: Callable[[Any, Any], object]
) -> None:
    at = Station(pages=30)
    (row,) = at.admit(TEXT[:10], salt="a")
    at.reach(row)
    (parked,) = at.park(row)
    at.mem.submit()
    at.mem.poll()
    before = whole(at.mem)
    with pytest.raises(error, match=says):
        call(at.mem, parked)
    after = whole(at.mem)
    assert after | {"stats": before["stats"]} == before, "all is as before but the number of refused admissions"
    at.resume([parked], tokens=TEXT[:20], salt="a")
    at.finish()


def test_lengths_that_the_device_has_not_told_are_refused() -> None:
    mem = tailed(overlap=True, tracking=ms.Redirect(PAGE))
    (row,) = mem.admit([ms.Request("a", 40)])
    first = mem.plan([row], 3)
    mem.submit(first)
    drafted = mem.plan([row], 2, drafts=1)
    mem.settle(first)
    refused(mem, ms.InvalidArgument, "accept", lambda: mem.park([row]))
    mem.submit(drafted)
    refused(mem, ms.InvalidArgument, "accept", lambda: mem.park([row]))
    mem.accept(drafted, [2])
    (parked,) = mem.park([row])
    assert parked.length == 5
    mem.drop([parked])


def test_a_tail_that_the_caller_keeps_is_refused() -> None:
    """Its tokens are in memory that the manager does not know. A step of 0 tokens adds them to the state."""
    mem = on(CPU, LAYOUT, slots=4, max_requests=2, prefix=ms.Prefix(), tail=2, tiers=ms.Tiers("toy", host_slots=4))
    (row,) = mem.admit([ms.Request("a", 40)])
    mem.settle(mem.plan([row], 3))
    mem.settle(mem.plan([row], 1, defer=4))
    refused(mem, ms.InvalidArgument, "a tail of your own: run a step of 0 tokens", lambda: mem.park([row]))
    mem.settle(mem.plan([row], 0))
    (parked,) = mem.park([row])
    assert (parked.length, parked.pending) == (4, 0)


# -- what ends parked requests ---------------------------------------------------------------------


def lost(mem: ms.StateManager, parked: ms.Parked) -> None:
    """Asserts that a parked request is gone, for good and with all that it had."""
    for call in (lambda: resume(mem, parked), lambda: mem.drop([parked])):
        with pytest.raises(ms.StaleHandle):
            call()
    mem.submit()
    mem.poll()
    mem.audit().raise_if_leaking()
    assert mem.tiers.leaked == 0


@pytest.mark.parametrize("ending", ["drop", "resume", "clear", "recover", "recover all"])
@pytest.mark.parametrize("known", [False, True])
def test_B85_a_handle_ends_once(ending: str, known: bool, caplog: pytest.LogCaptureFixture) -> None:
    """`clear` and `recover` say how many requests they lose."""
    at = Station()
    rows = at.start(TEXT[:9], OTHER[:9])
    if not known:
        for row in rows:
            at.step([row], 4)
    one, two = at.park(*rows, known=known)
    at.mem.submit()
    with caplog.at_level(logging.INFO, "memstate"):
        if ending == "drop":
            at.mem.drop([one, two])
        elif ending == "resume":
            at.mem.end(at.mem.admit([ms.Request("r", resume=one), ms.Request("s", resume=two)]))
        elif ending == "clear":
            at.below.clear()
        else:
            at.mem.recover(keep=ending == "recover")
    told = [record for record in caplog.records if "lost" in record.getMessage() and "2" in record.getMessage()]
    assert bool(told) == (ending not in ("drop", "resume"))
    for parked in (one, two):
        lost(at.mem, parked)
    records = at.below.host.of_kv.cache if at.below.host.of_kv else None
    assert at.below.host.states.pool.claimed == 0
    assert records is not None and records.pool.claimed == 4 * (ending in ("drop", "resume"))
    at.finish()


def test_parked_requests_are_counted_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    at = Station()
    rows = at.start(TEXT[:9], OTHER[:5])
    with caplog.at_level(logging.INFO, "memstate"):
        parked = at.park(*rows)
        at.resume(parked)
    texts = [record.getMessage() for record in caplog.records]
    for word in ("parked", "resumed"):
        (line,) = [text for text in texts if text.startswith(word)]
        assert "2" in line and "14" in line
    at.finish()


def test_figures_inspections_and_audits_name_parked_requests() -> None:
    """Whole pages of known tokens count once. A trip is no request more."""
    at = Station({"host_pages": 3, "store": MemoryStore()})
    assert "parked" not in str(at.mem.audit())
    parked = at.park(*at.start(TEXT[:9], [*TEXT[:8], 50]), known=True)
    trip = at.below.write(parked[0])
    stats, seen, host = at.mem.stats().tiers, at.mem.inspect(), at.below.host
    assert (stats.parked, stats.parked_pages) == (2, 1)
    assert stats.parked_bytes == 2 * host.states.form.nbytes + 3 * host.kv.form.nbytes
    assert seen.stats["tiers"]["parked"] == at.mem.audit().parked == 2 and "2 requests parked" in str(at.mem.audit())
    trip.cancel()
    at.mem.drop(parked)
    at.text.clear()
    at.mem.poll()
    stats = at.mem.stats().tiers
    assert (stats.parked, stats.parked_bytes, stats.parked_pages) == (0, 0, 0)
    at.finish()


def test_a_parked_request_keeps_its_kind_until_another_is_named() -> None:
    at = Station()
    (parked,) = at.park(*at.admit(TEXT[:9], kind="chat"))
    for given, kind in (({"tokens": TEXT[:12]}, "chat"), ({"kind": "tool"}, "tool"), ({}, "tool")):
        (parked,) = at.mem.park(at.mem.admit([ms.Request("r", resume=parked, **given)]))
        assert parked.prompt.kind == kind


def test_B85_a_handle_that_nobody_keeps_keeps_its_records() -> None:
    at = Station()
    at.park(*at.start(TEXT[:9]))
    gc.collect()
    assert len(at.below.parked) == 1 and at.below.host.states.pool.claimed == 1
    at.mem.audit().raise_if_leaking()
    at.finish()


def test_close_names_what_is_parked() -> None:
    at = Station()
    (parked,) = at.park(*at.start(TEXT[:9]))
    refused(at.mem, ms.InvalidArgument, "1 requests are parked", at.mem.close)
    at.mem.drop([parked])
    at.mem.close()
    with pytest.raises(ms.ConfigurationError, match="host memory"):
        at.mem.park([])


def test_without_host_memory_or_with_inexact_records_nothing_is_parked() -> None:
    plain = on(CPU, LAYOUT, slots=4, max_requests=2)
    floats = ms.StateLayout((ms.Plane("s", (4, 32), torch.float32),), layers=1)
    tiers = ms.Tiers("toy", host_slots=4, int8={"s": 1})
    small = on(CPU, floats, slots=4, max_requests=2, prefix=ms.Prefix(), page_size=PAGE, tiers=tiers)
    (parked,) = (at := Station()).park(*at.start(TEXT[:3]))
    for mem, says in ((plain, r"tiers=ms\.Tiers"), (small, "int8")):
        park = partial(mem.park, mem.admit([ms.Request("a", 3)]))
        refused(mem, ms.ConfigurationError, says, park)
    with pytest.raises(ms.ConfigurationError, match=r"tiers=ms\.Tiers"):
        resume(plain, parked)
    with pytest.raises(ms.StaleHandle):
        plain.drop([parked])


def test_nothing_is_parked_or_goes_on_while_memory_sleeps() -> None:
    """States in host memory outlive the sleep of the device's."""
    at = Station()
    one, two = at.start(TEXT[:9], OTHER[:6])
    (parked,) = at.park(one)
    at.mem.device.sleep()
    with pytest.raises(Asleep):
        at.mem.park([two])
    with pytest.raises(Asleep):
        resume(at.mem, parked)
    at.mem.device.wake()
    at.resume([parked])
    at.look(two)
    at.kv.sleep()
    refused(at.mem, Asleep, "park", lambda: at.mem.park([two]))
    at.kv.wake()
    at.mem.recover(keep=False)
    at.text.clear()
    at.finish()


def test_an_empty_prefix_cache_is_nothing_to_a_parked_request() -> None:
    at = Station(tracking=ms.Redirect(PAGE))
    (row,) = at.start(TEXT[:9])
    at.mem.publish([row], keep="cache", tokens=[at.text[row]])
    (parked,) = at.park(row, known=True)
    at.mem.prefix.clear()
    at.scribble()
    at.resume([parked])
    at.finish()


def test_a_prefetch_is_late_when_its_prompt_goes_on_from_a_parked_request(tmp_path: Path) -> None:
    at = Station({"store": ms.FileStore(tmp_path)})
    (parked,) = at.park(*at.start(TEXT[:9]))
    fetch = at.mem.prefetch(TEXT[:30])
    at.resume([parked], tokens=TEXT[:30], fetch=fetch)
    assert at.mem.stats().tiers.prefetch.late == 1
    at.below.cancel(fetch)
    at.finish()
    at.mem.close()


def test_audits_count_pins_and_pages_of_parked_requests() -> None:
    at = Station()
    (parked,) = at.park(*at.start(TEXT[:9]))
    at.mem.submit()
    page, *_, state = at.below.parked._of[parked]
    entry = state.entry
    for change in (1, -1):
        entry.pins += change
        assert any("pins" in text for text in at.mem.audit().miscounts)
        entry.pins -= change
    at.mem.audit().raise_if_leaking()
    at.below.parked.above[page] = None  # a page that it does not hold
    with pytest.raises(LeakFound, match="page 1 is counted for 0 holders and has 1"):
        at.mem.audit().raise_if_leaking()
    del at.below.parked.above[page]
