"""Steps with drafts of a few rows: what they cost the host, and that plain integers decide what arrays decide."""

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.checks import INT32_MAX
from memstate.errors import InvalidArgument, MemstateError
from memstate.kernels.dispatch import Backend
from memstate.requests.tracking import few
from memstate.state.planes import Planes
from memstate_tools.bench.host_sides import python_calls
from tests.support import inside
from tests.support.build import build

TAIL = 4
RINGS = ms.StateLayout([ms.Plane("s_x", (3 * TAIL - 1, 4), torch.float32)], layers=1)
LAYOUT = ms.StateLayout([ms.Plane("s", (4,), torch.float32)], layers=1, rows=RINGS)
KINDS = {"none": ms.NoTracking, "ping-pong": ms.PingPong, "lazy": ms.LazyPingPong, "redirect": ms.Redirect}
kinds = pytest.mark.parametrize("kind", KINDS)


class Touched(np.ndarray[Any, Any]):
    """Counts the entries of all arrays that are made from it, and the entries that are written."""

    entries = 0

    def __array_finalize__(self, of: object) -> None:
        Touched.entries += self.size

    def __setitem__(self, key: Any, value: Any) -> None:
        Touched.entries += np.asarray(self)[key].size
        super().__setitem__(key, value)


def manager(kind: str, rows: int, slots: int, **more: Any) -> ms.StateManager:
    every = {} if kind == "none" else {"every": 256}
    given = {"slots": slots, "max_requests": rows, "tracking": KINDS[kind](**every), "tail": TAIL, **more}
    return build(LAYOUT, backend="reference", **given)


@kinds
def test_a_step_with_drafts_touches_as_much_in_a_pool_of_any_size(kind: str) -> None:
    seen = []
    for size in (64, 4096):
        mem = manager(kind, size, 5 * size)
        rows, file, mirror = mem.admit([ms.Request(i) for i in range(16)]), inside.registers(mem), mem._parts.mirror
        for name in ("held", "labels", "tracked", "source", "pending", "newest"):
            setattr(file, name, getattr(file, name).view(Touched))
        mirror._columns = type(mirror._columns)(file.held, file.labels, file.tracked, file.source)
        before, Touched.entries = mem.plan(rows, TAIL, drafts=TAIL - 1), 0
        step = mem.plan(rows, TAIL, drafts=TAIL - 1)
        assert step.batch is before.batch
        mem.accept(before, [1 + i % TAIL for i in range(16)], written=True)
        seen.append(Touched.entries)
    assert seen[0] == seen[1] > 0


def test_a_mark_costs_the_same_in_a_batch_of_any_size() -> None:
    seen = []
    for size in (16, 256):
        mem = manager("redirect", size, 5 * size, page_size=256)
        rows = mem.admit([ms.Request(i, length=512, snapshot_at=[256] if i == 1 else []) for i in range(size)])
        mem.settle(mem.plan(rows, 3))
        seen.append(python_calls(lambda mem=mem, rows=rows: mem.settle(mem.plan(rows, 3))).tolist())
        assert mem._parts.marks.rows == {rows[1].index}
    assert seen[0] == seen[1]


def test_a_length_beyond_int32_is_refused_in_a_step_of_few_rows() -> None:
    mem = manager("ping-pong", 1, 4, tracking=ms.PingPong(every=100))
    rows = mem.admit([ms.Request("a")])
    mem.settle(mem.plan(rows, INT32_MAX - TAIL))
    mem.accept(mem.plan(rows, TAIL, drafts=1), [TAIL])
    with pytest.raises(InvalidArgument, match="a label holds"):
        mem.plan(rows, TAIL, drafts=1)


