"""Idle sessions make way: which goes first, what is found again, and what a refusal leaves. Waiting for a tool.

The model judges each call: see `tests/proof/stateful/script.py`. Snapshots every 4 tokens, pages of 2.
"""

from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, ClassVar

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.lease import NO_NODE
from tests.proof.injection.points import Tracer
from tests.proof.stateful.script import ALL, Play, script
from tests.support import owners

T = list(range(1, 16))
CACHES = {"prefix": (False, True)}
KINDS = {"strategy": ALL, "overlap": True, **CACHES}


def other(n: int, length: int = 9) -> list[int]:
    """Returns tokens of another conversation."""
    return [100 * n + at for at in range(length)]


def talked(play: Play, *names: str, **how: Any) -> list[ms.Session]:
    """Opens a session per name and returns the sessions.

    One after the other, each session has one turn: a prompt of 1 token and an answer of 8 tokens.
    """
    sessions = []
    for n, name in enumerate(names, 1):
        sessions += play.open(name, **{key: value[n - 1] for key, value in how.items()})
        play.turn(other(n), sessions[-1], prompt=1)
    return sessions


@script(**KINDS, slots=9, pages=24)
def test_S1_idle_sessions_refuse_no_request(play: Play) -> None:
    """Sessions fill the pool, then requests need all of it. All are admitted that fit: see `Play.finish`."""
    sessions = talked(play, *"abcdef")
    rows = [row for n in (7, 8, 9) for row in play.admit(other(n, 14))]
    for row, n in zip(rows, (7, 8, 9), strict=False):
        play.run(row, other(n, 14))
    for row in rows:
        play.end(row, how="told" if play.settings.prefix else "release")
    for n, session in enumerate(sessions, 1):
        play.turn([*other(n), 1, 2], session)


@script(strategy=ALL, **CACHES, slots=6, rows=8)
def test_S1_making_way_takes_no_upload_and_no_launch_of_its_own(play: Play) -> None:
    talked(play, "a")
    if play.settings.prefix:
        play.evict(states=9)
    play.submit()
    play.mem.backend.counts.reset()
    play.model.moving = 0
    each = 1 + play.settings.lanes_at_admission
    rows = play.admit(*[None] * (play.mem.free_slots // each + 1))
    play.submit()
    counted = play.mem.backend.counts
    play.reached(made_way=play.mem.stats().sessions_emptied, admitted=len(rows))
    assert counted.uploads == 1 and counted.total_launches <= 2


@script(strategy="none", **CACHES, share=0.0, rows=8, room=({"slots": 5}, {"pages": 26}))
def test_S2_the_least_recently_used_of_the_lowest_priority_goes_first(play: Play) -> None:
    sessions = talked(play, *"abcde", priority=(0, 1, 0, 0, -1))
    play.turn([*other(1), 1], sessions[0])
    for n in range(5):
        play.admit(other(7 + n, 9))


@script(strategy="ping-pong", overlap=True, **CACHES, per_session=1, room=({"slots": 4}, {"pages": 12}))
def test_S2_a_session_makes_no_way_for_its_own_turn(play: Play) -> None:
    """The other session makes way, although it was used more recently."""
    a, b = talked(play, "a", "b")
    play.turn([*other(1), *range(6)], a)
    play.turn([*other(2), *range(6)], b)


@script(strategy="redirect", prefix=True, per_session=1, rows=2, slots=(6, 9))
def test_S12_marks_and_states_of_older_turns_cost_no_session_its_state(play: Play) -> None:
    """Six sessions take turns, and each keeps one state, whether or not the ends of their prompts find room."""
    texts, sessions = [other(n, 8) for n in range(6)], play.open(*"abcdef")
    for turn in range(3):
        for text, session in zip(texts, sessions, strict=True):
            play.turn(text, session)
            text += [turn] * 3
        if play.settings.slots > 6:
            play.turn([900 + turn] * 3, prompt=1)
    play.reached(each=min(info.states for info in play.mem.sessions.infos()))


@script(strategy=("lazy", "ping-pong", "redirect"), **CACHES, slots=4)
def test_S3_what_an_idle_session_gave_up_is_found_by_its_tokens(play: Play) -> None:
    """The prefix cache has those of the session's states that fill whole pages. Without a cache, nobody has them."""
    (a,) = talked(play, "a")
    rows = play.admit(None, None)
    play.end(*rows, how="release")
    if play.settings.prefix:
        play.match([*other(1), 1])
    play.turn([*other(1), 1, 2], a)


@script(strategy="lazy", overlap=True, **CACHES, slots=4)
def test_what_a_turn_gives_back_is_room_for_it(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:9], a)
    play.admit([900])
    play.turn([*T[:8], 50, 51], a)


@script(strategy="none", prefix=True, slots=2, share=(1.0, 0.0))
def test_S4_sessions_beyond_their_share_go_before_cached_states(play: Play) -> None:
    """With share=1, cached states are evicted first; with share=0, the sessions are."""
    play.turn(other(2, 8), prompt=1)
    talked(play, "a")
    play.end(*play.admit(other(5)), how="release")
    play.match(other(2))


@script(strategy="lazy", **CACHES, slots=8, pages=20, at=("admit", "poll", "extend"))
def test_S5_an_expired_session_goes_first_and_at_the_next_poll(play: Play) -> None:
    sessions = talked(play, *"abc", ttl=(None, 10, 20), priority=(0, 5, 5))
    play.wait(10)
    play.poll()
    if play.at == "extend":
        (row,) = play.admit(T[:1])
    play.wait(1)
    if play.at == "poll":
        play.poll()
    elif play.at == "admit":
        play.end(*play.admit(T[:1]), how="release")
    else:
        play.extend(row, 14 if play.settings.prefix else 12)
        play.end(row, how="release")
    play.poll()
    play.turn([*other(2), 1], sessions[1])


@script(strategy="lazy", **CACHES)
def test_S5_a_session_that_has_been_idle_for_exactly_its_time_to_live_stays(play: Play) -> None:
    talked(play, *"abc", ttl=(1, 2, 3))
    for _ in range(4):
        play.wait(1)
        play.poll()


@script(strategy="lazy", per_session=1, most_kept=2, **CACHES)
def test_S6_limits_of_states_hold_when_a_turn_ends(play: Play) -> None:
    talked(play, *"abc", priority=(1, 0, 0))


@script(strategy="lazy", **CACHES, at=("told", "release", "cancel"))
def test_S8_a_session_closed_during_a_turn_closes_at_its_end(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:5], a)
    (row,) = play.admit(T, sessions=[a])
    play.run(row, T[:8])
    play.close(a)
    play.close(a)
    play.admit(T, sessions=[a])
    if play.at == "cancel":
        play.cancel(play.step([row], 1, run=False), how="told")
    else:
        play.end(row, how=play.at)
    play.reached("StaleHandle")


