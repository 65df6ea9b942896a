"""Keeps the level slots of states that are sets of slots. It knows no plane.

A row of m whole chunks has a level for each set bit of m: level j covers 2**j chunks, and ends where the next lower
level begins. The step that ends a chunk merges levels into a new one; a level slot that has been written never changes
again. So states share level slots, and a level slot is free when the last state lets go of it.

    chunks         5              6              7                 8
    level slots    c . a    ->    . d a    ->    e d a    ->    . . . f          "." is no level; the lowest is first

The sets belong to registers. They follow the states when the command buffer moves, copies and releases them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from memstate.errors import InvalidArgument, OutOfLevels
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.requests.pages import PageAllocator
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import Longs

DEPTH: Final = 16  # levels of a row: 2**16 chunks at most
Set = tuple[int, ...]
NONE: Final[Set] = (0,) * DEPTH


class LevelSets:
    """Gives level slots to states, and notes them in the device's table: `row 2 level`, those to read and new ones.

    A set that a state lets go of may be read by a forward to come. Its level slots are free from the next plan on.

    Args:
        commands: records the changes of owners.
        count: number of level slots.
        chunk: tokens of a chunk.

    Attributes:
        allocator: the free level slots.
    """

    def __init__(self, commands: CommandBuffer, count: int, chunk: int) -> None:
        self._commands, self._file = commands, commands.registers
        self.chunk, self.allocator = chunk, PageAllocator(count)
        self._of: dict[int, Set] = {}
        self.reset()

    def reset(self, kept: Iterable[int] = ()) -> None:
        """Forgets the sets of all registers but these."""
        self._of = {register: self._of[register] for register in kept if register in self._of}
        self._leaving: list[int] = []  # level slots that states have let go of since the last plan
        self._stale: set[int] = set()  # rows whose entries of the table are not those of their next step
        self._coming: dict[int, tuple[Set, Set]] = {}  # what each of these rows reads and has after it
        self.allocator.reset(self._counted())

    def _counted(self) -> Counter[int]:
        """Returns how often each level slot is held."""
        held = Counter(slot for levels in self._of.values() for slot in levels if slot)
        return held + Counter(self._leaving)

    def of(self, register: int) -> Set:
        """Returns the level slots of the state in a register, 0 where it has no level."""
        return self._of.get(register, NONE)

    # By the command buffer

    def move(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """The states of `sources` are in `targets`, which were empty."""
        for target, source in zip(targets, sources, strict=True):
            if levels := self._of.pop(source, None):
                self._of[target] = levels

    def copy(self, targets: Sequence[int], sources: Sequence[int]) -> None:
        """The states of `sources` are also in `targets`."""
        for target, source in zip(targets, sources, strict=True):
            self._put(target, self.of(source))

    def release(self, registers: Iterable[int]) -> None:
        """The states in these registers are gone."""
        for register in registers:
            self._leaving += filter(None, self._of.pop(register, NONE))

    def _put(self, register: int, levels: Set) -> None:
        """Gives the state in a register a set, which it shares."""
        self.allocator.share([*filter(None, levels)])
        self.release([register])
        if any(levels):
            self._of[register] = levels

    # By a plan

    def start(self, rows: Iterable[int]) -> None:
        """The next step of these rows reads another state than their last one has left."""
        self._stale.update(rows)

    def arrived(self, register: int, length: int) -> list[int]:
        """Gives a state that came from elsewhere level slots, and returns them as `level_ends`. They must be free."""
        self._of[register] = levels = _after(NONE, 0, length // self.chunk, self.allocator)
        return [slot for slot in levels if slot]

    def let_go(self) -> bool:
        """Frees what states have let go of. Returns False, and frees none, if a forward is to come: it may read it."""
        if self._commands.fencing:
            return False
        for slot in self._leaving:  # one can be there more than once
            self.allocator.release([slot])
        self._leaving = []
        return True

    def unheld(self, without: Collection[int] = ()) -> int:
        """Returns how many level slots no state has, except states in these registers."""
        held = {slot for register, levels in self._of.items() if register not in without for slot in levels if slot}
        return self.allocator.pages - len(held)

    def short_of(self, before: Longs, after: Longs) -> OutOfLevels | None:
        """Returns what to raise if a step needs more level slots than are free; otherwise None.

        Args:
            before: tokens of each row before it.
            after: tokens of each row after it.
        """
        ended = before // self.chunk != after // self.chunk
        pairs = zip((before[ended] // self.chunk).tolist(), (after[ended] // self.chunk).tolist(), strict=True)
        needed, free = sum(len(_new(m, n)) for m, n in pairs), self.allocator.free
        return OutOfLevels(needed, free, self.allocator.pages) if needed > free else None

    def require_depth(self, after: Longs) -> None:
        """Requires lengths that the levels can hold. Raises: InvalidArgument."""
        if after.size and (most := int(after.max())) // self.chunk >> DEPTH:
            raise InvalidArgument(
                f"{most} tokens: {DEPTH} levels of chunks of {self.chunk} hold fewer than {self.chunk << DEPTH}"
            )

    def prepare(self, rows: Longs, before: Longs, after: Longs) -> tuple[list[int], list[int]]:
        """Chooses the level slots of a step. So many must be free.

        Args:
            rows: distinct rows.
            before: tokens of each row before it.
            after: tokens of each row after it.

        Returns:
            The cells to write, and their values.
        """
        cells, values, start = list[int](), list[int](), self._file.starts["levels"]
        chunks = zip(rows.tolist(), (before // self.chunk).tolist(), (after // self.chunk).tolist(), strict=True)
        for row, m, n in chunks:
            if m == n and row not in self._stale and not self._file.source_at[row]:
                continue
            read = self.of(self._file.origin(row))
            write = read if m == n else _after(read, m, n, self.allocator)
            self._coming[row] = read, write
            (self._stale.discard if m == n else self._stale.add)(row)
            cells += range(start + 2 * DEPTH * row, start + 2 * DEPTH * (row + 1))
            values += (*read, *(slot if slot != old else 0 for slot, old in zip(write, read, strict=True)))
        return cells, values

    def planned(self, lanes: Iterable[int], reads_old_slot: bool) -> None:
        """The plan of the step that was prepared has changed the states of rows.

        Args:
            lanes: lane registers that got snapshots.
            reads_old_slot: whether snapshots are the states before the step, not those after it.
        """
        for lane in lanes:
            live = lane // REGISTERS_PER_ROW * REGISTERS_PER_ROW
            read, write = self._coming.get(lane // REGISTERS_PER_ROW, (self.of(live), self.of(live)))
            self._put(lane, read if reads_old_slot else write)
        for row, (read, write) in self._coming.items():
            live = REGISTERS_PER_ROW * row
            self._put(live, write)
            self.allocator.release([slot for slot, old in zip(write, read, strict=True) if slot != old and slot])
        self._coming = {}

    def miscounts(self) -> list[str]:
        """Returns what is wrong with sets and counts."""
        held, labels, found = self._file.held, self._file.labels, list[str]()
        for register in {*self._of, *held.nonzero()[0].tolist()}:
            chunks = int(labels[register]) // self.chunk if held[register] else 0
            if [slot > 0 for slot in self.of(register)] != [chunks >> level & 1 > 0 for level in range(DEPTH)]:
                found.append(f"register {register}: level slots {self.of(register)} for {chunks} chunks")
        return found + [f"level slots: {why}" for why in self.allocator.miscounts(self._counted())]


def level_ends(length: int, chunk: int) -> list[tuple[int, int]]:
    """Returns the levels of a state of so many tokens, the lowest first, each with the tokens up to its end."""
    chunks = length // chunk
    return [(level, (chunks >> level << level) * chunk) for level in range(DEPTH) if chunks >> level & 1]


def _new(m: int, n: int) -> list[int]:
    """Returns the levels of n chunks that m chunks do not have, or have of other chunks."""
    return [level for level in range(DEPTH) if n >> level & 1 and m >> level != n >> level]


def _after(levels: Set, m: int, n: int, allocator: PageAllocator) -> Set:
    """Returns the set after n chunks, given that after m of them: what stays, and new level slots."""
    new = _new(m, n)
    claimed = dict(zip(new, allocator.claim(len(new)), strict=True))
    return tuple(claimed.get(level, levels[level] if n >> level & 1 else 0) for level in range(DEPTH))
