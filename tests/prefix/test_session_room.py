"""Idle sessions make way: which goes first, what is found again, and what a refusal leaves.

Snapshots every 4 tokens, pages of 2.
"""

from typing import Any

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.lease import NO_NODE
from memstate.testing import Clock
from tests.support import owners
from tests.support.planes import every_strategy
from tests.support.talks import TEXT, Talks, counts
from tests.support.ways import with_and_without_cache

SLOTS = {"none": 1, "ping-pong": 3, "lazy": 2, "redirect": 2}  # strategy -> slots of a request with a snapshot


def other(n: int, length: int = 9) -> list[int]:
    """Returns tokens of another conversation."""
    return [100 * n + at for at in range(length)]


def talked(talks: Talks, *names: Any, **how: Any) -> list[ms.Session]:
    """Opens a session per name and returns the sessions.

    One after the other, each session has one turn: a prompt of 1 token and an answer of 8 tokens.
    """
    sessions = []
    for n, name in enumerate(names, 1):
        sessions.append(talks.mem.sessions.open(name, **{key: value[n - 1] for key, value in how.items()}))
        talks.whole(other(n), sessions[-1], prompt=1)
    return sessions


def left(talks: Talks, sessions: list[ms.Session]) -> list[bool]:
    """Returns for each session whether it still keeps states."""
    return [bool(talks.kept(session)) for session in sessions]


@every_strategy
@with_and_without_cache
def test_S1_idle_sessions_refuse_no_request(backend: Backend, name: str, cache: bool) -> None:
    """Sessions fill the pool, then requests need all of it: all requests are admitted."""
    few = backend.name != "reference"
    talks = Talks(backend, name, cache=cache, slots=(1 if few else 3) * SLOTS[name], pages=24)
    sessions = talked(talks, *("ab" if few else "abcdef"))
    assert sum(left(talks, sessions)) >= 1
    numbers, length = ((7,), 3) if few else ((7, 8, 9), 14)
    rows = [talks.turn(other(n, length)) for n in numbers]
    for row, n in zip(rows, numbers, strict=True):
        talks.run(row, other(n, length))
    talks.look()
    if few:
        return
    for row in rows:
        talks.end(row) if cache else talks.mem.end([row])
    for n, session in enumerate(sessions, 1):
        start = talks.whole([*other(n), 1, 2], session)
        assert start in (0, 4, 8, 9), start


@pytest.mark.parametrize("scarce", ["slots", "pages"])
@with_and_without_cache
def test_S2_the_least_recently_used_of_the_lowest_priority_goes_first(
    backend: Backend, cache: bool, scarce: str
) -> None:
    room = {"slots": 5, "pages": 80} if scarce == "slots" else {"slots": 24, "pages": 26}
    room["rows"] = 8
    talks = Talks(backend, "none", cache=cache, sessions=ms.SessionLimits(share=0), **room)
    sessions = talked(talks, *"abcde", priority=[0, 1, 0, 0, -1])
    assert left(talks, sessions) == [True] * 5
    talks.whole([*other(1), 1], sessions[0])
    took = []
    for n in range(5):
        row = talks.turn(other(7 + n, 9 if n or scarce == "slots" else 10))
        took += [at for at, there in enumerate(left(talks, sessions)) if not there and at not in took]
        talks.look()
        talks.fed.setdefault(row, [])
    assert took == [4, 2, 3, 0, 1]


@pytest.mark.parametrize("scarce", [{"slots": 4}, {"pages": 12}], ids=["slots", "pages"])
@with_and_without_cache
def test_S2_a_session_makes_no_way_for_its_own_turn(backend: Backend, cache: bool, scarce: dict[str, int]) -> None:
    """The other session makes way, although it was used more recently."""
    talks = Talks(backend, "ping-pong", cache=cache, sessions=ms.SessionLimits(per_session=1), **scarce)
    first, second = talked(talks, *"ab")
    elsewhere = talks.mem.pool.claim(1)
    row = talks.turn([*other(1), *range(6)], first)
    assert talks.mem.info(row).length == 9 and not talks.kept(second)
    talks.run(row, [*other(1), *range(6)])
    talks.mem.pool.release(elsewhere)
    talks.end(row)
    talks.look()


@pytest.mark.parametrize("slots", [6, 9])
def test_S12_marks_and_states_of_older_turns_cost_no_session_its_state(backend: Backend, slots: int) -> None:
    """Six sessions take turns, and each keeps one state, whether or not the ends of their prompts find room."""
    talks = Talks(
        backend, "redirect", slots=slots, ends=True, sessions=ms.SessionLimits(per_session=1), rows=2,
        prefix=ms.Prefix(ms.policies.Lru()),
    )  # fmt: skip
    texts = [other(n, 8) for n in range(6)]
    sessions = [talks.mem.sessions.open(n) for n in range(6)]
    for turn in range(3):
        for text, session in zip(texts, sessions, strict=True):
            assert talks.whole(text, session) == (len(text) - 3 if turn else 0)
            text += [turn] * 3
        if slots > 6:
            talks.whole([900 + turn] * 3, prompt=1)
    talks.look()


