"""Readings while the loop runs show the manager between two calls, and each slot and page counts for one tenant."""

import gc
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import memstate as ms
from memstate.guard import Guard
from memstate.metrics.reading import ExportedManager, between_calls
from memstate.metrics.table import FIGURES
from memstate.metrics.tenants import OTHER, UNKNOWN, Holding, holdings
from memstate.stats import Stats
from tests.support.metered import PAGE, manager, turn


def wrong(stats: Stats) -> list[str]:
    """Returns the names of conditions that do not hold, but should at every moment between two calls."""
    prefix = stats.prefix
    held = stats.held_by_live + stats.held_by_lanes + stats.held_by_snapshots + stats.held_by_sessions
    gone = sum(n for name, n in vars(prefix).items() if name.startswith("gone_"))
    lost = prefix.lost_no_sharing + prefix.lost_evicted + prefix.lost_no_snapshot
    return [
        name
        for name, holds in {
            "slots": held + stats.free == stats.capacity,
            "cached states": prefix.states <= stats.held_by_snapshots,
            "evictions": gone == prefix.evicted_states == prefix.inserted + prefix.loaded - prefix.states,
            "tokens": prefix.hit_tokens + lost == prefix.prompt_tokens,
        }.items()
        if not holds
    ]


@contextmanager
def hammered(look: Callable[[], object], n: int = 2) -> Iterator[None]:
    """Lets n threads call `look` again and again while the block runs; raises their errors at the end of the block."""
    over, interval = threading.Event(), sys.getswitchinterval()

    def run() -> None:
        while not over.is_set():
            look()

    with ThreadPoolExecutor(n) as threads:
        sys.setswitchinterval(1e-5)
        jobs = [threads.submit(run) for _ in range(n)]
        try:
            yield
        finally:
            over.set()
            sys.setswitchinterval(interval)
    for job in jobs:
        job.result()


def test_O1_a_scrape_never_sees_half_a_call() -> None:
    mem = manager(slots=6)
    source, seen, fresh = ExportedManager(mem, str, 2, True), list[str](), list[float]()

    def look() -> None:
        reading = source.read()
        assert reading is not None and reading.steps is not None and not reading.interrupted
        seen.extend(wrong(reading.stats))
        fresh.append(reading.age)
        for figure in FIGURES:
            figure.read(reading)

    with hammered(look):
        for who in range(25):
            turn(mem, who % 9, f"tenant {who % 3}")
            time.sleep(0.001)  # about as long as a forward of a toy model: readers need a moment between two calls
    assert seen == [] and 0.0 in fresh
    mem.audit().raise_if_leaking()


@pytest.mark.parametrize("stumbles", [False, True])
def test_a_look_that_a_call_disturbs_is_repeated(stumbles: bool) -> None:
    guard, looks = Guard(), list[int]()

    def look() -> int:
        looks.append(len(looks))
        if len(looks) == 1:
            with guard.changing("plan"):  # a whole call happens during the look
                pass
            if stumbles:
                raise RuntimeError("dictionary changed size during iteration")
        return len(looks)

    assert between_calls(guard, look) == 2


