"""Keeps the lengths of prompts at which states are kept (*marks*), and these states until they are handed out.

The tokens of a prompt are known before the step that computes them. So the host decides which states a step keeps, and
claims a register of its own for each state. A state is real as soon as its step has run. This file knows no slot.

word       what it names                                                         since
wanted     lengths that a request asks for, ascending                            admission
due        wanted lengths that a step reaches, moved down to what the forward    plan
           can give
kept       the states at these lengths                                           plan, until publish or the end
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, count
from math import gcd, lcm
from typing import NamedTuple

import numpy as np

from memstate import logs
from memstate.checks import is_count, shown
from memstate.errors import InvalidArgument
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.requests.handles import Snapshot
from memstate.requests.holdings import Holdings, Marked
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import Longs

LOG = logs.logger("marks")
RANKS = ("named", "again", "branch", "prompt")  # kinds of marks, the most valuable first; others come last


class Mark(NamedTuple):
    """A state that a step keeps.

    Attributes:
        entry: entry of the batch.
        row: row of this entry.
        offset: tokens of the step up to the mark. 0: the state before the step.
        length: tokens that the state stands for.
        kind: why the state is kept; see `memstate.prefix.policies.base.Place`.
    """

    entry: int
    row: int
    offset: int
    length: int
    kind: str


@dataclass
class _Coming:
    """The wanted lengths that a row has not reached yet.

    Attributes:
        wanted: (length, kind) of each, ascending.
        floor: tokens of the newest state that the row has kept or started from.
        prompt: length of the prompt, where a chunk ends in any case; 0 if the length is not known.
    """

    wanted: list[tuple[int, str]]
    floor: int
    prompt: int = 0


class _End(NamedTuple):
    """A live state that is to be kept.

    Attributes:
        length: tokens that the state stands for.
        kind: why the state is kept.
        wanted: the wanted length that the state is kept for. If `wanted` is larger than `length`, the next chunk may
            give a state closer to it.
    """

    length: int
    kind: str
    wanted: int


class Marks:
    """Decides which states of prompts are kept, and holds them by row.

    Args:
        commands: records the changes of owners.
        holdings: gives holders.
        unit: the length of a kept state is a multiple of this number of tokens: whole pages.
        grid: the forward can give a state at multiples of this number of tokens inside a chunk; 0: only at its end.
        packed: whether multiples of `grid` count from the start of the batch, not from the start of the row's chunk.
        direct_hits: whether a step can read another slot than it writes, so that no state is copied.

    Attributes:
        refused: number of marks without a slot or a holder since the start.
        missed: number of wanted lengths, since the start, for which no chunk could give a state at a length near them.
        kept: row -> its states at marks, until they are handed out.
    """

    def __init__(
        self, commands: CommandBuffer, holdings: Holdings, unit: int, grid: int, packed: bool, direct_hits: bool
    ) -> None:
        self._commands, self._file, self._holdings = commands, commands.registers, holdings
        self._page, self._grid, self._packed, self._direct_hits = unit, grid, packed and grid > 1, direct_hits
        self._stores_ends = grid > 0 and not direct_hits
        self._finest = lcm(unit, max(1, grid))
        self.refused = self.missed = 0
        self.reset()

    def reset(self) -> None:
        """Forgets all marks and states. Call it only where registers are reset as well."""
        self._coming: dict[int, _Coming] = {}
        self._ends: dict[int, _End] = {}  # row -> its live state, if that is to be kept
        self.kept: dict[int, list[Snapshot]] = {}

    def start(self, row: int, wanted: Sequence[tuple[int, str]], length: int, prompt: int = 0) -> None:
        """Notes the wanted lengths of a new row.

        Args:
            row: number of the row.
            wanted: (length, kind) of each, ascending. Lengths are multiples of the unit.
            length: tokens of the state that the row starts from.
            prompt: length of the prompt, 0 if it is not known.
        """
        if left := [(at, kind) for at, kind in wanted if at > length]:
            self._coming[row] = _Coming(left, length, prompt)

    def add(self, row: int, lengths: Sequence[int], length: int, prompt: int) -> None:
        """Notes more wanted lengths of a running row.

        Args:
            row: number of the row.
            lengths: the wanted lengths, multiples of the unit.
            length: length of the row.
            prompt: length of the prompt.
        """
        coming = self._coming.get(row, _Coming([], 0, prompt))
        if new := [(at, "named") for at in lengths if at > length]:
            self._coming[row] = replace(coming, wanted=sorted((dict(new) | dict(coming.wanted)).items()))

    def arrived(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Notes the lengths of states that arrived in live slots. A state of a wanted length is to be kept."""
        for row, length in zip(rows, lengths, strict=True) if self._coming else ():
            if (coming := self._coming.get(row)) and (kind := dict(coming.wanted).get(length)):
                coming.floor, self._ends[row] = length, _End(length, kind, length)

    def end(self, rows: Iterable[int]) -> None:
        """Forgets rows that have ended, and drops their states that were not handed out."""
        if self._coming or self._ends or self.kept:
            for row in rows:
                self._coming.pop(row, None)
                self._ends.pop(row, None)
                if kept := self.kept.pop(row, None):
                    self._holdings.end(kept)

    @property
    def awaited(self) -> bool:
        """Whether a plan can find a mark."""
        return bool(self._coming or self._ends)

    @property
    def rows(self) -> set[int]:
        """Rows that have not reached a wanted length, or have states at marks."""
        return self._coming.keys() | self._ends.keys() | self.kept.keys()

    def next(self, row: int, length: int) -> int:
        """Returns the row's next wanted length above `length` that a chunk must end at; 0 for none."""
        if (coming := self._coming.get(row)) is None:
            return 0
        if self._grid and not self._packed and length % gcd(self._page, self._grid) == 0:
            return 0  # the grid meets page ends inside the chunk, so the chunk need not end at a mark
        return next((at for at, _ in coming.wanted if at > length), 0)

    def chunk(self, row: int, length: int, end: int, prompt: int) -> int:
        """Returns the length at which a chunk should end, so that the forward can give the wanted states.

        Args:
            row: number of the row.
            length: length of the row.
            end: largest length at which the chunk can end.
            prompt: length of the prompt.
        """
        whole = end // self._page * self._page
        if row not in self._coming:
            return end
        if length < (wanted := self.next(row, length)) <= end:
            return wanted
        return whole if length < whole and end < prompt else end

    def due(
        self, rows: Longs, before: Longs, after: Longs, tokens: Longs | None = None, label: Longs | None = None
    ) -> list[Mark]:
        """Returns the marks of a step, in the order of its entries, then of lengths.

        A wanted length moves down to the nearest length at which the forward can give a state. The mark is left out if
        its state is less than a page beyond the row's last kept state. A state at the end of the step stays in the row
        until the next step, which then has a mark at offset 0, unless the next step comes closer to the wanted length.
        If steps cannot read another slot than they write, the forward stores the state at the end as it stores the
        others. A step of one token stores no state at a mark, so that the graphs of decode need no marks.

        Args:
            rows: row of each entry; 0 for padding.
            before: length of each entry before the step.
            after: length of each entry after the step.
            tokens: tokens of each entry in the packed batch; None: `after - before`.
            label: for each entry, the largest length whose state is in a slot after the step; the tokens from there to
                `after` are in a tail. None: `after`.
        """
        marks: list[Mark] = []
        numbers, awaited = rows.tolist(), self._coming.keys() | self._ends.keys()
        entries = list(compress(count(), map(awaited.__contains__, numbers)))  # a batch is large, and few rows wait
        if not entries:
            return marks
        sizes, labels = after - before if tokens is None else tokens, after if label is None else label
        origins = np.cumsum(sizes) - sizes if self._packed else np.zeros_like(sizes)  # where entries start in the batch
        columns = [column[entries].tolist() for column in (rows, before, after, origins, labels)]
        for entry, row, length, reach, origin, stands in zip(entries, *columns, strict=True):
            most = reach - (stands < reach)
            if (end := self._ends.pop(row, None)) is not None and self._stays(end, reach, most, origin):
                marks.append(self._at_end(row, end, entry))
            if reach > length and (coming := self._coming.get(row)) is not None:
                marks += self._due(entry, row, coming, length, reach, most, origin)
                if not coming.wanted:
                    del self._coming[row]
        return marks

    def _stays(self, end: _End, reach: int, most: int, origin: int) -> bool:
        """Returns whether a live state is kept: not if the next chunk gives a state nearer to the wanted length.

        Args:
            end: the live state.
            reach: length at which the next chunk ends.
            most: largest length at which the next chunk has a state in a slot.
            origin: token of the packed batch at which the next chunk begins; 0 if the grid counts from the chunk.
        """
        if end.length == end.wanted:
            return True
        if self._give(min(end.wanted, most), end.length, reach, origin, end.length):
            return False
        return end.wanted <= reach or end.wanted < end.length + self._finest

    def _due(
        self, entry: int, row: int, coming: _Coming, length: int, reach: int, most: int, origin: int
    ) -> list[Mark]:
        marks: list[Mark] = []
        stores_end = self._stores_ends and reach - length > 1
        while coming.wanted:
            wanted, kind = coming.wanted[0]
            at = self._give(min(wanted, most), length, reach, origin, max(coming.floor, length))
            if wanted > reach and not self._keeps_before(wanted, reach, stores_end, coming.prompt):
                break
            if at - coming.floor >= self._page:
                if at < reach or stores_end:
                    marks.append(Mark(entry, row, at - length, at, kind))
                    coming.floor = at
                else:
                    self._ends[row] = _End(at, kind, wanted)
                    coming.floor = at if at == wanted else coming.floor
            if wanted > reach:
                break
            if wanted - coming.floor >= self._finest:  # no chunk has ended near it; the log has the first case
                if not self.missed:
                    why = "the forward gives no state near it: plan chunks as mem.chunk() says, or say Forward(grid=)"
                    logs.event(LOG, logging.WARNING, "missed", row=row, wanted=wanted, chunk=[length, reach], why=why)
                self.missed += 1
            del coming.wanted[0]
        return marks

    def _keeps_before(self, wanted: int, reach: int, stores_end: bool, prompt: int) -> bool:
        """Returns whether a chunk keeps a state for a wanted length beyond the end of the chunk.

        Args:
            wanted: the wanted length.
            reach: length at which the chunk ends.
            stores_end: whether the forward stores the state at the end now; if not, the next plan decides on it.
            prompt: length of the prompt, where a chunk ends in any case.
        """
        if wanted == prompt:
            return False
        soon = wanted < reach + self._finest  # the next chunk's grid perhaps meets no page end before `wanted`
        if reach % gcd(self._page, self._grid):  # the next chunk's grid meets no page end, unless it is packed
            return soon or not self._packed
        return reach % self._page == 0 and (soon or not stores_end)

    def _give(self, wanted: int, length: int, reach: int, origin: int, floor: int) -> int:
        """Returns the largest length in `floor + 1 .. wanted` at which the forward can give a state; 0 for none."""
        if wanted == reach and reach % self._page == 0:
            return reach
        if not self._grid:
            return 0
        at = wanted - (origin + wanted - length) % self._grid
        while at > floor and at % self._page:
            at -= self._grid
        return at if at > floor else 0

    def choose(self, marks: list[Mark], room: int) -> list[Mark]:
        """Returns the `room` most valuable marks, in their order, and counts the others as refused."""
        if len(marks) <= room:
            return marks
        ranked = sorted(marks, key=lambda mark: (_rank(mark.kind), -mark.length))
        chosen = set(ranked[: max(0, room)])
        self.refused += len(marks) - len(chosen)
        return [mark for mark in marks if mark in chosen]

    def keep(self, marks: Sequence[Mark]) -> tuple[Longs, ...]:
        """Gives each mark a holder and a slot. Call it only where a holder and a slot for each mark are free.

        For a mark at offset 0, the live slot of the row moves to the holder. The row reads it there, and gets another
        live slot. If a step cannot read another slot than it writes, the state is copied instead.

        Returns:
            Entry, offset and register of the marks whose states the forward stores, each `mark`; empty for none.
        """
        inside: list[tuple[Mark, int]] = []
        ends: list[tuple[Mark, int]] = []
        for mark in marks:
            states = self._holdings.add([mark.length], Marked(mark.row, mark.kind))
            self.kept.setdefault(mark.row, []).extend(states)
            (inside if mark.offset else ends).append((mark, states[0].register))
        self._holdings.published += len(marks)
        if ends:
            self._keep_ends([mark.row for mark, _ in ends], [register for _, register in ends])
        if not inside:
            return ()
        columns = np.array([(mark.entry, mark.offset, register) for mark, register in inside], np.int64).T
        self._commands.claim([register for _, register in inside], [mark.length for mark, _ in inside])
        return tuple(columns)

    def _keep_ends(self, rows: list[int], registers: list[int]) -> None:
        live = [REGISTERS_PER_ROW * row for row in rows]
        if not self._direct_hits:
            self._commands.claim(registers)
            self._commands.copy(registers, live)
            return
        self._commands.move(registers, live)
        self._commands.claim(live)
        self._file.source[rows] = registers
        self._commands.write(self._file.address("source", rows), registers)
        for register in registers:
            self._holdings.begin_read(register)

    def at_ends(self, rows: Sequence[int], known: Sequence[int]) -> list[int]:
        """Returns the rows whose live state is to be kept, has a wanted length, and has at most `known` tokens."""
        if not self._ends:
            return []
        pairs = zip(rows, known, strict=True)
        return [row for row, most in pairs if (end := self._ends.get(row)) and end.length == end.wanted <= most]

    def ends(self, rows: Sequence[int], known: Sequence[int], but: Collection[int] = ()) -> list[Mark]:
        """Removes the marks of the rows that `at_ends` returns, except the rows in `but`. Returns them, for `keep`."""
        return [mark for row in self.at_ends(rows, known) if row not in but for mark in self.shared(row)]

    def shared(self, row: int) -> list[Mark]:
        """Removes and returns the mark at a row's live state, if any, for `keep`, so that other rows can read it."""
        end = self._ends.pop(row, None)
        return [self._at_end(row, end)] if end else []

    def _at_end(self, row: int, end: _End, entry: int = 0) -> Mark:
        if row in self._coming:
            self._coming[row].floor = end.length
        return Mark(entry, row, 0, end.length, end.kind)

    def kind_of(self, row: int, length: int) -> str:
        """Returns why the row's live state is to be kept; "" if it is not, or has another length."""
        end = self._ends.get(row)
        return end.kind if end and end.length == length else ""

    def kind(self, state: Snapshot) -> str:
        """Returns why a state at a mark is kept; "" for other states."""
        owner = self._holdings.owner[state.register]
        return owner.kind if isinstance(owner, Marked) else ""

    def newest(self, row: int, known: int) -> Snapshot | None:
        """Returns the row's longest state of at most `known` tokens."""
        states = [state for state in self.kept.get(row, ()) if state.length <= known]
        return max(states, key=lambda state: state.length, default=None)

    def hand_over(self, row: int, known: int) -> list[tuple[int, int, str]]:
        """Takes from a row its states of at most `known` tokens: (register, length, kind) of each, ascending."""
        if taken := [state for state in self.kept.get(row, ()) if state.length <= known]:
            self._hold(row, [state for state in self.kept[row] if state.length > known])
        return [(state.register, state.length, self.kind(state)) for state in taken]

    def remove(self, row: int, state: Snapshot) -> None:
        """Takes one state at a mark from its row."""
        self._hold(row, [kept for kept in self.kept[row] if kept.register != state.register])

    def _hold(self, row: int, kept: list[Snapshot]) -> None:
        if kept:
            self.kept[row] = kept
        else:
            del self.kept[row]


def _rank(kind: str) -> int:
    return RANKS.index(kind) if kind in RANKS else len(RANKS)


def require_lengths(request: object, given: object, unit: int, prompt: int) -> list[int]:
    """Returns the lengths of `Request.snapshot_at` at which states can be kept, ascending, each once.

    Args:
        request: id of the request, for the error.
        given: the lengths that the caller gave.
        unit: each length is rounded down to a multiple of this number of tokens.
        prompt: length of the prompt; larger lengths are left out. 0: it is not known.

    Raises:
        InvalidArgument: `given` is no sequence of whole numbers from 0 on.
    """
    lengths = given.tolist() if isinstance(given, np.ndarray) else given
    if isinstance(lengths, Sequence) and not isinstance(lengths, str | bytes) and all(map(is_count, lengths)):
        return sorted({int(at) // unit * unit for at in lengths if unit <= at <= (prompt or at)})
    raise InvalidArgument(
        f"request {shown(request)}: snapshot_at={shown(lengths)}: expected lengths in tokens such as [64, 128]: whole "
        "numbers from 0 to 2**31 - 1"
    )
