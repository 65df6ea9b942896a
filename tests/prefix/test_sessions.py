"""Sessions: what a turn leaves to the next turn, and from which state that turn goes on.

Snapshots every 4 tokens, pages of 2.
"""

from collections.abc import Callable
from typing import Any

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Count
from tests.support import inside, owners
from tests.support.planes import both_orders, every_strategy
from tests.support.talks import TEXT, Talks, counts, row_holds_nothing, told
from tests.support.ways import every_strategy_and_order, every_way_and_cache, with_and_without_cache


@every_way_and_cache
def test_B69_a_turn_that_ends_moves_everything_to_the_session(
    backend: Backend, name: str, overlap: bool, cache: bool
) -> None:
    """States at marks of the prompt go to the cache, if there is one."""
    talks, mem, session = told(backend, name, overlap, cache)
    row = talks.turn(TEXT[:9], session, snapshot_at=[6])
    talks.run(row, TEXT[:9])
    held = sorted((talks.label(row, part), talks.slot(row, part)) for part in range(3) if talks.label(row, part))
    pages = owners.pages_of(mem, row)
    talks.end(row)
    lanes = {"none": [], "ping-pong": [8, 4] if overlap else [8]}.get(name, [8]) if not cache else []
    marks = ([6] if name == "none" else [4, 6, 8]) if cache else []
    assert row_holds_nothing(mem, row.index) and talks.kept(session) == [9, *lanes] and talks.cached() == marks
    talk = owners.session(mem, session)
    assert sorted((snap.length, talks.node(snap)) for snap in talk.kept) == held and list(talk.pages) == pages
    owned = {"session": len(held)} | ({"cached": len(marks)} if marks else {})
    assert mem.free_slots == 24 - len(held) - len(marks) and mem.audit().owned_by_kind == owned
    said = {owner for owner in mem._reports.owners().values() if owner[0] == "session"}
    assert said == {("session", f"session 'a' ({n} tokens)") for n, _ in held}


@every_way_and_cache
def test_B73_the_next_turn_goes_on_where_the_last_one_ended(
    backend: Backend, name: str, overlap: bool, cache: bool
) -> None:
    """The turn takes moves only: no byte is copied or zeroed, no slot changes, and pages stay."""
    talks, mem, session = told(backend, name, overlap, cache)
    assert talks.whole(TEXT[:7], session) == 0
    moved, spent = mem.stats(), mem.backend.counts.launches.copy()
    pages, slots = list(owners.session(mem, session).pages), [talks.node(s) for s in owners.session(mem, session).kept]
    row = talks.turn(TEXT[:12], session)
    mem.submit()
    assert mem.info(row).length == mem.info(row).confirmed == 7 and owners.pages_of(mem, row)[:4] == pages
    assert [talks.slot(row, part) for part in range(len(slots))] == slots
    now = mem.stats()
    assert (now.copied_bytes, now.zeroed_bytes) == (moved.copied_bytes, moved.zeroed_bytes)
    assert (mem.backend.counts.launches - spent) == {"ownership": 1}
    talks.run(row, TEXT[:12])
    talks.end(row)
    assert talks.whole(TEXT, session) == 12


@every_strategy
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([*TEXT[:8], 50, 51], {"none": 0, "ping-pong": 8, "lazy": 8, "redirect": 8}),
        ([*TEXT[:6], 50, 51], {"none": 0, "ping-pong": 4, "lazy": 4, "redirect": 4}),
        ([50, *TEXT[1:]], {"none": 0, "ping-pong": 0, "lazy": 0, "redirect": 0}),
        (TEXT[:9], {"none": 0, "ping-pong": 8, "lazy": 8, "redirect": 8}),  # the last token is always computed
        (TEXT[:8], {"none": 0, "ping-pong": 4, "lazy": 4, "redirect": 4}),
        (TEXT[:10], dict.fromkeys(["none", "ping-pong", "lazy", "redirect"], 9)),
    ],
    ids=["after 8", "after 6", "at once", "nothing new", "shorter", "not at all"],
)
def test_B73_an_edited_history_goes_on_from_an_older_state(
    backend: Backend, name: str, text: list[int], expected: dict[str, int]
) -> None:
    """States beyond the common beginning of both histories are released; a cached state at a mark may remain."""
    talks, _, session = told(backend, name, first=9)
    assert talks.kept(session) == [9] and talks.cached() == ([] if name == "none" else [4, 8])
    assert talks.whole(text, session) == expected[name]
    assert talks.whole([*text, 60], session) == len(text)


@both_orders
@with_and_without_cache
def test_B73_two_turns_at_once_are_refused(backend: Backend, overlap: bool, cache: bool) -> None:
    talks, mem, session = told(backend, "redirect", overlap, cache, first=5)

    def refused(*requests: ms.Request) -> None:
        before = (*counts(talks), talks.kept(session), bool(inside.commands(mem).queue))
        with pytest.raises(ms.InvalidArgument, match="one turn at a time"):
            mem.admit(requests)
        assert before == (*counts(talks), talks.kept(session), bool(inside.commands(mem).queue))
        talks.look()

    turn, other = ms.Request("turn", tokens=TEXT, session=session), ms.Request("other", tokens=TEXT)
    refused(turn, other, ms.Request("second", tokens=TEXT[:9], session=session))
    row = talks.turn(TEXT, session)
    refused(turn)
    refused(other, turn)
    talks.run(row, TEXT)
    refused(turn)
    talks.end(row)
    assert talks.whole([*TEXT, 1], session) == 15


