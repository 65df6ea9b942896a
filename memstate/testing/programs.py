"""Makes random calls, valid and invalid, on a pool, and checks after each call who owns each slot."""

from collections.abc import Callable
from typing import Any

from memstate.testing.pools import Clears, Groups, RowPool, SlotPool, Tracks
from memstate.testing.trial import Draw, Trial

MOST = 99  # largest number drawn to choose a slot, a row or a count


class Program(Trial):
    """A trial that knows the owner of each slot.

    Args:
        pool: the pool under test.

    Attributes:
        held: slots that the caller holds by id.
        running: for each row with a running request, the slots of the request.
        seen: all rows that requests had.
        open: number of open groups.
    """

    def __init__(self, pool: SlotPool) -> None:
        super().__init__(pool)
        self.held: list[int] = []
        self.running: dict[int, list[int]] = {}
        self.seen: list[int] = []
        self.open = 0

    @property
    def owned(self) -> list[int]:
        """All slots with an owner."""
        return [*self.held, *(slot for slots in self.running.values() for slot in slots)]

    def require(self) -> None:
        """Requires that each slot has one owner, and that all other slots are free."""
        for row, slots in self.running.items():
            self.need((now := [*self.read("slots_of", row)]) == slots, f"row {row} holds {now}, expected {slots}")
        self.need_ids(self.owned)
        if not self.open:
            self.need_free(self.capacity - len(self.owned))


class Strict(Program):
    """A program that requires that a refused call changes nothing."""

    def __call__(self, name: str, *given: Any) -> Any:
        """Makes a call, and compares the state of the pool if the call is refused."""
        before = self._state()
        result = super().__call__(name, *given)
        if self.refused and (now := self._state()) != before:
            self.need(False, f"it was refused; free() and slots of rows were {before}, and are {now}")
        return result

    def _state(self) -> tuple[int, dict[int, list[int]]]:
        return self.read("free"), {row: [*self.read("slots_of", row)] for row in self.running}

    def require(self) -> None:
        """Requires nothing: this program checks refusals, not owners."""


def claim(p: Program, a: int, b: int) -> None:
    """Claims any number of slots, valid or not."""
    n = a % (p.capacity + 3)
    p.held += p("claim", n if n <= p.capacity + 1 else -1) or []


def release(p: Program, a: int, b: int) -> None:
    """Releases slots of the caller, free slots, or ids that no slot has.

    It never releases a slot of a row or of a group: a pool cannot tell such an id from one that the caller holds.
    """
    # an open group owns slots that `owned` lacks
    free = [] if p.open else sorted({*range(1, p.capacity + 1)} - {*p.owned})
    ids = [*p.held, *free, 0, -1, p.capacity + 1]
    given = [ids[at % len(ids)] for at in ((a, b - 1) if b else (a,))]
    p("release", given)
    if not p.refused:
        p.held = [slot for slot in p.held if slot not in given]


def open_group(p: Program, a: int, b: int) -> None:
    """Opens a group of any size, also inside another group."""
    p("open_group", a % (p.capacity + 2))
    p.open += not p.refused


def close_group(p: Program, a: int, b: int) -> None:
    """Closes a group, also if none is open."""
    p("close_group")
    p.open = max(0, p.open - 1)


def clear(p: Program, a: int, b: int) -> None:
    """Clears the pool."""
    p("clear")
    p.held, p.running, p.open = [], {}, 0


def admit(p: Program, a: int, b: int) -> None:
    """Admits a request."""
    if (row := p("admit", f"r{len(p.seen)}")) is not None:
        p.seen.append(row)
        p.running[row] = [*p.read("slots_of", row)]


def end(p: Program, a: int, b: int) -> None:
    """Ends a request, also one that has ended."""
    if p.seen:
        p("end", row := p.seen[a % len(p.seen)])
        p.running.pop(row, None)


def track(p: Program, a: int, b: int) -> None:
    """Lets a running request keep one more state."""
    if p.running:
        p("track", row := [*p.running][a % len(p.running)])
        p.running[row] = [*p.read("slots_of", row)]


def publish(p: Program, a: int, b: int) -> None:
    """Publishes a state of a running request, also if it has kept none."""
    if p.running:
        slot = p("publish", row := [*p.running][a % len(p.running)])
        p.held += [] if slot is None else [slot]
        p.running[row] = [*p.read("slots_of", row)]


CALLS: tuple[tuple[type, Callable[[Program, int, int], None]], ...] = (
    (SlotPool, claim), (SlotPool, release), (Groups, open_group), (Groups, close_group), (Clears, clear),
    (RowPool, admit), (RowPool, end), (Tracks, track), (Tracks, publish),
)  # fmt: skip


def run(p: Program, draw: Draw) -> None:
    """Makes a random sequence of calls on a pool.

    Each call is three drawn numbers, so hypothesis, which draws fewer numbers to shrink, finds a shorter sequence.

    Args:
        p: makes the calls.
        draw: draws the numbers.
    """
    calls = [call for part, call in CALLS if isinstance(p.pool, part)]
    while kind := draw(0, len(calls)):
        calls[kind - 1](p, draw(0, MOST), draw(0, MOST))
        p.require()


def refusals(t: Trial, draw: Draw) -> None:
    """G1: requires that refused calls change nothing."""
    run(Strict(t.pool), draw)


def owners(t: Trial, draw: Draw) -> None:
    """G3: requires that each slot is free or has one owner."""
    run(p := Program(t.pool), draw)
    while p.open:
        close_group(p, 0, 0)
    p.need_rest(p.owned)