@with_and_without_cache
def test_S3_what_an_idle_session_gave_up_is_found_by_its_tokens(backend: Backend, cache: bool) -> None:
    """The prefix cache has those of the session's states that fill whole pages.

    Without a cache, the next turn starts from 0.
    """
    talks = Talks(backend, "lazy", cache=cache, slots=4)
    (session,) = talked(talks, "a")
    assert talks.kept(session) == [9, 8]
    talks.mem._parts.room.give_way(owners.session(talks.mem, session))
    talks.look()
    assert talks.kept(session) == [] and talks.mem.stats().held_by_sessions == 0
    assert talks.mem.free_slots == (3 if cache else 4)
    if talks.mem.prefix:
        assert talks.mem.match([*other(1), 1]).length == 8
    assert talks.whole([*other(1), 1, 2], session) == (8 if cache else 0)
    assert talks.kept(session)[0] == 11


def test_S3_a_state_that_was_being_handed_over_has_one_owner_after_recover(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    talks = Talks(backend, "lazy", slots=4)
    (session,) = talked(talks, "a")
    talks.mem.submit()
    with monkeypatch.context() as patch:
        patch.setattr(talks.mem.prefix.settings.states, "added", lambda *_: 1 / 0)  # type: ignore[union-attr]
        with pytest.raises(ZeroDivisionError):
            talks.mem.admit([ms.Request(n) for n in range(2)])
    talks.mem.recover()
    talks.look()
    assert talks.kept(session) == [9] and talks.mem.match([*other(1), 1]).length == 8
    assert talks.whole([*other(1), 1], session) == 9


def test_S4_sessions_beyond_their_share_go_before_cached_states(backend: Backend) -> None:
    """With share=1, cached states are evicted first; with share=0, the sessions are."""
    for share, kept, cached in ((1.0, True, 0), (0.0, False, 8)):
        talks = Talks(backend, "none", slots=2, sessions=ms.SessionLimits(share=share))
        talks.whole(other(2, 8), prompt=1)
        sessions = talked(talks, "a")
        talks.mem.end([talks.turn(other(5))])
        assert left(talks, sessions) == [kept] and talks.mem.match(other(2)).length == cached
        talks.look()


@pytest.mark.parametrize("at", ["admit", "poll", "extend"])
@with_and_without_cache
def test_S5_an_expired_session_goes_first_and_at_the_next_poll(backend: Backend, cache: bool, at: str) -> None:
    clock = Clock()
    talks = Talks(backend, "lazy", cache=cache, slots=8, pages=20, sessions=ms.SessionLimits(clock=clock))
    mem = talks.mem
    sessions = talked(talks, *"abc", ttl=[None, 10, 20], priority=[0, 5, 5])
    clock.now = 10.0
    mem.poll()
    assert left(talks, sessions) == [True] * 3
    clock.now = 11.0
    if at == "poll":
        mem.poll()
    elif at == "admit":
        mem.end([talks.turn(TEXT[:1])])
    else:
        clock.now = 0.0
        row = talks.turn(TEXT[:1])
        clock.now = 11.0
        mem.extend([row], [14 if cache else 12])
        talks.fed[row] = []
    assert left(talks, sessions) == [True, False, True]
    assert not mem.prefix or not mem.match([*other(2), 1]).length
    talks.look()
    assert [info.idle for info in mem.sessions.infos()] == [11.0] * 3
    assert talks.whole([*other(2), 1], sessions[1]) == 0


def test_S5_sessions_are_listed(backend: Backend) -> None:
    clock = Clock()
    talks = Talks(backend, "lazy", sessions=ms.SessionLimits(clock=clock))
    mem = talks.mem
    clock.now = 1.0
    first, second = mem.sessions.open("a", priority=2, ttl=60), mem.sessions.open("b")
    clock.now = 3.0
    talks.whole(TEXT[:9], first, prompt=1)
    row = talks.turn(TEXT[:3], second)
    clock.now = 4.0
    mem.sessions.close(second)
    assert mem.sessions.infos() == [
        ms.prefix.SessionInfo(first, False, False, tokens=9, states=2, pages=5, priority=2, age=3.0, idle=1.0, ttl=60),
        ms.prefix.SessionInfo(second, True, True, tokens=0, states=0, pages=0, priority=0, age=3.0, idle=0.0, ttl=None),
    ]
    mem.end([row])
    assert [info.session for info in mem.sessions.infos()] == [first]


def test_S6_limits_of_states_hold_when_a_turn_ends(backend: Backend) -> None:
    talks = Talks(backend, "lazy", sessions=ms.SessionLimits(per_session=1, most_states=2))
    sessions = talked(talks, *"abc", priority=[1, 0, 0])
    assert [talks.kept(session) for session in sessions] == [[9], [], [9]]
    assert talks.mem.stats().held_by_sessions == 2
    talks.look()


@pytest.mark.parametrize("how", ["cache", "nothing", "cancel"])
@with_and_without_cache
def test_S8_a_session_closed_during_a_turn_closes_at_its_end(backend: Backend, cache: bool, how: str) -> None:
    talks = Talks(backend, "lazy", cache=cache)
    mem = talks.mem
    session = mem.sessions.open("a")
    talks.whole(TEXT[:5], session)
    row = talks.turn(TEXT, session)
    talks.run(row, TEXT[:8])
    mem.sessions.close(session)
    for again in (lambda: mem.sessions.close(session), lambda: talks.turn(TEXT, session)):
        with pytest.raises(ms.StaleHandle):
            again()
    assert mem.sessions.infos()[0].closing
    talks.look()
    if how == "cancel":
        mem.extend([row], [9])
        mem.cancel(mem.plan([row]), keep="cache", tokens=[TEXT[:8]])
    elif how == "nothing":
        mem.end([row])
    else:
        mem.end([row], keep="cache", tokens=[TEXT[:8]])
    assert mem.sessions.infos() == [] and mem.stats().held_by_sessions == 0 and not owners.sessions(mem).by_row
    talks.look()
    if mem.prefix and how == "cache":
        assert mem.match([*TEXT[:8], 1]).length == 8
    elif not mem.prefix:
        assert counts(talks)[:2] == (24, 80)


def test_S9_a_refusal_takes_nothing_from_idle_sessions(backend: Backend) -> None:
    """Even all slots or all pages of the idle sessions would not be enough."""
    for cache in (True, False):
        talks = Talks(backend, "none", cache=cache, slots=4, pages=20, rows=8)
        sessions = talked(talks, *"ab")
        before = counts(talks), [talks.kept(session) for session in sessions]
        for error, requests in (
            (ms.OutOfSlots, [ms.Request(n) for n in range(5)]),
            (ms.OutOfPages, [ms.Request(0, length=44)]),
        ):
            with pytest.raises(error):
                talks.mem.admit(requests)
            assert before == (counts(talks), [talks.kept(session) for session in sessions])
        talks.look()


def test_G1_limits_that_are_none_are_refused() -> None:
    for wrong in ({"share": 2}, {"share": True}, {"per_session": 0}, {"most_states": -1}, {"clock": 3}):
        with pytest.raises(ms.ConfigurationError):
            ms.SessionLimits(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"priority": 0.5}, {"priority": True}, {"ttl": -1}, {"ttl": "x"}, {"ttl": True}, {"ttl": 10**400}]
)
def test_G1_numbers_of_a_session_are_checked(backend: Backend, wrong: dict[str, Any]) -> None:
    talks = Talks(backend, "none")
    with pytest.raises(ms.InvalidArgument):
        talks.mem.sessions.open("a", **wrong)
    assert talks.mem.sessions.infos() == []


