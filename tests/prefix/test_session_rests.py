"""Sessions whose client waits for a tool: they make way sooner, later or at once.

Snapshots every 4 tokens, pages of 2.
"""

from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import ClassVar

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.testing import Clock
from tests.prefix.test_session_room import left, other, talked
from tests.proof.injection.points import Tracer
from tests.support.planes import every_strategy
from tests.support.talks import TEXT, Talks
from tests.support.ways import with_and_without_cache


@with_and_without_cache
def test_S15_a_priority_that_is_set_counts_at_once(backend: Backend, cache: bool) -> None:
    """A setting that is not given stays."""
    talks = Talks(backend, "none", cache=cache, slots=3, sessions=ms.SessionLimits(share=1.0))
    sessions = talked(talks, *"abc", ttl=[60, None, None])
    talks.mem.sessions.set(sessions[0], priority=1)
    assert [(info.priority, info.ttl) for info in talks.mem.sessions.infos()] == [(1, 60), (0, None), (0, None)]
    talks.mem.end(talks.mem.admit([ms.Request("one")]))
    assert left(talks, sessions) == [True, False, True]
    talks.mem.sessions.set(sessions[0], priority=-1)
    talks.mem.end(talks.mem.admit([ms.Request(n) for n in range(2)]))
    assert left(talks, sessions) == [False, False, True]
    talks.look()


def test_S15_a_time_to_live_that_is_set_counts_from_the_last_turn(backend: Backend) -> None:
    clock = Clock()
    talks = Talks(backend, "none", sessions=ms.SessionLimits(clock=clock))
    mem, sessions = talks.mem, talked(talks, *"abc", ttl=[None, 10, 10], priority=[4, 5, 6])
    clock.now = 8.0
    mem.sessions.set(sessions[0], ttl=9)
    mem.sessions.set(sessions[1], ttl=None)
    mem.poll()
    assert [(info.priority, info.ttl) for info in mem.sessions.infos()] == [(4, 9), (5, None), (6, 10)]
    for now, there in ((9.0, [True, True, True]), (9.5, [False, True, True]), (99.0, [False, True, False])):
        clock.now = now
        mem.poll()
        assert left(talks, sessions) == there
    mem.sessions.set(sessions[1], ttl=99)  # idle for exactly its time to live, so the session stays
    mem.poll()
    assert left(talks, sessions) == [False, True, False]
    mem.sessions.set(sessions[1], ttl=0)
    mem.poll()
    assert left(talks, sessions) == [False] * 3
    talks.look()


CALLS: dict[str, Callable[[ms.StateManager, ms.Session], object]] = {
    "set": lambda mem, session: mem.sessions.set(session, priority=3, ttl=1),
    "rest": lambda mem, session: mem.sessions.rest(session),
}


@pytest.mark.parametrize("call", CALLS)
def test_S15_a_session_that_runs_or_is_closed_is_refused_by_name(backend: Backend, call: str) -> None:
    talks = Talks(backend, "redirect")
    (session,) = talked(talks, "a")
    row = talks.turn([*other(1), 1], session)
    with pytest.raises(ms.InvalidArgument, match=f"'a' has a turn running in row {row.index}: one turn at a time"):
        CALLS[call](talks.mem, session)
    talks.mem.sessions.close(session)
    with pytest.raises(ms.StaleHandle, match="it was closed"):
        CALLS[call](talks.mem, session)
    with pytest.raises(ms.InvalidArgument, match="is no session"):
        CALLS[call](talks.mem, "a")  # type: ignore[arg-type]
    talks.mem.end([row])
    talks.look()


def test_S15_numbers_that_are_not_valid_change_nothing(backend: Backend) -> None:
    talks = Talks(backend, "redirect")
    (session,) = talked(talks, "a", priority=[2], ttl=[5])
    before = talks.mem.sessions.infos()
    for given in ({"priority": True}, {"priority": None}, {"priority": 1.5, "ttl": 3}, {"priority": 3, "ttl": -1}):
        with pytest.raises(ms.InvalidArgument, match="expected"):
            talks.mem.sessions.set(session, **given)  # type: ignore[arg-type]
    after = talks.mem.sessions.infos()
    assert [(info.priority, info.ttl) for info in after] == [(info.priority, info.ttl) for info in before] == [(2, 5)]


