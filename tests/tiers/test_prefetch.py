"""Prefetches of one rank, judged by the model: what is asked for, claimed, read, kept and given back."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace

import pytest
import torch

from memstate import Pages, Prefix, StateManager
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.state.layout import Plane, StateLayout
from memstate.tiers import Tiers, workers
from memstate.tiers.prefetch.settings import Prefetch
from tests.proof.stateful.script import Play, script
from tests.support.prefetch_rig import Rig, digests
from tests.support.virtual import MemoryStore

BELOW = {"prefix": True, "tiered": True, "storing": True, "host_slots": 12, "host_pages": 40}
T, OTHER = list(range(1, 22)), list(range(101, 122))
EVEN = range(2, 21, 2)


@script(**BELOW, fetch_threshold=(0, 1, 5, 6), covered=(0, 6))
def test_B54_whole_pages_are_asked_for_and_what_lacks_too_little_is_given_up(play: Play) -> None:
    if play.covered:
        play.turn(T[: play.covered])
    play.stock(T, 10, 12)
    for length in (1, 5, 10, 11, 12, 13, 14, 21):
        play.fetch(T[:length])
    play.reached("short", "complete", "missed" if play.fetch_threshold < 2 else "short")


@script(**BELOW, chunk=(1, 2, 32), gap=(4, 5, 9))
def test_a_gap_ends_what_storage_is_asked_for(play: Play) -> None:
    play.turn(T[:4])
    play.stock(T, 4, 6, 8, 10, 12, 20, gap=play.gap)
    play.fetch(T)
    play.turn(T)
    play.reached("complete", "storage hit")


ROOM = {"filled": (0, 3, 6), "fetch_threshold": (1, 8), "states": (EVEN, (20,), (8, 12))}


@script(**(BELOW | {"host_pages": 9}), **ROOM, host_reserve=(0.0, 0.3, 0.9))
def test_B55_B56_B57_B68_a_hit_is_truncated_to_the_room_that_host_memory_has(play: Play) -> None:
    """Records of another prompt can be evicted for it, as many as it lacks. The reserve stays free."""
    play.stock(OTHER[: 2 * play.filled], *EVEN)
    play.fetch([*OTHER[: 2 * play.filled], 1])
    play.stock(T, *play.states)
    play.fetch(T)
    play.fetch([*T[:9], 0])
    play.turn(T)
    reached = {EVEN: "truncated", (20,): "no_room", (8, 12): "complete"}
    play.reached("no_room" if play.host_reserve > 0.5 else reached[play.states])


@script(**(BELOW | {"host_pages": 10}))
def test_B57_what_a_prefetch_relies_on_is_not_evicted_for_it(play: Play) -> None:
    play.stock(T[:6], 6)
    play.fetch(T[:7])
    play.stock(OTHER[:8], 8)
    play.fetch(OTHER[:9])
    play.stock(T, 20)
    play.fetch(T)
    play.reached("thinned", "complete")


@script(**BELOW, fetch_limit=(8, 12, 25, 30), fetch_threshold=(1, 8), covered=(0, 8))
def test_B58_S10_prefetches_have_one_limit_and_the_longest_start_that_fits_is_fetched(play: Play) -> None:
    if play.covered:
        play.turn(T[: play.covered])
    for text in (T, OTHER):
        play.stock(text, 4, 10, 20)
    fetches = [play.prefetch(text) for text in (T, OTHER[:13], OTHER, T[:5])]
    for fetch in fetches:
        while not fetch.done:
            play.work()
            play.poll()
    play.fetch(OTHER)
    play.reached("limited" if play.fetch_limit < 30 else "complete")


@script(**(BELOW | {"host_slots": 1}), written=(False, True))
def test_B59_without_a_record_for_the_state_the_pages_go_back(play: Play) -> None:
    """While a state is written to storage, it cannot make room."""
    play.turn(OTHER[:4])
    play.submit()
    play.poll()
    play.poll()
    if play.written:
        play.drain()
    play.stock(T, 20)
    play.prefetch(T)
    play.work(at=-1)
    play.poll()
    play.reached(*() if play.written else ("no_room",))
    play.drain()
    play.fetch(T)
    play.reached("thinned", "complete")


@script(**BELOW, fetch_threshold=(1, 6), lost=(0, 2, 5), covered=(0, 4))
def test_B60_B64_pages_alone_are_fetched_to_states_in_host_memory_and_revoked_too(play: Play) -> None:
    if play.covered:
        play.turn(T[: play.covered])
    play.stock(T, *EVEN)
    for end in EVEN:
        play.fetch(T[: end + 1])
    play.thin(pages=99)
    play.spoil("kv", T[: 2 * play.lost + 2], "gone")
    play.fetch(T)
    play.thin(pages=99)
    play.spoil("kv", T[: 2 * play.lost + 2], "garbage")
    play.fetch(T)
    play.turn(T)
    play.reached("complete", "thinned")


@script(strategy=("none", "redirect"), **BELOW, gone=(0, 1, 99))
def test_B62_B64_a_state_comes_back_to_the_kv_of_its_length(play: Play) -> None:
    play.turn(T[:12])
    play.drain()
    play.evict(states=99, pages=play.gone)
    play.empty_host()
    play.fetch(T[:13])
    play.match(T[:13])
    play.turn(T)
    play.turn([*T[:12], 0])
    play.reached("complete", "storage hit")


@script(**BELOW, gone=("thin", "empty"))
def test_what_host_memory_has_no_longer_ends_the_reach(play: Play) -> None:
    """Pages were in host memory when storage was asked, so nobody knows whether storage has them."""
    play.stock(T, 6, 20)
    play.fetch(T[:7])
    play.evict(states=9, pages=99)
    fetch = play.prefetch(T)
    if play.gone == "thin":
        play.thin(pages=1)
    else:
        play.empty_host()
    while not fetch.done:
        play.work()
        play.poll()
    play.reached("complete" if play.gone == "empty" else "thinned")


STOPS = {"stop": ("best_effort", "timeout", "wait_complete"), "chunk": (2, 32), "at": (0, 1, 2, 4, 6)}


@script(**BELOW, **STOPS, stated=(False, True))
def test_B61_what_has_arrived_when_a_prefetch_stops_is_usable(play: Play) -> None:
    """A timeout grows with the length. Chunks that have not begun never do."""
    play.stock(T, *EVEN)
    if play.stated:
        for end in EVEN:
            play.fetch(T[: end + 1])
        play.thin(pages=99)
    fetch = play.prefetch(T)
    for _ in range(play.at):
        play.work()
        play.poll()
        play.work(at=1, finish=False)
    for seconds in (1.0, 4.75, 0.25):
        play.tick(seconds)
        play.ready(fetch)
    play.drain()
    play.turn(T)
    early = play.at == 0 and play.stop != "wait_complete"
    play.reached("stopped" if early else "complete" if play.stop == "wait_complete" else "started")


@script(**(BELOW | {"host_pages": 12}), at=(0, 1, 2, 4, 5, 9), begun=(False, True), how=("cancel", "close"))
def test_B65_an_abort_at_any_moment_returns_everything(play: Play) -> None:
    """Until a thread has ended its job, the records that it writes to are nobody else's."""
    play.stock(T, 10, 20)
    fetch = play.prefetch(T)
    for _ in range(play.at):
        play.work()
        play.poll()
    if play.begun:
        play.work(2, finish=False)
    if play.how == "close":
        return
    play.unfetch(fetch)
    play.reached("cancelled" if play.at < 3 else "started")
    play.stock(OTHER, 20)
    play.prefetch(OTHER)
    play.work(at=-1)
    play.poll()
    play.work(2, at=-2)
    play.poll()
    play.drain()
    play.turn(OTHER)