@script(strategy="none", **CACHES, slots=4, pages=20, rows=8)
def test_S9_a_refusal_takes_nothing_from_idle_sessions(play: Play) -> None:
    """Even all slots or all pages of the idle sessions would not be enough. They still make way for later requests."""
    a, _ = talked(play, "a", "b")
    play.admit(*[None] * 5)
    play.admit(None, length=44)
    play.admit([*other(1), 1], *[None] * 4, sessions=[a, *[None] * 4])
    play.reached("OutOfSlots", "OutOfPages")
    play.end(*play.admit(*[None] * 4), how="release")


# A client that waits for a tool: its session makes way sooner, later or at once


@script(strategy="none", **CACHES, slots=3, share=1.0)
def test_S15_a_priority_that_is_set_counts_at_once(play: Play) -> None:
    """A setting that is not given stays."""
    a, _, _ = talked(play, *"abc", ttl=(60, None, None))
    play.set(a, priority=1)
    play.end(*play.admit(None), how="release")
    play.set(a, priority=-1)
    play.end(*play.admit(None, None), how="release")


@script(strategy="none", prefix=True)
def test_S15_a_time_to_live_that_is_set_counts_from_the_last_turn(play: Play) -> None:
    a, b, _ = talked(play, *"abc", ttl=(None, 10, 10), priority=(4, 5, 6))
    play.wait(8)
    play.set(a, ttl=9)
    play.set(b, ttl=None)
    for seconds in (0, 1, 0.5, 89.5):
        play.wait(seconds)
        play.poll()
    play.set(b, ttl=99)  # idle for exactly its time to live, so the session stays
    play.poll()
    play.set(b, ttl=0)
    play.poll()


CALLS: dict[str, Callable[[ms.StateManager, ms.Session], object]] = {
    "set": lambda mem, session: mem.sessions.set(session, priority=3, ttl=1),
    "rest": lambda mem, session: mem.sessions.rest(session),
}