class Twins:
    """Two managers that get the same calls: one decides steps of few rows in integers, the other all in arrays.

    After each call, both have the same answer or error, and the same tables on the host and on the device.
    """

    def __init__(self, patch: pytest.MonkeyPatch, kind: str, overlap: bool, pages: str, seed: int) -> None:
        for module in ("table", "holdings"):  # so that both give the same handles
            patch.setattr(f"memstate.requests.{module}.first_generation", lambda: 1)
        more = {"pages": 160, "pages_per_row": 30, "page_size": 4} if pages else {}
        every = {} if kind == "none" else {"every": 16}
        more |= {"tracking": KINDS[kind](**every), "overlap": overlap, "snapshots": 30}
        self.sides = [manager(kind, 10, 26, **more, **(below() if pages == "tiers" else {})) for _ in range(2)]
        self.patch, self.draw = patch, Random(seed)
        self.rows: list[ms.Row] = []
        self.kept: list[ms.Snapshot] = []
        self.batch: tuple[Any, ...] = ()  # arguments of the last plan
        self.flights: list[tuple[list[ms.Step], list[int], list[int], bool]] = []  # accepted, certain; whether written
        self.taken = [0, 0]  # steps that each side has decided in integers
        for at, mem in enumerate(self.sides):
            decider = mem._parts.stepping._few
            patch.setattr(decider, "note", partial(self.note, at, decider.note))

    def note(self, at: int, note: Callable[..., None], *given: Any) -> None:
        self.taken[at] += 1
        note(*given)

    def rarely(self, chance: float) -> bool:
        return self.draw.random() < chance

    def run(self, calls: int) -> None:
        ways = {self.plan: 50, self.accept: 50, self.admit: 4, self.end: 3, self.cancel: 1, self.publish: 2}
        ways |= {self.drop: 1, self.submit: 1, self.fork: 1, self.pool: 1}
        for way in self.draw.choices([*ways], [*ways.values()], k=calls):
            way()

    def both(self, call: Callable[[ms.StateManager, int], Any]) -> list[Any] | None:
        """Makes a call on both sides. Returns both answers; None: both have raised the same error."""
        answers, told = [], []
        for at, mem in enumerate(self.sides):
            self.patch.setattr(few, "FEW", 0 if at else 8)
            try:
                answers.append(call(mem, at))
                told.append("")
            except MemstateError as error:
                told.append(f"{type(error).__name__}: {error}")
        assert told[0] == told[1]
        one, other = ({**tables(mem), **steps(mem)} for mem in self.sides)
        for name in one | other:
            assert np.array_equal(one[name], other[name]), (name, one[name], other[name])
        return None if told[0] else answers

    def admit(self) -> None:
        resume = self.draw.choice(self.kept) if self.kept and self.rarely(0.5) else None
        marks = [self.draw.randint(1, 9)] if self.rarely(0.2) else []
        request = ms.Request(self.draw.random(), length=32, resume=resume, snapshot_at=marks)
        if answers := self.both(lambda mem, at: mem.admit([request])):
            self.rows += answers[0]

    def plan(self) -> None:
        draw = self.draw
        if not self.batch or self.rarely(0.1):
            rows: list[Any] = draw.sample(self.rows, min(len(self.rows), draw.choice([1, 1, 2, 3, 8, 9])))
            if self.rarely(0.05):
                rows.append(draw.choice([None, *rows]))
            tokens: Any = draw.choice([TAIL, TAIL, 3, 1, 0])
            drafts: Any = max(tokens - 1, draw.randint(0, tokens))
            if self.rarely(0.2):
                tokens = [draw.choice([0, 1, 2, 3, TAIL, TAIL + 1]) for _ in rows]
                drafts = [draw.randint(0, n) for n in tokens]
            self.batch = rows, tokens, drafts, draw.choice([0, 0, 2, 5, 2 * TAIL]), draw.choice([99, 99, 0, 1])
        rows, tokens, drafts, defer, limit = self.batch
        if self.flights and not self.rarely(0.05):
            planned, accepted, certain, _ = self.flights[-1]
            self.flights[-1] = planned, accepted, certain, True
            for step in planned:
                step.accepted.copy_(torch.tensor(accepted, dtype=torch.int32))
        more: dict[str, Any] = {"drafts": drafts, "defer": defer, "limit": limit}
        launched = self.rarely(0.05)
        answers = self.both(
            lambda mem, at: mem.plan(rows, tokens, replay=launch(mem, rows) if launched else None, **more)
        )
        if answers is None:
            self.batch = ()
            return
        n, certain = answers[0].tokens_of.tolist(), (answers[0].after - answers[0].before).tolist()
        self.flights.append((answers, [draw.randint(*pair) for pair in zip(certain, n, strict=True)], certain, False))

    def accept(self) -> None:
        if not self.flights:
            return
        place = -1 if self.rarely(0.1) else 0
        planned, accepted, certain, written = self.flights[place]
        over = [self.rarely(0.5) for _ in accepted] if self.rarely(0.02) else None
        given: Any = accepted
        if self.rarely(0.1):
            wrong = [n + self.draw.randint(-1, 1) for n in accepted]
            given = self.draw.choice([np.array(accepted), wrong, wrong, accepted[1:], 1, [True] * len(accepted)])
        told = written != self.rarely(0.05)
        if accepted == certain and self.rarely(0.3):
            done = self.both(lambda mem, at: mem.settle(planned[at], over))
        else:
            done = self.both(lambda mem, at: mem.accept(planned[at], given, over, written=told))
        if done is not None:
            del self.flights[place]

    def cancel(self) -> None:
        if self.flights and self.both(lambda mem, at: mem.cancel(self.flights[-1][0][at])) is not None:
            gone = self.flights.pop()[0][0].numbers.tolist()
            self.rows = [row for row in self.rows if row.index not in gone]

    def end(self) -> None:
        row, keep = self.draw.choice([*self.rows, None]), self.draw.choice([None, "handle"])
        if row and (answers := self.both(lambda mem, at: mem.end([row], keep=keep))):
            self.rows.remove(row)
            self.kept += filter(None, answers[0])

    def publish(self) -> None:
        self.kept += filter(None, (self.both(lambda mem, at: mem.publish(self.rows)) or [[]])[0])

    def drop(self) -> None:
        gone, self.kept = self.kept[:1], self.kept[1:]
        self.both(lambda mem, at: mem.drop(gone))

    def submit(self) -> None:
        self.both(lambda mem, at: mem.submit(*(flight[0][at] for flight in self.flights[-1:])))

    def fork(self) -> None:
        named = self.draw.random()
        if self.rows and (answers := self.both(lambda mem, at: mem.fork(self.rows[0], [named]).rows)):
            self.rows += answers[0]

    def pool(self) -> None:
        self.both(lambda mem, at: mem.pool.release(mem.pool.claim(1)))
        if not self.rarely(0.2):
            self.both(lambda mem, at: mem.pool.allocator.confirm(99))


