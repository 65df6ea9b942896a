"""Prefetches that are stopped, or whose storage fails: what has arrived is kept or given back at any moment."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from memstate import Pages, Prefix, StateManager
from memstate.errors import InvalidArgument
from memstate.state.layout import Plane, StateLayout
from memstate.tiers import Tiers, workers
from memstate.tiers.prefetch.fetch import Fetch
from memstate.tiers.prefetch.settings import Prefetch
from tests.support.prefetch_rig import KV, STATE, Rig, digests, outcome, record
from tests.support.virtual import MemoryStore

CHUNK = 8
ENDS = (496, 992)
WAIT = Prefetch(stop="wait_complete", chunk=CHUNK)
BEST = Prefetch(stop="best_effort", chunk=CHUNK)


def stocked(settings: Prefetch, stated: bool = False, **sizes: object) -> tuple[Rig, list[bytes], Fetch]:
    """Returns a rig, the keys of 62 pages in storage, and a prefetch of them, whose first read begins.

    With `stated`, host memory has all states, so only KV is read; otherwise storage has the states at 496 and 992.
    """
    rig, keys = Rig(settings, states=62 if stated else 4, **sizes), digests("a", 62)  # type: ignore[arg-type]
    rig.stock(keys, range(62), ENDS)
    if stated:
        rig.host(keys, (), range(16, 993, 16))
    fetch = rig.start(1000, keys)
    rig.clock.advance(1)
    rig.prefetcher.poll()
    return rig, keys, fetch


def waiting(rig: Rig) -> int:
    """Returns the number of records that are neither free nor claimed, because a thread still writes to them."""
    return sum(cache.pool.records - cache.pool.free - cache.pool.claimed for cache in rig.caches)


# With one worker, the first second brings the answer, the next one the state, and each later one 8 pages.
@pytest.mark.parametrize(
    ("stated", "seconds", "expected"),
    [(True, 0, ("stopped", 0)), (True, 3, ("partial", 384)), (True, 8, ("complete", 992)), (False, 8, ("stopped", 0)),
     (False, 9, ("complete", 992))],
)  # fmt: skip
def test_B61_best_effort_takes_what_has_arrived(stated: bool, seconds: int, expected: tuple[str, int]) -> None:
    rig, keys, fetch = stocked(BEST, stated, workers=1)
    rig.clock.advance(seconds)
    assert rig.prefetcher.ready(fetch), "it stops in the same call"
    assert outcome(rig, fetch, keys) == expected
    reads = len(rig.store.calls)
    rig.run()
    assert len(rig.store.calls) - reads <= 1, "chunks that had not begun never do"
    assert outcome(rig, fetch, keys) == expected
    assert waiting(rig) == 0


@pytest.mark.parametrize(("timeout", "per_page"), [(1.0, 2 / 62), (100.0, 0.0)])
def test_timeouts_grow_with_length(timeout: float, per_page: float) -> None:
    settings = Prefetch(stop="timeout", timeout=timeout, timeout_per_page=per_page, chunk=CHUNK)
    rig, keys, fetch = stocked(settings, stated=True, workers=1)
    rig.clock.advance(1.875)
    assert not rig.prefetcher.ready(fetch)
    rig.clock.advance(0.25)
    assert rig.prefetcher.ready(fetch) == (timeout < 100)
    if timeout < 100:
        assert outcome(rig, fetch, keys) == ("partial", 2 * CHUNK * 16)
    rig.run()
    assert outcome(rig, fetch, keys) == (("partial", 256) if timeout < 100 else ("complete", 992))


@pytest.mark.parametrize(
    ("settings", "level"), [(Prefetch(stop="timeout", chunk=CHUNK), "WARNING"), (BEST, "INFO")], ids=["timeout", "best"]
)
def test_a_prefetch_that_was_stopped_says_so_in_the_log(
    settings: Prefetch, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "memstate.tiers")
    rig, keys, fetch = stocked(settings, stated=True, workers=1)
    rig.clock.advance(1.0)  # 8 pages are read, and the timeout of 1.62 s is over
    assert rig.prefetcher.ready(fetch)
    assert outcome(rig, fetch, keys) == ("partial", CHUNK * 16)
    (said,) = [one for one in caplog.records if one.getMessage().startswith("prefetch ended")]
    assert (said.levelname, fetch.why) == (level, f"stopped by {settings.stop} after 2.000 s")
    assert f"why={fetch.why!r}" in said.getMessage()


def test_a_loop_waits_for_an_answer_of_storage_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this test, time passes only while the loop sleeps."""
    now, gate, begun = [0.0], Event(), Event()

    class Gated(MemoryStore):
        def exists(self, names: Sequence[str]) -> list[bool]:
            begun.set()
            gate.wait()
            return super().exists(names)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 1.0:  # the loop has waited about ten times
            gate.set()
            real.sleep(seconds)  # the sleep lets the threads run

    real = workers.time
    monkeypatch.setattr(workers, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now[0]))
    layout, waits = StateLayout((Plane("s", (7,), torch.float32),), layers=1), 0
    tiers = Tiers("m", host_slots=4, store=Gated(), prefetch=Prefetch(threshold=1, stop="wait_complete"))
    mem = StateManager(layout, slots=4, max_requests=1, pages=Pages(size=4), prefix=Prefix(), tiers=tiers)
    assert mem.tiers is not None
    fetch = mem.prefetch(range(9))
    begun.wait()
    while not mem.tiers.ready(fetch):
        before, waits = now[0], waits + 1
        mem.tiers.wait(fetch)
        assert gate.is_set() or 0.1 <= now[0] - before < 0.11
    assert waits >= 9 and fetch.outcome == "missed"
    mem.tiers.wait(fetch)  # the prefetch has ended: `wait` returns at once
    with pytest.raises(InvalidArgument, match="not what this manager"):
        mem.tiers.wait(None)  # type: ignore[arg-type]
    mem.close()