@script(strategy="redirect", prefix=True, at=tuple(CALLS))
def test_S15_a_session_that_runs_or_is_closed_is_refused_by_name(play: Play) -> None:
    call = lambda session: lambda: CALLS[play.at](play.mem, session)  # noqa: E731
    (a,) = talked(play, "a")
    (row,) = play.admit([*other(1), 1], sessions=[a])
    play.refuses(ms.InvalidArgument, call(a), f"'a' has a turn running in row {row.index}: one turn at a time")
    play.close(a)
    play.refuses(ms.StaleHandle, call(a), "it was closed")
    play.refuses(ms.InvalidArgument, call("a"), "is no session")


@script(strategy=ALL, overlap=(False, True), prefix=True)
def test_S16_another_request_starts_from_what_a_session_at_rest_has_given_up(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:8], a, prompt=1)
    play.rest(a)
    play.turn([*T[:8], 50, 51])
    play.reached("hit_tokens")
    play.turn(T[:12], a)


@script(strategy=ALL, overlap=False, prefix=True, waiting=(False, True))
def test_S16_a_session_rests_in_the_cache_and_goes_on_from_there(play: Play) -> None:
    """A rest does not count as making way; a second rest finds nothing."""
    (a,) = talked(play, "a")
    if play.waiting:
        (row,) = play.admit(T[:3])
        flight = play.step([row], 3, run=False)
    for _ in range(2):
        play.rest(a)
    if play.waiting:
        play.cancel(flight)
    assert play.mem.stats().sessions_emptied == 0
    play.match([*other(1), 1])
    play.turn([*other(1), 1, 2], a)


@script(strategy="redirect", **CACHES)
def test_S16_what_a_session_without_a_cache_keeps_is_not_thrown_away(play: Play) -> None:
    """A session without states stays as it is."""
    a, b = *talked(play, "a"), *play.open("b")
    play.rest(b)
    play.rest(a)
    for n, session in ((1, a), (5, b)):
        play.turn(other(n), session, prompt=1)
        play.turn([*other(n), 1], session)
    play.reached(*[] if play.prefix else ["ConfigurationError"])


@pytest.mark.script
def test_S16_a_rest_says_that_there_is_no_cache(backend: Backend) -> None:
    play = Play(backend)
    (a,) = play.open("a")
    with pytest.raises(ms.ConfigurationError, match=r"there is no prefix cache .* prefix=ms.Prefix\(\)"):
        play.mem.sessions.rest(a)


@script(strategy="redirect", prefix=True)
def test_S16_one_that_has_expired_leaves_nothing(play: Play) -> None:
    """A rest empties an expired session, as the next poll would do."""
    (a,) = talked(play, "a", ttl=[5])
    play.wait(6)
    play.rest(a)


@script(strategy=ALL, prefix=True)
def test_S16_a_fork_keeps_the_state_that_it_shares(play: Play) -> None:
    (a,) = play.open("a")
    play.turn(T[:8], a, prompt=1)
    twin = play.fork_session(a)
    play.rest(a)
    play.turn(T[:10], twin)
    play.rest(twin)
    play.turn(T[:12], a)


@script(strategy="redirect", prefix=True, per_session=1)
def test_S16_where_the_answer_fills_no_page_the_end_of_the_prompt_goes_last_again(play: Play) -> None:
    """While the session kept a newer state, the prompt's state was the first to go; after a rest it is not."""
    (a,) = play.open("a")
    for length, prompt in ((7, 5), (15, 13)):
        play.turn(T[:length], a, prompt=prompt)
    play.rest(a)
    play.evict(states=1)
    play.turn([*T, 1], a)


@pytest.mark.script
def test_S16_wherever_a_rest_is_interrupted_no_state_has_two_owners(backend: Backend) -> None:
    """Interrupts a rest at each point where the session releases what it shares with a fork, and then recovers."""

    class Seen(Tracer):
        points: ClassVar[list[str]] = []

        def _point(self, frame: FrameType, event: str) -> None:
            super()._point(frame, event)
            self.points.append(frame.f_code.co_name)

    def rested(tracer: Tracer) -> tuple[ms.StateManager, list[ms.Session]]:
        play = Play(backend, strategy="redirect", prefix=True)
        (a,) = play.open("a")
        play.turn(T[:8], a, prompt=1)
        twin = play.fork_session(a)
        play.submit()
        with suppress(KeyboardInterrupt):
            tracer.run(lambda: play.mem.sessions.rest(a))
        return play.mem, [a, twin]

    rested(Seen())
    for at in [at for at, name in enumerate(Seen.points, 1) if name in ("empty", "_let_go", "give")]:
        mem, sessions = rested(tracer := Tracer(at, KeyboardInterrupt()))
        mem.recover()
        assert mem.audit().clean, tracer.place
        rows = mem.admit([ms.Request(n, tokens=T[:10], session=one) for n, one in enumerate(sessions)])
        mem.settle(mem.plan(rows, [1, 1]))
        assert mem.audit().clean, tracer.place


