"""Conversations at random, several at once: whatever turns do, everything adds up and comes back at the end. Then
misuse that would cost a conversation, and what is not to be counted twice.
"""

import random
from array import array

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support import owners
from tests.support.talks import TEXT, Talks, counts, fork, row_holds_nothing, told
from tests.support.ways import every_way_and_cache

pytestmark = pytest.mark.sample(interpreter=0)  # without MEMSTATE_PROOF the reference alone


BACK_PRESSURE = (ms.OutOfSlots, ms.OutOfPages, ms.OutOfRows)
WEIGHTS = {
    "open": 2, "close": 1, "begin": 6, "run": 8, "publish": 2, "finish": 2, "end": 3, "abort": 2, "cancel": 1,
    "fork": 1, "evict": 1, "sleep": 1,
}  # fmt: skip


class Walk:
    """Sessions with their histories, and rows with their sessions and texts."""

    def __init__(self, talks: Talks, choose: random.Random) -> None:
        self.talks, self.mem, self.choose = talks, talks.mem, choose
        self.history: dict[ms.Session, list[int]] = {}
        self.rows: dict[ms.Row, tuple[ms.Session | None, list[int]]] = {}
        self.resumed = self.refused = 0

    def step(self) -> None:
        """One operation; some need something to work on."""
        (name,) = self.choose.choices(list(WEIGHTS), list(WEIGHTS.values()))
        row = self.choose.choice(list(self.rows)) if self.rows else None
        if name in ("open", "close", "begin", "evict", "sleep"):
            getattr(self, name)()
        elif row:
            try:
                getattr(self, name)(row)
            except BACK_PRESSURE:
                self.talks.land()
        self.talks.look()

    def open(self) -> None:
        if len(self.history) < 4:
            self.history[self.mem.sessions.open(len(self.history))] = []

    def close(self) -> None:
        for session in [one.session for one in self.mem.sessions.infos() if not one.running][:1]:
            self.mem.sessions.close(session)
            del self.history[session]

    def begin(self) -> None:
        """A turn that goes on, one with an edited history, or a request without a session."""
        idle = [one.session for one in self.mem.sessions.infos() if not one.running]
        session = self.choose.choice([*idle, None])
        text = list(self.history[session]) if session else [1, 2, 3] * self.choose.randrange(5)
        if self.choose.random() < 0.2:
            text = text[: self.choose.randrange(len(text) + 1)]
        text = [*text, *self.tokens(1, 7)][:30]
        salt = self.choose.choice([None] * 9 + ["x"])
        before, expected = (counts(self.talks), session and self.talks.kept(session)), self.start(session, text, salt)
        try:
            row = self.talks.turn(text, session, salt=salt)
        except BACK_PRESSURE:
            assert before == (counts(self.talks), session and self.talks.kept(session))
            self.refused += 1
            return
        assert self.mem.info(row).length == self.mem.info(row).confirmed == expected
        self.resumed += session is not None and expected > 0
        self.rows[row] = session, text

    def start(self, session: ms.Session | None, text: list[int], salt: str | None) -> int:
        """Where a request must begin: with the longest state, of session or cache, that its prompt begins with."""
        found = [self.mem.match(text, salt).length if self.mem.prefix else 0]
        if session and owners.session(self.mem, session).prompt.salt == salt:
            kept, tokens = self.talks.kept(session), owners.session(self.mem, session).prompt.key
            found += [n for n in kept if n < len(text) and tokens[: 8 * n] == array("q", text[:n]).tobytes()]
        return max(found)

    def tokens(self, least: int, most: int) -> list[int]:
        return [self.choose.randrange(1, 3) for _ in range(self.choose.randint(least, most))]

    def run(self, row: ms.Row, **how: bool) -> None:
        if self.mem.info(row).length < 36:
            text = self.rows[row][1]
            told = text if len(text) > self.mem.info(row).length else [*self.talks.fed[row], *self.tokens(1, 5)]
            self.talks.run(row, told[: self.mem.info(row).length + self.choose.randint(1, 12)], **how)

    def publish(self, row: ms.Row) -> None:
        if self.mem.prefix:
            self.mem.publish([row], keep="cache", tokens=[self.talks.fed[row]])

    def finish(self, row: ms.Row) -> None:
        """The end with one step more in flight."""
        self.run(row, dead=self.mem.overlap)
        self.end(row)

    def end(self, row: ms.Row) -> None:
        session, _ = self.rows.pop(row)
        if session:
            self.history[session] = self.talks.known(row)
        self.talks.end(row) if session or self.mem.prefix else self.mem.end([row])
        assert row_holds_nothing(self.mem, row.index)

    def abort(self, row: ms.Row) -> None:
        del self.rows[row]
        self.mem.end([row])

    def cancel(self, row: ms.Row) -> None:
        session, _ = self.rows[row]
        step, tokens = self.talks.feed([row], [[1]], run=False), self.talks.fed[row][:-1]
        del self.rows[row]
        told = bool(session) and self.choose.random() < 0.5
        self.mem.cancel(step, keep="cache" if told else None, tokens=[tokens] if told else None)

    def fork(self, row: ms.Row) -> None:
        for new in fork(self.talks, row, "fork"):
            self.rows[new] = None, self.rows[row][1]

    def evict(self) -> None:
        if self.mem.prefix:
            self.mem.prefix.evict_states(self.choose.randrange(3))
            self.mem.prefix.evict_pages(self.choose.randrange(5))

    def sleep(self) -> None:
        self.mem.device.sleep()
        self.mem.device.wake()


