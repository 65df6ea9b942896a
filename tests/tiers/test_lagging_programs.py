"""Random programs of nearly all calls (`tests/proof/stateful`) on a fake device whose loads or saves lag behind.

Between two comparisons, which are rare and wait for all streams, calls meet copies that are still under way. Each
program calls what uses pages or states soon after an admission that leaves loads under way.
"""

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from memstate.kernels.dispatch import Backend
from memstate.tiers.host import transfers
from tests.proof.stateful.machine import Flight, Handles
from tests.proof.stateful.operations import BELOW, OPERATIONS, Operations
from tests.proof.stateful.program import LARGEST, Program, carry_out
from tests.proof.stateful.settings import Digits, Settings
from tests.support.fake_cuda import FakeCuda, fake_cuda
from tests.support.sampling import PROOF

SEED = int(os.environ.get("MEMSTATE_SEED", "4"))
PROGRAMS = 40 if PROOF else 2
LATE = {"loads": (1,), "saves": (0,), "both": (0, 1)}  # which streams of `Transfers`
OFTEN = {"admit": 60, "park": 40, "plan": 40, "serve": 30, "leave": 30, "forget_states": 16, "forget_pages": 16}
WEIGHTS = dict.fromkeys(OPERATIONS | BELOW, 2) | {"publish": 16, "twin": 10, "settle": 16, "poll": 8, "work": 8} | OFTEN
SOON = ("split", "go") * 5 + ("twin", "publish", "park", "evict", "poll", "reorder", "cancel", "admit")


@pytest.fixture
def poison() -> None:
    """Does nothing: poison reads the device, so that the host would wait."""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(transfers.Ticket, "done", transfers.Ticket.done)  # the machine replaces it
    with fake_cuda(monkeypatch) as fake:
        yield fake


class Lagging(Operations):
    """A machine whose copies lag. Numbers of operations also decide when it compares, and when late copies run."""

    def __init__(self, settings: Settings, cuda: FakeCuda, late: str) -> None:
        self.cuda, self.chance, self.late = cuda, random.Random(0), []
        super().__init__(settings, Backend("reference", "cuda:0"))
        self.late = [each.transfers._streams[at] for each in self.mem.tiers.host.sets for at in LATE[late]]
        cuda.lag(*self.late)

    def run(self, name: str, number: int) -> None:
        self.chance = random.Random(number)
        super().run(name, number)
        while any(self.cuda.lagging.values()) and self.chance.random() < 0.75:
            super().run(self.chance.choice(SOON), self.chance.randrange(LARGEST))

    def look(self) -> None:
        if not self.late or self.chance.random() < 0.1:
            self.cuda.synchronize()
            super().look()
            return
        self.lower.learn(self.parked)  # type: ignore[union-attr]
        told = self.model.free_pages, self.model.free_count
        self._same("free pages and slots", (self.mem.free_pages, self.mem.free_slots), told)
        if self.chance.random() < 0.1:
            self.cuda.advance(self.chance.choice(self.late), 2)

    def note_step(self, flight: Flight) -> None:
        self.flights.append(flight)  # a fake tensor cannot name the storage that all steps share

    @property
    def newest(self) -> Handles:
        return list(self.handles)[-1:]

    def split(self, d: Digits) -> None:
        """Forks the newest row."""
        for row in self.newest:
            self.fork_row(row, [f"twin {self.calls}"], set())

    def go(self, d: Digits) -> None:
        """Ends the newest row, and then needs all room of the cache."""
        self.end_rows(d, self.newest, "told")
        self.evict(d)

    def evict(self, d: Digits) -> None:
        if not self.asleep:
            self._same("evicted states", self.mem.prefix.evict_states(99), self.model.evict_states(99))
            self._same("evicted pages", self.mem.prefix.evict_pages(99), self.model.evict_pages(99))


def drawn(seed: str, length: int) -> Program:
    """Draws a program whose rows share pages that are filled in part, and whose host memory has some room."""
    chance = random.Random(seed)
    while True:
        program = Program(chance.randrange(LARGEST), (), {"tiered": True})
        s = program.drawn()
        if s.page_size > 1 and s.pages and s.host_slots > 2 and s.host_pages > 7 and s.slots > 5 and s.row_count > 2:
            break
    names = chance.choices(list(WEIGHTS), list(WEIGHTS.values()), k=length)
    return replace(program, operations=tuple((name, chance.randrange(LARGEST)) for name in names))


@pytest.mark.parametrize("seed", range(SEED, SEED + PROGRAMS))
@pytest.mark.parametrize("late", LATE)
def test_random_programs_follow_the_rules_whatever_copies_are_late(cuda: FakeCuda, late: str, seed: int) -> None:
    program = drawn(f"{seed} {late}", 60)
    settings = replace(program.drawn(), memory="own")  # fake tensors are no parts of larger blocks
    carry_out(program, Lagging(settings, cuda, late))
