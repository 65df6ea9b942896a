"""Tests the prefix cache as it is used without a manager: it then keeps ids of an engine's states and KV."""

import random
from typing import Any

import pytest

from memstate import Broken, InvalidArgument, LeakFound, Prefix
from memstate.integrations.sglang.prefix import Gone, PrefixChange, PrefixHit, PrefixPart
from memstate.prefix.policies import Lru, LruPages, Place


def test_what_was_inserted_is_found() -> None:
    cache = PrefixPart(2)
    assert cache.insert([1, 2, 3, 4], [10, 11], 7)[:3] == (0, True, Gone([], []))
    assert cache.insert([1, 2, 3, 4, 5, 6], [20, 21, 22]).had == 4  # the engine keeps ids 20 and 21
    hit = cache.match([1, 2, 3, 4, 5, 6, 7])
    assert (hit.length, hit.pages, hit.state, hit.branch) == (4, [10, 11], 7, 6)
    assert cache.insert([1, 2, 3, 4], [30, 31], 8).kept is False
    short = cache.match([1, 2, 3, 4])  # the last token of a prompt never hits
    assert (short.length, short.pages, short.state, short.branch) == (0, [], None, 2)
    other = cache.match([1, 2, 3, 4, 5], salt="tenant")
    assert (other.length, other.state, other.branch) == (0, None, None)
    assert cache.evictable == (3, 1)


def parts(hit: PrefixHit) -> tuple[int, list[int], int | None]:
    return hit.length, hit.pages, hit.state