@every_strategy_and_order
def test_B72_a_session_can_be_closed_whenever_no_turn_runs(backend: Backend, name: str, overlap: bool) -> None:
    """A session gives back all that it holds.

    Sessions are also closed before their first turn, and after a dead step.
    """
    talks = Talks(backend, name, overlap)
    mem = talks.mem
    for turns in ([], [7], [7, 9], [3], [1]):
        session = mem.sessions.open("a")
        for length in turns:
            row = talks.turn(TEXT[:length], session)
            talks.run(row, TEXT[:length], dead=overlap and length != 9)
            talks.end(row)
        free, held = mem.free_slots, len(talks.kept(session))
        mem.sessions.close(session)
        assert mem.free_slots == free + held
        for again in (lambda: mem.sessions.close(session), lambda: talks.turn(TEXT, session)):  # noqa: B023
            with pytest.raises(ms.StaleHandle, match=r"it was closed, ended by recover"):
                again()
        talks.look()
        assert talks.count(Count.DOUBLE_RELEASE) == talks.count(Count.OUT_OF_RANGE) == 0


def ask(mem: ms.StateManager, **more: Any) -> ms.Rows:
    return mem.admit([ms.Request("a", **more)])


REFUSED: dict[str, Callable[[ms.StateManager, ms.Session, ms.Snapshot], object]] = {
    "no tokens": lambda mem, session, snap: ask(mem, session=session),
    "no token": lambda mem, session, snap: ask(mem, tokens=[], session=session),
    "a state as well": lambda mem, session, snap: ask(mem, tokens=TEXT, session=session, resume=snap),
    "a name": lambda mem, session, snap: ask(mem, tokens=TEXT, session="a"),
    "a salt that is no key": lambda mem, session, snap: ask(mem, tokens=TEXT, session=session, salt=["a"]),
    "a name that is no key": lambda mem, session, snap: mem.sessions.open(["a"]),  # type: ignore[arg-type]
    "a row": lambda mem, session, snap: mem.sessions.close(ms.Row(1, 1)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("case", REFUSED)
def test_G1_misuse_is_refused_and_changes_nothing(backend: Backend, case: str) -> None:
    talks, _, session = told(backend, "ping-pong", cache=False, first=9)
    row = talks.turn(TEXT[:5])
    talks.run(row, TEXT[:5])
    (snap,) = talks.mem.publish([row], strict=True)
    before = (*counts(talks), talks.kept(session))
    with pytest.raises(ms.InvalidArgument):
        REFUSED[case](talks.mem, session, snap)
    assert before == (*counts(talks), talks.kept(session))


def idle(backend: Backend, cache: bool = False, **settings: object) -> tuple[Talks, ms.Session]:
    """Returns a session of 9 tokens between two turns."""
    talks, _, session = told(backend, "none", True, cache, first=9, **settings)
    return talks, session


def test_B19_a_session_of_another_manager_is_stale(backend: Backend) -> None:
    (talks, _), (_, foreign) = idle(backend), idle(backend)
    with pytest.raises(ms.StaleHandle):
        talks.mem.sessions.close(foreign)


@with_and_without_cache
@pytest.mark.parametrize("call", ["end", "publish", "cancel"])
@pytest.mark.parametrize("wrong", [[*TEXT[:9], 50], TEXT[9:]], ids=["not its prompt", "new tokens alone"])
def test_G1_tokens_of_a_turn_that_are_not_its_prompt_are_refused(
    backend: Backend, wrong: list[int], call: str, cache: bool
) -> None:
    """The whole prompt is compared, not only the tokens from which the turn began."""
    talks, session = idle(backend, cache)
    mem, row = talks.mem, talks.turn(TEXT, session)
    step = talks.feed([row], [TEXT[9:10]], run=False)
    before = (*counts(talks), mem.audit())
    with pytest.raises(ms.InvalidArgument, match="not those of its prompt"):
        if call == "cancel":
            mem.cancel(step, keep="cache", tokens=[wrong])
        else:
            (mem.end if call == "end" else mem.publish)([row], keep="cache", tokens=[wrong])
    assert before == (*counts(talks), mem.audit())
    mem.cancel(step)


@with_and_without_cache
def test_B73_a_prompt_that_its_caller_changes_stands_for_what_was_read(backend: Backend, cache: bool) -> None:
    talks, mem, session = told(backend, "none", True, cache)
    prompt = TEXT[:4]
    row = talks.turn(prompt, session)
    talks.run(row, TEXT[:4])
    prompt[:] = [50] * 4
    mem.end([row], keep="cache", tokens=[prompt])
    assert talks.whole([50] * 4 + [51], session) == 0
    row = talks.turn(TEXT[:4], session)
    talks.run(row, TEXT[:4])
    mem.end([row], keep="cache")  # nothing was decoded, and the prompt is known
    assert talks.whole(TEXT[:5], session) == 4
