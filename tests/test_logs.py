"""Events of the log: one line for each thing that is counted, and no line unless logging is configured."""

import json
import logging
from collections.abc import Callable
from typing import Any

import pytest

import memstate as ms
from memstate import logs
from memstate.kernels.dispatch import Backend
from tests.proof.stateful.script import Play
from tests.support import owners
from tests.support.tiered_small import fetch, push_down, tiered, whole
from tests.support.virtual import ByHand, MemoryStore

CPU = Backend("reference", "cpu")
pytestmark = pytest.mark.script


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[str], list[dict[str, Any]]]:
    """A function that returns the fields of all logged events that have a given name."""
    caplog.set_level(logging.INFO, "memstate")
    return lambda name: [
        {key: value for key, value in fields.items() if key != "event"}
        for record in caplog.records
        if (fields := getattr(record, logs.FIELDS, {})).get("event") == name
    ]


def rig(**settings: Any) -> Play:
    return Play(CPU, **({"strategy": "redirect", "every": 8, "page_size": 4} | settings))


def served(prompts: int, **settings: Any) -> Play:
    """Returns a manager whose cache has states of 8 tokens."""
    play = rig(**({"every": 64, "pages": 26, "prefix": True} | settings))
    for n in range(prompts):
        play.turn(range(100 * n, 100 * n + 9))
    return play


@pytest.mark.parametrize("why", ["room", "pages", "limit", "cleared", "superseded"])
def test_O5_every_evicted_state_is_counted_and_logged_with_its_reason(
    why: str, told: Callable[[str], list[dict[str, Any]]]
) -> None:
    play = served(3, slots=4 if why == "room" else 6, most_states=2 if why == "limit" else None)
    cache = play.mem.prefix
    assert cache is not None
    if why == "room":
        play.admit([1, 2, 3], [4, 5, 6])
    elif why == "pages":
        play.admit(range(500, 590))
    elif why == "cleared":
        cache.clear()
    elif why == "superseded":
        cache._note_superseded(next(iter(owners.nodes(cache).values())))
        cache.evict_states(1)
    stats = play.mem.stats().prefix
    assert stats.evicted_states
    gone = {name: n for name, n in vars(stats).items() if name.startswith("gone_") and n}
    assert gone == {f"gone_{why}": stats.evicted_states}
    assert told("evicted") == stats.evicted_states * [{"why": why, "tokens": 8, "uses": 0}]


def test_a_state_that_a_row_takes_over_is_no_loss(told: Callable[[str], list[dict[str, Any]]]) -> None:
    play = served(1, slots=2)
    play.claim(1)
    play.admit(range(9))
    stats = play.mem.stats().prefix
    assert (stats.gone_taken, stats.evicted_states, [each["why"] for each in told("evicted")]) == (1, 1, ["taken"])


def test_recover_counts_the_states_that_it_could_not_keep() -> None:
    mem = served(2).mem
    mem.submit()
    with pytest.raises(KeyboardInterrupt), mem._parts.guard.changing("plan"):
        mem._parts.guard.registers.append(list(owners.nodes(mem.prefix))[:1])
        raise KeyboardInterrupt
    mem.recover()
    stats = mem.stats().prefix
    assert (stats.gone_cleared, stats.evicted_states, stats.states) == (1, 1, 1)


def test_degradations_refusals_and_interrupted_calls_are_events(told: Callable[[str], list[dict[str, Any]]]) -> None:
    play = rig(slots=2, rows=2, pages=3)
    a, b = play.admit(None, None)
    play.run(a, range(9))  # the row is at a boundary, and no slot is free
    assert told("degraded") == [{"refused": 1, "free": 0, "reserve": 0, "limit": 2**31 - 1}]
    play.admit(None)
    play.fork(b, "c")
    play.extend(b, 90)
    play.end(a, how="release")
    play.claim(1)
    play.admit(None)
    stats = play.mem.stats()
    assert (stats.short_of_rows, stats.short_of_pages, stats.short_of_slots) == (2, 1, 1)
    assert [(each["call"], each["error"]) for each in told("refused")] == [
        ("admit", "OutOfRows"), ("fork", "OutOfRows"), ("extend", "OutOfPages"), ("admit", "OutOfSlots"),
    ]  # fmt: skip
    with pytest.raises(ZeroDivisionError), play.mem._parts.guard.changing("plan"):
        raise ZeroDivisionError
    assert told("interrupted") == [{"call": "plan", "why": "ZeroDivisionError()"}]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """A function that returns the lines since its last call."""
    caplog.set_level(logging.INFO, "memstate")

    def new_lines() -> list[str]:
        texts = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return texts

    return new_lines