@every_strategy
@with_and_without_cache
def test_S1_making_way_takes_no_upload_and_no_launch_of_its_own(backend: Backend, name: str, cache: bool) -> None:
    talks = Talks(backend, name, cache=cache, slots=2 * SLOTS[name])
    sessions = talked(talks, "a")
    if talks.mem.prefix:
        talks.mem.prefix.evict_states(9)
    talks.mem.submit()
    talks.mem.backend.counts.reset()
    rows = talks.mem.admit(
        [ms.Request(n) for n in range(talks.mem.free_slots // talks.mem._parts.admission.per_request + 1)]
    )
    talks.mem.submit()
    counted = talks.mem.backend.counts
    assert left(talks, sessions) == [False] and counted.uploads == 1 and counted.total_launches <= 2
    talks.mem.end(rows)


def test_a_path_that_goes_while_room_is_made_is_no_lease_of_the_refused_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that starts from the cache releases the lease of the session's path to make room.

    Others may then take the KV.
    """
    talks = Talks(Backend("reference"), "redirect")
    mem, text = talks.mem, list(range(1, 12))
    session = mem.sessions.open("chat")
    talks.whole(text, session, prompt=8)
    talks.whole([*text, *range(50, 56)], session, prompt=14)
    real, paths = mem._parts.admission.make_room, []

    def make_room(rows: int, pages: int, slots: int) -> Any:
        paths.append(owners.session(mem, session).path)
        if len(paths) > 1:
            return real(rows, pages, slots)
        mem.prefix.evict_pages(80)
        return ms.OutOfSlots(slots, 0, 0)

    monkeypatch.setattr(mem._parts.admission, "make_room", make_room)
    row = talks.turn([*text[:8], 99, 98, 97], session)
    before, after = paths
    assert before.end == 8 and after is NO_NODE and mem.info(row).length == 6
    talks.run(row, [*text[:8], 99, 98, 97])
    talks.end(row)
    talks.all_free()