def below() -> dict[str, Any]:
    """Returns the arguments of a manager with host memory for states and KV."""
    kv = Planes(ms.StateLayout([ms.Plane("kv", (16,), torch.uint8)], layers=1), 160, Backend("reference"))
    return {"prefix": ms.Prefix(), "tiers": ms.Tiers("toy", host_slots=4, kv=kv)}


def launch(mem: ms.StateManager, rows: list[Any]) -> Callable[[], object]:
    return lambda: mem.launch(len(rows))


def tables(mem: ms.StateManager) -> dict[str, Any]:
    """Returns what the host knows and what the device has."""
    file, parts, commands = inside.registers(mem), mem._parts, inside.commands(mem)
    parts_of: list[tuple[Any, str]] = [
        (file, "held labels tracked source pending newest longest cells undecided"),
        (file.allocator, "free held_back unconfirmed bitmap counters"),
        (parts.table, "confirmed used finished version over"),
        (parts.mirror, "snapshots degraded doubled"),
        (parts.marks, "missed refused rows"),
        (mem.backend.counts, "total_launches uploads upload_bytes syncs"),
        *([(parts.tiers.host, "_unwritten")] if parts.tiers is not None else []),
    ]
    found = {name: getattr(of, name) for of, names in parts_of for name in names.split()}
    fenced = [] if commands._used is None else sorted(commands._used.tolist())
    columns = torch.cat([*parts.log._columns, *parts.log.tails])
    return found | {"fenced": fenced, "queue": [len(commands.queue), len(commands.waiting)], "columns": columns}


def steps(mem: ms.StateManager) -> dict[str, Any]:
    """Returns what the host knows of the unsettled steps."""
    names = "serial", "before", "after", "label", "there", "numbers", "tokens_of"
    return {f"{at} {name}": getattr(step, name) for at, step in enumerate(mem._parts.log.unsettled) for name in names}


@kinds
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("pages", ["", "pages", "tiers"])
def test_steps_of_few_rows_are_those_of_many(
    kind: str, overlap: bool, pages: str, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds, taken = (10, int(torch.randint(2**31, (1,), generator=generator))), []
    for seed in seeds:
        twins = Twins(monkeypatch, kind, overlap, pages, seed)
        twins.run(400)
        taken.append(twins.taken)
    assert taken[0][0] > 10 and not taken[0][1] + taken[1][1]