class Watched(Lru):
    """A policy that notes each `Place` that it is asked to admit."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Place] = []

    def admits(self, place: Place) -> bool:
        self.asked.append(place)
        return super().admits(place)


def test_tenants_with_equal_tokens_have_ids_of_their_own() -> None:
    states, changes = Watched(), list[PrefixChange]()
    cache = PrefixPart(1, Prefix(states=states), changes.append)
    assert cache.insert([1, 2], [10, 11], 7, salt="a")[:3] == (0, True, Gone([], []))
    assert cache.insert([1, 2, 3], [20, 21, 22], 8, salt="b")[:3] == (0, True, Gone([], []))
    assert parts(cache.match([1, 2, 3, 4], salt="a")) == (2, [10, 11], 7)
    assert parts(cache.match([1, 2, 3, 4], salt="b")) == (3, [20, 21, 22], 8)
    assert parts(cache.match([1, 2, 3, 4])) == (0, [], None)
    cache.insert([1, 2, 3, 4], [10, 11, 32, 33], 9, salt="a")
    assert [place.above for place in states.asked] == [0, 0, 2], "states above are those of the same tenant"
    assert [change.salt for change in changes] == ["a", "b", "a"]


def test_locks_keep_what_was_found() -> None:
    cache = PrefixPart(1, Prefix(states=Lru()))
    cache.insert([1, 2], [10, 11], 7)
    cache.insert([1, 3], [10, 12], 8)
    hit = cache.match([1, 2, 9])
    cache.lock(hit)
    cache.lock(hit)
    assert cache.evict(pages=9, states=9) == Gone([12], [8])
    assert cache.unlock(hit) == Gone([], [])
    assert cache.evict(pages=9, states=9) == Gone([], [])
    cache.unlock(hit)
    with pytest.raises(InvalidArgument, match="not locked"):
        cache.unlock(hit)
    late = cache.match([1, 2, 9])
    gone = cache.evict(pages=9, states=9)
    assert (sorted(gone.pages), gone.states) == ([10, 11], [7])
    with pytest.raises(InvalidArgument, match="match again"):
        cache.lock(late)
    nothing = cache.match([5, 6])
    cache.lock(nothing)
    cache.unlock(nothing)


@pytest.mark.parametrize(
    "call",
    [
        lambda: PrefixPart(0), lambda: PrefixPart(2).insert([1, 2, 3], [1], 1), lambda: PrefixPart(2).insert([], []),
        lambda: PrefixPart(1).insert([1], [1], 0), lambda: PrefixPart(1).evict(pages=-1),
        lambda: PrefixPart(1).insert([1, 2], [1]), lambda: PrefixPart(1).match([1], salt=[]),
        lambda: PrefixPart(1).insert([1], [1], salt=[]), lambda: PrefixPart(1).insert([1], [-1]),
        lambda: PrefixPart(1).insert([1], [None]), lambda: PrefixPart(1).insert([1], [1.0]),
        lambda: PrefixPart(1).insert([1, 2], [3, 3]), lambda: PrefixPart(1).lock(PrefixPart(1).match([1])),
    ],
)  # fmt: skip
def test_misuse_is_refused(call: Any) -> None:
    with pytest.raises(InvalidArgument):
        call()


def test_an_error_of_the_listener_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def heard(change: PrefixChange) -> None:
        raise KeyError(change.stored)

    cache = PrefixPart(1, heard=heard)
    assert cache.insert([1, 2], [10, 11], 7).kept
    assert cache.evict(pages=2) == Gone([10, 11], [7])
    said = [line for line in caplog.messages if line.startswith("not")]
    assert said == ["not heard why='KeyError: True'", "not heard why='KeyError: False'"]


class Refusing(Lru):
    """A policy that raises for each state."""

    def admits(self, place: Place) -> bool:
        raise KeyError(place)


def test_an_error_of_the_policy_changes_nothing() -> None:
    cache = PrefixPart(1, Prefix(states=Refusing()))
    with pytest.raises(KeyError):
        cache.insert([1, 2], [10, 11], 7)
    assert (cache.match([1, 2, 3]).branch, cache.evictable) == (None, (0, 0))


def test_a_state_that_was_read_can_go_while_its_kv_stays() -> None:
    cache = PrefixPart(1, Prefix(states=Lru()))
    end = cache.insert([1, 2], [10, 11], 7).end
    cache.lock(end)
    cache.lock(end)
    cache.read(end)
    assert cache.evict(pages=2, states=1) == Gone([], [])
    cache.read(end)
    with pytest.raises(InvalidArgument, match="has been read"):
        cache.read(end)
    assert cache.evict(pages=2, states=1) == Gone([], [7])
    cache.unlock(end)
    assert (end.pages, cache.evict(pages=2)) == ([10, 11], Gone([], []))
    assert cache.unlock(end, drop=False) == Gone([], [])
    assert cache.held == (2, 0)
    assert cache.evict(pages=2) == Gone([10, 11], [])


def test_an_end_without_a_state_can_be_locked_and_grows_with_what_comes() -> None:
    cache = PrefixPart(1)
    end = cache.insert([1, 2], [10, 11]).end
    cache.lock(end)
    with pytest.raises(LeakFound, match="leases"):
        cache.check()
    cache.insert([1, 2, 3], [20, 21, 12], 7)
    assert (end.pages, end.state, cache.all_pages()) == ([10, 11], None, [10, 11, 12])
    cache.unlock(end)
    cache.check()
    cache.evict(pages=3)
    with pytest.raises(InvalidArgument, match="match again"):
        cache.lock(end)


def test_what_an_insertion_brought_stays_until_it_ends() -> None:
    """A request goes on from a locked path, so the limit of states must evict nothing there."""
    cache = PrefixPart(1, Prefix(states=Lru(), pages=LruPages(tombstones=False), most_states=1))
    first = cache.insert([1, 2], [10, 11], 7).end
    cache.lock(first)
    came = cache.insert([3, 4], [20, 21], 8)
    assert (came.gone, came.end.pages, came.end.state) == (Gone([], [8]), [20, 21], None)
    cache.lock(came.end)
    assert cache.evict(pages=9) == Gone([], [])
    cache.unlock(came.end)
    assert cache.held == (2, 1)


@pytest.mark.parametrize("when", ["added", "used", "dropped"])
def test_a_policy_that_raises_in_the_middle_breaks_the_cache_until_a_reset(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = Lru()
    cache = PrefixPart(1, Prefix(states=states))
    cache.insert([1, 2], [10, 11], 7)
    hit, calls = cache.match([1, 2, 3]), {
        "added": lambda: cache.insert([3, 4], [12, 13], 8), "used": lambda: (cache.lock(hit), cache.evict(states=1)),
        "dropped": lambda: cache.evict(states=1),
    }  # fmt: skip

    def fail(*_: object) -> None:
        raise KeyError(when)

    with monkeypatch.context() as patched:
        patched.setattr(states, when, fail)
        with pytest.raises(KeyError):
            calls[when]()
    for call in calls.values():
        with pytest.raises(Broken):
            call()
    cache.reset()
    assert cache.insert([1, 2], [10, 11], 7).kept


def test_nothing_from_before_a_reset_means_anything() -> None:
    cache = PrefixPart(1)
    end = cache.insert([1, 2], [10, 11], 7).end
    cache.lock(end)
    cache.reset()
    assert (cache.held, cache.evictable, cache.match([1, 2, 3]).length) == ((0, 0), (0, 0), 0)
    with pytest.raises(InvalidArgument, match="reset"):
        cache.unlock(end)
    assert cache.insert([1, 2], [10, 11], 7).kept


def test_a_reset_after_a_policy_raised_gives_no_id_back_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    cache = PrefixPart(2, Prefix(states=Lru()))
    cache.insert([1, 2, 3, 4], [10, 11], 7)
    for method, call in (("dropped", lambda: cache.evict(states=1)), ("reset", cache.reset)):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Lru, method, interrupted)
            call()
        with pytest.raises(Broken, match=r"a PrefixPart has reset\(\)"):
            cache.insert([5, 6], [12])
    cache.reset()
    assert cache.insert([5, 6, 7, 8], [10, 11], 7).gone == Gone([], [])
    assert cache.held == (2, 1)


@pytest.mark.parametrize("seed", range(4))
def test_random_calls_against_a_naive_search(seed: int) -> None:
    """No id is lost or given back twice, and each hit is the longest prefix with a state."""
    rng, changes = random.Random(seed), list[PrefixChange]()
    cache = PrefixPart(2, Prefix(states=Lru(), most_states=12), changes.append)
    states: dict[tuple[int, ...], int] = {}
    pages, owned, ids, hits = set[int](), set[int](), iter(range(1, 10**6)), []
    for _ in range(300):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(2, 13))]
        hit = cache.match(prompt)
        known = [key for key in states if len(key) < len(prompt) and tuple(prompt[: len(key)]) == key]
        best = max(known, key=len, default=())
        assert (hit.length, hit.state) == (len(best), states.get(best))
        assert len(hit.pages) * 2 == hit.length and set(hit.pages) <= pages
        gone = []
        if rng.random() < 0.5:
            cache.lock(hit)
            hits.append(hit)
        if hits and rng.random() < 0.5:
            gone.append(cache.unlock(hits.pop(rng.randrange(len(hits)))))
        key = tuple(prompt[: len(prompt) // 2 * 2])
        new = [next(ids) for _ in range(len(key) // 2)]
        state = next(ids)
        had, kept, evicted, end = cache.insert(key, new, state)
        if not (evicted.pages or evicted.states) and rng.random() < 0.3:
            cache.lock(end)
            hits.append(end)
            assert len(end.pages) * 2 == len(key) == end.length
        pages |= set(new[had // 2 :])
        if kept:
            states[key] = state
            owned.add(state)
        gone.append(evicted)
        if rng.random() < 0.3:
            gone.append(cache.evict(pages=rng.randrange(6), states=rng.randrange(3)))
        for each in gone:
            assert set(each.pages) <= pages and set(each.states) <= owned, seed
            pages -= set(each.pages)
            owned -= set(each.states)
            states = {key: state for key, state in states.items() if state in owned}
        held = {page for hit in hits for page in hit.pages}
        assert held <= pages and {hit.state for hit in hits if hit.state} <= owned, seed
        assert len(owned) <= 12 + len(hits) and cache.stats().pages == len(pages)
    heard = [{*change.pages, *change.states} for change in changes if change.stored]
    assert pages | owned == set().union(*heard) - {
        each for change in changes if not change.stored for each in (*change.pages, *change.states)
    }
