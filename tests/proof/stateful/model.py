"""Models the rules of tracking without memstate's code: admissions, marks, plan, settle, accept, cancel and ends."""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from tests.proof.stateful.cache import Cache, Found, Lease, Start, Talk
from tests.proof.stateful.ledger import FILLED, Kept, Later, Packet, Row, Text
from tests.proof.stateful.settings import Settings

RANKS = {"named": 0, "branch": 2, "prompt": 3}  # kind of a mark -> its rank if slots are short; 0 comes first


class Mark(NamedTuple):
    """A state inside a prompt that a step keeps. offset: number of tokens of the step in it; 0: none."""

    entry: int
    row: Row
    offset: int
    length: int
    kind: str


Claim = Callable[[int], bool]  # claims a slot for a register; returns False if the slot budget is used up


class Tail(NamedTuple):
    """What a step does with the tail of a row.

    label: tokens of the state that the step reads. pending: real tokens after this state, which are in the tail. store:
    how many tokens the stored state has beyond the read one (pending tokens, then tokens of the step); -1: no state is
    stored. left: pending tokens that stay in the tail. newest: tokens of the step that are put into the tail.
    """

    label: int
    pending: int
    store: int
    left: int
    newest: int

    @property
    def after(self) -> int:
        """Tokens of the state in the written slot after the step."""
        return self.label + max(0, self.store)


NO_TAIL = Tail(0, 0, 0, 0, 0)


@dataclass
class Entry:
    """One entry of a planned step. row: None for padding.

    before, after: lengths of the row. read, write, snapshot: slots. accepted: tokens of the step that the device counts
    as real. counted: whether `row` includes them. more: number of accepted drafts of the step before, as long as the
    host does not know it. memory: what the memory of the row has before the step.
    """

    row: Row | None = None
    tokens: list[int] = field(default_factory=list)
    before: int = 0
    after: int = 0
    read: int = 0
    write: int = 0
    snapshot: int = 0
    drafts: int = 0
    tail: Tail = NO_TAIL
    accepted: int = 0
    counted: bool = False
    more: int = 0
    memory: Text = ()

    @property
    def certain(self) -> int:
        """Number of tokens that cannot be rejected."""
        return len(self.tokens) - self.drafts

    @property
    def left(self) -> int:
        """Number of certain tokens in the row's tail after the step."""
        return self.tail.left + (self.certain if self.tail.newest else 0)

    @property
    def whole(self) -> int:
        """Length of the newest state that the row still has if this step never runs."""
        return self.tail.label - (self.tail.store == 0)


@dataclass(eq=False)
class Planned:
    """A step of the model.

    drafted: whether it has drafts. changes: whether the packet with the batch also carries changes. moves: whether it
    also carries data. marks: the marks whose states the forward stores.
    """

    entries: list[Entry]
    drafted: bool = False
    changes: bool = False
    moves: bool = False
    marks: list[tuple[Mark, Kept]] = field(default_factory=list)


class Late(NamedTuple):
    """A planned step of which the host does not know what the device has decided, because accepted numbers are missing.

    kept: free slots that the host sets aside for claims of the step. granted: slots that the step has claimed. figures:
    numbers of snapshots and of refused claims, which the host does not know yet.
    """

    step: Planned
    kept: int
    granted: int
    figures: tuple[int, int]