FLAWS = {"vanished": "missing", "half": "damaged", "garbage": "checksum", "foreign": "foreign", "denied": "failed",
         "raises": "failures"}  # fmt: skip


@script(**BELOW, chunk=(2, 32), kind=("kv", "state"), fault=tuple(FLAWS))
def test_B61_B62_B67_what_does_not_come_ends_what_is_usable(play: Play) -> None:
    play.stock(T, 6, 12, 20)
    play.fetch(T[:7])
    play.evict(states=9, pages=99)
    play.thin(pages=99)
    why = FLAWS[play.fault] if play.fault != "raises" else "ConnectionResetError('storage went away')"
    for length in (20, 8):
        play.spoil(play.kind, T[:length], play.fault)
        assert play.fetch(T).why == why
    play.turn(T[:9])
    play.reached(FLAWS[play.fault])
    for length in (20, 8):
        play.spoil(play.kind, T[:length], "")
    play.empty_host()
    play.fetch(T)
    play.reached("complete")


@script(**BELOW, chunk=(1, 2, 32))
def test_B61_of_two_pages_that_do_not_come_the_first_one_counts(play: Play) -> None:
    play.stock(T, *EVEN)
    for end in EVEN:
        play.fetch(T[: end + 1])
    play.thin(pages=99)
    for end in (8, 14):
        play.spoil("kv", T[:end], "vanished")
    fetch = play.prefetch(T)
    play.work()
    play.poll()
    play.work(99)
    play.poll()
    play.ready(fetch)
    play.reached("partial")