def test_what_repeats_is_one_line_a_minute(lines: Callable[[], list[str]]) -> None:
    now = [0.0]
    repeats = logs.Repeats(logs.logger("x"), lambda: now[0], ["n"])
    for n in (1, 2, 3):
        repeats.event(logging.INFO, "failed", why="E", n=n, at=n)
    repeats.event(logging.INFO, "failed", why="F", n=9)
    repeats.write_due()
    assert lines() == ["failed why='E' n=1 at=1", "failed why='F' n=9"]
    now[0] = 60.0
    repeats.write_due()
    assert lines() == ["failed why='E' n=5 at=3 times=2"]
    repeats.event(logging.INFO, "failed", why="E", n=4, at=4)
    repeats.event(logging.INFO, "failed", why="F", n=8)  # no F came for a minute
    assert lines() == ["failed why='F' n=8"]
    now[0] = 120.0
    repeats.event(logging.INFO, "failed", why="E", n=1, at=5)  # writes a line: n=5 is the sum with the event before
    assert lines() == ["failed why='E' n=5 at=5 times=2"]
    repeats.event(logging.INFO, "failed", why="E", n=7, at=6)
    repeats.write_due(float("inf"))
    assert lines() == ["failed why='E' n=7 at=6"]


def test_an_error_s_own_words_and_numbers_make_no_kind_and_there_are_few(lines: Callable[[], list[str]]) -> None:
    repeats = logs.Repeats(logs.logger("x"), lambda: 0.0)
    for n in range(50):
        repeats.event(logging.INFO, "failed", why=f"OSError('{chr(65 + n)}')")
        repeats.event(logging.INFO, "refused", why=f"{n} rows of {n}")
    assert len(lines()) == 2
    for n in range(500):
        repeats.event(logging.INFO, "failed", why="x" * n)
    assert len(lines()) <= logs.KINDS


def test_slots_that_were_claimed_are_counted_by_whoever_claims() -> None:
    play = rig()
    play.release(play.claim(2))
    (row,) = play.admit(None)
    play.run(row, range(9))  # the last plan claims a slot at the boundary
    stats = play.mem.stats()
    assert (stats.claimed, stats.snapshots, stats.capacity - stats.free) == (4, 1, 2)


def test_sessions_that_make_way_are_counted(told: Callable[[str], list[dict[str, Any]]]) -> None:
    play = rig(slots=2)
    (talk,) = play.open("talk")
    play.turn(range(8), talk)
    assert play.mem.stats().sessions == 1 and play.mem.stats().held_by_sessions == 1
    play.admit(None, None)
    assert play.mem.stats().sessions_emptied == 1
    assert [(each["expired"], each["states"]) for each in told("session emptied")] == [(False, 1)]


def test_what_storage_and_host_memory_lose_is_an_event(told: Callable[[str], list[dict[str, Any]]]) -> None:
    """A prefetch that has not ended counts as late, also if its request names no tokens."""
    store, prompts, jobs = MemoryStore(), [[*whole(n), 1] for n in (2, 3, 4)], ByHand()
    store.put = lambda names, buffers: (_ for _ in ()).throw(OSError("disk is full"))  # type: ignore[method-assign]
    mem = tiered(tiers={"store": store})
    push_down(mem, whole(1))
    failed = told("write failed")
    # one more line within a minute counts the rest
    assert mem.stats().tiers.write_failed > sum(each["records"] for each in failed) > 0
    assert {each["why"] for each in failed} == {"OSError('disk is full')"}
    mem = tiered(tiers={"store": store, "executor": jobs})
    late = [mem.prefetch(prompt) for prompt in prompts[:2]]
    mem.admit([ms.Request("a", tokens=prompts[0], fetch=late[0]), ms.Request("b", fetch=late[1])])
    assert mem.stats().tiers.prefetch.late == len(told("prefetch late")) == 2
    for job in jobs.jobs:
        assert job.begin()
        job.finish()
    mem.poll()
    assert [each["outcome"] for each in told("prefetch ended")] == ["missed"] * 2
    mem = tiered(tiers={"store": store})
    mem.admit([ms.Request("c", tokens=prompts[2], fetch=fetch(mem, prompts[2]))])
    assert mem.stats().tiers.prefetch.late == 0