@pytest.mark.script
def test_S3_a_state_that_was_being_handed_over_has_one_owner_after_recover(
    backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Play(backend, strategy="lazy", overlap=True, prefix=True, slots=4)
    mem, (a,) = play.mem, talked(play, "a")
    play.submit()
    with monkeypatch.context() as patch:
        patch.setattr(mem.prefix.settings.states, "added", lambda *_: 1 / 0)  # type: ignore[union-attr]
        with pytest.raises(ZeroDivisionError):
            mem.admit([ms.Request(n) for n in range(2)])
    mem.recover()
    assert [snap.length for snap in owners.session(mem, a).kept] == [9] and mem.match([*other(1), 1]).length == 8
    (row,) = mem.admit([ms.Request("again", tokens=[*other(1), 1], session=a)])
    assert mem.info(row).length == 9 and mem.audit().clean


@pytest.mark.script
def test_a_path_that_goes_while_room_is_made_is_no_lease_of_the_refused_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that starts from the cache releases the lease of the session's path to make room.

    Others may then take the KV.
    """
    play, text = Play(Backend("reference"), strategy="redirect", overlap=True, prefix=True), list(range(1, 12))
    mem, (a,) = play.mem, play.open("chat")
    play.turn(text, a, prompt=8)
    play.turn([*text, *range(50, 56)], a, prompt=14)
    real, paths = mem._parts.admission.make_room, []

    def make_room(rows: int, pages: int, slots: int) -> Any:
        paths.append(owners.session(mem, a).path)
        if len(paths) > 1:
            return real(rows, pages, slots)
        mem.prefix.evict_pages(80)
        return ms.OutOfSlots(slots, 0, 0)

    monkeypatch.setattr(mem._parts.admission, "make_room", make_room)
    (row,) = mem.admit([ms.Request("turn", tokens=[*text[:8], 99, 98, 97], session=a)])
    before, after = paths
    assert before.end == 8 and after is NO_NODE and mem.info(row).length == 6 and mem.audit().clean


@pytest.mark.script
def test_S9_a_session_makes_way_after_a_call_that_a_placement_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(Backend("reference"), strategy="ping-pong", overlap=True, prefix=True)
    mem, (a,) = play.mem, talked(play, "a")

    def make_room(*_: int) -> ms.OutOfSlots:
        monkeypatch.setattr(mem.prefix, "marks", lambda *_: 1 / 0)  # fails where the call tries again
        return ms.OutOfSlots(9, 0, 0)

    monkeypatch.setattr(mem._parts.admission, "make_room", make_room)
    with pytest.raises(ZeroDivisionError):
        mem.admit([ms.Request("turn", tokens=[*other(1), 1], session=a)])
    assert [one.handle for one in owners.sessions(mem).idle()] == [a]


def test_G1_limits_that_are_none_are_refused() -> None:
    for wrong in ({"share": 2}, {"share": True}, {"per_session": 0}, {"most_states": -1}, {"clock": 3}):
        with pytest.raises(ms.ConfigurationError):
            ms.SessionLimits(**wrong)  # type: ignore[arg-type]


NUMBERS = ({"priority": 0.5}, {"priority": True}, {"ttl": -1}, {"ttl": "x"}, {"ttl": True}, {"ttl": 10**400})
MORE = ({"priority": None}, {"priority": 1.5, "ttl": 3}, {"priority": 3, "ttl": -1})


@script(strategy="none", prefix=True)
def test_G1_numbers_of_a_session_are_checked(play: Play) -> None:
    (a,) = play.open("a", priority=2, ttl=5)
    for wrong in NUMBERS:
        play.refuses(ms.InvalidArgument, lambda wrong=wrong: play.mem.sessions.open("b", **wrong))
    for wrong in (*NUMBERS, *MORE):
        play.refuses(ms.InvalidArgument, lambda wrong=wrong: play.mem.sessions.set(a, **wrong), "expected")