class Model(Cache):
    """The rules of a manager in dictionaries and loops.

    holders_left: holders that states from host memory can get, according to the last `weigh`.
    """

    holders_left = 0

    def __init__(self, settings: Settings, generations: Sequence[int]) -> None:
        self.snapshots = self.refused_claims = 0
        width = -(-max(settings.max_batch or 0, settings.row_count) // 64) * 64
        self.vectors = np.zeros((5, width), np.int32)  # `column entry`: the vectors of the newest step
        self.of_tails = np.zeros((6, width), np.int32)  # first axis: label, pending, store, length, accepted, batch
        super().__init__(settings, generations)

    def clear(self) -> None:
        super().clear()
        self.steps: list[Planned] = []  # unsettled, oldest first
        self.named_last: tuple[list[tuple[int, int, int]], int, int] | None = None  # last batch, limit, defer
        self.defer = 0  # the setting `defer` of the plan under way
        self.due: list[tuple[int, int]] = []  # (to, of) slots of in-place planes to copy after the forward
        self.late: Late | None = None  # the newest step, until the step before it is accepted
        self.newest: Planned | None = None  # the step that was planned last, even if it is settled or cancelled
        self.open: Planned | None = None  # the open step
        self.coming: set[Kept] = set()  # snapshots that the forward of the open step will store
        self.promised = False  # whether a state or KV that the open step computes was published

    def reset(self) -> None:
        """Forgets everything except the bytes, and increments the generation of each row."""
        self.clear()
        self.generation = [generation + 1 for generation in self.generation]

    def recover(self, held: Sequence[int]) -> list[Kept]:
        """Ends all requests, and keeps the states that are certain. Returns the published snapshots that are lost.

        A state is uncertain if a change of it waits, or if the open step must still write it.

        held: slots that the caller keeps by id.
        """
        self.submit()
        unsure = self.unwritten.union(*[entry.phase for entry in self.queue if isinstance(entry, Packet)])
        there = {r: one for r, one in self.kept.items() if r in self.slot and r not in unsure and not one.dropped}
        published = [one for one in self.kept.values() if one.owner == "snapshot" and not one.dropped]
        sure = {one for one in there.values() if self.label[one.register] == one.length}
        talks = [self.survivor(talk, sure) for talk in self.talks if not talk.closing]
        lost = self.open is not None and self.promised  # the open step must still write the KV of the cache
        entries = [] if lost else sorted(self.entries, key=lambda entry: len(entry.tokens))
        stays = [one for one in published if one in sure]
        stays += {one: None for talk in talks for one in talk.kept}
        stays += [entry.state for entry in entries if entry.state in sure]
        places = {one: self.slot[one.register] for one in stays}
        content = {part: list(states) for part, states in self.content.items()}
        stirred = set(self.stirred)
        self.reset()
        for one, slot in places.items():
            self.kept[one.register] = one
            self.slot[one.register], self.label[one.register] = slot, one.length
            self.page_users.update(one.pages)
        used = [*places.values(), *held]
        for part, states in content.items():
            for slot in used:
                self.content[part][slot] = states[slot]
                self.stirred -= {(part, slot)} - stirred
        self.by_id = [*held]
        self.free -= set(used)
        self.agree()
        free = [register for register in range(self.first_holder, self.register_count) if register not in self.kept]
        self.free_holders = [{register} for register in free]
        self.talks = talks
        self.page_users.update(page for talk in talks for page in talk.pages)
        self.grow_again(entries, sure)
        return [one for one in published if one not in stays]

    def launched(self, step: Planned | None, send: bool = False) -> None:
        """Closes `step` if it is open. For planes that kernels update in place, copies its snapshots.

        send: whether to submit if a callback is in the queue.
        """
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
        """Notes that states and KV of rows are published up to these lengths."""
        before = {entry.row: entry.whole for entry in self.open.entries if self.tenant(entry)} if self.open else {}
        self.promised |= any(bound > before.get(row, bound) for row, bound in zip(rows, bounds, strict=True))

    def told(self, rows: Sequence[Row], bounds: Sequence[int], keys: Sequence[Text]) -> list[int]:
        """Returns the length up to which each row is published: whole pages, or all tokens for a turn of a session."""
        lengths = [min(bound, len(key)) for bound, key in zip(bounds, keys, strict=True)]
        return [n if row.talk else self.floor(n) for row, n in zip(rows, lengths, strict=True)]

    # Boundaries

    def is_due(self, row: Row, length: int) -> bool:
        """Says whether a snapshot of the row is due at this length."""
        return length % self.settings.every == 0 and length > row.tracked

    def next_boundary(self, row: Row) -> int:
        """Returns the next length where a chunk should end: a due boundary, or a mark that no chunk can have inside."""
        length = self.length(row) + 1
        wanted = [] if self.settings.states_inside(length - 1) else [at for at, _ in row.coming]
        while not self.is_due(row, length) and length not in wanted:
            length += 1
        return length

    def chunk(self, row: Row, most: int) -> int:
        """Returns the number of tokens of a chunk, at most `most`, that loses no mark.

        If the forward can store no state inside the chunk, the chunk ends at the next mark. Otherwise it ends at the
        end of a page of the prompt.
        """
        length = self.length(row)
        if length >= row.tracked:
            return most
        end, page = min(length + most, row.tracked), self.settings.unit
        ends = [at for at, _ in row.coming if length < at <= end]
        if ends and not self.settings.states_inside(length):
            return ends[0] - length
        whole = [at for at in range(length + 1, end + 1) if at % page == 0]
        return (whole[-1] if row.coming and whole and end < row.tracked else end) - length

    def boundaries(self, row: Row, length: int, reach: int) -> list[int]:
        """Returns the boundaries in length + 1 .. reach at which a snapshot is due."""
        return [n for n in range(length + 1, reach + 1) if self.is_due(row, n)]

    def fold(self, row: Row, n: int, drafts: int) -> Tail:
        """Returns what the row's next step does with its tail.

        There are two cases. A step puts its own tokens into the tail if the tail has room, and if it has drafts, or a
        boundary lies among the pending tokens, or it waits for `defer` tokens. Its state then gains the pending tokens:
        all of them, those up to the last such boundary, or none if it waits. In any other step, the state gains all
        pending tokens and all tokens of the step.
        """
        label, pending = self.in_state(row), row.pending
        if not self.settings.tail:
            return Tail(label, 0, n, 0, 0)
        ends = self.boundaries(row, label, label + pending) if self.settings.lanes else []
        waits = 0 < n < self.defer - pending
        kept = (drafts or ends or waits) and n <= self.settings.tail
        store = ends[-1] - label if kept and ends else pending * (not waits) if kept else pending + n
        left, newest = (pending - store, n) if kept else (0, 0)
        return Tail(label, pending, store if store or row.source else -1, left, newest)

    def needs(self, row: Row, n: int, drafts: int = 0, most: bool = False) -> bool:
        """Says whether a row claims a slot in its next step.

        most: whether it is enough that the row may claim one, depending on the number of accepted tokens.
        """
        tail, lanes = self.fold(row, n, drafts), self.lanes(row)
        held = [lane for lane in lanes if lane in self.held]
        if self.settings.strategy == "redirect":
            return self.is_due(row, tail.label) and not row.source and not held and (most or tail.store >= 0)
        full = held == lanes or any(not self.known[lane] for lane in held)
        if most:
            ends = bool(self.boundaries(row, tail.label, self.length(row) + self.unsure(row) + n))
        else:
            ends = self.is_due(row, tail.after) and tail.store > 0
        return ends and not full

    def unsure(self, row: Row) -> int:
        """Returns the number of drafts in the row's newest step; 0 if that step is settled."""
        unsettled = self._unsettled(row)
        return unsettled.drafts if unsettled else 0

    def _unsettled(self, row: Row) -> Entry | None:
        """Returns the row's entry in the newest unsettled step."""
        entries = self.steps[-1].entries if self.steps else ()
        return next((entry for entry in entries if entry.row is row and not row.finished), None)

    def text_of(self, row: Row) -> Text:
        """Returns the row's tokens as the device knows them."""
        unsettled = self._unsettled(row)
        if unsettled and unsettled.drafts and not unsettled.counted:
            return (*row.text[: unsettled.before], *unsettled.tokens[: unsettled.accepted])
        return row.text[: self.length(row)]

    @property
    def undecided(self) -> list[Row]:
        """Rows of the late step. The host does not know what the device decided for them."""
        return [entry.row for entry in self.late.step.entries if entry.row] if self.late else []

    def shortfall(self, wanted: int) -> int:
        """Returns the number of slots that are missing for `wanted` claims."""
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

    def plan(
        self, batch: Sequence[tuple[Row | None, list[int]]], limit: int, drafts: Sequence[int] = ()
    ) -> Planned:  # fmt: skip
        """Plans a step. batch: (row, its tokens); finished rows and None are padding. drafts: number per entry."""
        rows = [row if row is not None and not row.finished else None for row, _ in batch]
        drafts = [n if row else 0 for row, n in zip(rows, drafts or [0] * len(rows), strict=True)]
        planned = [(row, len(tokens), n) for row, (_, tokens), n in zip(rows, batch, drafts, strict=True) if row]
        self.launched(self.open)
        fed = [len(tokens) for _, tokens in batch]
        marks = self.due_marks(list(zip(rows, fed, drafts, strict=True)))
        inside: list[tuple[Mark, Kept]] = []
        if marks:
            marks = self.choose_marks(marks, limit)
            inside, limit = self.keep_marks(marks), limit - len(marks)
        late = any(self.unsure(row) for row, _, _ in planned)
        claims = sum(self.needs(row, n, of, late) for row, n, of in planned)
        if self.settings.prefix and self.settings.evict:
            self.free_slots(self.free_count + min(limit, self.shortfall(claims)))
        sent = zip(rows, batch, drafts, strict=True)
        named = [(row.number, len(tokens), n) if row else (0, 0, 0) for row, (_, tokens), n in sent]
        step = Planned([], any(drafts), marks=inside)
        if self.queue or (named, limit, self.defer) != self.named_last:  # the same batch is not sent again
            step.changes, step.moves = self.submit_batch()
        self.named_last = named, limit, self.defer
        kept = max(0, min(claims, limit, self.free_count - self.settings.reserve))
        hidden = self._hide(planned) if late else {}
        self._count_accepted()
        claim, figures, free = self.budget(limit), (self.snapshots, self.refused_claims), len(self.free)
        for row, (_, tokens), of in zip(rows, batch, drafts, strict=True):
            entry = Entry()
            if row is not None:
                origin = row.source or row.live
                length, tail = self.length(row), self.fold(row, len(tokens), of)
                entry = Entry(row, tokens, length, length, self.slot[origin], self.slot[row.live], 0, of, tail)
                entry.accepted = entry.certain
                self._plan_row(entry, claim)
            step.entries.append(entry)
            self.vectors[:, len(step.entries) - 1] = self._vector(entry, self.settings.pad)
            if self.settings.tail:
                self._note_tail(len(step.entries) - 1, entry)
        if late:
            self.late = Late(step, kept, free - len(self.free), figures)
            self._forget_what_was_decided(hidden)
        else:
            self.agree()
            self._note_tails(step)
        if self.settings.debug:
            self._fill(step)
        self.open = self.newest = step
        slots = [slot for entry in step.entries for slot in (entry.read, entry.write, entry.snapshot)]
        marked = [kept.register for _, kept in inside]
        self.fence([*slots, *(self.slot[register] for register in marked)], marked)
        self.fenced |= {row.live + part for row in self.undecided for part in range(3)}
        for mark, one in inside:
            self.coming.add(one)
            one.text = mark.row.text[: mark.length]
        if self.below:
            told = [(e.row, e.before - e.more, e.after - e.more) for e in step.entries if e.row]
            self.below.planned(told)
        for entry in step.entries:
            if entry.row:
                if not entry.row.unsettled:
                    entry.row.confirmed = entry.after
                entry.row.unsettled += 1
        self.unpin([entry.row for entry in step.entries if entry.row])
        self.steps.append(step)
        return step

    def _hide(self, planned: Sequence[tuple[Row, int, int]]) -> dict[Row, tuple[int, int, int]]:
        """Adds to each row the accepted tokens that only the device knows. Returns row -> what the host knows.

        That is (pending before, tracked, number of added tokens).
        """
        hidden = {}
        for row, _, _ in planned:
            unsettled, pending = self._unsettled(row), row.pending
            if unsettled and unsettled.drafts:
                self._count(unsettled)
            hidden[row] = pending, row.tracked, row.pending - pending
        return hidden

    def _count(self, entry: Entry) -> None:
        """Adds the accepted tokens of an entry to its row."""
        row = entry.row
        assert row and not entry.counted
        entry.counted = True
        if entry.drafts:
            row.text = (*row.text[: entry.before], *entry.tokens[: entry.accepted])
            row.pending += entry.accepted - entry.certain

    def _forget_what_was_decided(self, hidden: Mapping[Row, tuple[int, int, int]]) -> None:
        """Sets the host's view after the plan of a late step: it knows labels of rows without drafts, but no lanes."""
        assert self.late
        for entry in self.late.step.entries:
            if row := entry.row:
                pending, row.tracked, entry.more = hidden[row]
                if self.unsure(row):
                    row.pending = pending
                else:
                    self.known[row.live], row.pending = self.label[row.live], entry.left
        self.free_count -= self.late.kept
        (self.snapshots, self.refused_claims), figures = self.late.figures, (self.snapshots, self.refused_claims)
        self.late = self.late._replace(figures=figures)

    def _decide(self) -> None:
        """Gives the host's view the decisions of the device in the plan of the late step."""
        assert self.late
        self._note_tails(self.late.step)
        for entry in self.late.step.entries:
            if row := entry.row:
                entry.more, row.tracked = 0, self.columns["tracked"][row.number]
                own = range(row.live, row.live + 3)
                self.held |= {register for register in own if register in self.slot}
                self.known |= {register: self.label[register] for register in own if register in self.slot}
        self.free_count += self.late.kept - self.late.granted
        self.snapshots, self.refused_claims = self.late.figures
        self.late = None

    def _note_tails(self, step: Planned) -> None:
        """Notes what a step leaves in the tails of its rows. Of all other rows, sets `newest` to 0."""
        for row in self.rows.values():
            row.newest = 0
        for entry in step.entries:
            if entry.row:
                entry.row.pending, entry.row.newest = entry.left, entry.tail.newest

    def require_same(self) -> None:
        """Asserts that host and device agree, unless there is a late step."""
        if not self.late:
            super().require_same()

    def count_slots(self) -> None:
        """Gives the host the number of free slots that the device counts, also during a late step."""
        if self.late:
            self.free_count += self.late.kept - self.late.granted
            self.late = self.late._replace(kept=0, granted=0)

    def _count_accepted(self) -> None:
        """Adds the accepted tokens of the last step to the device's column `pending`."""
        pending, newest = self.columns["pending"], self.columns["newest"]
        for number, accepted in list(zip(self.vectors[0], self.of_tails[4], strict=True))[: self.of_tails[5, :1].sum()]:
            pending[number] += min(max(0, int(accepted)), newest[number]) if number else 0
            newest[number] = 0
        self.of_tails[5, :1] = 0

    def _note_tail(self, at: int, entry: Entry) -> None:
        row, tail = entry.row, entry.tail
        told = tail.label, tail.pending, tail.store, entry.before, entry.certain
        self.of_tails[:5, at] = told if row else 0
        self.of_tails[5, 0] = at + 1
        if row:
            self.columns["pending"][row.number], self.columns["newest"][row.number] = tail.left, tail.newest

    def _fill(self, step: Planned) -> None:
        """Writes canaries, as debug mode does, to the slots to which the forward stores without reading them."""
        slots = [entry.write for entry in step.entries if entry.write != entry.read and entry.tail.store >= 0]
        slots += [entry.snapshot for entry in step.entries if entry.snapshot]
        slots += [self.slot[kept.register] for _, kept in step.marks]
        for part, states in self.content.items():
            for slot in slots if part not in self.settings.copied else ():
                states[slot] = FILLED

    @staticmethod
    def _vector(entry: Entry, pad: int) -> list[int]:
        """Returns the numbers of an entry in the step's vectors: row, tokens, read, write, snapshot."""
        if entry.row is None:
            return [0, 0, pad, pad, pad]
        return [entry.row.number, len(entry.tokens), entry.read, entry.write, entry.snapshot or pad]

    def _plan_row(self, entry: Entry, claim: Claim) -> None:
        s, row, length, after = self.settings, entry.row, entry.tail.label, entry.tail.after
        assert row is not None
        entry.after = entry.before + entry.certain
        copied = s.slot_bytes(s.copied) if s.copied else 0
        moved = bool(row.source)
        due = self.is_due(row, after) and entry.tail.store > 0
        if s.strategy in ("ping-pong", "lazy") and due:
            lane = self._lane(row, claim)
            if lane:
                self.snapshots += 1
                entry.snapshot, self.label[lane] = self.slot[lane], after
                if copied:
                    self.due.append((entry.snapshot, entry.write))
        if s.strategy == "redirect" and self.is_due(row, length) and not row.source and entry.tail.store >= 0:
            moved = self._turn(row, length, claim)
            entry.write = self.slot[row.live]
        if moved and copied:
            if self.below:
                self.below.require_arrived(entry.read)
            self.copy_content(entry.write, entry.read, s.copied)
            self.copied += copied
        self._go_on(row, after)
        row.text = (*row.text[: entry.before], *entry.tokens[: entry.certain])
        if s.tails:
            entry.memory, row.tail = row.tail, (*row.tail, *entry.tokens)

    def _go_on(self, row: Row, after: int) -> None:
        self.label[row.live] = after
        row.source = self.columns["source"][row.number] = 0

    def _turn(self, row: Row, length: int, claim: Claim) -> bool:
        """Takes a snapshot under Redirect: lane and live swap slots. Returns False if the lane can get no slot."""
        (lane,) = self.lanes(row)
        if lane not in self.slot and not claim(lane):
            return False
        self.slot[lane], self.slot[row.live] = self.slot[row.live], self.slot[lane]
        self.snapshots += 1
        self.label[lane] = row.tracked = self.columns["tracked"][row.number] = length
        return True

    def _lane(self, row: Row, claim: Claim) -> int:
        """Returns the lane that takes a snapshot, 0 for none."""
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
        """Runs a forward on the texts of slots, plane by plane. Asserts that each row reads the state of its tokens."""
        for part, states in self.content.items():
            copied = part in self.settings.copied
            before = {i: states[e.write if copied else e.read] for i, e in enumerate(step.entries)}
            for i, entry in enumerate(step.entries):
                if entry.row:
                    old, text, tail = before[i], entry.row.text[: entry.before], entry.tail
                    assert old == text[: tail.label], f"row {entry.row.number} reads another state"
                    if tail.store >= 0:
                        states[entry.write] = (*text, *entry.tokens)[: tail.after]
                    if entry.snapshot and not copied:
                        states[entry.snapshot] = states[entry.write]
            for _, kept in step.marks:
                self.coming.discard(kept)
                if kept.register in self.slot:
                    states[self.slot[kept.register]] = kept.text

        for entry in step.entries if self.settings.tails else ():
            if row := entry.row:
                assert self.tails[row.number] == entry.memory, f"row {row.number} finds the memory of another"
                self.tails[row.number] = (*entry.memory, *entry.tokens)
                if self.settings.tail:
                    self._keep_in_tail(entry)

    def _keep_in_tail(self, entry: Entry) -> None:
        """Checks the pending tokens in the tail, and adds the tokens of the step that the stored state lacks."""
        row, tail, size = entry.row, entry.tail, self.settings.ring
        assert row
        ring, text = list(self.rings[row.number]), (*row.text[: entry.before], *entry.tokens)
        for at in range(tail.label, entry.before):
            assert ring[at % size] == text[: at + 1], f"row {row.number} finds another token {at} in its tail"
        for at in range(max(entry.before, tail.label + tail.store), len(text)):
            ring[at % size] = text[: at + 1]
        self.rings[row.number] = tuple(ring)

    def tenant(self, entry: Entry) -> Row | None:
        """Returns the row of an entry, unless the entry is padding or another request has the row now."""
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
            if not row.finished:  # if it has finished, this step is dead
                row.confirmed = entry.after if over else self.length(row)
                row.finished |= over
                settled.append(row)
        self._release_lanes(settled)

    def _release_lanes(self, rows: Sequence[Row]) -> None:
        """Under LazyPingPong, releases lanes with a label below the largest one in 1..K (K: confirmed length)."""
        if self.settings.strategy != "lazy":
            return
        gone: list[int] = []
        for row in rows:
            labels = {lane: self.known[lane] for lane in self.lanes(row) if lane in self.held}
            real = [label for label in labels.values() if 1 <= label <= row.confirmed]
            gone += [lane for lane, label in labels.items() if real and label < max(real)]
        self.record_releases(gone)

    def wrote(self, step: Planned, accepted: Sequence[int]) -> None:
        """Notes that the device gets the number of real tokens of each entry of the newest step."""
        self.of_tails[4, : len(accepted)] = accepted
        for entry, n in zip(step.entries, accepted, strict=True):
            entry.accepted = n

    def accept(self, step: Planned, accepted: Sequence[int], finished: Sequence[bool], written: bool) -> None:
        """Accepts a step. accepted: real tokens of each entry. written: whether the device has these numbers."""
        self.launched(step, send=True)
        if step is self.newest and not written:
            self.wrote(step, accepted)
        settled = []
        for entry, n, over in zip(step.entries, accepted, finished, strict=True):
            row = self.tenant(entry)
            if entry.row:
                entry.after = entry.before + n
            if row and not row.finished:
                if not entry.counted:
                    self._count(entry)
                settled.append((row, over, entry))
            if row:
                row.unsettled -= 1
        self.steps.remove(step)
        if self.late:
            self._decide()
        for row, over, entry in settled:
            row.confirmed = entry.after if over else self.length(row)
            row.finished |= over
        self._release_lanes([row for row, _, _ in settled])

    def cancelled(self, step: Planned) -> list[Row]:
        """Undoes the newest step. Returns its rows, whose confirmed length is now that of their state before it."""
        self.steps.remove(step)
        self.due = []
        self.launched(step, send=True)
        rows = [row for entry in step.entries if (row := self.tenant(entry))]
        for row, entry in zip(rows, [e for e in step.entries if self.tenant(e)], strict=True):
            row.confirmed = min(row.confirmed, max(0, entry.whole))
        return rows

    def snapshots_are_true(self) -> None:
        """Asserts that each holder has, in every plane, the state of the tokens that its snapshot stands for."""
        for one in self.kept.values():
            if one.register in self.slot and not self.named(one.register) and one not in self.coming:
                for states in self.content.values():
                    assert states[self.slot[one.register]] == one.text, f"{one} holds another state"

    # The state from which a request starts

    def look_up(self, start: Start) -> None:
        """Finds the longest state for a prompt, in its session or in the cache, and notes it in `start`."""
        s, prompt, talk = self.settings, start.prompt, start.talk
        assert prompt
        match, start.asked = self.find(prompt, start.salt, start.reach) if s.prefix else None, start.wants
        serving = self.serving(talk, prompt, start.salt) if talk else []
        if talk and serving and not (match and match.length > serving[0].length):
            start.length = serving[0].length
            if self.stays(talk, serving[0]):
                start.reads = start.origin = serving[0]
            else:
                start.moved = serving
            start.shared = talk.pages[: self.pages_for(start.length)]
        self._go_on_from(start, match)

    def from_elsewhere(self, start: Start) -> Start:
        """Returns the start that the same request has if its session makes way first."""
        if start.parked:
            return replace(start, talk=None, away=start.talk)
        other = replace(
            start, talk=None, away=start.talk, origin=None, length=0, moved=(), reads=None, shared=(), wants=start.asked
        )
        self.look_up(other)
        return other

    def serving(self, talk: Talk, prompt: Text, salt: Hashable) -> Sequence[Kept]:
        """Returns those states of a session whose tokens the prompt begins with, longest first."""
        same = 0
        while same < min(len(talk.text), len(prompt) - 1) and talk.text[same] == prompt[same]:
            same += 1
        serving = [one for one in talk.kept if one.length <= same][: 1 + self.settings.lanes]
        return serving if talk.salt == salt else []

    def _go_on_from(self, start: Start, match: Found | None) -> None:
        s, prompt = self.settings, start.prompt
        assert prompt
        if match and match.stated and not (start.moved or start.reads):
            start.origin, start.length = match.stated.state, match.length
            start.shared = match.stated.pages
        if match and (start.moved or start.reads):
            far = start.length
            match = Found(match.tokens, far, max(match.kv, far), max(match.gone, far))
        start.match = match
        if match:
            ends = max(0, len(prompt) - s.spare), match.kv
            size, branch = (length // s.unit * s.unit for length in ends)
            distance = -(-s.placed // s.unit) * s.unit or len(prompt) + 1
            more = dict.fromkeys(range(distance, size + 1, distance), "every") if s.lanes else {}
            more |= {branch: "branch", size: "prompt"} if s.lanes else {}
            start.wants = sorted({**more, **dict(start.asked)}.items())

    def from_host(self, start: Start) -> Start | None:
        """Returns the start that the same request has from host memory; None if the device has a state as long."""
        if not (self.below and start.prompt):
            return None
        match = self.find(start.prompt, start.salt)
        serving = self.serving(start.talk, start.prompt, start.salt) if start.talk else []
        known = max(match.length, serving[0].length if serving else 0)
        hit = self.below.find(start.prompt, start.salt, match, known)
        if not hit:
            return None
        shared = [0] * self.pages_for(hit.length)
        return replace(start, hit=hit, match=match, origin=None, length=0, moved=(), shared=shared, wants=start.asked)

    def _bring_up(self, starts: Sequence[Start]) -> None:
        """Loads states and KV of starts from host memory into the cache, and changes these into starts from the cache.

        A state that is in the cache by now is not loaded.
        """
        if not self.below:
            return
        self.free_some_holders(len({start.hit.state.key for start in starts if start.hit}))
        for start in starts:
            if start.hit and self.find(start.prompt or (), start.salt).length >= start.hit.length:
                start.taken = False
                self._start_cached(start)
        promoted = [start for start in starts if start.hit]
        if not promoted:
            return
        registers, brought, ids, pages = [], [], [], []
        distinct = {start.hit.state.key: start for start in promoted if start.hit}
        for start in sorted(distinct.values(), key=lambda start: start.hit.length if start.hit else 0):
            assert start.hit and start.prompt
            state, had, fresh = self.plant(start.prompt[: start.hit.length], start.salt)
            registers.append(state.register)
            brought.append(start.hit)
            ids += fresh
            pages += start.hit.pages[had - start.hit.first :] if fresh else []
        self.below.bring(registers, brought, ids, pages)
        for start in promoted:
            assert start.hit and start.match and start.prompt
            more = start.hit.length - start.match.length
            self.below.figures[f"{'storage' if start.hit.state.fetched else 'host'} hit"] += more
        for start in promoted:
            length = start.hit.length if start.hit else 0
            self._start_cached(start)
            assert start.length == length

    def _start_cached(self, start: Start) -> None:
        """Changes a start from host memory into a start from the cache."""
        hit, lease = start.hit, start.lease
        assert hit and lease and self.below
        start.hit = None
        self._go_on_from(start, self.find(start.prompt or (), start.salt))
        self._hold([start])
        self.below.hold(hit, -1)
        self.leases.remove(lease)

    def _hold(self, starts: Sequence[Start]) -> None:
        """Leases and pins the states and KV of the starts, so that they are not evicted to make room.

        Of the pages of a session, only those that its turn uses stay leased.
        """
        for start in starts:
            if start.hit and start.match and self.below:
                self.below.hold(start.hit)
                self.leases.append(lease := Lease(start.match.reached, start.salt))
                start.lease = lease
            elif start.match:
                kept = start.talk.lease if start.talk else None
                start.lease = Lease(start.match.stated, start.salt)
                if kept:
                    self.leases.remove(kept)
                if kept and (start.moved or start.reads):
                    start.lease = Lease(self.up(kept.entry, start.length), start.salt)
                if start.talk:
                    start.lease.own = start.talk.own
                self.leases.append(start.lease)
            elif start.parked and start.talk and start.talk.lease:
                self.leases.remove(start.talk.lease)
            if not start.hit and (state := self._read(start)):
                self.pins[state.register] += 1

    @staticmethod
    def _read(start: Start) -> Kept | None:
        if start.reads or start.hit:
            return start.reads
        return start.origin if start.match and start.match.stated and isinstance(start.origin, Kept) else None

    def _unpin(self, start: Start) -> None:
        if state := self._read(start):
            self.pins[state.register] -= 1
            if start.reads and state.dropped and not self.pins[state.register]:  # the last fork has copied it
                self._forget([state])
                self.free_holders.append({state.register})

    def _demand(self, starts: Sequence[Start]) -> tuple[int, int]:
        """Returns the numbers of pages and slots that starts need. Sets `taken` of starts that take over a slot."""
        each = 1 + self.settings.lanes_at_admission
        pages = sum(max(0, self.pages_for(start.size) - len(start.shared)) - self.surplus(start)[1] for start in starts)
        pages += sum(not page for start in starts if start.parked for page in start.shared)
        slots = sum(max(0, each - len(start.moved)) - self.surplus(start)[0] for start in starts)
        users = Counter(start.hit.state.key for start in starts if start.hit)
        slots += len(users)
        pages += len({item.key for start in starts if start.hit for item in start.hit.pages})
        short = slots - self.free_count - self.ready_to_go
        for start in starts:
            state = self._read(start)
            alone = users[start.hit.state.key] == 1 if start.hit else state and self.pins[state.register] == 1
            alone = alone and not start.reads
            start.taken = bool(short > 0 and alone)
            short -= start.taken
        return pages, slots - sum(start.taken for start in starts)

    def weigh(self, starts: Sequence[Start]) -> tuple[tuple[int, int], tuple[int, int], int]:
        """Returns (pages, slots) needed, (pages, slots) available, and the number of snapshots that can be dropped.

        States and KV that the starts use do not count as available.
        """
        self.starting = [start.talk for start in starts if start.talk]
        self._hold(starts)
        need = self._demand(starts)
        self.holders_left = sum(map(len, self.free_holders)) + self.ready_to_go
        room = self.free_pages + self.pages_ready_to_go, self.free_count + self.ready_to_go
        numbers = need, room, self.evictable
        for start in starts:
            self._unpin(start)
            if start.lease:
                self.leases.remove(start.lease)
                if start.hit and self.below:
                    self.below.hold(start.hit, -1)
                elif start.talk and start.talk.lease:
                    self.leases.append(start.talk.lease)
            elif start.parked and start.talk and start.talk.lease:
                self.leases.append(start.talk.lease)
        self.starting = []
        return numbers

    def make_room(self, pages: int, slots: int) -> None:
        self.free_some_pages(pages)
        self.free_slots(slots)

    # Rows

    def admit(self, starts: Sequence[Start]) -> list[Row]:
        self.starting = [start.talk for start in starts if start.talk]
        self._hold(starts)
        self.make_room(*self._demand(starts))
        for start in starts:
            if start.talk:
                self.give_back(start)
            elif start.away:
                start.talk = start.away
                if start.talk.kept:
                    self.give_way(start.talk)
                if start.lease:
                    start.lease.own = start.talk.own
        self._bring_up(starts)
        rows = self.start(starts)
        for row, start in zip(rows, starts, strict=True):
            if start.lease and start.match:
                row.lease = start.lease
                self._unpin(start)
                if start.taken and (state := self._read(start)):
                    del self.kept[state.register]
                    self.free_holders.append({state.register})
                self.use(start.match, start.lease)
            elif start.reads:
                self._unpin(start)
        return rows

    def start(self, starts: Sequence[Start]) -> list[Row]:
        """Starts requests in the lowest free rows, with slots and pages. Returns the rows."""
        s = self.settings
        rows = [
            Row(number, self.generation[number], start.name)
            for number, start in zip(self.free_rows, starts, strict=False)
        ]
        assert len(rows) == len(starts)
        for row, start in zip(rows, starts, strict=True):
            self.rows[row.number] = row
            missing = sum(not page for page in start.shared)
            self.page_users.update(filter(None, start.shared))
            fresh = iter([page for page in range(1, s.pages + 1) if not self.page_users[page]][:missing])
            self.page_users -= Counter(filter(None, start.shared))
            self.append_pages(row, [page or next(fresh) for page in start.shared])
            self.add_pages(row, max(0, self.pages_for(start.size) - len(start.shared)))
        for row, start in zip(rows, starts, strict=True):
            if start.taken and start.match and start.match.stated:
                state = self.give_up(start.match.stated)
                state.dropped = True
                self.record_moves([(row.live, state.register)])
            if start.talk:
                self.begin_turn(row, start.talk, start)
                if (start.moved or start.reads) and start.lease:
                    self.shorten(start.lease, start.length)
        self.record_claims(
            [row.live + k for row, one in zip(rows, starts, strict=True)
             for k in range(one.taken or len(one.moved), 1 + s.lanes_at_admission)]
        )  # fmt: skip
        copies, direct = [], []
        for row, start in zip(rows, starts, strict=True):
            register = self._restore(row, start)
            if register and s.direct:
                row.source = register
                direct.append((row, register))
            elif register:
                copies.append((row.live, register))
            row.coming = [(at, kind) for at, kind in start.wants if at > start.length]
            row.floor = row.tracked = row.confirmed = start.length
            row.until = len(start.prompt or ())
            if start.prompt and (start.match or start.talk or start.parked):
                row.longest = len(start.prompt)
            if (start.match or start.parked) and start.prompt:
                row.tracked = max(row.tracked, len(start.prompt))
            elif isinstance(origin := start.origin, Row):
                row.tracked = max(row.tracked, origin.tracked)
            for column in ("tracked", "source"):
                self.record_write(column, row.number, getattr(row, column))
        fresh = [row.live for row, start in zip(rows, starts, strict=True) if not (start.length or start.origin)]
        self.record_zeros(fresh)
        for row, register in direct:
            self.pin(row, register)
        self.record_copies(copies)
        of = [start.origin for start in starts if isinstance(start.origin, Row)]
        self.record_rows([row.number for row in rows], [origin.number for origin in of])
        for row, origin in zip(rows, of, strict=False):
            row.tail = origin.tail
            row.pending = origin.pending
            if row.pending:
                self.record_write("pending", row.number, row.pending)
        going = [(start.parked, row) for start, row in zip(starts, rows, strict=True) if start.parked]
        for one, row in going:
            self.leases.append(lease := Lease(None, one.salt, row.talk.own if row.talk else {}))
            row.lease = lease
        if going and self.below:
            self.below.parking.load(going)
        return rows

    def _restore(self, row: Row, start: Start) -> int:
        """Sets prompt and text of a row. Returns the register that it first reads or copies; 0 for none."""
        origin, length = start.origin, start.length
        row.prompt, row.given = start.prompt, start.given
        if origin:
            row.text = origin.text[:length]
        elif start.moved and not start.reads:
            row.text = start.moved[0].text
        elif start.parked:
            row.text, row.tail = start.parked.text, start.parked.memory
        if row.prompt and length:
            assert row.text == row.prompt[:length], "another prefix"
        if not origin or start.taken:
            return 0
        return origin.register if isinstance(origin, Kept) else origin.source or origin.live

    def fork(
        self, groups: Sequence[tuple[Row, Sequence[object]]], holders: Sequence[int], gone: Sequence[Row] = ()
    ) -> tuple[list[Row], list[tuple[int, int]]]:  # fmt: skip
        """Forks rows, and ends others first. Returns the new rows, and (to, of) for each page to copy.

        groups: (row, names of its forks). holders: for each group, the register to which memstate has moved the state
        of the row, if it has moved it.
        """
        need = self.needs_to_fork(groups, gone)
        self.make_room(*need)
        self.end(gone, None, [row.confirmed for row in gone])
        shared = [self._share(row, holder) for (row, _), holder in zip(groups, holders, strict=True)]
        kept = {row: self.pages_for(self.floor(self.length(row))) for row, _ in groups}
        of = [row for row, names in groups for _ in names]
        names = [name for _, names in groups for name in names]
        starts = [
            Start(name, length := self.length(row), origin=row, length=length, shared=row.pages[: kept[row]])
            for name, row in zip(names, of, strict=True)
        ]
        rows = self.start(starts)
        copies = []
        for new, row, start in zip(rows, of, starts, strict=True):
            new.prompt, new.taste = row.prompt, row.taste
            new.given = row.given[: self.nameable(start.length)]  # its later tokens may differ from the prompt
            if row.lease:
                self.leases.append(lease := Lease(row.lease.entry, row.lease.salt))
                new.lease = lease
            if self.pages_for(start.length) > kept[row]:
                copies.append((new.pages[kept[row]], row.pages[kept[row]]))
        for one in shared:
            if one:
                one.dropped = True  # the last row that reads it releases it
        return rows, copies

    def needs_to_fork(
        self, groups: Sequence[tuple[Row, Sequence[object]]], gone: Sequence[Row] = ()
    ) -> tuple[int, int]:
        """Returns the numbers of pages and slots that forks need beyond those of the rows that end first."""
        n = sum(len(names) for _, names in groups)
        pages = sum(self.partial(row) * len(names) for row, names in groups)
        slots = n * (1 + self.settings.lanes_at_admission) + sum(map(self.shares_live, dict(groups)))
        held = Counter(page for row in gone for page in row.pages)
        reads = Counter(row.source for row in gone if row.source)
        slots -= sum(row.live + part in self.held for row in gone for part in range(3))
        slots -= sum(self.kept[one].dropped and self.pins[one] == times for one, times in reads.items())
        return pages - sum(self.page_users[page] == times for page, times in held.items()), slots

    def partial(self, row: Row) -> int:
        """Returns the number of pages that a fork of a row copies."""
        return self.pages_for(length := self.length(row)) - self.pages_for(self.floor(length))

    def shares_live(self, row: Row) -> bool:
        """Says whether a fork moves the live state of a row to a holder."""
        return self.settings.direct and not row.source

    def _share(self, row: Row, holder: int) -> Kept | None:
        """Moves the live state of a row to a holder, which its forks read. Returns the holder; None for a mark."""
        if not self.shares_live(row):
            return None
        self.free_some_holders(1)
        if row.end:
            self.keep_marks([Mark(0, row, 0, *row.end[:2])])
            row.floor = row.end[0]
            row.end = None
            return None
        shared = self.hold(holder, label := self.in_state(row), row.text[:label])
        self.record_moves([(holder, row.live)])
        self.record_claims([row.live])
        row.source = holder
        self.record_write("source", row.number, holder)
        self.pin(row, holder)
        return shared

    def keep(self, rows: Sequence[Row], bounds: Sequence[int], keys: Sequence[Text], ended: bool) -> list[Kept | None]:
        """Gives KV and the newest snapshot of each row to the cache. bounds: confirmed length of each row."""
        if not self.settings.prefix:
            return [None] * len(rows)
        offers = []
        last = []
        for row, bound, key in zip(rows, bounds, keys, strict=True):
            known = self.floor(min(bound, len(key)))
            for kept, _ in [one for one in row.marks if one[0].length <= min(bound, len(key))]:
                row.marks = [one for one in row.marks if one[0] is not kept]
                pages = row.pages[: kept.length // self.settings.page_size]
                offers.append((row, key[: kept.length], pages, kept.register, kept, False))
            register = 0 if ended and self.to_talk(row) else self.answer(row, known, ended)
            decoded = not row.end or row.end[0] != self.known.get(register)
            offers.append((row, key[:known], row.pages[: known // self.settings.page_size], register, None, decoded))
            last.append(len(offers))
        states = [self.insert(*offer) for offer in offers]
        self.trim()
        there = [entry.state for entry in self.stated]
        states = [one if one in there else None for one in states]
        return [
            next((one for one in reversed(states[first:end]) if one), None)
            for first, end in zip([0, *last], last, strict=False)
        ]

    def end(
        self, rows: Sequence[Row], registers: Sequence[int] | None, bounds: Sequence[int],
        keys: Sequence[Text] | None = None,
    ) -> list[Kept | None]:  # fmt: skip
        """Ends rows. Returns the published snapshot of each, or None.

        registers: holders for rows that publish a handle; None: no row does. keys: if given, rows publish to the cache
        and their session; the tokens of each row.
        """
        kept: list[Kept | None] = [None] * len(rows)
        self.unpin(rows)
        if keys is not None:
            kept = self.keep(rows, bounds, keys, ended=True)
        elif registers is not None:
            kept = self.publish(rows, bounds, registers, ended=True)
        for i, row in enumerate(rows):
            if row.talk:
                self.end_turn(row, row.talk, bounds[i] if keys is not None else row.confirmed, keys and keys[i])
        self.record_releases([row.live + k for row in rows for k in range(3)])
        for row in rows:
            if row.lease:
                self.end_lease(row.lease)
        marked = [row for row in rows if row.marks]
        for row in rows:
            for at in range(len(row.pages)):
                self.record_write("page", row.number, 0, at)
            self.page_users -= Counter(row.pages)
            del self.rows[row.number]
            self.generation[row.number] += 1
        self.end_marks(marked)
        for row in rows:
            for column in self.columns.keys() - {"tracked"}:  # the next request of the row writes its own
                self.record_write(column, row.number, 0)
        return kept

    # Marks: which states inside prompts a step keeps, and what holds each of them until `publish`

    def lengths(self, length: int, reach: int, origin: int) -> list[int]:
        """Returns the lengths in length + 1 .. reach that fill whole pages and where a forward can store a state."""
        grid, page = self.settings.grid, self.settings.unit
        inside = [n for n in range(length + 1, reach) if grid and (origin + n - length) % grid == 0]
        return [n for n in (*inside, reach) if n % page == 0]

    def due_marks(self, batch: Sequence[tuple[Row | None, int, int]]) -> list[Mark]:
        """Returns the marks of a step. batch: (row, tokens, drafts) of each entry.

        The state at the end of a chunk stays live at first, and the next step of the row keeps it. In two cases it does
        not: the forward stores the state itself, or the tokens of the step go into the tail.
        """
        marks, start = [], 0
        for at, (row, tokens, drafts) in enumerate(batch):
            if row is None:
                continue
            length, n = self.length(row), 0 if self.unsure(row) else tokens - drafts
            reach, floor = length + n, row.floor
            there = self.lengths(length, reach, start if self.settings.packed else 0)
            if self.fold(row, tokens, drafts).newest:
                there = [one for one in there if one < reach]
            if row.end:
                was, kind, goal = row.end
                row.end = None
                nearer = any(one <= goal for one in there)
                if was == goal or (not nearer and (goal <= reach or goal - was < self.finest)):
                    marks.append(Mark(at, row, 0, was, kind))
                    row.floor = max(row.floor, was)
            # whether the forward itself stores the state at the end of the chunk
            stored = self.settings.grid and not self.settings.direct and n > 1
            for wanted, kind in list(row.coming) if n else ():
                best = max((one for one in there if one <= wanted), default=0)
                gains = best - row.floor >= self.settings.unit
                if wanted > reach and not self._before(row, reach, wanted, bool(stored)):
                    break
                if gains and best == reach and not stored:
                    row.end = best, kind, wanted
                elif gains:
                    marks.append(Mark(at, row, best - length, best, kind))
                if gains and not (wanted > reach and best == reach and not stored):
                    row.floor = best
                if wanted > reach:
                    break
                row.coming.remove((wanted, kind))
                self.missed += wanted - row.floor >= self.finest
            assert row.floor >= floor
            start += tokens
        return marks

    @property
    def finest(self) -> int:
        """Smallest distance of two marks in one chunk: a multiple of the grid that fills whole pages."""
        return next(
            n for n in itertools.count(self.settings.unit, self.settings.unit) if n % (self.settings.grid or 1) == 0
        )

    def _before(self, row: Row, reach: int, wanted: int, stored: bool) -> bool:
        """Says whether a chunk that ends before a wanted length keeps the state at its end in place of that one."""
        page, grid = self.settings.unit, self.settings.grid
        soon = wanted < reach + self.finest
        if wanted == row.until:
            return False  # a chunk always ends at the end of the prompt
        if all((reach + n * grid) % page for n in range(page)):  # no state of the next chunk fills whole pages
            return soon or not self.settings.packed
        return reach % page == 0 and (soon or not stored)

    def left_for_marks(self, limit: int) -> int:
        return min(sum(map(len, self.free_holders)), self.free_count - self.settings.reserve, limit)

    def choose_marks(self, marks: list[Mark], limit: int) -> list[Mark]:
        """Evicts states to make room for marks, and returns the marks that can be kept."""
        wanted = min(len(marks), limit)
        if self.settings.prefix and self.settings.evict:
            self.evict_states(
                max(self.settings.reserve + wanted - self.free_count, wanted - sum(map(len, self.free_holders)))
            )
        if len(marks) <= self.left_for_marks(limit):
            return marks
        order = sorted(marks, key=lambda mark: (RANKS.get(mark.kind, 4), -mark.length))
        chosen = order[: max(0, self.left_for_marks(limit))]
        self.refused += len(marks) - len(chosen)
        return [mark for mark in marks if mark in chosen]

    def keep_marks(self, marks: Sequence[Mark]) -> list[tuple[Mark, Kept]]:
        """Gives each mark a holder and a slot. Returns the marks that the forward will store, with their snapshots."""
        pairs = []
        for mark in marks:
            row, n = mark.row, mark.length
            kept = self.hold(self.next_holder(n), n, row.text[:n], owner="mark")
            row.marks.append((kept, mark.kind))
            pairs.append((mark, kept))
        self.published += len(pairs)
        ends = [(mark.row, kept) for mark, kept in pairs if not mark.offset]
        if ends and self.settings.direct:
            self.record_moves([(kept.register, row.live) for row, kept in ends])
            self.record_claims([row.live for row, _ in ends])
            for row, kept in ends:
                row.source = kept.register
                self.record_write("source", row.number, kept.register)
                self.pin(row, kept.register)
        elif ends:
            self.record_claims([kept.register for _, kept in ends])
            self.record_copies([(kept.register, row.live) for row, kept in ends])
        inside = [(mark, kept) for mark, kept in pairs if mark.offset]
        self.record_claims([kept.register for _, kept in inside])
        self.record_labels([(kept.register, kept.length) for _, kept in inside])
        return inside

    def keep_ends(self, rows: Sequence[Row], bounds: Sequence[int]) -> None:
        """Keeps the live state of each row if it is a mark, because the row publishes before its next step."""
        marks = []
        for row, bound in zip(rows, bounds, strict=True):
            if row.end and row.end[0] == row.end[2] <= bound and not row.talk:
                marks.append(Mark(0, row, 0, *row.end[:2]))
                row.end = None
        if marks:
            self.keep_marks(self.choose_marks(marks, 2**31 - 1))

    def arrived_at(self, row: Row) -> None:
        """If a mark is wanted at the length of a state that has arrived, notes that the live state is this mark."""
        length = row.confirmed
        if kinds := [kind for at, kind in row.coming if at == length]:
            row.floor, row.end = length, (length, kinds[0], length)

    def strictly_publishable(self, rows: Sequence[Row], bounds: Sequence[int]) -> bool:
        """Says whether each row has a state to publish, and there are holders and slots for all of them."""
        left = sum(map(len, self.free_holders))
        ends = [
            row
            for row, bound in zip(rows, bounds, strict=True)
            if row.end and row.end[0] == row.end[2] <= bound and not row.talk
        ]
        if ends and len(ends) > min(left, self.free_count - self.settings.reserve):
            return False
        rest = []
        for row, bound in zip(rows, bounds, strict=True):
            if row not in ends and not self.marked(row, bound, ended=False):
                rest.append(bool(self.answer(row, bound, ended=False)))
        return all(rest) and len(rest) + len(ends) <= left

    def end_marks(self, rows: Sequence[Row]) -> None:
        """Drops those marks of rows that were not published."""
        for row in rows:
            if row.marks:
                self.drop([kept for kept, _ in row.marks])
            row.marks, row.coming, row.end = [], [], None