@script(**BELOW, when=("asking", "reading", "forgetful"))
def test_a_store_that_raises_has_failed(play: Play) -> None:
    play.stock(T, 20)
    fetch = play.prefetch(T)
    if play.when == "reading":
        play.work()
        play.poll()
    play.break_store(play.when != "forgetful", play.when == "forgetful")
    play.drain()
    play.reached("failures", "failed")
    said = "storage was asked for 10 records" if play.when == "forgetful" else "storage is not there"
    assert fetch.why.startswith(f"OSError('{said}")
    play.break_store()
    play.fetch(T)
    play.turn(T)
    play.reached("complete")


@pytest.mark.parametrize(("stop", "level"), [("timeout", "WARNING"), ("best_effort", "INFO")])
def test_a_prefetch_that_was_stopped_says_so_in_the_log(
    stop: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "memstate.tiers")
    play = Play(Backend("reference"), **BELOW, stop=stop)
    play.stock(T, 20)
    fetch = play.prefetch(T)
    play.tick(6.0)
    play.ready(fetch)
    (said,) = [one for one in caplog.records if one.getMessage().startswith("prefetch ended")]
    assert (said.levelname, fetch.why) == (level, f"stopped by {stop} after 6.000 s")
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


def test_B65_close_waits_for_what_has_begun() -> None:
    with ThreadPoolExecutor(2) as threads:
        rig, keys = Rig(Prefetch(stop="wait_complete", chunk=8), executor=threads), digests("a", 62)
        rig.stock(keys, range(62), (496, 992))
        fetches = [rig.start(1000, keys) for _ in range(3)]
        rig.close()
        assert [fetch.outcome for fetch in fetches] == ["cancelled"] * 3
        rig.check()
        assert all(cache.pool.free + cache.pool.claimed == cache.pool.records for cache in rig.caches)
    late = rig.start(1000, keys)  # the executor has been shut down
    rig.prefetcher.poll()
    assert (late.outcome, rig.prefetcher.stats().failures) == ("failed", 1)
    rig.check()


@pytest.mark.parametrize(
    ("host", "device", "tokens"),
    [(3000, 1000, 1600), (1000, 0, 800), (1000, 900, 400), (1000, 5000, 400), (10, 0, 256), (0, 0, None)],
)
def test_S10_the_limit_is_a_part_of_host_memory_that_is_no_copy(host: int, device: int, tokens: int | None) -> None:
    assert Prefetch().in_tokens(host, device).limit == tokens
    assert [Prefetch(limit=given).in_tokens(host, device).limit for given in (None, 300)] == [None, 300]


WRONG = [("threshold", -1), ("threshold", 1.5), ("limit", -1), ("limit", True), ("limit", 1.5), ("limit", 0.0),
         ("stop", "now"), ("timeout", -1.0), ("timeout", float("inf")), ("timeout_per_page", float("nan")),
         ("timeout", "1"), ("chunk", 0)]  # fmt: skip


def test_settings_that_cannot_be_meant_are_refused() -> None:
    for name, value in WRONG:
        with pytest.raises(ConfigurationError, match=name):
            Prefetch(**{name: value})  # type: ignore[arg-type]