def test_O6_nothing_is_written_unless_logging_is_configured(capfd: pytest.CaptureFixture[str]) -> None:
    log = logs.logger("quiet")
    assert logs.logger("quiet") is log and len(log.handlers) == 1
    root = logging.getLogger()
    before, root.handlers = root.handlers, []  # without pytest's handlers
    try:
        logs.event(log, logging.ERROR, "interrupted", call="plan")
    finally:
        root.handlers = before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("raises", [True, False])
def test_a_handler_that_raises_ends_no_call(
    raises: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", raises)
    log, handler = logging.getLogger("memstate.prefix"), logging.Handler()
    handler.emit = lambda record: 1 // 0  # type: ignore[method-assign]
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        play = served(3, slots=4)
        play.admit([1, 2, 3], [4, 5, 6])  # this admission evicts
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    assert play.mem.stats().prefix.evicted_states == 1
    assert ("ZeroDivisionError" in capsys.readouterr().err) == raises


def test_every_line_is_json_and_ascii() -> None:
    record = logging.LogRecord("memstate.x", logging.INFO, "", 0, "", (), None)
    record.memstate = {
        "event": "odd",
        "seconds": float("nan"),
        "rate": float("-inf"),
        "why": "\udcff\u2028é",
        "n": b"\n",
    }
    line = logs.JsonFormatter().format(record)
    assert line.isascii() and len(line.splitlines()) == 1
    fields = json.loads(line, parse_constant=lambda name: pytest.fail(name))
    assert {key: fields[key] for key in ("seconds", "rate", "why", "n")} == {
        "seconds": "nan", "rate": "-inf", "why": "\udcff\u2028é", "n": "b'\\n'",
    }  # fmt: skip


def test_an_event_is_one_line_of_json_and_of_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "memstate")
    logs.event(logs.logger("x"), logging.INFO, "evicted", why="a\nb", tokens=8)
    logs.event(logs.logger("x"), logging.INFO, "bare")
    logging.getLogger("memstate.chaos").info("fault %d", 3)
    try:
        raise ValueError("no")
    except ValueError:
        logging.getLogger("memstate.other").exception("failed")
    assert [record.getMessage() for record in caplog.records[:2]] == ["evicted why='a\\nb' tokens=8", "bare"]
    lines = [logs.JsonFormatter().format(record) for record in caplog.records]
    assert all("\n" not in line for line in lines)
    events = [json.loads(line) for line in lines]
    assert events[0] | {"time": 0} == {
        "time": 0, "level": "INFO", "logger": "memstate.x", "event": "evicted", "why": "a\nb", "tokens": 8,
    }  # fmt: skip
    assert events[2]["message"] == "fault 3" and "ValueError: no" in events[3]["exception"]


def test_a_state_that_no_chunk_came_near_is_told_once(told: Callable[[str], list[dict[str, Any]]]) -> None:
    """The counter counts each such state. The only line names the call that helps."""
    play = rig(every=64, prefix=True)
    for n in range(2):
        (row,) = play.admit(range(100 * n, 100 * n + 7))
        play.step([row], 7)  # one chunk, though mem.chunk() would end the first chunk at 4
        play.end(row, how="release")
    (line,) = told("missed")
    assert (line["wanted"], line["chunk"]) == (4, [0, 7]) and play.mem.stats().missed == 2
    assert "mem.chunk()" in line["why"] and "Forward(grid=)" in line["why"]