@pytest.mark.parametrize("half_seconds", [0, 1, 2, 9, 21])
def test_B65_an_abort_at_any_moment_returns_everything(half_seconds: int) -> None:
    rig, keys = Rig(WAIT, workers=1), digests("a", 62)
    rig.stock(keys, range(62), ENDS)
    fetch = rig.start(1000, keys)
    for _ in range(half_seconds):
        rig.clock.advance(0.5)
        rig.prefetcher.poll()
    over = fetch.done
    rig.prefetcher.cancel(fetch)
    assert outcome(rig, fetch, keys) == (("complete", 992) if over else ("cancelled", 0))
    assert waiting(rig) <= CHUNK, "only what is being read at this moment"
    rig.run()
    assert waiting(rig) == 0
    assert outcome(rig, fetch, keys) == (("complete", 992) if over else ("cancelled", 0))


def test_B65_records_that_a_thread_still_writes_to_are_nobody_elses() -> None:
    """A thread of the cancelled prefetch writes late.

    Until then the next prefetch gets other records, afterwards these.
    """
    rig, _, fetch = stocked(WAIT, kv=70, workers=2, latency=iter([1.0, 50.0, 50.0] + [1.0] * 99).__next__)
    rig.prefetcher.cancel(fetch)
    assert waiting(rig) == CHUNK + 1
    others = digests("b", 62)
    rig.stock(others, range(62), [992])
    second = rig.start(1000, others)
    rig.run(150)
    assert outcome(rig, second, others) == ("complete", 992)
    assert waiting(rig) == 0


def test_B65_close_waits_for_what_has_begun() -> None:
    store = MemoryStore()
    with ThreadPoolExecutor(2) as threads:
        rig, keys = Rig(WAIT, executor=threads, store=store), digests("a", 62)
        rig.stock(keys, range(62), ENDS)
        fetches = [rig.start(1000, keys) for _ in range(3)]
        rig.close()
        assert [fetch.outcome for fetch in fetches] == ["cancelled"] * 3
        rig.check()
        assert waiting(rig) == 0
    late = rig.start(1000, keys)  # the executor has been shut down
    rig.prefetcher.poll()
    assert (late.outcome, rig.prefetcher.stats().failures) == ("failed", 1)
    rig.check()


FLAWS = {"vanished": "missing", "half": "damaged", "garbage": "checksum", "denied": "failed"}


@pytest.mark.parametrize("fault", FLAWS)
def test_B61_a_page_that_does_not_come_ends_what_is_usable(fault: str) -> None:
    rig, keys, fetch = stocked(WAIT, stated=True)
    rig.store.faults[KV.name(keys[7])] = fault
    rig.run()
    assert outcome(rig, fetch, keys) == ("partial", 7 * 16)
    stats = rig.prefetcher.stats()
    assert stats.flaws == {FLAWS[fault]: 1}
    assert stats.failures == 0 and fetch.why == FLAWS[fault]


@pytest.mark.parametrize("fault", ["garbage", "denied"])
def test_B62_a_state_that_does_not_come_is_not_attached(fault: str) -> None:
    rig, keys, fetch = stocked(WAIT)
    rig.store.faults[STATE.name(keys[61])] = fault
    rig.run()
    assert outcome(rig, fetch, keys) == ("failed" if fault == "denied" else "missed", 0)
    assert len(rig.states) == len(rig.kv) == 0
    assert sum(rig.prefetcher.stats().flaws.values()) == 1


def test_B62_a_state_of_another_length_is_foreign() -> None:
    """The record under the state's name is undamaged, but stands for fewer tokens."""
    rig, keys, fetch = stocked(WAIT)
    rig.store.records[STATE.name(keys[61])] = record(STATE, keys[61], 976)
    rig.run()
    assert outcome(rig, fetch, keys) == ("missed", 0)
    assert rig.prefetcher.stats().flaws == {"foreign": 1}


@pytest.mark.parametrize("when", ["asking", "reading", "one page", "forgetful"])
def test_a_store_that_raises_has_failed(when: str) -> None:
    rig, keys = Rig(WAIT, states=62), digests("a", 62)
    rig.stock(keys, range(62))
    rig.host(keys, (), range(16, 993, 16))
    fetch = rig.start(1000, keys)
    rig.store.broken, rig.store.forgetful = when == "asking", when == "forgetful"
    rig.clock.advance(1)
    rig.prefetcher.poll()
    rig.store.broken = when == "reading"
    if when == "one page":
        rig.store.faults[KV.name(keys[20])] = "raises"
    rig.run()
    assert outcome(rig, fetch, keys) == (("partial", 256) if when == "one page" else ("failed", 0))
    assert rig.prefetcher.stats().failures >= 1
    said = {"one page": "ConnectionResetError('storage went away')", "forgetful": "OSError('storage was asked for 8"}
    assert fetch.why.startswith(said.get(when, "OSError('storage is not there"))
    rig.store.broken = rig.store.forgetful = False
    again = rig.start(1000, keys)
    rig.run()
    assert again.length == (256 if when == "one page" else 992)