@every_strategy
@pytest.mark.parametrize("waiting", [False, True], ids=["", "forward waits"])
def test_S16_a_session_rests_in_the_cache_and_goes_on_from_there(backend: Backend, name: str, waiting: bool) -> None:
    """A rest does not count as making way; a second rest finds nothing."""
    talks = Talks(backend, name, overlap=False)
    (session,) = talked(talks, "a")
    kept = talks.kept(session)
    if waiting:
        row = talks.turn(TEXT[:3])
        step = talks.feed([row], [TEXT[:3]], run=False)
    for _ in range(2):
        talks.mem.sessions.rest(session)
        assert talks.kept(session) == [] and talks.mem.stats().held_by_sessions == 0
    if waiting:
        talks.planes.forward(step, [tuple(TEXT[:3])])
        talks.mem.submit(step)
        talks.mem.settle(step)
        talks.mem.end([row])
    talks.look()
    most = max((length for length in kept if length % 2 == 0), default=0)
    assert talks.mem.stats().sessions_emptied == 0 and talks.mem.match([*other(1), 1]).length == most
    assert talks.whole([*other(1), 1, 2], session) == most and talks.kept(session)[0] == 11


def test_S16_what_a_session_without_a_cache_keeps_is_not_thrown_away(backend: Backend) -> None:
    talks = Talks(backend, "redirect", cache=False)
    (session,) = talked(talks, "a")
    with pytest.raises(ms.ConfigurationError, match=r"there is no prefix cache .* prefix=ms.Prefix\(\)"):
        talks.mem.sessions.rest(session)
    assert talks.whole([*other(1), 1], session) == 9


def test_S16_a_session_without_states_stays_as_it_is(backend: Backend) -> None:
    talks = Talks(backend, "redirect")
    session = talks.mem.sessions.open("a")
    talks.mem.sessions.rest(session)
    talks.look()
    assert talks.whole(TEXT[:9], session, prompt=1) == 0 and talks.whole(TEXT[:11], session) == 9


def test_S16_one_that_has_expired_leaves_nothing(backend: Backend) -> None:
    """A rest empties an expired session, as the next poll would do."""
    clock = Clock()
    talks = Talks(backend, "redirect", sessions=ms.SessionLimits(clock=clock))
    (session,) = talked(talks, "a", ttl=[5])
    clock.now = 6.0
    talks.mem.sessions.rest(session)
    talks.look()
    assert not talks.kept(session) and talks.cached() == []


@every_strategy
def test_S16_a_fork_keeps_the_state_that_it_shares(backend: Backend, name: str) -> None:
    talks = Talks(backend, name)
    session = talks.mem.sessions.open("a")
    talks.whole(TEXT[:8], session, prompt=1)
    twin = talks.mem.sessions.fork(session, "b").session
    talks.mem.sessions.rest(session)
    talks.look()
    assert (talks.kept(session), talks.kept(twin)) == ([], [8])
    assert talks.whole(TEXT[:10], twin) == 8
    talks.mem.sessions.rest(twin)
    assert talks.kept(twin) == [] and talks.whole(TEXT[:12], session) == 10


def test_S16_wherever_a_rest_is_interrupted_no_state_has_two_owners(backend: Backend) -> None:
    """Interrupts a rest at each point where the session releases what it shares with a fork, and then recovers."""

    class Seen(Tracer):
        points: ClassVar[list[str]] = []

        def _point(self, frame: FrameType, event: str) -> None:
            super()._point(frame, event)
            self.points.append(frame.f_code.co_name)

    def rested(tracer: Tracer) -> tuple[Talks, list[ms.Session]]:
        talks = Talks(backend, "redirect")
        session = talks.mem.sessions.open("a")
        talks.whole(TEXT[:8], session, prompt=1)
        twin = talks.mem.sessions.fork(session, "b").session
        talks.mem.submit()
        with suppress(KeyboardInterrupt):
            tracer.run(lambda: talks.mem.sessions.rest(session))
        return talks, [session, twin]

    rested(Seen())
    for at in [at for at, name in enumerate(Seen.points, 1) if name in ("empty", "_let_go", "give")]:
        talks, sessions = rested(tracer := Tracer(at, KeyboardInterrupt()))
        talks.mem.recover()
        assert talks.mem.audit().clean, tracer.place
        rows = talks.mem.admit([ms.Request(n, tokens=TEXT[:10], session=one) for n, one in enumerate(sessions)])
        talks.mem.settle(talks.mem.plan(rows, [1, 1]))
        assert talks.mem.audit().clean, tracer.place


def test_S16_where_the_answer_fills_no_page_the_end_of_the_prompt_goes_last_again(backend: Backend) -> None:
    """While the session kept a newer state, the prompt's state was the first to go; after a rest it is not."""
    talks = Talks(backend, "redirect", sessions=ms.SessionLimits(per_session=1))
    cache, session = talks.mem.prefix, talks.mem.sessions.open("a")
    for length, prompt in ((7, 5), (15, 13)):
        talks.whole(TEXT[:length], session, prompt=prompt)
    assert cache and (talks.kept(session), talks.cached(), cache.superseded_states) == ([15], [4, 12], 2)
    talks.mem.sessions.rest(session)
    assert (talks.cached(), cache.superseded_states) == ([4, 12], 1)
    cache.evict_states(1)
    talks.look()
    assert talks.whole([*TEXT, 1], session) == 12
