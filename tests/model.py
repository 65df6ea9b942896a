"""The rules of tracking as an executable model: registers, claims, four strategies, the command buffer. Shares no code with the library.

Every slot carries the token history it stands for instead of bytes, so a wrong slot or a wrong label shows as a wrong
history. A slot of unknown content carries None: nobody may depend on it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Register = tuple[str, int]  # ("live" | "lane 0" | "lane 1", row) or ("node", any name)
History = tuple[int, ...]
MOVE, RELEASE, CLAIM, DATA = range(4)  # phases of the command buffer, in the order they run


@dataclass(frozen=True)
class Rules:
    """What a strategy is made of. lanes: registers it may fill; admission: those filled when a request is admitted."""

    name: str
    every: int
    lanes: int
    admission: int
    in_place: bool = False

    @classmethod
    def of(cls, name: str, every: int, overlap: bool, in_place: bool = True) -> "Rules":
        """The table of strategies: slots at admission 1, 3 (2 without overlap), 2, 1; at most 1, 3, 3, 2."""
        pair = 2 if overlap else 1
        lanes, admission = {"none": (0, 0), "ping-pong": (pair, pair), "lazy": (2, 1), "redirect": (1, 0)}[name]
        return cls(name, every, lanes, admission, in_place and name == "lazy")

    @property
    def most_slots(self) -> int:
        return 1 + self.lanes


@dataclass(eq=False)
class Row:
    """One tenancy of a row: a later tenant is another object, which is what a generation stands for."""

    number: int
    want: int = 0
    tracked: int = 0
    source: Register | None = None
    confirmed: int = 0
    unsettled: int = 0
    finished: bool = False
    pin: Register | None = None


@dataclass(frozen=True, eq=False)
class Entry:
    """One row of a planned step; `row` None is padding."""

    row: Row | None = None
    tokens: int = 0
    before: int = 0
    after: int = 0
    read: int = 0
    write: int = 0
    snapshot: int = 0


@dataclass
class Buffer:
    """Recorded and not yet carried out."""

    moves: list[tuple[Register, Register]] = field(default_factory=list)
    releases: list[Register] = field(default_factory=list)
    claims: list[Register] = field(default_factory=list)
    data: list[tuple[Register, Register | None]] = field(default_factory=list)  # source None: zero
    columns: bool = False  # request columns to write
    phase: dict[Register, int] = field(default_factory=dict)  # the last phase that names a register

    @property
    def pending(self) -> bool:
        return bool(self.phase) or self.columns


class Model:
    """capacity, nodes: slots and registers for snapshots. direct: a hit is read by the first step instead of copied."""

    def __init__(self, rules: Rules, *, capacity: int, nodes: int, direct: bool, reserve: int = 0, page: int = 1) -> None:
        self.rules, self.capacity, self.node_limit, self.direct = rules, capacity, nodes, direct
        self.reserve, self.page = reserve, page
        self.degraded = self.snapshots = self.copied = self.zeroed = 0
        self.reset()

    def reset(self) -> None:
        self.slot: Counter[Register] = Counter()  # on the device
        self.label: Counter[Register] = Counter()
        self.free = set(range(1, self.capacity + 1))
        self.content: dict[int, History | None] = dict.fromkeys(self.free)
        self.held: set[Register] = set()  # on the host: what holds once the buffer is carried out
        self.known: Counter[Register] = Counter()
        self.free_count = self.capacity
        self.buffer = Buffer()
        self.rows: dict[int, Row] = {}
        self.kept: set[Register] = set()  # snapshots with a handle
        self.pins: Counter[Register] = Counter()
        self.nodes: set[Register] = set()  # snapshots with a register: kept, or dropped and still pinned

    # The command buffer: order of record is order of effect, and the lowest free slot goes first.

    def _record(self, phase: int, registers: Iterable[Register]) -> None:
        registers = list(registers)
        latest = [self.buffer.phase.get(register, -1) for register in registers]
        if any(at > phase or at == phase == MOVE for at in latest):
            self.submit()
        self.buffer.phase |= dict.fromkeys(registers, phase)

    def _move(self, pairs: Sequence[tuple[Register, Register]]) -> None:
        self._record(MOVE, [register for pair in pairs for register in pair])
        self.buffer.moves += pairs
        for target, source in pairs:
            assert target not in self.held and source in self.held
            self.held ^= {target, source}
            self.known[target] = self.known.pop(source, 0)

    def _release(self, registers: Iterable[Register]) -> None:
        registers = [register for register in registers if register in self.held]
        self._record(RELEASE, registers)
        self.buffer.releases += registers
        self._forget(registers)

    def _forget(self, registers: Sequence[Register]) -> None:
        self.held -= set(registers)
        self.free_count += len(registers)
        for register in registers:
            self.known.pop(register, None)

    def submit(self) -> None:
        """Carries out what is recorded: moves, releases, claims, then zeros and copies."""
        buffer, self.buffer = self.buffer, Buffer()
        for target, source in buffer.moves:
            self.slot[target], self.label[target] = self.slot.pop(source), self.label.pop(source, 0)
        for register in buffer.releases:
            self._free(register)
        for register in buffer.claims:
            self._take(register)
        for target, origin in buffer.data:
            self.content[self.slot[target]] = () if origin is None else self.content[self.slot[origin]]
            self.label[target] = 0 if origin is None else self.label[origin]
            self.zeroed += origin is None
            self.copied += origin is not None
        assert {r for r, slot in self.slot.items() if slot} == self.held and len(self.free) == self.free_count
        assert +self.label == +self.known

    def _free(self, register: Register) -> None:
        slot = self.slot.pop(register)
        self.label.pop(register, None)
        self.free.add(slot)
        self.content[slot] = None

    def _take(self, register: Register) -> None:
        assert not self.slot[register]
        self.slot[register] = min(self.free)
        self.free.remove(self.slot[register])
        self.label[register] = 0

    # Requests.

    def lanes(self, row: Row) -> list[Register]:
        return [(f"lane {k}", row.number) for k in range(self.rules.lanes)]

    def length(self, row: Row) -> int:
        return self.known[row.source or ("live", row.number)]

    def boundary(self, row: Row, length: int) -> bool:
        return length % self.rules.every == 0 or length == row.want

    def next_boundary(self, row: Row) -> int:
        length = self.length(row)
        return next(n for n in range(length + 1, length + self.rules.every + 1) if self.boundary(row, n))

    def admit(self, admitted: Sequence[tuple[int, int, Register | None]]) -> list[Row]:
        """admitted: (row number, want, the node to continue from) each; the caller asked whether the slots suffice."""
        rows = []
        claims = []
        for number, want, node in admitted:
            assert number not in self.rows
            length = self.known[node] if node else 0
            row = Row(number, want, tracked=length, confirmed=length)
            self.rows[number] = row
            claims += [("live", number), *self.lanes(row)[: self.rules.admission]]
            rows.append(row)
        self._record(CLAIM, claims)
        self.buffer.claims += claims
        self.held |= set(claims)
        self.free_count -= len(claims)
        for row, (number, _, node) in zip(rows, admitted, strict=True):
            live = ("live", number)
            if node and self.direct:
                row.source = row.pin = node
                self.pins[node] += 1
            else:
                self._record(DATA, [live, *([node] if node else [])])
                self.buffer.data.append((live, node))
                self.known[live] = self.known[node] if node else 0
        self.buffer.columns = True
        return rows

    def plan(self, batch: Sequence[tuple[Row | None, int]], limit: int) -> list[Entry]:
        self.submit()
        budget = min(len(self.free) - self.reserve, limit)

        def claim(register: Register) -> bool:
            nonlocal budget
            if budget < 1:
                self.degraded += 1
                return False
            budget -= 1
            self._take(register)
            return True

        entries = [self._plan_row(row, n, claim) if row and not row.finished else Entry() for row, n in batch]
        self.held = {register for register, slot in self.slot.items() if slot}
        self.known = +self.label
        self.free_count = len(self.free)
        for entry in entries:
            if entry.row:
                row = entry.row
                row.confirmed = row.confirmed if row.unsettled else entry.after
                row.unsettled += 1
                self._unpin(row)
        return entries

    def _plan_row(self, row: Row, n: int, claim) -> Entry:  # type: ignore[no-untyped-def]
        slot, label, live = self.slot, self.label, ("live", row.number)
        origin = row.source or live
        length, read, snapshot = label[origin], slot[origin], 0
        after = length + n
        if self.rules.name == "redirect" and self.boundary(row, length) and length > row.tracked and not row.source:
            (lane,) = self.lanes(row)
            if slot[lane]:
                slot[lane], slot[live] = slot[live], slot[lane]
            else:
                slot[lane], slot[live] = slot[live], 0
                if not claim(live):
                    slot[live], slot[lane] = slot[lane], 0
            if slot[lane]:
                label[lane] = row.tracked = length
                self.snapshots += 1
        elif self.rules.name in ("ping-pong", "lazy") and self.boundary(row, after):
            chosen = self._lane(row, claim)
            if chosen:
                snapshot, label[chosen] = slot[chosen], after
                self.snapshots += 1
        label[live] = after
        row.source = None
        return Entry(row, n, length, after, read, slot[live], snapshot)

    def _lane(self, row: Row, claim) -> Register | None:  # type: ignore[no-untyped-def]
        lanes = self.lanes(row)
        held = [lane for lane in lanes if self.slot[lane]]
        fresh = [lane for lane in held if self.label[lane] == 0]
        if fresh:
            return fresh[0]
        if held == lanes:
            return min(lanes, key=lambda lane: self.label[lane])
        empty = next(lane for lane in lanes if not self.slot[lane])
        if claim(empty):
            return empty
        return held[0] if held and self.rules.in_place else None

    def forward(self, entries: Sequence[Entry], tokens: Sequence[History]) -> None:
        """Every real entry folds its tokens into what it reads; all reads come before all writes, as none may overlap."""
        written = [slot for e in entries if e.row for slot in (e.write, e.snapshot) if slot]
        assert len(set(written)) == len(written), "two entries write one slot"
        results = []
        for entry, fed in zip(entries, tokens, strict=True):
            others = [slot for slot in written if slot not in (entry.write, entry.snapshot)]
            assert not entry.row or entry.read not in others, "one entry reads what another writes"
            content = self.content[entry.read] if entry.row else ()
            assert content is not None, f"{entry} reads memory of unknown content"
            results.append(content + fed)
        for entry, result in zip(entries, results, strict=True):
            if entry.row:
                self.content[entry.write] = result
                if entry.snapshot:
                    self.content[entry.snapshot] = result

    def settle(self, entries: Sequence[Entry], finished: Sequence[bool]) -> bool:
        """Returns whether this needs a launch: a lane alone is never superseded."""
        current = [(e, over) for e, over in zip(entries, finished, strict=True) if e.row and self.rows.get(e.row.number) is e.row]
        for entry, over in current:
            row = entry.row
            assert row
            row.unsettled -= 1
            row.confirmed = entry.after if over else self.known["live", row.number]
            row.finished |= over
        rows = [entry.row for entry, _ in current if entry.row]
        if self.rules.name != "lazy" or not any(set(self.lanes(row)) <= self.held for row in rows):
            return False
        self.submit()
        for row in rows:
            labels = {lane: self.label[lane] for lane in self.lanes(row) if self.slot[lane]}
            top = max((label for label in labels.values() if 1 <= label <= row.confirmed), default=0)
            old = [lane for lane, label in labels.items() if label < top]
            for lane in old:
                self._free(lane)
            self._forget(old)
        return True

    def answer(self, row: Row, bound: int, ended: bool) -> Register | None:
        """The register that stands for the most tokens up to `bound`; live and a lane at one length hold the same bytes."""
        candidates = [*([("live", row.number)] if ended else []), *self.lanes(row)]
        bound = bound // self.page * self.page
        labels = {r: self.known[r] for r in candidates if r in self.held and 1 <= self.known[r] <= bound}
        return max(labels, key=lambda register: labels[register], default=None)

    def publish(self, rows: Sequence[Row], bounds: Sequence[int], nodes: Sequence[Register | None], ended: bool = False) -> None:
        """nodes: where the answer of each row goes; None for a row that has none."""
        pairs = []
        for row, bound, node in zip(rows, bounds, nodes, strict=True):
            answer = self.answer(row, bound, ended)
            if answer and len(self.nodes) < self.node_limit:
                assert node and node not in self.nodes, f"{row} has a snapshot at {self.known[answer]}"
                self.nodes.add(node)
                self.kept.add(node)
                pairs.append((node, answer))
            else:
                assert node is None, f"{row} has no snapshot up to {bound}"
        self._move(pairs)

    def end(self, rows: Sequence[Row], bounds: Sequence[int] | None, nodes: Sequence[Register | None]) -> None:
        """Release, abort and retract: bounds None publishes nothing."""
        if bounds is not None:
            self.publish(rows, bounds, nodes, ended=True)
        self._release(register for row in rows for register in [("live", row.number), *self.lanes(row)])
        for row in rows:
            self._unpin(row)
            del self.rows[row.number]
        self.buffer.columns = True

    def cancel(self, entries: Sequence[Entry], nodes: Sequence[Register | None], publish: bool) -> None:
        current = [(e, node) for e, node in zip(entries, nodes, strict=True) if e.row and self.rows.get(e.row.number) is e.row]
        rows = [e.row for e, _ in current if e.row]
        for entry, _ in current:
            assert entry.row
            entry.row.confirmed = min(entry.row.confirmed, entry.before)
        self.end(rows, [row.confirmed for row in rows] if publish else None, [node for _, node in current])

    def drop(self, nodes: Sequence[Register]) -> None:
        self.kept -= set(nodes)
        gone = [node for node in nodes if not self.pins[node]]
        self.nodes -= set(gone)
        self._release(gone)

    def _unpin(self, row: Row) -> None:
        node, row.pin = row.pin, None
        if node:
            self.pins[node] -= 1
            if not self.pins[node] and node not in self.kept:
                self.nodes.remove(node)
                self._release([node])
