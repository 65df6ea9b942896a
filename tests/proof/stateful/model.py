"""The rules of tracking, written down once more: plan, settle, accept and cancel on the tenants' ledger."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.proof.stateful.below import Below
from tests.proof.stateful.cache import Text
from tests.proof.stateful.history import FILLED, fold
from tests.proof.stateful.ledger import Later
from tests.proof.stateful.marking import Mark
from tests.proof.stateful.rows import Kept, Row
from tests.proof.stateful.settings import Settings
from tests.proof.stateful.starting import Starting

Claim = Callable[[int], bool]  # fills a register where the budget allows


@dataclass
class Entry:
    """One row of a planned step; `row` None is padding. The step's vectors hold its numbers."""

    row: Row | None = None
    tokens: list[int] = field(default_factory=list)
    before: int = 0
    after: int = 0
    read: int = 0
    write: int = 0
    snapshot: int = 0


@dataclass(eq=False)
class Planned:
    """A step of the model. changes: whether the packet with its batch carries changes, too. marks: those that the
    forward stores.
    """

    entries: list[Entry]
    window: bool
    changes: bool = False
    marks: list[tuple[Mark, Kept]] = field(default_factory=list)


class Model(Starting):
    """A manager's rules as dictionaries and loops."""

    def __init__(self, settings: Settings, generations: Sequence[int]) -> None:
        self.snapshots = self.refused_claims = 0
        width = -(-max(settings.max_batch or 0, settings.row_count) // 64) * 64
        self.vectors = np.zeros((5, width), np.int32)  # column, entry: of the newest step
        super().__init__(settings, generations)
        self.below = Below(self) if settings.tiered else None
        if self.below:
            self.before_packet = self.below.prepare

    def clear(self) -> None:
        super().clear()
        self.steps: list[Planned] = []  # unsettled, oldest first
        self.named_last: tuple[list[tuple[int, int]], int] | None = None  # the batch that is on the device, its limit
        self.due: list[tuple[int, int]] = []  # (to, of): copies of in-place planes once the forward has run
        self.open: Planned | None = None  # whose forward may not have been launched
        self.coming: set[Kept] = set()  # what its forward has still to store
        self.promised = False  # what it computes has been handed out

    def reset(self) -> None:
        """The bytes stay, and generations rise."""
        self.clear()
        self.generation = [generation + 1 for generation in self.generation]

    def launched(self, step: Planned | None, send: bool = False) -> None:
        """The forward of the open step is in order; snapshots of planes that kernels update in one slot are copied."""
        if step is None or step is not self.open:
            return
        self.open, self.promised = None, False
        self.lift()
        for to, of in self.due:
            self.copy_content(to, of, self.settings.copied)
            self.copied += self.settings.slot_bytes(self.settings.copied)
        self.due = []
        if send and any(isinstance(entry, Later) for entry in self.queue):
            self.submit()

    def promise(self, rows: Sequence[Row], bounds: Sequence[int]) -> None:
        """States and KV of rows are handed out up to these lengths."""
        before = {entry.row: entry.before for entry in self.open.entries if self.tenant(entry)} if self.open else {}
        self.promised |= any(bound > before.get(row, bound) for row, bound in zip(rows, bounds, strict=True))

    def told(self, rows: Sequence[Row], bounds: Sequence[int], keys: Sequence[Text]) -> list[int]:
        """What cache and sessions rely on: whole pages, or all of a turn."""
        lengths = [min(bound, len(key)) for bound, key in zip(bounds, keys, strict=True)]
        return [n if row.talk else self.floor(n) for row, n in zip(rows, lengths, strict=True)]

    # Boundaries

    def is_boundary(self, row: Row, length: int) -> bool:
        return length % self.settings.every == 0

    def next_boundary(self, row: Row) -> int:
        """Where a chunk should end: beyond the prompt, or at a mark that is lost inside of the chunk."""
        length = self.length(row) + 1
        wanted = [] if self.settings.grid else [at for at, _ in row.coming]
        while not (self.is_boundary(row, length) and length > row.tracked) and length not in wanted:
            length += 1
        return length

    def chunk(self, row: Row, most: int) -> int:
        """How many tokens lose no mark: up to one that needs the end of a chunk, else to a whole page of the prompt."""
        length = self.length(row)
        if length >= row.tracked:
            return most
        end, page = min(length + most, row.tracked), self.settings.page_size
        if row.coming and not self.settings.grid and (ends := [at for at, _ in row.coming if length < at <= end]):
            return ends[0] - length
        whole = [at for at in range(length + 1, end + 1) if at % page == 0]
        return (whole[-1] if row.coming and whole and end < row.tracked else end) - length

    def boundaries(self, row: Row, length: int, reach: int) -> list[int]:
        """Those in length + 1 .. reach."""
        return [n for n in range(length + 1, reach + 1) if self.is_boundary(row, n)]

    def needs(self, row: Row, n: int, window: bool) -> tuple[bool, bool]:
        """Whether a row claims a slot in its next step, for certain and perhaps."""
        strategy, length, lanes = self.settings.strategy, self.length(row), self.lanes(row)
        held = [lane for lane in lanes if lane in self.held]
        full = held == lanes or any(not self.known[lane] for lane in held)
        new = self.is_boundary(row, length) and length > row.tracked and not row.source
        if strategy == "redirect":
            certain = bool(self.boundaries(row, length, length + n - 1)) or new
            perhaps = bool(self.boundaries(row, length - 1, length + n))
            return (certain and not held, perhaps and not held) if window else (new and not held,) * 2
        inside = bool(self.boundaries(row, length, length + n))
        at = self.is_boundary(row, length + n) and length + n > row.tracked
        if window:
            return inside and not full, bool(self.boundaries(row, length - 1, length + n)) and not full
        return (at and not full,) * 2

    def shortfall(self, wanted: int) -> int:
        """Slots that so many claims lack."""
        return max(0, wanted + self.settings.reserve - self.free_count) if wanted else 0

    # Steps

    def budget(self, limit: int) -> Claim:
        budget = min(len(self.free) - self.settings.reserve, limit)

        def claim(register: int) -> bool:
            nonlocal budget
            if budget < 1:
                self.refused_claims += 1
                self.degraded += 1
                return False
            budget -= 1
            self.take(register)
            return True

        return claim

    def plan(self, batch: Sequence[tuple[Row | None, list[int]]], limit: int, window: bool) -> Planned:
        """batch: rows with the tokens they are fed; finished rows and None are padding."""
        planned = [(row, len(tokens)) for row, tokens in batch if row is not None and not row.finished]
        self.launched(self.open)
        fed = [(row, 0 if window else len(tokens)) for row, tokens in batch]
        marks = self.due_marks([(row if row and not row.finished else None, n) for row, n in fed])
        inside: list[tuple[Mark, Kept]] = []
        if marks:
            marks = self.choose_marks(marks, limit)
            inside, limit = self.keep_marks(marks), limit - len(marks)
        if self.settings.prefix and self.settings.evict:
            lacking = self.shortfall(sum(self.needs(row, n, window)[1] for row, n in planned))
            self.free_slots(self.free_count + min(limit, lacking))
        named = [(row.number, len(tokens)) if row and not row.finished else (0, 0) for row, tokens in batch]
        step = Planned([], window, marks=inside)
        if self.pending or (named, limit) != self.named_last:  # else there is nothing to send
            step.changes = self.submit_batch()
        self.named_last = named, limit
        claim = self.budget(limit)
        for row, tokens in batch:
            entry = Entry()
            if row is not None and not row.finished:
                origin = row.source or row.live
                length = self.label[origin]
                entry = Entry(row, tokens, length, length, self.slot[origin], self.slot[row.live])
                if not window:
                    self._plan_row(entry, claim)
            step.entries.append(entry)
            self.vectors[:, len(step.entries) - 1] = self._vector(entry, self.settings.pad)
        self.agree()
        if self.settings.debug and not window:
            self._fill(step)
        self.open = step
        slots = [slot for entry in step.entries for slot in (entry.read, entry.write, entry.snapshot)]
        marked = [kept.register for _, kept in inside]
        self.fence([*slots, *(self.slot[register] for register in marked)], marked)
        for mark, kept in inside:
            self.coming.add(kept)
            kept.truth, kept.text = mark.row.truth[mark.length], mark.row.text[: mark.length]
        if self.below:
            self.below.planned([(entry.row, entry.before, entry.after) for entry in step.entries if entry.row])
        for entry in step.entries:
            if entry.row:
                row = entry.row
                if not window and not row.unsettled:
                    row.confirmed = entry.after
                row.unsettled += 1
        if not window:
            self.unpin([entry.row for entry in step.entries if entry.row])
        self.steps.append(step)
        return step

    def _fill(self, step: Planned) -> None:
        """Debug mode: what the forward stores in slots that it does not read must replace what is there now."""
        slots = [entry.write for entry in step.entries if entry.write != entry.read]
        slots += [entry.snapshot for entry in step.entries if entry.snapshot]
        slots += [self.slot[kept.register] for _, kept in step.marks]
        for part, states in self.content.items():
            for slot in slots if part not in self.settings.copied else ():
                states[slot] = FILLED

    @staticmethod
    def _vector(entry: Entry, pad: int) -> list[int]:
        """rows, tokens, read, write, snapshot."""
        if entry.row is None:
            return [0, 0, pad, pad, pad]
        return [entry.row.number, len(entry.tokens), entry.read, entry.write, entry.snapshot or pad]

    def _plan_row(self, entry: Entry, claim: Claim) -> None:
        s, row, length = self.settings, entry.row, entry.before
        assert row is not None
        entry.after = length + len(entry.tokens)
        copied = s.slot_bytes(s.copied) if s.copied else 0
        moved = bool(row.source)
        due = self.is_boundary(row, entry.after) and entry.after > row.tracked
        if s.strategy in ("ping-pong", "lazy") and due:
            lane = self._lane(row, claim)
            if lane:
                self.snapshots += 1
                entry.snapshot, self.label[lane] = self.slot[lane], entry.after
                if copied:
                    self.due.append((entry.snapshot, entry.write))
        if s.strategy == "redirect" and self.is_boundary(row, length) and length > row.tracked and not row.source:
            moved = self._turn(row, length, claim)
            entry.write = self.slot[row.live]
        if moved and copied:
            if self.below:
                self.below.require_arrived(entry.read)
            self.copy_content(entry.write, entry.read, s.copied)
            self.copied += copied
        self._go_on(row, entry.after)
        self._feed(row, length, entry.tokens)

    @staticmethod
    def _feed(row: Row, length: int, tokens: Sequence[int]) -> None:
        for n, token in enumerate(tokens, length):
            row.truth[n + 1] = fold(row.truth[n], [token])
        row.text = (*row.text[:length], *tokens)

    def _go_on(self, row: Row, after: int) -> None:
        self.label[row.live] = after
        row.source = self.columns["source"][row.number] = 0

    def _turn(self, row: Row, length: int, claim: Claim) -> bool:
        """Redirect: the state so far becomes the snapshot, and another slot is written. Nothing where none is free."""
        (lane,) = self.lanes(row)
        if lane not in self.slot and not claim(lane):
            return False
        self.slot[lane], self.slot[row.live] = self.slot[row.live], self.slot[lane]
        self.snapshots += 1
        self.label[lane] = row.tracked = self.columns["tracked"][row.number] = length
        return True

    def _lane(self, row: Row, claim: Claim) -> int:
        """The lane that takes a snapshot, 0 for none."""
        lanes = self.lanes(row)
        held = [lane for lane in lanes if lane in self.slot]
        for lane in held:
            if not self.label[lane]:
                return lane
        if held != lanes:
            (empty, *_) = [lane for lane in lanes if lane not in held]
            if claim(empty):
                return empty
            return held[0] if held and self.settings.strategy == "lazy" and self.settings.overwrite else 0
        return sorted(lanes, key=lambda lane: self.label[lane])[0]

    def forward(self, step: Planned) -> None:
        """What the engine has written, plane by plane; a plane updated in one slot must hold the state before."""
        for part, states in self.content.items():
            copied = part in self.settings.copied
            before = {i: states[e.write if copied else e.read] for i, e in enumerate(step.entries)}
            for i, entry in enumerate(step.entries):
                if entry.row:
                    old = before[i]
                    assert old == entry.row.truth[entry.before], f"row {entry.row.number} reads another state"
                    states[entry.write] = fold(old, entry.tokens)
                    if entry.snapshot and not copied:
                        states[entry.snapshot] = states[entry.write]
            for _, kept in step.marks:
                self.coming.discard(kept)
                if kept.register in self.slot:
                    states[self.slot[kept.register]] = kept.truth

    def tenant(self, entry: Entry) -> Row | None:
        """The row of an entry, unless it is padding or has another tenant since."""
        row = entry.row
        return row if row is not None and self.rows.get(row.number) is row else None

    def settle(self, step: Planned, finished: Sequence[bool]) -> None:
        self.steps.remove(step)
        self.launched(step, send=True)
        settled = []
        for entry, over in zip(step.entries, finished, strict=True):
            row = self.tenant(entry)
            if row is None:
                continue
            row.unsettled -= 1
            if not row.finished:  # else this step is dead, and says nothing
                row.confirmed = entry.after if over else self.length(row)
                row.finished |= over
                settled.append(row)
        self._release_lanes(settled)

    def _release_lanes(self, rows: Sequence[Row]) -> None:
        """Lazy: lanes with a label below the largest one in 1..K go, with the next packet."""
        if self.settings.strategy != "lazy":
            return
        gone: list[int] = []
        for row in rows:
            labels = {lane: self.known[lane] for lane in self.lanes(row) if lane in self.held}
            real = [label for label in labels.values() if 1 <= label <= row.confirmed]
            gone += [lane for lane, label in labels.items() if real and label < max(real)]
        self.record_releases(gone)

    def accept(self, step: Planned, accepted: Sequence[int], finished: Sequence[bool], limit: int) -> None:
        self.steps.remove(step)
        self.launched(step)
        self.submit()
        claim = self.budget(limit)
        settled, moved = [], []
        for i, (entry, n, over) in enumerate(zip(step.entries, accepted, finished, strict=True)):
            row = self.tenant(entry)
            self.vectors[3:, i] = 0  # write, snapshot
            if row is not None and n:
                self._accept_row(entry, row, n, claim)
                self.vectors[3:, i] = entry.write, entry.snapshot
                moved.append(row)
            if row is not None:
                settled.append((row, over))
        self.agree()
        for row, over in settled:
            row.unsettled -= 1
            row.confirmed = self.length(row)
            row.finished |= over
        self.unpin(moved)
        self._release_lanes([row for row, _ in settled])

    def _accept_row(self, entry: Entry, row: Row, n: int, claim: Claim) -> None:
        s, length = self.settings, entry.before
        assert length == self.label[row.source or row.live]
        entry.after = length + n
        self._feed(row, length, entry.tokens[:n])
        inside = self.boundaries(row, length, entry.after - (s.strategy == "redirect"))
        mark = inside[-1] if inside and s.strategy != "none" else 0
        lane = 0
        if mark and s.strategy == "redirect":
            lane = self.lanes(row)[0]
            if lane not in self.slot and not claim(lane):
                lane = 0
            if lane:
                row.tracked = self.columns["tracked"][row.number] = mark
        elif mark:
            lane = self._lane(row, claim)
        elif s.strategy == "redirect" and self.is_boundary(row, length) and length > row.tracked and not row.source:
            self._turn(row, length, claim)
        if lane:
            self.snapshots += 1
            entry.snapshot, self.label[lane] = self.slot[lane], mark
        entry.write = self.slot[row.live]
        self._go_on(row, entry.after)
        for states in self.content.values():
            states[entry.write] = row.truth[entry.after]
            if lane:
                states[entry.snapshot] = row.truth[mark]

    def cancelled(self, step: Planned) -> list[Row]:
        """Takes the newest step back; returns its rows, which are real up to where they were before it."""
        self.steps.remove(step)
        self.due = []
        self.launched(step, send=True)
        rows = [row for entry in step.entries if (row := self.tenant(entry))]
        for row, entry in zip(rows, [e for e in step.entries if self.tenant(e)], strict=True):
            row.confirmed = min(row.confirmed, entry.before)
        return rows

    def snapshots_are_true(self) -> None:
        """What holders keep is what the tokens of the row that it came from say."""
        for one in self.kept.values():
            if one.register in self.slot and not self.named(one.register) and one not in self.coming:
                for states in self.content.values():
                    assert states[self.slot[one.register]] == one.truth, f"{one} holds another state"
