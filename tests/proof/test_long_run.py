"""Tests that objects do not grow with steps: a manager with tiers and sessions, short of slots, pages and records."""

import gc
import random

import pytest
import torch

import memstate as ms
from memstate.testing import MemoryStore

LAYOUT = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
KV = ms.StateLayout([ms.Plane("k", (4,), torch.float32)], layers=1)
ROWS, PAGE, TOPICS = 8, 4, 400
FIRST, MORE, GROWTH = 18_000, 6_000, 1.005  # steps until histories of a fixed size are full, and steps after them


class Forgetful(MemoryStore):
    """A store that keeps only the last 256 records, so that it does not grow either."""

    def put(self, names, buffers):  # type: ignore[no-untyped-def]
        outcomes = super().put(names, buffers)
        for name in list(self.records)[: max(0, len(self.records) - 256)]:
            del self.records[name]
        self.calls.clear()
        return outcomes


class Service:
    """Serves conversations and single prompts. A conversation of more than 80 tokens ends, and another one begins."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        tiers = ms.Tiers(
            model="long run", host_slots=64, host_pages=512, kv=ms.Planes(KV, 512, ms.Backend("reference")),
            store=Forgetful(),
        )  # fmt: skip
        self.mem = ms.StateManager(
            LAYOUT, slots=64, max_requests=ROWS, tracking=ms.Redirect(every=PAGE), backend="reference",
            pages=ms.Pages(size=PAGE, count=512, per_row=32), prefix=ms.Prefix(), tiers=tiers,
            sessions=ms.SessionLimits(per_session=2),
        )  # fmt: skip
        self.talks = {n: self.mem.sessions.open(n) for n in range(ROWS)}
        self.said = {n: [n] for n in self.talks}
        self.running: dict[ms.Row, tuple[list[int], int, int | None]] = {}  # row -> text, length of the end, talk

    def begin(self) -> None:
        """Admits one request if there is room: a turn of a conversation, or a single prompt about a topic."""
        idle = [n for n in self.talks if n not in [talk for _, _, talk in self.running.values()]]
        talk = self.random.choice(idle) if idle and self.random.random() < 0.5 else None
        if talk is not None and len(self.said[talk]) > 80:
            self.mem.sessions.close(self.talks[talk])
            self.talks[talk], self.said[talk] = self.mem.sessions.open(talk), [talk]
        start = [self.random.randrange(TOPICS)] * 9 if talk is None else self.said[talk]
        text = [*start, *(self.random.randrange(1 << 20) for _ in range(self.random.randrange(2, 7)))]
        session, goal = None if talk is None else self.talks[talk], len(text) + self.random.randrange(1, 13)
        try:
            (row,) = self.mem.admit([ms.Request("a", tokens=text, session=session, length=goal)])
        except (ms.OutOfSlots, ms.OutOfPages):
            return
        self.running[row] = text, goal, talk

    def step(self) -> None:
        """Runs one iteration of the loop: an admission, a step of all rows, the ends of requests, a poll."""
        if len(self.running) < ROWS:
            self.begin()
        tokens = []
        for row, (text, _, _) in self.running.items():
            left = len(text) - self.mem.info(row).length
            text += [] if left else [self.random.randrange(1 << 20)]
            tokens.append(left or 1)
        self.mem.settle(self.mem.plan(list(self.running), tokens))
        over = {row: self.running.pop(row) for row, (text, goal, _) in [*self.running.items()] if len(text) == goal}
        if over:
            self.mem.end(list(over), keep="cache", tokens=[text for text, _, _ in over.values()])
        self.said |= {talk: text for text, _, talk in over.values() if talk is not None}
        self.mem.poll()


@pytest.mark.proof
def test_objects_do_not_grow_with_the_number_of_steps(generator: torch.Generator) -> None:
    service, counts = Service(generator.initial_seed()), []
    for steps in (FIRST, MORE):
        for _ in range(steps):
            service.step()
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert counts[1] <= GROWTH * counts[0], counts
    service.mem.audit().raise_if_leaking()
