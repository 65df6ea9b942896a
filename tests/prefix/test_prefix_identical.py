"""B51 and B52: with a prefix cache, and packed with others, a request has the states and tokens that it has alone.

The workload is random: prompts that share beginnings, lengths around pages, chunks and boundaries, padding, requests
that are retracted, aborted, cancelled, and a pool too small for what could be cached.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.prefix.policies import Lru, LruPages
from tests.support.planes import every_strategy, fold
from tests.support.serving import EVERY, PAGE, Server, written
from tests.support.ways import every_strategy_and_order

pytestmark = pytest.mark.sample(interpreter=0)  # without MEMSTATE_PROOF the reference alone


CHUNK = 6
SLOTS = {"none": 6, "ping-pong": 11, "lazy": 9, "redirect": 7}
LENGTHS = sorted({n + d for n in (PAGE, CHUNK, EVERY, 2 * EVERY, 3 * EVERY) for d in (-1, 0, 1)})
BASES = [[(7 * n + base) % 50 for n in range(30)] for base in range(2)]


@dataclass
class Job:
    """A request until all of it is written. text: what a next attempt begins with."""

    prompt: list[int]
    goal: int
    salt: str | None
    text: list[int] = field(default_factory=list)

    @property
    def total(self) -> int:
        return len(self.prompt) + self.goal


@dataclass
class Load:
    """Serves jobs, three at a time, by chance. Looks at everything on the way where `look` says so."""

    at: Server
    chance: random.Random
    overlap: bool
    look: bool = True
    running: dict[ms.Row, Job] = field(default_factory=dict)
    flying: deque[tuple[ms.Step, list[ms.Row | None]]] = field(default_factory=deque)

    def serve(self, jobs: Sequence[Job]) -> None:
        waiting = deque(jobs)
        for job in jobs:
            job.text = list(job.prompt)
        rounds = 0
        while waiting or self.running:
            rounds += 1
            assert rounds < 100 * len(jobs), "nothing gets done"
            self.admit(waiting)
            dice = self.chance.random()
            if dice < 0.12:
                self.give_up(self.chance.choice(list(self.running)), waiting, keep=dice < 0.08)
            self.step(waiting, cancelled=0.12 <= dice < 0.15)
            if self.chance.random() < 0.6:
                self.at.publish(self.chance.sample(list(self.running), self.chance.randrange(len(self.running) + 1)))
            if self.look:
                self.at.look()
        while self.flying:
            self.settle(waiting)

    def admit(self, waiting: deque[Job]) -> None:
        while waiting:
            n = self.chance.randrange(1, 3)
            batch = [waiting[i] for i in range(min(n, len(waiting)))]
            try:
                rows = self.at.admit(*(ms.Request("x", tokens=job.text, salt=job.salt) for job in batch))
            except (ms.OutOfRows, ms.OutOfSlots, ms.OutOfPages):
                if len(batch) == 1:
                    assert self.running, "one request alone does not fit"
                    return
                batch = batch[:1]
                continue
            for row, job in zip(rows, batch, strict=True):
                self.running[row] = job
                waiting.popleft()

    def give_up(self, row: ms.Row, waiting: deque[Job], keep: bool) -> None:
        """Retracts, or aborts and begins anew."""
        job = self.running.pop(row)
        if keep:
            job.text = self.at.text[row][: max(len(job.text), self.at.mem.info(row).confirmed + 1)]
        else:
            job.text = list(job.prompt)
        if keep and self.at.mem.prefix:
            self.at.mem.end([row], keep="cache", tokens=[self.at.text[row]])
        else:
            self.at.mem.end([row])
        waiting.append(job)

    def step(self, waiting: deque[Job], cancelled: bool) -> None:
        rows: list[ms.Row | None] = [*self.chance.sample(list(self.running), len(self.running)), None]
        if self.chance.random() < 0.3:
            rows.insert(self.chance.randrange(len(rows)), None)
        if cancelled and self.running:
            self._cancel(rows, waiting)
            return
        while self.running:
            try:
                self.flying.append((self.at.step(rows, CHUNK), rows))
                break
            except ms.OutOfPages:
                row = next(row for row in reversed(rows) if row)
                rows = [other for other in rows if other is not row]
                self.give_up(row, waiting, keep=True)
        if len(self.flying) > int(self.overlap) or not self.running:
            self.settle(waiting)

    def _cancel(self, rows: list[ms.Row | None], waiting: deque[Job]) -> None:
        try:
            step = self.at.step(rows, CHUNK, run=False)
        except ms.OutOfPages:
            return
        tokens = [self.at.text[row] if row else None for row in rows] if self.at.mem.prefix else None
        self.at.mem.cancel(step, keep="cache", tokens=tokens)
        for row in [row for row in rows if row]:
            job = self.running.pop(row)
            job.text = list(job.prompt)
            waiting.append(job)

    def settle(self, waiting: deque[Job]) -> None:
        if not self.flying:
            return
        step, rows = self.flying.popleft()
        over = [row in self.running and int(step.after[i]) >= self.running[row].total - 1 for i, row in enumerate(rows)]
        self.at.mem.settle(step, over)
        ended = [row for row, is_over in zip(rows, over, strict=True) if row and is_over]
        for row in ended:
            job = self.running.pop(row)
            job.text = self.at.text[row][: job.total]
            self.at.text[row] = self.at.text[row][
                : max(job.total, self.at.mem.info(row).confirmed)
            ]  # of a cut job, more
        self.at.end(ended)


def jobs(chance: random.Random, n: int) -> list[Job]:
    made = []
    for _ in range(n):
        base, length = chance.choice(BASES), chance.choice(LENGTHS)
        shared = chance.choice([length, length, length // 2, min(10, length)])
        tail = [50 + chance.randrange(3)] * (length - shared)
        made.append(Job([*base[:shared], *tail], chance.randrange(1, 7), chance.choice([None, None, "other"])))
    return made


def server(backend: Backend, name: str, overlap: bool, prefix: ms.Prefix | bool, in_place: bool, **more: int) -> Server:
    sizes = {"slots": SLOTS[name], "rows": 3, "pages": 25} | more
    return Server(backend, name, overlap=overlap, prefix=prefix, in_place=in_place, **sizes)  # type: ignore[arg-type]


@pytest.mark.sample
@every_strategy_and_order
@pytest.mark.parametrize("in_place", [False, True], ids=["", "in place"])
def test_B51_with_and_without_a_cache_the_same_tokens(
    name: str, overlap: bool, in_place: bool, backend: Backend, generator: torch.Generator
) -> None:
    seed = int(torch.randint(2**31, (1,), generator=generator))
    n, trials = (25, 3) if backend.name == "reference" else (3, 1)
    hits = 0
    for trial in range(trials):
        work = jobs(random.Random(seed + trial), n)
        settings = [ms.Prefix(Lru(), LruPages()), ms.Prefix(Lru(), LruPages(tombstones=False), 4), ms.Prefix()]
        cached, uncached = (server(backend, name, overlap, given, in_place) for given in (settings[trial], False))
        answers = []
        for at in (cached, uncached):
            Load(at, random.Random(seed - trial), overlap, look=at is cached).serve(work)
            answers.append([job.text for job in work])
        assert answers[0] == answers[1] == [written(job.prompt, job.goal) for job in work]
        figures = cached.mem.stats().prefix
        assert figures and figures.hit_tokens <= figures.prompt_tokens
        hits += figures.hit_tokens
        cached.empty()
        assert uncached.mem.free_slots == SLOTS[name] and uncached.mem.free_pages == 25
    assert hits or n < 25 or name == "none", "a workload that never hits shows nothing"


@every_strategy
def test_B51_every_length_around_pages_chunks_and_boundaries(name: str, backend: Backend) -> None:
    """Each prompt after each other one that shares its beginning, with room for everything."""
    lengths = LENGTHS if backend.name == "reference" else [EVERY - 1, EVERY, 2 * EVERY + 1]
    at = server(backend, name, True, ms.Prefix(states=Lru(), pages=LruPages()), False, slots=60, pages=200)
    for length, goal in product(lengths, (1, 2)):
        match = at.mem.match(BASES[0][:length])
        assert at.turn(BASES[0][:length], goal, most=CHUNK) == match.length < length
        at.look(idle=True)
    assert at.mem.match(BASES[0]).length >= (3 * EVERY if backend.name == "reference" else EVERY)
    assert at.mem.stats().prefix.evicted_states == 0  # type: ignore[union-attr]


@pytest.mark.sample(interpreter=1)
@every_strategy_and_order
def test_B52_prompts_packed_into_one_batch_have_the_states_they_have_alone(
    name: str, overlap: bool, backend: Backend
) -> None:
    """With a hit or without, equal prompts and different ones, chunks of different lengths, padding between them."""
    at = server(backend, name, overlap, ms.Prefix(states=Lru(), pages=LruPages()), False, slots=20, rows=5, pages=60)
    first = BASES[0]
    at.turn(first[:16])
    prompts = [[*first[:16], 1, 2, 3], first[:11], first[:11], [*BASES[1][:23]], [*first[:16], 4]]
    rows = at.admit(*(ms.Request(n, tokens=prompt) for n, prompt in enumerate(prompts)))
    starts = [at.mem.info(row).length for row in rows]
    assert starts == [16, 0 if name == "none" else 8, 0 if name == "none" else 8, 0, 16]
    while any(at.mem.info(row).length < len(prompt) for row, prompt in zip(rows, prompts, strict=True)):
        left = [
            row if at.mem.info(row).length < len(prompt) else None for row, prompt in zip(rows, prompts, strict=True)
        ]
        at.run([None, *left], CHUNK)
        at.look()
    alone = [server(backend, name, overlap, False, False) for _ in prompts]
    for row, prompt, other in zip(rows, prompts, alone, strict=True):
        twin = other.start(prompt)
        other.prefill(twin, CHUNK)
        for plane, reference in zip(at.mem.planes.values(), other.mem.planes.values(), strict=True):
            assert torch.equal(plane[:, at.slot(3 * row.index)], reference[:, other.slot(3 * twin.index)])
        assert int(at.mem.planes["long"][0, at.slot(3 * row.index), 0]) == fold(tuple(prompt))
    at.end(rows)
