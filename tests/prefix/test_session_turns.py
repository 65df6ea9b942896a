"""Turns of sessions: a call of several does what as many calls do, and a turn costs the host few frames."""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch

import memstate as ms
from tests.proof.injection.points import Tracer
from tests.support import inside, owners
from tests.support.build import build

LAYOUT = ms.StateLayout([ms.Plane("s", (4,), torch.float32)], layers=1)
TALKS = 6


class Turn(NamedTuple):
    """A turn: tokens of the text before that its prompt keeps, tokens that are new, and tokens of the answer."""

    talk: int
    kept: int
    new: int
    answer: int
    aborted: bool


def rounds(seed: int) -> Iterator[list[Turn]]:
    """Yields rounds of turns that run at the same time, each of another session."""
    rng = random.Random(seed)
    for _ in range(25):
        yield [
            Turn(talk, rng.choice((99, 99, 99, 5, 2)), rng.randrange(1, 7), rng.randrange(4), rng.random() < 0.2)
            for talk in rng.sample(range(TALKS), rng.randrange(1, 5))
        ]


class Chats:
    """A manager with open sessions. `at_once`: all turns of a round are in one call, otherwise each in its own."""

    def __init__(self, at_once: bool, snapshots: int | None, limits: ms.SessionLimits) -> None:
        self.mem = build(
            LAYOUT, device="cpu", backend="reference", slots=60, max_requests=5, tracking=ms.PingPong(4),
            snapshots=snapshots, sessions=limits,
        )  # fmt: skip
        self.at_once, self.texts = at_once, [[0]] * TALKS
        self.talks = [self.mem.sessions.open(talk, priority=talk % 3) for talk in range(TALKS)]

    def parts(self, turns: Sequence[Any]) -> list[Sequence[Any]]:
        return [turns] if self.at_once else [[turn] for turn in turns]

    def round(self, turns: list[Turn]) -> Iterator[object]:
        """Runs the turns of a round. Yields what the host knows after each call of several turns."""
        mem, rows = self.mem, list[ms.Row]()
        for turn in turns:
            self.texts[turn.talk] = [*self.texts[turn.talk][: turn.kept], *range(turn.new)]
        for part in self.parts(turns):
            asked = [ms.Request(0, tokens=self.texts[turn.talk], session=self.talks[turn.talk]) for turn in part]
            rows += mem.admit(asked)
        yield self.known()
        sizes = [len(self.texts[turn.talk]) - mem.info(row).length for row, turn in zip(rows, turns, strict=True)]
        mem.settle(mem.plan(rows, sizes))
        for step in range(3):
            if going := [row for row, turn in zip(rows, turns, strict=True) if turn.answer > step]:
                mem.settle(mem.plan(going))
        for turn in turns:
            self.texts[turn.talk] = [*self.texts[turn.talk], *range(turn.answer)]
        pairs = list(zip(rows, turns, strict=True))
        for part in self.parts([pair for pair in pairs if not pair[1].aborted]):
            mem.end([row for row, _ in part], keep="cache", tokens=[self.texts[turn.talk] for _, turn in part])
        for part in self.parts([row for row, turn in pairs if turn.aborted]):
            mem.end(part)
        yield self.known()

    def known(self) -> object:
        """Returns what the host knows, without the numbers of holders: free ones are used in turn."""
        file, held, sessions = inside.registers(self.mem), owners.holdings(self.mem), owners.sessions(self.mem)
        assert self.mem.audit().clean
        labels, rows = file.labels.tolist(), slice(file.first_holder)
        return (
            file.held.tolist()[rows], labels[rows], file.tracked.tolist(), self.mem.free_slots, held.free,
            sessions.refused, sessions.emptied, sessions.parted, {kind: len(of) for kind, of in held.held.items()},
            [
                (one.prompt, [labels[state.register] for state in one.kept], one.row, one.start, one.asked)
                for one in sessions.opened.values()
            ],
        )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("snapshots", [None, 7, 2])
@pytest.mark.parametrize("limits", [{}, {"per_session": 1}, {"most_states": 3}])
def test_a_call_of_several_turns_does_what_as_many_calls_do(
    limits: dict[str, Any], snapshots: int | None, seed: int
) -> None:
    """Also where few holders are free, so that the state of one turn makes way for that of another."""
    together, apart = (Chats(at_once, snapshots, ms.SessionLimits(**limits)) for at_once in (True, False))
    for turns in rounds(seed):
        for one, other in zip(together.round(turns), apart.round(turns), strict=True):
            assert one == other


@pytest.mark.parametrize(("n", "most"), [(1, 92), (4, 182)])
def test_a_turn_that_ends_and_one_that_comes_take_few_frames(n: int, most: int) -> None:
    """Python 3.12 takes fewer, because a comprehension is no frame there."""
    mem = ms.StateManager(LAYOUT, slots=60, max_requests=5, backend="reference", tracking=ms.PingPong(256))
    talks = [mem.sessions.open(at) for at in range(n)]
    rows = list[ms.Row]()
    frames = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal frames
        frames += event == "call"

    for length in (5, 6, 7, 8):
        ended = [[at] * (length - 1) for at in range(n)]
        asked = [ms.Request(at, tokens=[at] * length, session=talk) for at, talk in enumerate(talks)]
        frames = 0
        sys.setprofile(note)
        try:
            if rows:
                mem.end(rows, keep="cache", tokens=ended)
            came = mem.admit(asked)
        finally:
            sys.setprofile(None)
        rows = list(came)
        mem.settle(mem.plan(rows, length - mem.info(rows[0]).length))
    assert frames <= most


@pytest.mark.script
@pytest.mark.parametrize("call", ["end", "admit"])
def test_wherever_two_turns_are_interrupted_nothing_or_all_has_changed_or_recover_helps(call: str) -> None:
    """Tries every 7th point."""
    texts = [[0, 1, 2, 3, 4], [0, 1, 2, 3, 5]]

    def asked(chats: Chats, *more: int) -> list[ms.Request]:
        pairs = zip(chats.talks, texts, strict=False)
        return [ms.Request(0, tokens=[*text, *more], session=talk) for talk, text in pairs]

    def torn(tracer: Tracer) -> tuple[Chats, object]:
        chats = Chats(True, None, ms.SessionLimits())
        mem, rows = chats.mem, chats.mem.admit(asked(chats))
        mem.settle(mem.plan(rows, 5))
        acts = {"end": lambda: mem.end(rows, keep="cache", tokens=texts), "admit": lambda: mem.admit(asked(chats, 6))}
        if call == "admit":
            acts["end"]()
        before = chats.known()
        with suppress(KeyboardInterrupt):
            tracer.run(acts[call])
        return chats, before

    after = torn(every := Tracer())[0].known()
    for at in range(1, every.count + 1, 7):
        chats, before = torn(tracer := Tracer(at, KeyboardInterrupt))
        try:
            assert chats.known() in (before, after), tracer.place
        except ms.Broken:
            chats.mem.recover()
        chats.mem.end([row for row in owners.table(chats.mem).running if row is not None])
        rows = chats.mem.admit(asked(chats, 6))
        chats.mem.settle(chats.mem.plan(rows, [6 - chats.mem.info(row).length for row in rows]))
        assert chats.mem.audit().clean, tracer.place
