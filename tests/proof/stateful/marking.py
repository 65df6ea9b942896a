"""Marks: states of prompts, kept inside of a chunk or at its end, and who holds them until they are published."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from tests.proof.stateful.rows import Kept, Row
from tests.proof.stateful.talking import Talking

RANKS = {"named": 0, "branch": 2, "prompt": 3}


class Mark(NamedTuple):
    """offset: tokens of the step up to it; 0: the state before the step."""

    entry: int
    row: Row
    offset: int
    length: int
    kind: str


class Marking(Talking):
    """Which states of prompts a step keeps."""

    def lengths(self, length: int, reach: int, origin: int) -> list[int]:
        """Where a forward has states in length + 1 .. reach, as far as they fill pages."""
        grid, page = self.settings.grid, self.settings.page_size
        inside = [n for n in range(length + 1, reach) if grid and (origin + n - length) % grid == 0]
        return [n for n in (*inside, reach) if n % page == 0]

    def due_marks(self, batch: Sequence[tuple[Row | None, int]]) -> list[Mark]:
        """What a step of so many tokens of each row keeps. A row's last state stays live, and is kept by its next step,
        unless the forward stores it.
        """
        found, start = [], 0
        for at, (row, n) in enumerate(batch):
            if row is None or row.finished:
                continue
            length = self.length(row)
            reach, floor = length + n, row.floor
            there = self.lengths(length, reach, start if self.settings.packed else 0)
            if row.end:
                was, kind, goal = row.end
                row.end = None
                nearer = any(one <= goal for one in there)
                if was == goal or (not nearer and (goal <= reach or goal - was < self.finest)):
                    found.append(Mark(at, row, 0, was, kind))
                    row.floor = max(row.floor, was)
            stored = self.settings.grid and not self.settings.direct and n > 1  # by the step itself
            for wanted, kind in list(row.coming) if n else ():
                best = max((one for one in there if one <= wanted), default=0)
                gains = best - row.floor >= self.settings.page_size
                if wanted > reach and not self._before(row, reach, wanted, bool(stored)):
                    break
                if gains and best == reach and not stored:
                    row.end = best, kind, wanted
                elif gains:
                    found.append(Mark(at, row, best - length, best, kind))
                if gains and not (wanted > reach and best == reach and not stored):
                    row.floor = best
                if wanted > reach:
                    break
                row.coming.remove((wanted, kind))
                self.missed += wanted - row.floor >= self.finest
            assert row.floor >= floor
            start += n
        return found

    @property
    def finest(self) -> int:
        """Tokens between two lengths that a forward has and that fill pages, in a chunk that begins with one."""
        return next(
            n
            for n in itertools.count(self.settings.page_size, self.settings.page_size)
            if n % (self.settings.grid or 1) == 0
        )

    def _before(self, row: Row, reach: int, wanted: int, stored: bool) -> bool:
        """Whether a chunk that ends before the length wanted has something to keep for it."""
        page, grid = self.settings.page_size, self.settings.grid
        soon = wanted < reach + grid
        if wanted == len(row.prompt or ()):
            return False  # where a chunk ends
        if all((reach + n * grid) % page for n in range(page)):  # the next one is off the pages
            return soon or not self.settings.packed
        return reach % page == 0 and (soon or not stored)

    def left_for_marks(self, limit: int) -> int:
        return min(sum(map(len, self.free_holders)), self.free_count - self.settings.reserve, limit)

    def choose_marks(self, marks: list[Mark], limit: int) -> list[Mark]:
        """Those that find room, and what has to go for them."""
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
        """Registers and slots for them; returns those that the forward stores."""
        pairs = []
        for mark in marks:
            row, n = mark.row, mark.length
            kept = self.hold(self.next_holder(n), n, (), row.truth.get(n, ()), row.text[:n], "mark")  # type: ignore[arg-type]
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
        """Live states at marks, of rows that publish before their next step."""
        marks = []
        for row, bound in zip(rows, bounds, strict=True):
            if row.end and row.end[0] == row.end[2] <= bound and not row.talk:
                marks.append(Mark(0, row, 0, *row.end[:2]))
                row.end = None
        if marks:
            self.keep_marks(self.choose_marks(marks, 2**31 - 1))

    def arrived_at(self, row: Row) -> None:
        """A state that arrives at a mark is to be kept."""
        length = row.confirmed
        if kinds := [kind for at, kind in row.coming if at == length]:
            row.floor, row.end = length, (length, kinds[0], length)

    def strictly_publishable(self, rows: Sequence[Row], bounds: Sequence[int]) -> bool:
        """Whether each row has something to publish, and what that takes is free."""
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
        """What nobody was given."""
        for row in rows:
            if row.marks:
                self.drop([kept for kept, _ in row.marks])
            row.marks, row.coming, row.end = [], [], None
