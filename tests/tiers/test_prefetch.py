"""Prefetch, one rank on virtual time: what is asked, claimed, read, kept and given back."""

import pytest

from memstate.errors import ConfigurationError
from memstate.tiers.prefetch.fetch import Fetch
from memstate.tiers.prefetch.settings import Prefetch
from tests.support.prefetch_rig import PAGE, Rig, digests

WAIT = Prefetch(stop="wait_complete")


def names(rig: Rig, call: str, kind: str) -> int:
    return sum(name.startswith(kind) for name in rig.store.asked(call))


def outcome(rig: Rig, fetch: Fetch, keys: list[bytes], kv_pages: int = 0) -> tuple[str | None, int]:
    """How a prefetch ended, once it is certain that nothing is held and that a look finds what it promised."""
    assert fetch.done
    rig.check()
    found = rig.found(keys, kv_pages)
    assert found == fetch.length or (found <= fetch.covered == fetch.length)
    return fetch.outcome and fetch.outcome.value, fetch.length


# -- what it is after ---------------------------------------------------------------------------------


def test_B54_a_prompt_of_1000_tokens_asks_for_992() -> None:
    rig, keys = Rig(WAIT), digests("a", 63)
    rig.stock(keys, range(62), [992])
    fetch = rig.start(1000, keys)
    assert (fetch.tokens, fetch.end, rig.prefetcher.in_flight_tokens) == (992, 62, 992)
    rig.run()
    assert outcome(rig, fetch, keys) == ("complete", 992)
    assert names(rig, "exists", "kv") == names(rig, "get", "kv") == 62
    assert rig.prefetcher.stats().tokens == 992


