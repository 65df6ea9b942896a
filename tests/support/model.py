"""The rules of tracking as an executable model: four strategies on a ledger. Shares no code with the library."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.support.ledger import CLAIM, DATA, History, Ledger, Register

Claim = Callable[[Register], bool]  # fills a register where the budget allows


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
    snapshot_at: int = 0
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


class Model(Ledger):
    """capacity, nodes: slots and registers for snapshots. direct: a hit is read by the first step instead of copied."""

    def __init__(
        self, rules: Rules, *, capacity: int, nodes: int, direct: bool, reserve: int = 0, page: int = 1
    ) -> None:
        self.rules, self.node_limit, self.direct = rules, nodes, direct
        self.reserve, self.page = reserve, page
        self.degraded = self.snapshots = 0
        super().__init__(capacity)

    def reset(self) -> None:
        super().reset()
        self.rows: dict[int, Row] = {}
        self.kept: set[Register] = set()  # snapshots with a handle
        self.pins: Counter[Register] = Counter()
        self.nodes: set[Register] = set()  # snapshots with a register: kept, or dropped and still pinned

    def _tenant(self, entry: Entry) -> Row | None:
        """The row of an entry, unless it is padding or has another tenant since."""
        return entry.row if entry.row and self.rows.get(entry.row.number) is entry.row else None

    def lanes(self, row: Row) -> list[Register]:
        return [(f"lane {k}", row.number) for k in range(self.rules.lanes)]

    def length(self, row: Row) -> int:
        return self.known[row.source or ("live", row.number)]

    def boundary(self, row: Row, length: int) -> bool:
        return length % self.rules.every == 0 or length == row.snapshot_at

    def next_boundary(self, row: Row) -> int:
        length = self.length(row)
        return next(n for n in range(length + 1, length + self.rules.every + 1) if self.boundary(row, n))

    def admit(self, admitted: Sequence[tuple[int, int, Register | None]]) -> list[Row]:
        """admitted: (row number, want, the node to continue from) each; the caller asked whether the slots suffice."""
        rows = []
        claims = []
        for number, snapshot_at, node in admitted:
            assert number not in self.rows
            length = self.known[node] if node else 0
            row = Row(number, snapshot_at, tracked=length, confirmed=length)
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

    def _plan_row(self, row: Row, n: int, claim: Claim) -> Entry:
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

    def _lane(self, row: Row, claim: Claim) -> Register | None:
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
        """Every real entry folds its tokens into what it reads; no entry touches what another writes."""
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
        rows = []
        for entry, over in zip(entries, finished, strict=True):
            row = self._tenant(entry)
            if row and not row.finished:  # the step behind the last one is dead, whenever its results come
                rows.append(row)
                row.unsettled -= 1
                row.confirmed = entry.after if over else self.known["live", row.number]
                row.finished |= over
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
        """The register that stands for the most tokens up to `bound`; live before a lane that stands for the same."""
        candidates = [*([("live", row.number)] if ended else []), *self.lanes(row)]
        bound = bound // self.page * self.page
        labels = {r: self.known[r] for r in candidates if r in self.held and 1 <= self.known[r] <= bound}
        return max(labels, key=lambda register: labels[register], default=None)

    def publish(
        self, rows: Sequence[Row], bounds: Sequence[int], nodes: Sequence[Register | None], ended: bool = False
    ) -> None:
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
        rows, kept = [], []
        for entry, node in zip(entries, nodes, strict=True):
            if row := self._tenant(entry):
                row.confirmed = min(row.confirmed, entry.before)
                rows.append(row)
                kept.append(node)
        self.end(rows, [row.confirmed for row in rows] if publish else None, kept)

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
