"""Models a pool of slots in plain Python, correct or with one fault. A request holds two slots."""

from collections.abc import Callable
from functools import partial
from typing import Any

ROWS = 2


class Toy:
    """A pool of slots. fault: the name of its fault; "" for a correct pool."""

    def __init__(self, fault: str = "", capacity: int = 6) -> None:
        self.fault, self.capacity, self.rows = fault, capacity, ROWS
        self.generations = dict.fromkeys(range(ROWS + 1), 0)
        self.running: dict[int, list[int]] = {}
        self.groups: list[list[int]] = []
        self.clear()

    def of_size(self, slots: int) -> "Toy":
        if slots > 64:
            raise ValueError("a toy is small")
        return Toy(self.fault, slots)

    def clear(self) -> None:
        self.slots = list(range(1, self.capacity + 1))
        self.by_id: list[list[int]] = []
        self.kept: dict[int, int] = {}
        if self.fault != "clear keeps requests":
            self.running = {}
        if self.fault != "clear keeps groups":
            self.groups = []
        if self.fault == "generations start again":
            self.generations = dict.fromkeys(self.generations, 0)

    def free(self) -> int:
        return len(self.slots) + (self.fault != "groups do not count") * sum(map(len, self.groups))

    def _take(self, n: int) -> list[int]:
        if n > len(self.slots) + sum(map(len, self.groups)):
            if self.fault == "a refusal costs a slot" and self.slots:
                self.slots.pop()
            raise MemoryError(n)
        self.slots.sort(reverse=self.fault == "highest first")
        taken: list[int] = []
        for place in (*self.groups[::-1], self.slots):
            while place and len(taken) < n:
                taken.append(place.pop(0))
        if self.fault == "slot 0" and 1 in taken:
            taken[taken.index(1)] = 0
        if self.fault == "more than 32 slots" and 33 in taken:
            taken[taken.index(33)] = 1
        return taken

    def claim(self, n: int) -> list[int]:
        if self.fault == "any count":
            n = max(0, int(n or 0))
        if n < 0 or n != int(n):
            raise ValueError(n)
        ids = self._take(n)
        self.by_id.append(ids if self.fault == "keeps the list" else [*ids])
        return ids

    def release(self, ids: list[int]) -> None:
        for slot in ids[:1] if self.fault == "releases one" else ids:
            owners = [each for each in self.by_id if slot in each]
            if owners:
                owners[0].remove(slot)
            if (
                owners
                or (self.fault == "frees twice" and slot in self.slots)
                or (self.fault == "frees 0" and slot == 0)
            ):
                self.slots.append(slot)

    def open_group(self, n: int) -> None:
        if self.fault == "groups replace groups":
            self.groups = []
        self.groups.append(self._take(n))

    def close_group(self) -> None:
        if self.groups:
            rest = self.groups.pop()
            self.slots += [] if self.fault == "groups keep the rest" else rest

    def admit(self, key: str) -> int | None:
        rows = range(ROWS) if self.fault == "rows from 0" else range(1, ROWS + 1)
        row = next((row for row in rows if row not in self.running), None)
        if row is None:
            return None
        if self.fault == "half an admission" and self.free() == 1:
            self._take(1)
        self.running[row] = self._take(2)
        if self.fault == "a hidden slot":
            self._take(1)
        self.generations[row] += 1
        if self.fault != "states outlive requests":
            self.kept.pop(row, None)
        return row

    def slots_of(self, row: int) -> list[int]:
        return [*self.running[row]]

    def end(self, row: int) -> None:
        slots = self.running.pop(row)
        if self.fault == "end forgets a slot" and row in self.kept:
            slots.pop()
        self.slots += slots

    def generation(self, row: int) -> int:
        return self.generations[row]

    def track(self, row: int) -> None:
        self.kept[row] = self.running[row][1]

    def tracked(self, row: int) -> int | None:
        return self.kept.get(row)

    def publish(self, row: int) -> int | None:
        if row not in self.kept and self.fault != "publishes anything":
            return None
        mine, new = self.running[row], self._take(1)
        slot = mine.pop(0 if self.fault == "publishes the wrong slot" else 1)
        self.kept.pop(row, None)
        self.by_id.append([slot])
        mine += new
        return slot


def made(fault: str) -> Callable[[], Any]:
    """Returns a function that makes pools with this fault."""
    return partial(Toy, fault)


right, highest = made(""), made("highest first")  # pools that `--pool tests.support.toy_pool:right` names