@pytest.mark.parametrize(
    ("tokens", "covered", "asked"),
    [(255, 0, False), (256, 0, True), (271, 16, False), (272, 16, True), (1000, 737, False), (1000, 736, True),
     (1000, 992, False), (100, 500, False), (0, 0, False)],
)  # fmt: skip
def test_B54_what_lacks_less_than_the_threshold_is_given_up_at_once(tokens: int, covered: int, asked: bool) -> None:
    rig, keys = Rig(), digests("a", tokens // PAGE)
    fetch = rig.start(tokens, keys, covered=covered)
    assert (not fetch.done, bool(rig.workers.jobs), rig.prefetcher.stats().short) == (asked, asked, int(not asked))
    if not asked:
        assert outcome(rig, fetch, keys) == ("short", covered)


def test_a_gap_ends_what_storage_is_asked_for() -> None:
    """40 pages: 10 on the device, 5 in host memory, then storage, with a gap at page 33: chunks of 8 from page 15."""
    rig, keys = Rig(Prefetch(stop="wait_complete", chunk=8)), digests("a", 80)
    rig.host(keys, range(10, 15))
    rig.stock(keys, [*range(33), *range(34, 80)], [16 * n for n in (5, 30, 33, 34, 70)])
    fetch = rig.start(1280, keys, kv_pages=10)
    rig.run()
    assert outcome(rig, fetch, keys, 10) == ("complete", 33 * 16)
    assert [name.split("-")[1] for name in rig.store.asked("exists") if name.startswith("kv")] == [
        key.hex() for key in keys[15:39]
    ]
    assert names(rig, "exists", "state") == 33 - 15  # ends that gain 256 tokens, where KV reaches: 16 to 33
    assert names(rig, "get", "kv") == 33 - 15 and names(rig, "get", "state") == 1


# -- host memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens_free", "filled", "length"),
    [(500, 0, 496), (511, 0, 496), (512, 0, 512), (300, 200, 496), (992, 0, 992), (5000, 0, 992)],
)
def test_B55_a_hit_is_truncated_to_the_pages_that_host_memory_has(tokens_free: int, filled: int, length: int) -> None:
    """filled: tokens of others, which can be evicted."""
    rig, keys, others = Rig(WAIT, kv=(tokens_free + filled) // PAGE), digests("a", 62), digests("b", 62)
    rig.stock(keys, range(62), range(16, 993, 16))
    rig.host(others, range(filled // PAGE))
    fetch = rig.start(1000, keys)
    rig.clock.advance(1)
    rig.prefetcher.poll()
    assert (fetch.tokens, fetch.keys) == (length, keys[: length // PAGE])
    assert rig.prefetcher.in_flight_tokens == length
    rig.run()
    assert outcome(rig, fetch, keys) == ("complete", length)
    stats = rig.prefetcher.stats()
    assert (stats.truncated, stats.truncated_tokens) == (int(length < 992), 992 - length)


@pytest.mark.parametrize(("tokens_free", "ends"), [(250, range(16, 993, 16)), (255, range(16, 993, 16)), (600, [992])])
def test_B56_truncated_below_the_threshold_gives_everything_up(tokens_free: int, ends: range | list[int]) -> None:
    """The last: pages for 592 tokens, and no state before 992."""
    rig, keys = Rig(WAIT, kv=tokens_free // PAGE), digests("a", 62)
    rig.stock(keys, range(62), ends)
    fetch = rig.start(1000, keys)
    rig.run()
    assert outcome(rig, fetch, keys) == ("no_room", 0)
    assert rig.kv.pool.free == rig.kv.pool.records and rig.states.pool.free == rig.states.pool.records
    assert rig.prefetcher.stats().no_room == 1 and rig.store.asked("get") == []


@pytest.mark.parametrize(
    ("free", "filled", "evicted"), [(62, 20, 0), (61, 20, 1), (40, 40, 22), (10, 40, 40), (0, 30, 30)]
)
def test_B57_eviction_asks_for_the_shortfall_only(free: int, filled: int, evicted: int) -> None:
    """The last two are truncated: to what there is after one eviction, with no second one."""
    rig, keys, others = Rig(WAIT, kv=free + filled), digests("a", 62), digests("b", 80)
    rig.stock(keys, range(62), range(16, 993, 16))
    rig.host(others, range(filled))
    fetch = rig.start(1000, keys)
    rig.run()
    assert rig.kv.evicted == evicted
    assert outcome(rig, fetch, keys) == ("complete", min(62, free + filled) * 16)
    assert [key in rig.kv for key in others[:filled]] == [False] * evicted + [True] * (filled - evicted)


def test_B57_what_a_prefetch_relies_on_is_not_evicted_for_it() -> None:
    """20 pages of the prompt itself are the least recently used of 40."""
    rig, keys, others = Rig(WAIT, kv=62), digests("a", 62), digests("b", 40)
    rig.stock(keys, range(20, 62), [992])
    rig.host(keys, range(20))
    rig.host(others, range(40))
    fetch = rig.start(1000, keys)
    rig.run()
    assert outcome(rig, fetch, keys) == ("complete", 992) and rig.kv.evicted == 40


def test_B58_over_the_limit_nothing_is_allocated() -> None:
    rig = Rig(Prefetch(limit=1000, stop="wait_complete"))
    prompts = [digests(name, 62) for name in "abc"]
    for keys in prompts:
        rig.stock(keys, range(62), [496, 992])
    first, second = (rig.start(tokens, keys) for tokens, keys in zip((600, 400), prompts, strict=False))
    assert rig.prefetcher.in_flight_tokens == 592 + 400
    before = len(rig.workers.jobs), rig.kv.pool.free
    refused = rig.start(1000, prompts[2])
    assert (refused.outcome, refused.length, rig.prefetcher.stats().limited) == ("limited", 0, 1)
    assert (len(rig.workers.jobs), rig.kv.pool.free) == before
    rig.run()
    assert (first.length, second.outcome) == (496, "missed")
    assert rig.prefetcher.in_flight_tokens == 0
    again = rig.start(1000, prompts[2])
    rig.run()
    assert outcome(rig, again, prompts[2]) == ("complete", 992)


@pytest.mark.parametrize("pinned", [True, False])
def test_B59_without_a_record_for_the_state_the_pages_go_back(pinned: bool) -> None:
    rig, keys, others = Rig(WAIT, states=1), digests("a", 62), digests("b", 10)
    rig.stock(keys, range(62), [992])
    (entry,) = rig.host(others, (), [160])
    if pinned:
        rig.states.pin(entry)
    fetch = rig.start(1000, keys)
    rig.run()
    if pinned:
        assert rig.kv.pool.free == rig.kv.pool.records and rig.store.asked("get") == []
        rig.states.unpin(entry)
    assert rig.states.evicted == int(not pinned)
    assert outcome(rig, fetch, keys) == (("no_room", 0) if pinned else ("complete", 992))


@pytest.mark.parametrize(
    ("pages", "covered", "length"), [(15, 0, 0), (16, 0, 256), (20, 80, 0), (21, 80, 336), (0, 0, 0)]
)
def test_B60_pages_alone_are_revoked_too(pages: int, covered: int, length: int) -> None:
    rig, keys = Rig(WAIT, states=None), digests("a", 62)
    rig.stock(keys, range(pages))
    fetch = rig.start(1000, keys, covered, covered // PAGE)
    rig.run()
    assert (fetch.outcome, fetch.length) == (("complete", length) if length else ("missed", covered))
    rig.check()
    assert rig.kv.pool.records - rig.kv.pool.free == max(0, length - covered) // PAGE


@pytest.mark.parametrize(
    ("kv", "reserve", "length"), [(62, 0, 992), (62, 10, 832), (62, 46, 256), (62, 47, 0), (20, 30, 0)]
)
def test_B68_truncation_leaves_the_reserve(kv: int, reserve: int, length: int) -> None:
    rig, keys = Rig(WAIT, kv=kv, reserve=reserve), digests("a", 62)
    rig.stock(keys, range(62), range(16, 993, 16))
    fetch = rig.start(1000, keys)
    rig.run()
    assert outcome(rig, fetch, keys) == ("complete" if length else "no_room", length)
    assert rig.kv.pool.free >= min(kv, reserve)


def test_B68_the_reserve_holds_where_records_are_being_copied() -> None:
    rig, keys, others = Rig(WAIT, kv=62, reserve=10), digests("a", 62), digests("b", 30)
    rig.stock(keys, range(62), range(16, 993, 16))
    writing = [entry.record for entry in rig.host(others, range(30))]
    rig.kv.pool.use(writing)
    fetch = rig.start(1000, keys)
    rig.run()
    rig.kv.pool.unuse(writing)
    assert outcome(rig, fetch, keys) == ("complete", (32 - 10) * 16)


# -- where it lands -----------------------------------------------------------------------------------


def test_B62_a_state_stands_for_the_length_that_it_is_filed_under() -> None:
    """Truncated to 600 tokens: the state at 592 it is, though those at 608 and 992 are nearer to what was asked."""
    rig, keys = Rig(WAIT, kv=600 // PAGE), digests("a", 62)
    rig.stock(keys, range(62), [256, 592, 608, 992])
    fetch = rig.start(1000, keys)
    rig.run()
    assert outcome(rig, fetch, keys) == ("complete", 592)
    (entry,) = rig.states.entries()
    assert (entry.key, entry.length, entry.fetched) == (keys[36], 592, True)  # its bytes: see Rig.check
    assert [entry.length for entry in rig.kv.entries()] == [16 * n for n in range(37, 0, -1)]  # the first goes last


def test_B64_a_state_comes_back_to_kv_that_is_on_the_device() -> None:
    rig, keys = Rig(WAIT, kv=0), digests("a", 62)
    rig.stock(keys, (), [640])
    fetch = rig.start(1000, keys, covered=320, kv_pages=40)
    rig.run()
    assert outcome(rig, fetch, keys, kv_pages=40) == ("complete", 640)
    assert names(rig, "get", "kv") == 0 and len(rig.kv) == 0


def test_B64_kv_comes_back_to_a_state_that_is_in_host_memory() -> None:
    rig, keys = Rig(WAIT, states=2), digests("a", 62)
    rig.stock(keys, range(62), [])
    rig.host(digests("b", 10), (), [160])
    rig.host(keys, (), [640])
    fetch = rig.start(1000, keys, covered=0, kv_pages=10)
    rig.run()
    assert outcome(rig, fetch, keys, kv_pages=10) == ("complete", 640)
    assert names(rig, "get", "kv") == 30 and names(rig, "get", "state") == rig.states.evicted == 0


def test_what_host_memory_has_no_longer_ends_the_reach() -> None:
    """Page 20 was in host memory when storage was asked, so that nobody knows whether storage has it."""
    rig, keys = Rig(WAIT), digests("a", 62)
    rig.stock(keys, range(62), [320, 992])
    (entry,) = rig.host(keys, [20])
    fetch = rig.start(1000, keys)
    rig.kv.drop(entry)
    rig.run()
    assert outcome(rig, fetch, keys) == ("complete", 320)


def test_two_prefetches_of_one_prefix_keep_it_once() -> None:
    rig, keys = Rig(WAIT), digests("a", 62)
    rig.stock(keys, range(62), [496, 992])
    fetches = [rig.start(tokens, keys) for tokens in (1000, 1000, 500)]
    rig.run()
    assert [fetch.length for fetch in fetches] == [992, 992, 496]
    assert (len(rig.kv), len(rig.states)) == (62, 2)
    assert outcome(rig, fetches[0], keys) == ("complete", 992)


# -- the door -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [{"threshold": -1}, {"threshold": 1.5}, {"limit": -1}, {"limit": True}, {"stop": "now"}, {"timeout": -1.0},
     {"timeout": float("inf")}, {"timeout_per_page": float("nan")}, {"timeout": "1"}, {"chunk": 0}],
)  # fmt: skip
def test_settings_that_cannot_be_meant_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        Prefetch(**wrong)  # type: ignore[arg-type]
