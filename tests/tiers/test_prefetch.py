"""Prefetch of one rank on virtual time: what is asked for, claimed, read, kept and given back."""

import pytest

from memstate.errors import ConfigurationError
from memstate.tiers.prefetch.settings import Prefetch
from tests.support.prefetch_rig import ALL, ENDS, PAGE, Case, Rig, digests, outcome


def test_B54_a_prompt_of_1000_tokens_asks_for_992() -> None:
    case = Case(ends=[992])
    assert (case.fetch.tokens, case.fetch.end, case.rig.prefetcher.in_flight_tokens) == (992, 62, 992)
    assert case.end() == ("complete", 992)
    assert case.asked("exists", "kv") == case.asked("get", "kv") == 62 and case.rig.prefetcher.stats().tokens == 992


@pytest.mark.parametrize(
    ("tokens", "covered", "asked"),
    [(255, 0, False), (256, 0, True), (1000, 737, False), (1000, 736, True), (100, 500, False)],
)
def test_B54_what_lacks_less_than_the_threshold_is_given_up_at_once(tokens: int, covered: int, asked: bool) -> None:
    rig, keys = Rig(), digests("a", tokens // PAGE)
    fetch = rig.start(tokens, keys, covered=covered)
    assert (not fetch.done, bool(rig.workers.jobs), rig.prefetcher.stats().short) == (asked, asked, int(not asked))
    assert asked or outcome(rig, fetch, keys) == ("short", covered)


def test_a_gap_ends_what_storage_is_asked_for() -> None:
    """Of 80 pages, 10 are on the device, 5 in host memory, and the others, except page 33, in storage.

    Chunks have 8 pages.
    """
    rig, keys = Rig(Prefetch(stop="wait_complete", chunk=8)), digests("a", 80)
    rig.host(keys, range(10, 15))
    rig.stock(keys, [*range(33), *range(34, 80)], [16 * n for n in (5, 30, 33, 34, 70)])
    fetch = rig.start(1280, keys, kv_pages=10)
    rig.run()
    assert outcome(rig, fetch, keys, 10) == ("complete", 33 * 16)
    asked = {call: rig.store.asked(call) for call in ("exists", "get")}
    assert [n.split("-")[1] for n in asked["exists"] if n.startswith("kv")] == [key.hex() for key in keys[15:39]]
    # only states of 16 to 33 pages are asked for: shorter ones gain less than 256 tokens, longer ones lack KV
    assert sum(name.startswith("state") for name in asked["exists"]) == 33 - 15
    assert sorted(name.split("-")[0] for name in asked["get"]) == ["kv"] * (33 - 15) + ["state"]


@pytest.mark.parametrize(
    ("tokens_free", "filled", "length"),
    [(511, 0, 496), (512, 0, 512), (300, 200, 496), (5000, 0, 992)],
)
def test_B55_a_hit_is_truncated_to_the_pages_that_host_memory_has(tokens_free: int, filled: int, length: int) -> None:
    """`filled` tokens of host memory belong to other prompts, and can be evicted."""
    case = Case(rig={"kv": (tokens_free + filled) // PAGE}, others=(range(filled // PAGE),))
    case.rig.clock.advance(1)
    case.rig.prefetcher.poll()
    assert (case.fetch.tokens, case.fetch.keys) == (length, case.keys[: length // PAGE])
    assert case.rig.prefetcher.in_flight_tokens == length and case.end() == ("complete", length)
    stats = case.rig.prefetcher.stats()
    assert (stats.truncated, stats.truncated_tokens) == (int(length < 992), 992 - length)


@pytest.mark.parametrize(("tokens_free", "ends"), [(255, range(16, 993, 16)), (600, [992])])
def test_B56_truncated_below_the_threshold_gives_everything_up(tokens_free: int, ends: range | list[int]) -> None:
    """In the second case, pages fit for 592 tokens, but the only state stands at 992."""
    case = Case(rig={"kv": tokens_free // PAGE}, ends=ends)
    assert case.end() == ("no_room", 0)
    assert all(cache.pool.free == cache.pool.records for cache in case.rig.caches)
    assert case.rig.prefetcher.stats().no_room == 1 and case.rig.store.asked("get") == []


@pytest.mark.parametrize(("free", "filled", "evicted"), [(61, 20, 1), (10, 40, 40)])
def test_B57_eviction_asks_for_the_shortfall_only(free: int, filled: int, evicted: int) -> None:
    """The second case is truncated to the room that one eviction makes. It evicts only once."""
    case = Case(rig={"kv": free + filled}, others=(range(filled),))
    assert case.end() == ("complete", min(62, free + filled) * 16) and case.rig.kv.evicted == evicted
    assert [key in case.rig.kv for key in case.others[:filled]] == [False] * evicted + [True] * (filled - evicted)


def test_B57_what_a_prefetch_relies_on_is_not_evicted_for_it() -> None:
    """Of the 40 pages in host memory, the 20 that were unused longest belong to the prompt itself."""
    case = Case(rig={"kv": 62}, kv=range(20, 62), ends=[992], here=(range(20),), others=(range(40),))
    assert case.end() == ("complete", 992) and case.rig.kv.evicted == 40


def test_B58_over_the_limit_nothing_is_allocated() -> None:
    rig = Rig(Prefetch(limit=1000, stop="wait_complete"))
    prompts = [digests(name, 62) for name in "abc"]
    for keys in prompts:
        rig.stock(keys, ALL, [496, 992])
    first, second = (rig.start(tokens, keys) for tokens, keys in zip((600, 400), prompts, strict=False))
    assert rig.prefetcher.in_flight_tokens == 592 + 400
    before = len(rig.workers.jobs), rig.kv.pool.free
    refused = rig.start(1000, prompts[2])
    assert (refused.outcome, refused.length, rig.prefetcher.stats().limited) == ("limited", 0, 1)
    assert (len(rig.workers.jobs), rig.kv.pool.free) == before
    rig.run()
    assert (first.length, second.outcome, rig.prefetcher.in_flight_tokens) == (496, "missed", 0)
    again = rig.start(1000, prompts[2])
    rig.run()
    assert outcome(rig, again, prompts[2]) == ("complete", 992)


@pytest.mark.parametrize(
    ("limit", "covered", "fetched", "end"),
    [(991, 0, 976, 496), (495, 0, 480, 0), (255, 0, 992, 0), (300, 496, 784, 496), (496, 496, 992, 992)],
)
def test_S10_of_a_prompt_above_the_limit_the_longest_start_that_fits_is_fetched(
    limit: int, covered: int, fetched: int, end: int
) -> None:
    """The start has whole pages, and at most `limit` tokens.

    If it gains less than the threshold, nothing is fetched.
    """
    rig, keys = Rig(Prefetch(threshold=250, limit=limit, stop="wait_complete")), digests("a", 62)
    rig.stock(keys, ALL, [496, 992])
    fetch = rig.start(1000, keys, covered=covered, kv_pages=covered // PAGE)
    assert fetch.tokens == fetched and rig.prefetcher.in_flight_tokens <= limit
    rig.run()
    assert fetch.length == (end or covered)
    assert rig.prefetcher.stats().limited == (limit == 255)
    assert rig.prefetcher.stats().truncated_tokens >= (0 if limit == 255 else 992 - fetched)


@pytest.mark.parametrize(
    ("host", "device", "tokens"),
    [(3000, 1000, 1600), (1000, 0, 800), (1000, 900, 400), (1000, 5000, 400), (10, 0, 256), (0, 0, None)],
)
def test_S10_the_limit_is_a_part_of_host_memory_that_is_no_copy(host: int, device: int, tokens: int | None) -> None:
    assert Prefetch().in_tokens(host, device).limit == tokens
    assert [Prefetch(limit=given).in_tokens(host, device).limit for given in (None, 300)] == [None, 300]


@pytest.mark.parametrize("pinned", [True, False])
def test_B59_without_a_record_for_the_state_the_pages_go_back(pinned: bool) -> None:
    case = Case(rig={"states": 1}, ends=[992], others=((), [160]))
    rig, (entry,) = case.rig, case.old
    if pinned:
        rig.states.pin(entry)
    rig.run()
    if pinned:
        assert rig.kv.pool.free == rig.kv.pool.records and rig.store.asked("get") == []
        rig.states.unpin(entry)
    assert rig.states.evicted == int(not pinned) and case.end() == (("no_room", 0) if pinned else ("complete", 992))


@pytest.mark.parametrize(("pages", "covered", "length"), [(15, 0, 0), (16, 0, 256), (20, 80, 0), (21, 80, 336)])
def test_B60_pages_alone_are_revoked_too(pages: int, covered: int, length: int) -> None:
    """All states are in host memory, so only KV pages are fetched."""
    case = Case(
        rig={"states": 62}, kv=range(pages), ends=(), here=((), ENDS), covered=covered, kv_pages=covered // PAGE
    )
    case.rig.run()
    assert (case.fetch.outcome, case.fetch.length) == (("complete", length) if length else ("missed", covered))
    case.rig.check()
    assert case.rig.kv.pool.claimed == max(0, length - covered) // PAGE


@pytest.mark.parametrize(("kv", "reserve", "length"), [(62, 10, 832), (62, 47, 0), (20, 30, 0)])
def test_B68_truncation_leaves_the_reserve(kv: int, reserve: int, length: int) -> None:
    case = Case(rig={"kv": kv, "reserve": reserve})
    assert case.end() == ("complete" if length else "no_room", length) and case.rig.kv.pool.free >= min(kv, reserve)


def test_B68_the_reserve_holds_where_records_are_being_copied() -> None:
    case = Case(rig={"kv": 62, "reserve": 10}, others=(range(30),))
    case.rig.kv.pin(*case.old)
    case.rig.run()
    case.rig.kv.unpin(*case.old)
    assert case.end() == ("complete", (32 - 10) * 16)


def test_B62_a_state_stands_for_the_length_that_it_is_filed_under() -> None:
    """Truncated to 600 tokens, the prefetch takes the state at 592; states at 608 and 992 are too long."""
    case = Case(rig={"kv": 600 // PAGE}, ends=[256, 592, 608, 992])
    assert case.end() == ("complete", 592)
    (entry,) = case.rig.states.entries()
    assert (entry.key, entry.length, entry.fetched) == (case.keys[36], 592, True)  # Rig.check compares its bytes
    lengths = [entry.length for entry in case.rig.kv.entries()]
    assert lengths == [16 * n for n in range(37, 0, -1)]  # the first page of the prompt goes last


def test_B64_a_state_comes_back_to_kv_that_is_on_the_device() -> None:
    case = Case(rig={"kv": 0}, kv=(), ends=[640], covered=320, kv_pages=40)
    assert case.end() == ("complete", 640) and case.asked("get", "kv") == 0 and len(case.rig.kv) == 0


def test_B64_kv_comes_back_to_a_state_that_is_in_host_memory() -> None:
    case = Case(rig={"states": 2}, ends=(), others=((), [160]), here=((), [640]), kv_pages=10)
    assert case.end() == ("complete", 640)
    assert case.asked("get", "kv") == 30 and case.asked("get", "state") == case.rig.states.evicted == 0


def test_what_host_memory_has_no_longer_ends_the_reach() -> None:
    """Page 20 was in host memory when storage was asked, so nobody knows whether storage has this page."""
    case = Case(ends=[320, 992], here=([20],))
    case.rig.kv.drop(case.here[0])
    assert case.end() == ("complete", 320)


WRONG = [("threshold", -1), ("threshold", 1.5), ("limit", -1), ("limit", True), ("limit", 1.5), ("limit", 0.0),
         ("stop", "now"), ("timeout", -1.0), ("timeout", float("inf")), ("timeout_per_page", float("nan")),
         ("timeout", "1"), ("chunk", 0)]  # fmt: skip


def test_settings_that_cannot_be_meant_are_refused() -> None:
    for name, value in WRONG:
        with pytest.raises(ConfigurationError, match=name):
            Prefetch(**{name: value})  # type: ignore[arg-type]