@pytest.mark.sample(6, interpreter=1)
@every_way_and_cache
def test_B70_open_run_close_leaves_the_counts_as_before(
    backend: Backend, name: str, overlap: bool, cache: bool, generator: torch.Generator
) -> None:
    choose = random.Random(int(torch.randint(2**31, (1,), generator=generator)))
    room = {"slots": choose.choice([10, 16, 24]), "pages": choose.choice([30, 80])}
    talks = Talks(backend, name, overlap, cache, **room)
    walk = Walk(talks, choose)
    for _ in range(120 if backend.name == "reference" else 12):
        walk.step()
    talks.land()


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
        talks.mem.sessions.close(foreign)


@pytest.mark.parametrize("how", ["release", "cancel", "new tokens alone"])
def test_G1_tokens_of_a_turn_that_are_none_are_refused(backend: Backend, how: str) -> None:
    """Else the conversation is lost without a word, or a state stands for other tokens than the session believes."""
    talks, session = idle(backend)
    row = talks.turn(TEXT, session)
    step = talks.feed([row], [[TEXT[9]]])
    with pytest.raises(ms.InvalidArgument):
        if how == "cancel":
            talks.mem.cancel(step, keep="cache", tokens=[None])  # type: ignore[list-item]
        else:
            talks.mem.end([row], keep="cache", tokens=[None if how == "release" else TEXT[9:]])  # type: ignore[list-item]


def test_B36b_a_cancelled_step_says_nothing_of_a_turn_that_has_one_of_its_rows_now(backend: Backend) -> None:
    talks, session = idle(backend, rows=2)
    ended, other = talks.turn(TEXT[:2]), talks.turn(TEXT[:2])
    first = talks.feed([ended, other], [[1], [1]])
    second = talks.mem.plan([ended, other])
    talks.mem.settle(first, [True, False])
    talks.mem.end([ended])
    turn = talks.turn(TEXT, session)
    assert turn.index == ended.index
    talks.mem.cancel(second, keep="handle")


def test_B70_a_state_lost_for_want_of_a_holder_is_counted(backend: Backend) -> None:
    talks, session = idle(backend, snapshots=0)
    assert talks.kept(session) == [] and talks.mem.stats().refused == 1


def test_B74_states_of_sessions_are_not_called_evictable(backend: Backend) -> None:
    talks, _ = idle(backend, slots=1)
    with pytest.raises(ms.OutOfSlots) as refusal:
        talks.mem.admit([ms.Request("a"), ms.Request("b")])
    assert refusal.value.evictable == 0 and refusal.value.in_sessions == 1


def test_B17_a_refusal_for_want_of_pages_gives_up_none(backend: Backend) -> None:
    """All pages that count as evictable can be had, the trunk of two conversations as well once both are gone."""
    talks = Talks(backend, "none", pages=16, prefix=ms.Prefix(states=ms.policies.ReturnRate()))
    talks.whole(TEXT[:14])
    talks.whole([*TEXT[:8], 77, 78, 79, 80])
    rows = talks.mem.stats().rows_used
    assert talks.mem.free_pages == 7 and talks.mem.prefix.evictable_pages == 9
    try:
        talks.mem.end([talks.turn(range(100, 132))])
    finally:
        assert talks.mem.stats().rows_used == rows
