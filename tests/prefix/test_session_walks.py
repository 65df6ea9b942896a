"""Misuse that would cost a conversation, and what is not to be counted twice. I = 4, pages of 2 tokens."""

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.talks import TEXT, Talks, told

pytestmark = pytest.mark.sample(interpreter=0)  # without MEMSTATE_PROOF the reference alone


def idle(backend: Backend, cache: bool = False, **settings: object) -> tuple[Talks, ms.Session]:
    """A session of 9 tokens between two turns."""
    talks, _, session = told(backend, "none", True, cache, first=9, **settings)
    return talks, session


@pytest.mark.parametrize("scarce", [{"slots": 1}, {"pages": 5}], ids=["slots", "pages"])
def test_B73_a_turn_has_room_in_what_its_own_session_gives_up(backend: Backend, scarce: dict[str, int]) -> None:
    """An edited history serves nothing, and only the turn itself can free what is held: waiting is no use."""
    talks, session = idle(backend, **scarce)
    assert talks.whole([50, 51, 52, 53], session) == 0


def test_B19_a_session_of_another_manager_is_stale(backend: Backend) -> None:
    (talks, _), (_, foreign) = idle(backend), idle(backend)
    with pytest.raises(ms.StaleHandle):
        talks.mem.close_session(foreign)


@pytest.mark.parametrize("how", ["release", "cancel", "new tokens alone"])
def test_G1_tokens_of_a_turn_that_are_none_are_refused(backend: Backend, how: str) -> None:
    """Else the conversation is lost without a word, or a state stands for other tokens than the session believes."""
    talks, session = idle(backend)
    row = talks.turn(TEXT, session)
    step = talks.feed([row], [[TEXT[9]]])
    with pytest.raises(ms.InvalidArgument):
        if how == "cancel":
            talks.mem.cancel(step, tokens=[None])  # type: ignore[list-item]
        else:
            talks.mem.release([row], tokens=[None if how == "release" else TEXT[9:]])  # type: ignore[list-item]


def test_B36b_a_cancelled_step_says_nothing_of_a_turn_that_has_one_of_its_rows_now(backend: Backend) -> None:
    talks, session = idle(backend, rows=2)
    ended, other = talks.turn(TEXT[:2]), talks.turn(TEXT[:2])
    first = talks.feed([ended, other], [[1], [1]])
    second = talks.mem.plan([ended, other])
    talks.mem.settle(first, [True, False])
    talks.mem.release([ended])
    turn = talks.turn(TEXT, session)
    assert turn.index == ended.index
    talks.mem.cancel(second, publish=True)


def test_B70_a_state_lost_for_want_of_a_holder_is_counted(backend: Backend) -> None:
    talks, session = idle(backend, snapshots=0)
    assert talks.kept(session) == [] and talks.mem.stats().refused == 1


def test_B17_a_refusal_for_want_of_pages_gives_up_none(backend: Backend) -> None:
    """All pages that count as evictable can be had, the trunk of two conversations as well once both are gone."""
    talks = Talks(backend, "none", pages=16, prefix=ms.Prefix(states=ms.policies.ReturnRate()))
    talks.whole(TEXT[:14])
    talks.whole([*TEXT[:8], 77, 78, 79, 80])
    rows = talks.mem.stats().rows_used
    assert talks.mem.free_pages == 7 and talks.mem.prefix.evictable_pages == 9
    try:
        talks.mem.abort([talks.turn(range(100, 132))])
    finally:
        assert talks.mem.stats().rows_used == rows