def test_an_error_of_the_look_itself_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        between_calls(Guard(), lambda: 1 // 0)


def test_O1_inside_of_a_long_call_the_last_figures_come_with_their_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstate.metrics.reading.PATIENCE", 0.0)
    mem = manager()
    source = ExportedManager(mem, None, 1, False)
    with mem._parts.guard.changing("plan"):
        mem.pool.allocator.free -= 5  # the count is wrong like this in the middle of a plan
        reading = source.read()
        assert reading is not None and reading.age > 0 and reading.stats.free == 12
        mem.pool.allocator.free += 5
    turn(mem, 1)
    reading = source.read()
    assert reading is not None and reading.age == 0 and reading.stats == mem.stats()


def test_a_broken_manager_says_so_and_shows_its_last_whole_figures() -> None:
    mem = manager()
    source = ExportedManager(mem, None, 1, False)
    turn(mem, 1)
    whole = source.read()
    with pytest.raises(KeyboardInterrupt), mem._parts.guard.changing("plan"):
        mem.pool.allocator.free -= 5
        raise KeyboardInterrupt
    broken = source.read()
    assert whole and broken and broken.interrupted and broken.stats == whole.stats
    mem.recover()
    mended = source.read()
    assert mended and not mended.interrupted and mended.stats == mem.stats()


def test_a_reading_keeps_no_manager_alive() -> None:
    mem = manager()
    source = ExportedManager(mem, str, 1, True)
    turn(mem, 1)
    assert source.read() is not None
    gc.disable()  # the states are freed at once, without the collector
    try:
        del mem
        assert source.read() is None
    finally:
        gc.enable()
    source.close()


def test_a_walk_that_fits_nowhere_leaves_the_other_figures_new(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memstate.metrics.reading.PATIENCE", 0.0)
    monkeypatch.setattr(between_calls, "__defaults__", (0.0,))
    mem = manager()
    turn(mem, 1, "a")
    source = ExportedManager(mem, lambda salt: (mem.submit(), str(salt))[1], 1, False)  # a call comes during each walk
    source._last = source._last[0], (source._last[1][0], {"a": Holding(1, 3, 12)})
    turn(mem, 2, "a")
    reading = source.read()
    assert reading is not None and reading.age == 0 and reading.stats == mem.stats()
    assert reading.tenants == {"a": Holding(1, 3, 12)}, "of the last walk that fitted"


def test_a_late_reader_takes_no_older_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers take turns. If they did not, the slower reader could store older figures last."""
    mem = manager()
    source, inside = ExportedManager(mem, None, 1, False), list[int]()
    own = ExportedManager._look

    def look(self: ExportedManager, mem: ms.StateManager) -> Any:
        inside.append(1)
        time.sleep(0.001)
        assert len(inside) == 1
        figures = own(self, mem)
        inside.clear()
        return figures

    monkeypatch.setattr(ExportedManager, "_look", look)
    with hammered(source.read, 3):
        turn(mem, 1)
        time.sleep(0.02)


def test_no_counter_falls_at_a_reset_or_recovery() -> None:
    mem = manager(slots=3, below=True)
    source = ExportedManager(mem, None, 1, True)

    def counters() -> dict[Any, float]:
        reading = source.read()
        assert reading is not None and wrong(reading.stats) == []
        return {
            (figure.name, labels): value
            for figure in FIGURES
            if figure.kind == "counter"
            for labels, value in figure.read(reading)
        }

    for start_over in (lambda: mem.recover(keep=False), mem.recover, lambda: mem.recover(keep=False)):
        for who in range(4):
            turn(mem, who % 3)
        before = counters()
        start_over()
        after = counters()
        assert {key for key, value in before.items() if after[key] < value} == set()
    assert after["memstate_prompt_tokens", ()] == 12 * 13 and after["memstate_prefix_evictions", ("cleared",)] > 0


# -- tenants --------------------------------------------------------------------------------------


def all_of(mem: ms.StateManager, most: int = 99) -> dict[str, tuple[int, int, int]]:
    """Returns tenant -> its slots, pages and tokens. Every slot and page in use must count for one of the tenants."""
    by_tenant = holdings(mem, str, most)
    stats = mem.stats()
    assert sum(each.slots for each in by_tenant.values()) == stats.capacity - stats.free
    assert sum(each.pages for each in by_tenant.values()) == stats.pages - stats.pages_free
    return {name: (each.slots, each.pages, each.tokens) for name, each in by_tenant.items()}


def test_cached_states_running_requests_and_sessions_count_for_their_salt() -> None:
    mem = manager(slots=20)
    assert all_of(mem) == {}
    turn(mem, 1, "a")
    assert all_of(mem) == {"a": (1, 3, 12)}
    turn(mem, 1, "b")  # the same tokens under another salt take pages of their own
    assert all_of(mem) == {"a": (1, 3, 12), "b": (1, 3, 12)}
    rows = mem.admit([ms.Request("runs", tokens=[1000 + at for at in range(12)] + [7] * 5, salt="b")])
    assert mem.info(rows[0]).length == 12
    assert all_of(mem)["b"] == (2, 5, 12), "what it found in the tree counts once"
    mem.settle(mem.plan(rows, 5))
    assert all_of(mem)["b"] == (2, 5, 17)
    talk = mem.sessions.open("talk")
    turn(mem, 3, "c", session=talk)
    slots, pages, tokens = all_of(mem)["c"]
    assert (pages, tokens) == (4, 14) and slots == mem.stats().held_by_sessions + 1
    mem.end(rows)
    assert all_of(mem)["b"] == (1, 3, 12)


def test_after_a_recovery_what_a_session_shares_counts_once() -> None:
    mem = manager(slots=20)
    turn(mem, 3, "c", session=mem.sessions.open("talk"))
    mem.recover()
    assert mem.stats().held_by_sessions == mem.stats().prefix.states == 1
    assert all_of(mem)["c"][1:] == (4, 14)


def test_a_fork_shares_pages_and_has_slots_of_its_own() -> None:
    mem = manager(slots=20)
    rows = mem.admit([ms.Request("a", tokens=list(range(9)), salt="a")])
    mem.settle(mem.plan(rows, 8))
    mem.settle(mem.plan(rows, 1))
    slots, pages, _ = all_of(mem)["a"]
    rows += mem.fork(rows[0], ["b", "c"]).rows
    assert all_of(mem) == {"a": (slots + 2, pages + 2, 27), UNKNOWN: (1, 0, 0)}, "each has a last page of its own"
    mem.extend(rows, [10] * 3)
    mem.settle(mem.plan(rows))  # the first step of the row has read the shared slot
    assert all_of(mem) == {"a": (slots + 2, pages + 2, 30)}


def test_slots_without_a_salt_are_unknown() -> None:
    mem = manager(prefix=None, pages=None)
    rows = mem.admit([ms.Request("a"), ms.Request("b")])
    mem.settle(mem.plan(rows, 8))
    mem.settle(mem.plan(rows))
    kept = mem.end(rows[:1], keep="handle")
    assert all(kept) and mem.stats().held_by_snapshots == 1
    assert all_of(mem).keys() == {UNKNOWN}


@pytest.mark.parametrize("most", [1, 2, 4, 5, 9])
def test_only_the_largest_have_names(most: int) -> None:
    mem = manager(slots=30)
    for who in range(5):
        for n in range(5 - who):
            turn(mem, 10 * who + n, f"t{who}")
    whole = holdings(mem, str, 99)
    assert [(name, held.slots) for name, held in whole.items()] == [(f"t{who}", 5 - who) for who in range(5)]
    named = all_of(mem, most)
    assert list(named) == [f"t{who}" for who in range(min(most, 5))] + [OTHER] * (most < 5)
    assert sum(tokens for _, _, tokens in named.values()) == sum(held.tokens for held in whole.values()) == 15 * 12


def test_a_tenant_with_most_of_the_pages_is_among_the_largest() -> None:
    mem = manager(slots=30)
    for n in range(3):
        turn(mem, n, "many", length=5)
        turn(mem, n, "more", length=5)
    turn(mem, 9, "long", length=40)
    assert all_of(mem, 1) == {"long": (1, 10, 40), OTHER: (6, 6, 24)}


def test_salts_map_to_tenants() -> None:
    mem = manager(slots=20)
    for n, salt in enumerate([("acme", 1), ("acme", 2), ("zoo", 1)]):
        turn(mem, n, salt)
    asked: list[Hashable] = []

    def tenant(salt: Hashable) -> str:
        asked.append(salt)
        return salt[0]  # type: ignore[index]

    assert holdings(mem, tenant, 9) == {"acme": Holding(2, 6, 24), "zoo": Holding(1, 3, 12)}
    assert sorted(asked) == [("acme", 1), ("acme", 2), ("zoo", 1)], "once for each salt"


def test_tokens_without_pages_of_memstate() -> None:
    mem = manager(below=True)
    turn(mem, 1, "a")
    assert all_of(mem) == {"a": (1, 0, 3 * PAGE)}
