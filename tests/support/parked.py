"""Serves several requests that park and go on. The bytes of states and KV follow from all tokens up to them.

Each step checks the states and the KV that it reads. Tests ask `whole` what a manager and its host memory hold.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import memstate as ms
from memstate.state.planes import Planes
from memstate.tiers import TierManager
from tests.support import owners
from tests.support.build import on
from tests.support.planes import LAYOUT
from tests.support.tiered import KV, kv_of, state_of
from tests.support.tiered_small import CPU, PAGE, tiered

History = Sequence[int]
TEXT = [7 * i % 50 for i in range(64)]
OTHER = [50 + i for i in range(64)]
ROWS = ms.StateLayout((ms.Plane("raw", (5, 2), torch.int64, fill=None),), layers=1)
FILLED = ms.StateLayout((ms.Plane("seen", (3,), torch.int16, fill=77),), layers=2)


class Station:
    """A manager with tiers, and the tokens of its rows and parked requests. tiers: settings in place of usual ones."""

    def __init__(self, tiers: dict[str, Any] | None = None, device: str = "cpu", **more: Any) -> None:
        backend = ms.Backend("reference", torch.device(device))
        pages = more.get("pages", 60)
        self.kv = Planes(KV, pages, backend)
        self.mem = tiered(backend, {"kv": self.kv, "write": "back", "ahead": 0} | (tiers or {}), **more)
        self.text: dict[ms.Row | ms.Parked, list[int]] = {}

    @property
    def below(self) -> TierManager:
        assert self.mem.tiers is not None
        return self.mem.tiers

    def admit(self, *texts: History, **more: Any) -> list[ms.Row]:
        rows = self.mem.admit([ms.Request(n, len(text), tokens=text, **more) for n, text in enumerate(texts)])
        self.text.update(zip(rows, map(list, texts), strict=True))
        return list(rows)

    def start(self, *texts: History) -> list[ms.Row]:
        """Admits requests, and computes all of their tokens."""
        rows = self.admit(*texts)
        for row in rows:
            self.reach(row)
        return rows

    def reach(self, row: ms.Row, end: int | None = None) -> None:
        """Computes tokens of a row up to a length."""
        end = len(self.text[row]) if end is None else end
        while (length := self.mem.info(row).length) < end:
            self.step([row], min(self.mem.info(row).next_boundary, end) - length)

    def step(self, rows: Sequence[ms.Row], n: int, between: Callable[[ms.Step], object] | None = None) -> Any:
        """Runs a step of `n` tokens of each row. Returns what `between` returns, which runs before the forward."""
        step, texts = self.plan(rows, n)
        told = between(step) if between else None
        self.forward(step, texts)
        self.mem.settle(step)
        return told

    def plan(self, rows: Sequence[ms.Row], n: int) -> tuple[ms.Step, list[list[int]]]:
        """Plans a step, and returns it with what `forward` needs."""
        for row in rows:
            self.text[row] += [3] * (self.mem.info(row).length + n - len(self.text[row]))
        self.mem.extend(rows, [self.mem.info(row).length + n for row in rows])
        return self.mem.plan(rows, n), [self.text[row] for row in rows]

    def forward(self, step: ms.Step, texts: Sequence[History]) -> None:
        """Checks what a step reads, and stores what it computes."""
        columns = (step.numbers, step.before, step.after, step.read, step.write, step.snapshot)
        pages = self.mem.device.page_table.tolist()
        for text, *numbers in zip(texts, *(column.tolist() for column in columns), strict=False):
            row, before, after, read, write, snapshot = numbers
            self.check(text[:before], read, pages[row])
            for at, kv in enumerate(kv_of(text[:after])[before:], before):
                self.kv["kv"][:, pages[row][at // PAGE], at % PAGE] = kv
            for slot in (write, *[snapshot] * (snapshot > 0)):
                for name, plane in self.mem.planes.items():
                    plane[:, slot] = state_of(text[:after])[name]

    def check(self, text: History, slot: int, pages: Sequence[int]) -> None:
        """Asserts that a slot and pages have the bytes of these tokens."""
        for name, plane in self.mem.planes.items():
            assert not text or torch.equal(plane[:, slot], state_of(text)[name]), f"{name} of {len(text)} tokens"
        for at, kv in enumerate(kv_of(text) if text else ()):
            assert torch.equal(self.kv["kv"][:, pages[at // PAGE], at % PAGE], kv), f"KV of token {at}"

    def park(self, *rows: ms.Row, known: bool = False) -> list[ms.Parked]:
        """Parks rows. known: whether the manager hears of all their tokens."""
        parked = self.mem.park(rows, [self.text[row] for row in rows] if known else None)
        self.text.update(zip(parked, [self.text.pop(row) for row in rows], strict=True))
        return parked

    def resume(self, parked: Sequence[ms.Parked], **more: Any) -> list[ms.Row]:
        """Goes on from parked requests, and checks their bytes."""
        rows = self.mem.admit([ms.Request("again", resume=one, **more) for one in parked])
        self.text.update(zip(rows, [self.text.pop(one) for one in parked], strict=True))
        assert [self.mem.info(row).length for row in rows] == [one.length for one in parked]
        self.look(*rows)
        return list(rows)

    def look(self, *rows: ms.Row) -> None:
        """Checks the bytes of rows, of which no step is open."""
        self.mem.submit()
        slots = self.mem.device.read_slots(rows).wait().tolist()
        for row, slot in zip(rows, slots, strict=True):
            self.check(self.text[row][: self.mem.info(row).length], slot, owners.pages_of(self.mem, row))

    def scribble(self) -> None:
        """Overwrites all memory of the device that is free."""
        self.mem.submit()
        held = {slot for slot in self.mem.inspect().slots if slot > 0}
        free = [slot for slot in range(1, self.mem.planes.slots + 1) if slot not in held]
        for plane in self.mem.planes.values():
            plane[:, free] = -5
        holders = owners.kv_pages(self.mem).holders
        self.kv["kv"][:, [page for page in range(1, self.kv.slots + 1) if not holders[page]]] = -5

    def finish(self) -> None:
        """Ends everything, and asserts that nothing is left."""
        mem = self.mem
        mem.audit().raise_if_leaking()
        mem.end([row for row in self.text if isinstance(row, ms.Row)])
        mem.submit()
        mem.poll()
        mem.audit().raise_if_leaking()
        mem.prefix.clear()
        self.below.clear()
        mem.submit()
        assert (mem.free_slots, mem.free_pages) == (mem.planes.slots, self.kv.slots)
        assert self.below.leaked == 0


def whole(mem: ms.StateManager) -> dict[str, Any]:
    """Returns what a manager says that it holds, to compare before and after a refused call."""
    audit, stats = mem.audit(), replace(mem.stats(), oldest_row=0, idlest_row=0, launches=0, syncs=0)
    free = [each.cache.pool.free for each in mem.tiers.host.sets] if mem.tiers else []
    return {"stats": stats, "audit": audit, "slots": mem.free_slots, "pages": mem.free_pages, "records": free,
            "parked": len(mem.tiers.parked) if mem.tiers else 0}  # fmt: skip


def refused(mem: ms.StateManager, error: type[Exception], says: str, call: Callable[[], object]) -> None:
    """Asserts that a call raises an error with this text, and changes nothing."""
    before, launches = whole(mem), mem.stats().launches
    with pytest.raises(error, match=says):
        call()
    assert mem.stats().launches == launches
    assert whole(mem) == before


def resume(mem: ms.StateManager, parked: ms.Parked, **more: Any) -> None:
    mem.admit([ms.Request("r", resume=parked, **more)])


def tailed(rows: ms.StateLayout = ROWS, tail: int = 2, **more: Any) -> ms.StateManager:
    """Returns a manager without KV whose rows have memory of their own."""
    layout = ms.StateLayout(LAYOUT.planes, layers=2, rows=rows)
    tiers = ms.Tiers("toy", host_slots=4, write="back", ahead=0)
    usual = {"slots": 8, "max_requests": 3, "prefix": ms.Prefix(), "page_size": PAGE, "tail": tail, "tiers": tiers}
    return on(CPU, layout, **usual | more)
