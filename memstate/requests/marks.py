"""Keeps the lengths of prompts at which states are kept (*marks*), and these states until they are handed out.

The tokens of a prompt are known before the step that computes them. So the host decides which states a step keeps, and
claims a register of its own for each. A state is real as soon as its step has run. This file knows no slot.

wanted     lengths that a request asks for, ascending                 admission
due        those that a step passes, moved down to what its forward can give        plan
kept       a state for each, until publish or the end of the row
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
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
RANKS = ("named", "again", "branch", "prompt")  # what is kept first where slots are short; other kinds come last


class Mark(NamedTuple):
    """A state that a step keeps.

    Attributes:
        entry: entry of the batch.
        row: its row.
        offset: tokens of the step up to the mark. 0: the state before the step.
        length: tokens that the state stands for.
        kind: why it is kept; see `memstate.prefix.policies.base.Place`.
    """

    entry: int
    row: int
    offset: int
    length: int
    kind: str


@dataclass
class _Coming:
    """Lengths that a row still has to reach.

    Attributes:
        wanted: (length, kind), ascending.
        floor: tokens of the newest state that the row has kept or started from.
        prompt: length of the prompt, where a chunk ends in any case; 0 if it is not known.
    """

    wanted: list[tuple[int, str]]
    floor: int
    prompt: int = 0


class _End(NamedTuple):
    """A live state that is to be kept.

    Attributes:
        length: tokens that it stands for.
        kind: why it is kept.
        wanted: the length that it is kept for. If it is longer, the next chunk may come closer to it.
    """

    length: int
    kind: str
    wanted: int


class Marks:
    """Decides which states of prompts are kept, and holds them by row.

    Args:
        commands: records the changes of owners.
        holdings: gives holders.
        unit: tokens of which the length of a kept state is a multiple: whole pages.
        grid: the forward can give a state at each multiple of so many tokens inside its chunk; 0: only at the end.
        packed: whether multiples count from the start of the batch instead of the start of the row's chunk.
        direct_hits: whether a step can read another slot than it writes, so that no state is copied.

    Attributes:
        refused: marks that found no slot, since the start.
        missed: wanted lengths near which no chunk could give a state, since the start.
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
        self._ends: dict[int, _End] = {}  # rows whose live state is to be kept
        self.kept: dict[int, list[Snapshot]] = {}

    def start(self, row: int, wanted: Sequence[tuple[int, str]], length: int, prompt: int = 0) -> None:
        """Notes what a new row is to keep.

        Args:
            row: the row.
            wanted: lengths and kinds, ascending; multiples of the unit.
            length: tokens of the state that the row starts from.
            prompt: tokens of the prompt, 0 if they are not known.
        """
        if left := [(at, kind) for at, kind in wanted if at > length]:
            self._coming[row] = _Coming(left, length, prompt)

    def add(self, row: int, lengths: Sequence[int], length: int, prompt: int) -> None:
        """Notes what a row is to keep as well.

        Args:
            row: the row.
            lengths: multiples of the unit.
            length: the row's length.
            prompt: tokens of the prompt.
        """
        coming = self._coming.get(row, _Coming([], 0, prompt))
        if new := [(at, "named") for at in lengths if at > length]:
            self._coming[row] = replace(coming, wanted=sorted((dict(new) | dict(coming.wanted)).items()))

    def arrived(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Notes the lengths of states that arrived from elsewhere. One of a wanted length is to be kept."""
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
    def rows(self) -> set[int]:
        """Rows with lengths to come, or with states."""
        return self._coming.keys() | self._ends.keys() | self.kept.keys()

    def next(self, row: int, length: int) -> int:
        """Returns the row's next wanted length beyond this one that a chunk must end at; 0 for none."""
        coming = self._coming.get(row)
        if coming is None:
            return 0
        if self._grid and not self._packed and length % gcd(self._page, self._grid) == 0:
            return 0  # the chunk's grid meets pages; where a packed grid begins, the plan alone says
        return next((at for at, _ in coming.wanted if at > length), 0)

    def chunk(self, row: int, length: int, end: int, prompt: int) -> int:
        """Returns where a chunk ends best, so that the forward can give the wanted states.

        Args:
            row: the row.
            length: its length.
            end: where the chunk ends at most.
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

        A wanted length moves down to the last one that the forward can give. It is left out where that gains less than
        a page. A state at the end of the step stays in the row until its next step, which then has a mark at offset 0,
        unless the next step comes closer to the wanted length. If steps cannot read another slot than they write, the
        forward stores it as the others. A step of one token stores nothing, so that the graphs of decode need no marks.

        Args:
            rows: row of each entry; 0 for padding.
            before: length of each entry before the step.
            after: length of each entry after it.
            tokens: of each entry in the packed batch; None: those from `before` to `after`.
            label: the last length of each entry of which a slot has a state then; None: `after`. Others are in a tail.
        """
        found: list[Mark] = []
        if not (self._coming or self._ends):
            return found
        start = 0  # of the entry in the packed batch
        sizes, labels = after - before if tokens is None else tokens, after if label is None else label
        columns = [column.tolist() for column in (rows, before, after, sizes, labels)]
        for entry, (row, length, reach, size, stands) in enumerate(zip(*columns, strict=True)):
            origin = start if self._packed else 0
            most = reach - (stands < reach)
            if (end := self._ends.pop(row, None)) is not None and self._stays(end, reach, most, origin):
                found.append(self._at_end(row, end, entry))
            if reach > length and (coming := self._coming.get(row)) is not None:
                found += self._due(entry, row, coming, length, reach, most, origin)
                if not coming.wanted:
                    del self._coming[row]
            start += size
        return found

    def _stays(self, end: _End, reach: int, most: int, origin: int) -> bool:
        """Returns whether a live state is kept, now that the next chunk is known. It may come closer to what is wanted.

        Args:
            end: the live state.
            reach: where the next chunk ends.
            most: the last length at which it has a state.
            origin: token of the batch at which the next chunk begins.
        """
        if end.length == end.wanted:
            return True
        if self._give(min(end.wanted, most), end.length, reach, origin, end.length):
            return False
        return end.wanted <= reach or end.wanted < end.length + self._finest

    def _due(
        self, entry: int, row: int, coming: _Coming, length: int, reach: int, most: int, origin: int
    ) -> list[Mark]:
        found: list[Mark] = []
        stores_end = self._stores_ends and reach - length > 1
        while coming.wanted:
            wanted, kind = coming.wanted[0]
            at = self._give(min(wanted, most), length, reach, origin, max(coming.floor, length))
            if wanted > reach and not self._keeps_before(wanted, reach, stores_end, coming.prompt):
                break
            if at - coming.floor >= self._page:
                if at < reach or stores_end:
                    found.append(Mark(entry, row, at - length, at, kind))
                    coming.floor = at
                else:
                    self._ends[row] = _End(at, kind, wanted)
                    coming.floor = at if at == wanted else coming.floor
            if wanted > reach:
                break
            if wanted - coming.floor >= self._finest:  # no chunk came near; the first one is an event of the log
                if not self.missed:
                    why = "the forward gives no state near it: plan chunks as mem.chunk() says, or say Forward(grid=)"
                    logs.event(LOG, logging.WARNING, "missed", row=row, wanted=wanted, chunk=[length, reach], why=why)
                self.missed += 1
            del coming.wanted[0]
        return found

    def _keeps_before(self, wanted: int, reach: int, stores_end: bool, prompt: int) -> bool:
        """Returns whether a chunk keeps a state for a wanted length that lies behind it.

        Args:
            wanted: the wanted length.
            reach: where the chunk ends.
            stores_end: whether the decision on the state at its end is due now, and not with the next chunk.
            prompt: where a chunk ends in any case.
        """
        if wanted == prompt:
            return False
        soon = wanted < reach + self._finest  # so the next chunk's grid may meet no page in between
        if reach % gcd(self._page, self._grid):  # it meets none at all, unless it counts from elsewhere
            return soon or not self._packed
        return reach % self._page == 0 and (soon or not stores_end)

    def _give(self, wanted: int, length: int, reach: int, origin: int, floor: int) -> int:
        """Returns the largest length up to `wanted` and above `floor` that the forward can give; 0 for none."""
        if wanted == reach and reach % self._page == 0:
            return reach
        if not self._grid:
            return 0
        at = wanted - (origin + wanted - length) % self._grid
        while at > floor and at % self._page:
            at -= self._grid
        return at if at > floor else 0

    def choose(self, marks: list[Mark], room: int) -> list[Mark]:
        """Returns the most valuable marks that find room, in the same order, and counts the others as refused."""
        if len(marks) <= room:
            return marks
        ranked = sorted(marks, key=lambda mark: (_rank(mark.kind), -mark.length))
        chosen = set(ranked[: max(0, room)])
        self.refused += len(marks) - len(chosen)
        return [mark for mark in marks if mark in chosen]

    def keep(self, marks: Sequence[Mark]) -> tuple[Longs, ...]:
        """Gives each mark a register, and a slot. Call it only where so many registers and slots are free.

        The live slot of a row becomes the state at offset 0, and the row continues from it in a new slot. If its
        forward cannot read another slot, the state is copied.

        Returns:
            Entry, offset and register of the states that the forward stores, axis `mark`.
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
        """Returns the rows whose live state, of at most `known` tokens, is to be kept. No chunk can come closer."""
        if not self._ends:
            return []
        pairs = zip(rows, known, strict=True)
        return [row for row, most in pairs if (end := self._ends.get(row)) and end.length == end.wanted <= most]

    def ends(self, rows: Sequence[int], known: Sequence[int], but: Collection[int] = ()) -> list[Mark]:
        """Returns the marks of the rows of `at_ends`, except some rows, for `keep`. The rows have them no longer."""
        return [mark for row in self.at_ends(rows, known) if row not in but for mark in self.shared(row)]

    def shared(self, row: int) -> list[Mark]:
        """Returns the mark of a row whose live state other rows are to read, for `keep`. The row has it no longer."""
        end = self._ends.pop(row, None)
        return [self._at_end(row, end)] if end else []

    def _at_end(self, row: int, end: _End, entry: int = 0) -> Mark:
        if row in self._coming:
            self._coming[row].floor = end.length
        return Mark(entry, row, 0, end.length, end.kind)

    def kind_of(self, row: int, length: int) -> str:
        """Returns why the live state of this length is to be kept, "" if it is not."""
        end = self._ends.get(row)
        return end.kind if end and end.length == length else ""

    def kind(self, state: Snapshot) -> str:
        """Returns why a state at a mark is kept."""
        owner = self._holdings.owner[state.register]
        return owner.kind if isinstance(owner, Marked) else ""

    def newest(self, row: int, known: int) -> Snapshot | None:
        """Returns the row's longest state of at most `known` tokens."""
        states = [state for state in self.kept.get(row, ()) if state.length <= known]
        return max(states, key=lambda state: state.length, default=None)

    def hand_over(self, row: int, known: int) -> list[tuple[int, int, str]]:
        """Takes a row's states of at most `known` tokens: register, length and kind of each, ascending."""
        found = [state for state in self.kept.get(row, ()) if state.length <= known]
        if found:
            self._hold(row, [state for state in self.kept[row] if state.length > known])
        return [(state.register, state.length, self.kind(state)) for state in found]

    def remove(self, row: int, state: Snapshot) -> None:
        """Takes one state from its row."""
        self._hold(row, [one for one in self.kept[row] if one.register != state.register])

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
        request: names the request in an error.
        given: the lengths.
        unit: each is rounded down to a multiple of it.
        prompt: tokens of the prompt; what lies beyond is left out. 0: they are not known.

    Raises:
        InvalidArgument: they are no sequence of whole numbers from 0 on.
    """
    lengths = given.tolist() if isinstance(given, np.ndarray) else given
    if isinstance(lengths, Sequence) and not isinstance(lengths, str | bytes) and all(map(is_count, lengths)):
        return sorted({int(at) // unit * unit for at in lengths if unit <= at <= (prompt or at)})
    raise InvalidArgument(
        f"request {shown(request)}: snapshot_at={shown(lengths)}: expected lengths in tokens such as [64, 128]: whole "
        "numbers from 0 to 2**31 - 1"
    )
