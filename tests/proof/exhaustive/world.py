"""A manager, its caller and the bytes of its slots: what a caller may call next, and what a call does.

The bytes of a slot say which tokens are folded in: one hexadecimal digit for each token, the number of the request that
computed it. Zero is the fresh state, and -1 is poison.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, permutations, product
from typing import Any, NamedTuple

import numpy as np
import torch

import memstate as ms
from memstate.kernels.rules import last_boundary
from memstate.kernels.tables import REGISTERS_PER_ROW, StepRecord
from memstate.slots.packet import DATA
from tests.proof.exhaustive.ownership import Launches
from tests.support import inside
from tests.support.build import build

ROWS, SLOTS, EVERY = 3, 5, 2
LONGEST = 7  # tokens of a row: three boundaries, and one token more
POISON, DIGIT = -1, 4  # bits
COLUMNS = ("slots", "labels", "tracked", "source", "bitmap", "counters")
LAYOUT = ms.StateLayout((ms.Plane("tokens", (1,), torch.int64),), layers=1)
NO_LIMIT = 2**31 - 1

Move = tuple[Any, ...]  # the name of a method of `World`, and its arguments
History = tuple[int, ...]  # of each token, the request that computed it


class Violation(AssertionError):
    """A state that no schedule may reach."""


def require(holds: bool, what: str, *numbers: object) -> None:
    if not holds:
        raise Violation(" ".join([what, *map(str, numbers)]))


@dataclass(frozen=True)
class Case:
    """One manager. direct_hits, in_place, speculation: see `ms.Forward`."""

    name: str
    tracking: ms.Tracking
    overlap: bool = True
    page: int = 1
    direct_hits: bool | None = None
    in_place: bool = False
    speculation: bool = False

    def build(self) -> ms.StateManager:
        return build(
            LAYOUT, slots=SLOTS, max_requests=ROWS, tracking=self.tracking, overlap=self.overlap, page_size=self.page,
            direct_hits=self.direct_hits, in_place=self.in_place, speculation=self.speculation, backend="reference",
        )  # fmt: skip


CASES = (
    Case("Redirect", ms.Redirect(EVERY)),
    Case("Redirect, pages of 2", ms.Redirect(EVERY), page=2),
    Case("Redirect, copied hits", ms.Redirect(EVERY), direct_hits=False),
    Case("Redirect, in place", ms.Redirect(EVERY), in_place=True),
    Case("Redirect, speculation", ms.Redirect(EVERY), overlap=False, speculation=True),
    Case("PingPong", ms.PingPong(EVERY)),
    Case("PingPong, direct hits", ms.PingPong(EVERY), direct_hits=True, page=2),
    Case("PingPong, speculation", ms.PingPong(EVERY), overlap=False, speculation=True),
    Case("LazyPingPong", ms.LazyPingPong(EVERY)),
    Case("LazyPingPong, skipping", ms.LazyPingPong(EVERY, overwrite=False), page=2),
    Case("LazyPingPong, speculation", ms.LazyPingPong(EVERY), overlap=False, speculation=True),
    Case("NoTracking", ms.NoTracking(EVERY)),
    Case("NoTracking, speculation", ms.NoTracking(EVERY), overlap=False, speculation=True),
)


def encoded(history: History) -> int:
    """The bytes of a state: one digit a token."""
    content = 0
    for request in history:
        content = content << DIGIT | request
    return content


@dataclass
class Tenant:
    """A running request, as its caller knows it. history: of all planned tokens; real: how many are confirmed."""

    handle: ms.Row
    request: int
    history: History
    real: int
    kept: int  # the length of its newest snapshot, or what it started from
    taken: tuple[int, ...] = ()  # lengths of its snapshots
    published: int = 0  # the longest one that was published
    unsettled: int = 0
    ended: bool = False


class Entry(NamedTuple):
    """One row of a planned step. before: its length."""

    row: int
    handle: ms.Row
    request: int
    tokens: int
    before: int


@dataclass
class Flight:
    """A planned step. slots: the register of each slot that it uses."""

    step: ms.Step
    entries: list[Entry]
    window: bool
    slots: dict[int, int]
    ran: bool = False
    promised: bool = False
    states: list[list[int]] = field(default_factory=list)  # of a window: after each token


class World:
    """One case under test. Each public method is a move; a move that is refused changes nothing."""

    def __init__(self, case: Case) -> None:
        self.case, self.mem = case, case.build()
        file = inside.registers(self.mem)
        self.device = {name: getattr(file.table, name).numpy() for name in COLUMNS}
        self.slots, self.labels = self.device["slots"], self.device["labels"]
        self.bytes = self.mem.planes["tokens"][0].numpy().reshape(-1)
        self.bytes[1:] = POISON
        self.rules = self.mem._parts.mirror.rules
        self.rows: dict[int, Tenant] = {}
        self.snaps: dict[int, tuple[ms.Snapshot, History]] = {}  # by register
        self.shared: dict[int, History] = {}  # of each holder, the state that was moved to it last
        self.flights: list[Flight] = []  # unsettled, oldest first
        self.open: Flight | None = None
        self.launches = Launches(file, self.rules)

    # What a caller may do now

    def moves(self) -> Iterator[Move]:
        """All calls that are allowed, with every argument that matters."""
        if self.open and not self.open.ran:
            yield ("forward",)
            yield from (("cancel", publish) for publish in (False, True))
        yield from self._settling()
        if len(self.flights) <= self.case.overlap:
            yield from self._planning()
        if len(self.rows) < ROWS:
            yield ("admit", 0)
            yield from (("admit", register) for register in self.snaps)
            yield from (("fork", row) for row, one in self.rows.items() if not one.unsettled and not one.ended)
        for row in self.rows:
            yield from ((name, row) for name in ("abort", "release", "publish"))
        yield from (("drop", register) for register in self.snaps)
        if self.open:
            yield ("launched",)
        if inside.commands(self.mem).queue:
            yield ("submit",)

    def _settling(self) -> Iterator[Move]:
        if not self.flights:
            return
        oldest = self.flights[0]
        alive = [self._tenant(entry) is not None and not self.rows[entry.row].ended for entry in oldest.entries]
        for over in product(*((False, True) if lives else (False,) for lives in alive)):
            if not oldest.window:
                yield ("settle", over)
                continue
            counts = [
                range(entry.tokens + 1) if lives else (entry.tokens,)
                for entry, lives in zip(oldest.entries, alive, strict=True)
            ]
            yield from (("accept", accepted, over, NO_LIMIT) for accepted in product(*counts))
            yield "accept", tuple(entry.tokens for entry in oldest.entries), over, 0

    def _planning(self) -> Iterator[Move]:
        """Every batch, with every number of tokens that matters."""
        running = [row for row, one in self.rows.items() if not one.ended]
        for size in range(1, len(running) + 1):
            for rows in combinations(running, size):
                for tokens in product(*map(self._tokens, rows)):
                    yield from self._batches(tuple(zip(rows, tokens, strict=True)), False)
                if len(rows) == len(running) and all(map(self._tokens, rows)):
                    yield "replay", tuple((row, self._tokens(row)[-1]) for row in rows), NO_LIMIT
                if self.case.speculation and not self.flights and size < ROWS:
                    room = min(LONGEST - len(self.rows[row].history) for row in rows)
                    for n in range(2, min(3 if size == 1 else 2, room) + 1):
                        yield from self._batches(tuple((row, n) for row in rows), True)

    def _tokens(self, row: int) -> list[int]:
        """One token, and all up to the next boundary."""
        length = len(self.rows[row].history)
        reach = next(n for n in range(length + 1, length + EVERY + 1) if last_boundary(length, n, self.rules.every))
        return [n for n in sorted({1, reach - length}) if length + n <= LONGEST]

    def _batches(self, batch: tuple[tuple[int, int], ...], window: bool) -> Iterator[Move]:
        """A batch; in every order of the rows that claim slots, if these are too few; and without any claim."""
        rows, tokens = np.array([row for row, _ in batch], np.int64), np.array([n for _, n in batch], np.int64)
        lengths = self.mem._parts.mirror.lengths(rows)
        claims = [
            bool(self.mem._parts.mirror.claims(rows[i : i + 1], lengths[i : i + 1], tokens[i : i + 1], window))
            for i in range(len(batch))
        ]
        first = [one for one, claim in zip(batch, claims, strict=True) if claim]
        rest = tuple(one for one, claim in zip(batch, claims, strict=True) if not claim)
        orders = permutations(first) if len(first) > self.mem.free_slots else [tuple(first)]
        name = "window" if window else "plan"
        yield from ((name, (*order, *rest), NO_LIMIT) for order in orders)
        if first and not window:
            yield name, (*first, *rest), 0

    # What a call does

    def apply(self, move: Move) -> bool:
        """Makes a move. Returns whether it was refused."""
        name, *arguments = move
        return getattr(self, name)(*arguments) is False

    def admit(self, register: int) -> bool:
        snap, history = self.snaps.get(register, (None, ()))
        free, needed = self.mem.free_slots, 1 + self.case.tracking.lanes_at_admission(self.case.overlap)
        try:
            (handle,) = self.mem.admit([ms.Request("r", resume=snap)])
        except ms.OutOfSlots:
            require(free < needed, "an admission was refused with", free, "slots free, it needs", needed)
            return False
        require(free >= needed, "an admission got", needed, "slots of", free)
        self._begin(handle, history)
        return True

    def _begin(self, handle: ms.Row, history: History) -> None:
        used = {request for one in self.rows.values() for request in (one.request, *one.history)}
        used.update(request for _, past in self.snaps.values() for request in past)
        used.update(request for past in self.shared.values() for request in past)
        used.update(entry.request for flight in self.flights for entry in flight.entries)
        request = min(set(range(1, 2**DIGIT)) - used)
        self.rows[handle.index] = Tenant(handle, request, history, len(history), len(history))

    def fork(self, row: int) -> bool:
        one = self.rows[row]
        try:
            (handle,) = self.mem.fork(one.handle, ["f"]).rows
        except ms.OutOfSlots:
            return False
        source = int(inside.registers(self.mem).source[row])
        if source:
            self.shared[source] = one.history
        self._begin(handle, one.history)
        return True

    def plan(self, batch: Sequence[tuple[int, int]], limit: int) -> None:
        self._plan(batch, limit, False)

    def window(self, batch: Sequence[tuple[int, int]], limit: int) -> None:
        self._plan(batch, limit, True)

    def replay(self, batch: Sequence[tuple[int, int]], limit: int) -> None:
        """A plan that launches its forward itself, as a captured graph does."""
        self._plan(batch, limit, False, replays=True)

    def _plan(self, batch: Sequence[tuple[int, int]], limit: int, window: bool, replays: bool = False) -> None:
        self._close()
        first = {row: inside.registers(self.mem).source[row] != 0 for row, _ in batch}
        handles = [self.rows[row].handle for row, _ in batch]
        tenants = [self.rows[row] for row, _ in batch]
        entries = [
            Entry(row, one.handle, one.request, n, len(one.history))
            for (row, n), one in zip(batch, tenants, strict=True)
        ]
        replay = (lambda: self._run(self.mem.launch(len(batch)), entries, window)) if replays else None
        step = self.mem.plan(handles, [n for _, n in batch], limit=limit, window=window, replay=replay)
        used = np.concatenate([column.numpy() for column in (step.read, step.write, step.snapshot)]).tolist()
        owners = self.owners()
        require(all(slot in owners for slot in used if slot), "a step uses free slots:", used, owners)
        self.open = Flight(step, entries, window, {slot: owners[slot] for slot in used if slot})
        self.flights.append(self.open)
        if replays:
            self.open.ran, self.open = True, None
            require(self.mem._parts.stepping.open is None, "the step of a replay is open")
        self._require_waits()
        for row, n in batch:
            one = self.rows[row]
            one.unsettled += 1
            if not window:
                length = len(one.history)
                one.history += (one.request,) * n
                if one.unsettled == 1:
                    one.real = len(one.history)
                self._require_snapshot(row, length, len(one.history), bool(first[row]))

    def _require_snapshot(self, row: int, length: int, after: int, first: bool) -> None:
        """A snapshot that is due is there, unless the budget was spent."""
        one, reads_old = self.rows[row], self.case.tracking.reads_old_slot
        at = length if reads_old else after
        if not self.rules.lanes or at % EVERY or (reads_old and (at <= one.kept or first)):
            return
        lanes = self._lanes(row)
        if at in self.labels[lanes].tolist():
            one.kept = at
            one.taken += (at,)
        else:
            held = [lane for lane in lanes if self.slots[lane]]
            own = (
                len(held) == len(lanes) or (held and self.rules.in_place) or not all(self.labels[lane] for lane in held)
            )
            require(self.launches.spent, "row", row, "has no snapshot at", at, "though slots were free")
            require(not own, "row", row, "has no snapshot at", at, "though a lane of its own was")

    def _lanes(self, row: int) -> list[int]:
        return [REGISTERS_PER_ROW * row + 1 + lane for lane in range(self.rules.lanes)]

    def forward(self) -> None:
        """Runs the forward of the open step, on the slots that the device says."""
        flight = self.open
        assert flight
        flight.ran = True
        flight.states = self._run(flight.step.record, flight.entries, flight.window)

    def _run(self, record: StepRecord, entries: Sequence[Entry], window: bool) -> list[list[int]]:
        """Folds the tokens of a step into the slots of its vectors. Returns the states of each entry after each token.

        In a window it changes no slot.
        """
        read, write, snapshot = (column.tolist() for column in record[2:5])
        written = [slot for slot in (*write, *(snapshot if not window else ())) if slot]
        require(len(set(written)) == len(written), "two entries write one slot:", write, snapshot)
        in_place, data = self.case.in_place and not window, self.bytes
        found = [int(data[to if in_place else of]) for of, to in zip(read, write, strict=True)]
        after = []
        for entry, of, to, also, content in zip(entries, read, write, snapshot, found, strict=True):
            require(of == to or of not in written, "row", entry.row, "reads slot", of, "which another entry writes")
            after.append(states := list[int]())
            for _ in range(entry.tokens):
                content = content << DIGIT | entry.request if content != POISON else POISON
                states.append(content)
            if not window:
                data[to] = content
                if also and not in_place:
                    data[also] = content
        return after

    def _close(self) -> None:
        """The forward of the open step is launched before this call, at the latest."""
        if self.open and not self.open.ran:
            self.forward()
        self.open = None

    def launched(self) -> None:
        step = self.open.step if self.open else None
        self._close()
        self.mem.submit(step)

    def submit(self) -> None:
        self.mem.submit()
        commands = inside.commands(self.mem)
        require(len(commands.waiting) == len(commands.queue), "a submit sent too little")
        self._require_waits()

    def _require_waits(self) -> None:
        """What waits begins with a change of a slot that the open step uses."""
        if inside.commands(self.mem)._waits is None:
            return
        waiting = inside.commands(self.mem).waiting
        section, _, second, registers = waiting[0].operations[0]  # type: ignore[union-attr]
        named = {*registers, *(second if section == DATA else ())}
        used = self.open.slots.values() if self.open else ()
        require(not named.isdisjoint(used), "registers", named, "wait, and the open step uses", used)

    def _tenant(self, entry: Entry) -> Tenant | None:
        one = self.rows.get(entry.row)
        return one if one and one.handle == entry.handle else None

    def settle(self, over: Sequence[bool]) -> None:
        flight = self.flights.pop(0)
        if flight is self.open:
            self._close()
        self.mem.settle(flight.step, list(over))
        for entry, ended in zip(flight.entries, over, strict=True):
            if one := self._tenant(entry):
                one.unsettled -= 1
                if not one.ended:
                    one.real = entry.before + entry.tokens if ended else len(one.history)
                    one.ended = ended

    def accept(self, accepted: Sequence[int], over: Sequence[bool], limit: int) -> None:
        flight = self.flights.pop(0)
        self._close()
        width = max(map(len, flight.states))
        states = [[*one, *[POISON] * (width - len(one))] for one in flight.states]
        windows = {"tokens": torch.tensor(states, dtype=torch.int64).reshape(1, len(states), width, 1)}
        first = {row: bool(inside.registers(self.mem).source[row]) for row, *_ in flight.entries}
        self.mem.accept(flight.step, list(accepted), windows, list(over), limit=limit)
        for entry, n, ended in zip(flight.entries, accepted, over, strict=True):
            if one := self._tenant(entry):
                length, redirect = len(one.history), self.case.tracking.reads_old_slot
                one.unsettled -= 1
                one.history += (one.request,) * n
                one.real, one.ended = len(one.history), ended
                boundary = int(last_boundary(length, one.real - redirect, EVERY))
                if boundary:
                    # the same check, as if a plain step had met this boundary
                    self._require_snapshot(entry.row, boundary, boundary, False)
                elif n and redirect:
                    self._require_snapshot(entry.row, length, length, first[entry.row])

    def cancel(self, publish: bool) -> bool:
        flight = self.open
        assert flight
        try:
            snaps = self.mem.cancel(flight.step, keep="handle" if publish else None)
        except ms.InvalidArgument:
            require(flight.promised, "a cancel was refused")
            return False
        require(not flight.promised, "a step was cancelled whose state was published")
        self.open = None
        self.flights.remove(flight)
        for entry, snap in zip(flight.entries, snaps, strict=True):
            if one := self._tenant(entry):
                one.real = min(one.real, entry.before)
                self._published(entry.row, snap, wanted=publish)
                del self.rows[entry.row]
        return True

    def abort(self, row: int) -> None:
        self.mem.end([self.rows.pop(row).handle])

    def release(self, row: int) -> None:
        self._publish(row, ended=True)
        del self.rows[row]

    def publish(self, row: int) -> None:
        self._publish(row, ended=False)

    def _publish(self, row: int, ended: bool) -> None:
        one = self.rows[row]
        best = self._best(row, ended)
        call = self.mem.end([one.handle], keep="handle") if ended else self.mem.publish([one.handle])
        self._published(row, call[0], True, best)

    def _best(self, row: int, ended: bool) -> int:
        """The longest confirmed state among the row's registers that fills whole pages; 0 for none."""
        real = self.rows[row].real // self.case.page * self.case.page
        first = REGISTERS_PER_ROW * row
        found = inside.registers(self.mem).labels[first + (not ended) : first + 1 + self.rules.lanes].tolist()
        best = max((label for label in found if label <= real), default=0)
        newest = max((length for length in self.rows[row].taken if length <= real), default=0)
        # only a strategy that overwrites its one lane may lose the newest snapshot
        kept = best >= newest or newest <= self.rows[row].published or self.rules.in_place
        require(kept, "row", row, "has lost its snapshot at", newest)
        return best

    def _published(self, row: int, snap: ms.Snapshot | None, wanted: bool, best: int | None = None) -> None:
        one = self.rows[row]
        require(best is None or best == (snap.length if snap else 0), "row", row, "published", snap, "expected", best)
        require(wanted or snap is None, "a snapshot was published that nobody asked for:", snap)
        if snap is None:
            return
        require(snap.length <= one.real and snap.length % self.case.page == 0, "published", snap, "of", one)
        one.published = max(one.published, snap.length)
        self.snaps[snap.register] = snap, one.history[: snap.length]
        self.shared[snap.register] = one.history[: snap.length]
        if self.open:
            before = [entry.before for entry in self.open.entries if entry.handle == one.handle]
            self.open.promised |= any(snap.length > length for length in before)

    def drop(self, register: int) -> None:
        self.mem.drop([self.snaps.pop(register)[0]])

    def owners(self) -> dict[int, int]:
        """Of each owned slot on the device, its register."""
        return {slot: register for register, slot in enumerate(self.slots.tolist()) if slot}

    def warm_up(self) -> list[list[Move]]:
        """Makes the manager busier in three stages, and returns the schedule of each.

        First one or two rows at their second boundary. Then, if there are two, one of them publishes its snapshot, and
        a third goes on from it. Then a step of all rows whose forward is to come.
        """
        moves: list[Move] = []
        stages: list[list[Move]] = []

        def make(*move: Any) -> None:
            if not self.apply(move):
                moves.append(move)

        make("admit", 0)
        make("admit", 0)
        for _ in range(2):
            make("plan", tuple((row, EVERY) for row in self.rows), NO_LIMIT)
            make("settle", (False,) * len(self.rows))
        stages.append(list(moves))
        if len(self.rows) > 1:
            make("publish", 1)
        for register in self.snaps:
            make("admit", register)
        stages.append(list(moves))
        make("plan", tuple((row, 1) for row in self.rows), NO_LIMIT)
        stages.append(list(moves))
        return stages
