"""Keeps published snapshots: their registers, pins and KV pages. This file knows no slot and no plane."""

from collections import Counter, deque
from collections.abc import Iterable, KeysView, Sequence
from dataclasses import replace
from operator import is_

import numpy as np

from memstate.errors import InvalidArgument, StaleHandle
from memstate.requests.handles import Snapshot, first_generation, risen
from memstate.requests.page_table import PageTable
from memstate.requests.tracking.mirror import Mirror
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import Longs


class Snapshots:
    """Moves states from rows to registers of their own, and releases them again.

    A register is used again as late as possible, so that a command buffer rarely sees it twice. A pin keeps a snapshot
    that a first step is about to read, also if its handle is dropped meanwhile.

    Args:
        commands: records the changes of owners.
        pages: KV pages of rows.
        mirror: the host's copy of held registers and labels.

    Attributes:
        kept: snapshots with a valid handle, by register.
        generation: of each register, int32 `holder`.
        published: count since the start.
        dropped: count since the start.
        refused: count since the start, for lack of a register.
    """

    def __init__(self, commands: CommandBuffer, pages: PageTable, mirror: Mirror) -> None:
        self._commands, self._pages, self._mirror = commands, pages, mirror
        self._first, self._count = commands.registers.first_holder, commands.registers.holders
        self.generation = np.full(self._count, first_generation(), np.int32)
        self.published = self.dropped = self.refused = 0
        self.reset()

    def reset(self, kept: Sequence[Snapshot] = ()) -> None:
        """Forgets every pin and snapshot; handles given out before become stale.

        Args:
            kept: snapshots whose handles stay valid.
        """
        self.generation = risen(self.generation)
        for snap in kept:
            self.generation[snap.register - self._first] = snap.generation
        taken = {snap.register for snap in kept}
        self._free = deque(r for r in range(self._first, self._first + self._count) if r not in taken)
        self._pins: dict[int, int] = {}
        self._dropped: dict[int, Snapshot] = {}  # dropped while pinned: released with the last pin
        self._first_reads: dict[int, int] = {}  # row -> register that its first step reads
        self.kept: dict[int, Snapshot] = {snap.register: snap for snap in kept}

    @property
    def first_reads(self) -> KeysView[int]:
        """Rows whose first step is about to read a snapshot."""
        return self._first_reads.keys()

    @property
    def ending(self) -> list[Snapshot]:
        """Snapshots without a valid handle that a pin still keeps."""
        return list(self._dropped.values())

    def miscounts(self) -> list[str]:
        """Returns what is wrong with pins, and with registers that are noted as free."""
        found, reads = [], Counter(self._first_reads.values())
        if self._pins != reads:
            found.append(f"snapshot registers are pinned {dict(self._pins)}, and first steps read {dict(reads)}")
        noted = sorted([*self._free, *self.kept, *self._dropped])
        if noted != list(range(self._first, self._first + self._count)):
            found.append(
                f"{len(self._free)} free registers and {len(self.kept) + len(self._dropped)} snapshots are not the "
                f"{self._count} registers of snapshots"
            )
        return found

    @property
    def free(self) -> int:
        """Registers that hold no snapshot."""
        return len(self._free)

    def pins(self, register: int) -> int:
        """Returns how many first steps are about to read a register."""
        return self._pins.get(register, 0)

    @property
    def pinned(self) -> KeysView[int]:
        """Registers that a first step is about to read."""
        return self._pins.keys()

    @property
    def evictable(self) -> int:
        """Snapshots that no first step is about to read."""
        return sum(register not in self._pins for register in self.kept)

    def publish(self, rows: Longs, known: Longs, ended: bool) -> list[Snapshot | None]:
        """Moves the newest snapshot within `known` tokens out of each row.

        Args:
            rows: `row`.
            known: tokens up to which each row is real, `row`.
            ended: the rows have ended, so their live states count too.

        Returns:
            One snapshot a row; None where there is none, or no register is free.
        """
        answers = self._answers(rows, known, ended)
        found = np.flatnonzero(answers)
        self.refused += max(0, len(found) - self.free)
        found = found[: self.free]
        sources = answers[found]
        lengths = self._commands.registers.labels[sources].tolist()
        registers = np.array([self._free.popleft() for _ in lengths], np.int64)
        generations = self.generation[registers - self._first].tolist()
        snapshots: list[Snapshot | None] = [None] * len(rows)
        for at, row, register, generation, length in zip(
            found.tolist(), rows[found].tolist(), registers.tolist(), generations, lengths, strict=True
        ):
            pages = tuple(self._pages.share(row, length)) if self._pages.allocator.pages else ()
            self.kept[register] = snapshots[at] = Snapshot(register, generation, length, pages)
        self._commands.move(registers, sources)
        self.published += len(sources)
        return snapshots

    def require_answers(self, rows: Longs, known: Longs, more: int = 0) -> None:
        """Requires that every running row has a snapshot to publish, and a register for it.

        Args:
            rows: `row`.
            known: tokens up to which each row is real, `row`.
            more: registers that other rows of the same call take.

        Raises:
            InvalidArgument: a snapshot or a register is missing.
        """
        if len(rows) + more > self.free:
            raise InvalidArgument(
                f"{len(rows) + more} snapshots to publish, room for {self.free}: drop some, or raise snapshots="
            )
        missing = rows[self._answers(rows, known, ended=False) == 0]
        if missing.size:
            raise InvalidArgument(
                f"rows {missing.tolist()} have no snapshot to publish: none was due yet, or it was published before"
            )

    def answer(self, row: int, known: int, ended: bool) -> int | None:
        """Returns the register with the newest snapshot within `known` tokens, which fill whole pages, or None."""
        return self._mirror.answer(row, known, ended)

    def _answers(self, rows: Longs, known: Longs, ended: bool) -> Longs:
        """Returns, for each row, the register with the newest snapshot within `known` tokens; 0 for none.

        A snapshot shares whole KV pages, so it stands for whole pages only.
        """
        return self._mirror.answers(rows, self._pages.floor(known), ended)

    def hold(self, register: int, length: int) -> Snapshot:
        """Moves a state to a register of its own for first steps that are about to read it. It goes with the last pin.

        It shares no page. Call it only where `free` is positive.
        """
        snapshot = self.add(length, ())
        self._commands.move([snapshot.register], [register])
        return snapshot

    def add(self, length: int, pages: Sequence[int]) -> Snapshot:
        """Takes a register for a snapshot. Call it only where `free` is positive."""
        register = self._free.popleft()
        snapshot = Snapshot(register, int(self.generation[register - self._first]), length, tuple(pages))
        self.kept[register] = snapshot
        return snapshot

    def with_pages(self, snapshot: Snapshot, pages: Sequence[int]) -> Snapshot:
        """Returns a new handle of a snapshot that has shared no pages so far. The handle given is no longer valid."""
        replaced = self.kept[snapshot.register] = replace(snapshot, pages=tuple(pages))
        return replaced

    def require(self, snapshots: Iterable[Snapshot]) -> None:
        """Requires valid handles.

        Raises:
            StaleHandle: a snapshot was dropped.
            InvalidArgument: something is not a snapshot.
        """
        kept = self.kept.get
        for snapshot in snapshots:
            if type(snapshot) is Snapshot and type(at := snapshot.register) is int and kept(at) is snapshot:
                continue
            if not isinstance(snapshot, Snapshot) or type(snapshot.register) is not int:
                raise InvalidArgument(
                    f"{snapshot!r} is no snapshot: use the handles that publish() and release() returned"
                )
            if self.kept.get(snapshot.register) != snapshot:
                at = snapshot.register - self._first
                now = int(self.generation[at]) if 0 <= at < self._count else 0
                raise StaleHandle(f"snapshot in register {snapshot.register}", snapshot.generation, now)

    def require_droppable(self, snapshots: list[Snapshot]) -> list[int]:
        """Requires distinct valid handles, and returns their registers.

        Raises:
            StaleHandle: a snapshot was dropped before.
            InvalidArgument: a snapshot is named twice, or something is not a snapshot.
        """
        try:  # all at once
            registers = [snapshot.register for snapshot in snapshots]
            valid = all(map(is_, map(self.kept.get, registers), snapshots))
        except (AttributeError, TypeError):
            valid = False
        if not valid:
            self.require(snapshots)
            registers = [snapshot.register for snapshot in snapshots]
        if len(set(registers)) != len(registers):
            raise InvalidArgument("a snapshot is named twice")
        return registers

    def drop(self, snapshots: Sequence[Snapshot], registers: list[int] | None = None) -> None:
        """Drops snapshots. One with a pin is released with its last pin.

        Args:
            snapshots: distinct valid handles.
            registers: their registers, if the caller has them.
        """
        ended = self.end(snapshots, registers)
        if not self._pins:
            self._release(snapshots, ended)
        elif loose := [snapshot for snapshot in snapshots if snapshot.register not in self._dropped]:
            self._release(loose)
        self.dropped += len(snapshots)

    def end(self, snapshots: Sequence[Snapshot], registers: list[int] | None = None) -> Longs:
        """Ends handles, and returns their registers. A register without a pin is free then; the others wait."""
        if registers is None:
            registers = [snapshot.register for snapshot in snapshots]
        for register in registers:
            del self.kept[register]
        ended = np.array(registers, np.int64)
        at = ended - self._first
        self.generation[at] = risen(self.generation[at])
        if not self._pins:
            self._free += registers
            return ended
        for snapshot in snapshots:
            if snapshot.register in self._pins:
                self._dropped[snapshot.register] = snapshot
            else:
                self._recycle(snapshot)
        return ended

    def pin(self, register: int) -> None:
        """Keeps a register's snapshot until `unpin`, even if it is dropped meanwhile."""
        self._pins[register] = self._pins.get(register, 0) + 1

    def unpin(self, register: int) -> Snapshot | None:
        """Removes a pin; returns the snapshot to release now, if it was dropped meanwhile and no pin is left."""
        self._pins[register] -= 1
        if self._pins[register]:
            return None
        del self._pins[register]
        snapshot = self._dropped.pop(register, None)
        return snapshot and self._recycle(snapshot)

    def read_first(self, row: int, register: int) -> None:
        """Pins a register until the row's first step, which reads it, is planned or the row has ended."""
        self.pin(register)
        self._first_reads[row] = register

    def left_by(self, rows: Iterable[int]) -> int:
        """Returns how many snapshots without a handle are released when these rows have ended before their next step.

        Args:
            rows: the rows.
        """
        reads = Counter(self._first_reads[row] for row in rows if row in self._first_reads)
        return sum(register in self._dropped and self._pins[register] == n for register, n in reads.items())

    def first_steps_done(self, rows: Longs) -> None:
        """Removes the pins of rows that have one."""
        for row in self._first_reads.keys() & set(rows.tolist()) if self._first_reads else ():
            if dropped := self.unpin(self._first_reads.pop(row)):
                self._release([dropped])

    def _release(self, snapshots: Sequence[Snapshot], registers: Longs | None = None) -> None:
        self._commands.release([snap.register for snap in snapshots] if registers is None else registers)
        for snap in snapshots if self._pages.allocator.pages else ():
            self._pages.allocator.release(snap.pages)

    def _recycle(self, snapshot: Snapshot) -> Snapshot:
        self._free.append(snapshot.register)
        return snapshot

    def name(self, register: int) -> str:
        """Returns a name for the owner of a holder register, for audits."""
        snapshot = self.kept.get(register) or self._dropped.get(register)
        return f"snapshot {register} of {snapshot.length} tokens" if snapshot else f"holder {register} (given up)"
