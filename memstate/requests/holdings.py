"""Keeps the owner of each holder: of each register outside of the rows. This file knows no slot and no plane.

A slot is in one register. The registers of a row belong to the row, by number. Every holder that is not free has one
owner, and the column `owner` names this owner:

kind       the owner                               how long
snapshot   the caller, who has a handle            until the snapshot is dropped
cached     a node of the prefix cache              until the state is evicted
session    an idle conversation                    until its next turn
mark       a row, for a length of its prompt       until the row publishes the state or ends
leaving    nobody                                  until the last row that reads it is done

A state gets another owner in one of two ways. When it leaves or enters a row, it is *moved*: the change is recorded,
and the device carries it out. When it stays in its holder, it *changes hands*, and nothing is recorded. A holder gets
its owner before the change is recorded, so that the journal can name the owner. Until the packet is sent, the holder
is empty on the device, and recovery gives it to nobody.
"""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from memstate.checks import INT32_MAX
from memstate.errors import InvalidArgument, StaleHandle
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.requests.handles import Snapshot, first_generation
from memstate.requests.pages import PageAllocator
from memstate.slots.commands import CommandBuffer

REGISTER: Final = attrgetter("register")
KINDS: Final = ("snapshot", "cached", "session", "mark", "leaving")


class Owner(Protocol):
    """An owner of a holder. It names its kind, one of `KINDS`."""

    @property
    def holds(self) -> str:
        """The kind of this owner."""


class Nobody(NamedTuple):
    """An owner that has no object of its own: only its kind is known."""

    holds: str


@dataclass(frozen=True)
class Marked:
    """The owner of a state at a mark.

    Attributes:
        row: the row that computes the prompt.
        kind: why the state is kept; see `memstate.prefix.policies.base.Place`.
    """

    row: int
    kind: str
    holds: ClassVar[str] = "mark"


PUBLISHED: Final = Nobody("snapshot")  # owner of published states: the caller has their handles
LEAVING: Final = Nobody("leaving")  # owner of ended states that a first step still reads


class Holdings:
    """Gives states to owners, and releases them. Handles are valid as long as their state has an owner.

    Free holders are used in turn, so that one packet rarely changes a holder twice. If an owner ends a state while rows
    read it, the state stays until the last reader is done.

    Args:
        commands: records the changes of owners.
        pages: KV pages, which published states share.

    Attributes:
        owner: for each register, its owner; None for a free holder, and for the registers of rows.
        readers: register -> number of its readers, at least 1. Readers are rows whose `source` is this register, and
            admissions under way.
        held: kind -> register -> its state, in the order in which the states came to owners of this kind.
        generation: for each register, a number that grows by one whenever the state in the register ends.
        published: number of states published since the start.
        dropped: number of states dropped since the start.
        refused: number of states since the start that were not published, for lack of a holder.
    """

    def __init__(self, commands: CommandBuffer, pages: PageAllocator) -> None:
        self._commands, self._file, self._pages = commands, commands.registers, pages
        self.generation = [first_generation()] * self._file.count
        self.published = self.dropped = self.refused = 0
        self.restart(())

    def restart(self, kept: Sequence[tuple[Snapshot, Owner]]) -> None:
        """Forgets all states except those of `kept`; the handles of the others become stale.

        Args:
            kept: states whose handles stay valid, each with its owner.
        """
        self.generation = [(generation + 1) & INT32_MAX for generation in self.generation]
        self.owner: list[Owner | None] = [None] * self._file.count
        self.readers: Counter[int] = Counter()
        self.held: dict[str, dict[int, Snapshot]] = {kind: {} for kind in KINDS}
        for state, owner in kept:
            self.generation[state.register] = state.generation
            self._own(state.register, owner, state)
        holders = range(self._file.first_holder, self._file.count)
        self._free = deque(register for register in holders if self.owner[register] is None)

    def _own(self, register: int, to: Owner, state: Snapshot) -> None:
        """Gives a state in a holder to another owner."""
        if (before := self.owner[register]) is not None:
            del self.held[before.holds][register]
        self.owner[register], self.held[to.holds][register] = to, state

    def _forget(self, registers: list[int]) -> None:
        """Frees holders that have owners. Their slots were released or moved, and nobody reads them."""
        owner, generation = self.owner, self.generation
        for register in registers:
            if (of := owner[register]) is not None:
                del self.held[of.holds][register]
            owner[register], generation[register] = None, (generation[register] + 1) & INT32_MAX
        self._free += registers

    @property
    def free(self) -> int:
        """Number of holders without a state."""
        return len(self._free)

    def evictable(self, kind: str) -> int:
        """Returns the number of states, of owners of this kind, that no first step is about to read."""
        return len(self.held[kind]) - sum(self.kind(register) == kind for register in self.readers)

    def state(self, register: int) -> Snapshot | None:
        """Returns the state in a holder; None if it has none, and for registers of rows."""
        return self.held[owner.holds].get(register) if (owner := self.owner[register]) is not None else None

    def kind(self, register: int) -> str:
        """Returns the kind of a register's owner, "" if it has none."""
        owner = self.owner[register]
        return "" if owner is None else owner.holds

    # Owners

    def add(self, lengths: Sequence[int], to: Owner, pages: Iterable[Sequence[int]] = repeat(())) -> list[Snapshot]:
        """Gives an owner free holders, one for each state that a step, a load or a recorded move writes to it.

        Call it only where `free` is large enough.

        Args:
            lengths: tokens that each state stands for.
            to: the new owner of all of these states.
            pages: for each state, the KV pages that it shares.
        """
        states: list[Snapshot] = []
        owner, held, generation = self.owner, self.held[to.holds], self.generation
        for length, shared in zip(lengths, pages, strict=False):
            register = self._free.popleft()
            state = Snapshot(register, generation[register], length, tuple(shared))
            owner[register], held[register] = to, state
            states.append(state)
        return states

    def move_in(
        self, cells: list[int], to: Owner, pages: Iterable[Sequence[int]] = repeat(()),
        later: tuple[list[int], list[int]] | None = None,
    ) -> list[Snapshot]:  # fmt: skip
        """Moves states from the registers of rows to holders. Call it only where `free` is large enough.

        Args:
            cells: registers of rows, one for each state.
            to: the new owner of all of these states.
            pages: for each state, the KV pages that it shares.
            later: targets and sources of moves that the caller will record; these moves are added. None: they are
                recorded here.
        """
        states = self.add(list(map(self._file.label_at.__getitem__, cells)), to, pages)
        targets = list(map(REGISTER, states))
        if later is None:
            self._commands.move(targets, cells)
        else:
            later[0].extend(targets)
            later[1].extend(cells)
        return states

    def give(self, state: Snapshot, to: Owner, pages: Sequence[int] = ()) -> Snapshot:
        """Gives a state in a holder to another owner.

        Args:
            state: handle of the state.
            to: its new owner.
            pages: KV pages that the state shares from now on; empty for no change.

        Returns:
            The handle of the state. With `pages` it is a new one, and the old handle is not valid.
        """
        if pages:
            state = replace(state, pages=tuple(pages))
        self._own(state.register, to, state)
        return state

    def take(self, taken: Iterable[tuple[int, Sequence[Snapshot]]]) -> None:
        """Moves states to the registers of rows, the first of a row to its live register. Their handles become stale.

        Args:
            taken: for each row without states, its number and states in holders that nobody will read.
        """
        targets: list[int] = []
        registers: list[int] = []
        for row, states in taken:
            first = REGISTERS_PER_ROW * row
            targets += range(first, first + len(states))
            registers += map(REGISTER, states)
        self._commands.move(targets, registers)
        self._forget(registers)

    def end(self, states: Sequence[Snapshot], registers: list[int] | None = None) -> None:
        """Ends states: their handles become stale. A state with readers is released after its last reader.

        Args:
            states: distinct states of owners of one kind.
            registers: their registers, if the caller has them.
        """
        registers = list(map(REGISTER, states)) if registers is None else registers
        if not registers:
            return
        kind = self.kind(registers[0])
        if kind != "session":  # states of sessions were never published
            self.dropped += len(registers)
        if self.readers:
            for register in registers:
                if register in self.readers:
                    state, generation = self.held[kind][register], (self.generation[register] + 1) & INT32_MAX
                    self.generation[register] = generation
                    self._own(register, LEAVING, replace(state, generation=generation))
            registers = [register for register in registers if register not in self.readers]
        self._release(registers, kind)

    def _release(self, registers: list[int], kind: str) -> None:
        """Releases states and their pages. Nobody reads the states, and their owners are of one kind."""
        if not registers:
            return
        self._commands.release(registers)
        if self._pages.pages:
            held = self.held[kind]
            for register in registers:
                if pages := held[register].pages:
                    self._pages.release(pages)
        self._forget(registers)

    # Readers

    def begin_read(self, register: int) -> None:
        """Counts one more reader of a state: the state stays until `end_read`, even if its owner ends it before."""
        self.readers[register] += 1

    def end_read(self, register: int) -> None:
        """Counts one reader less. A state that its owner has ended is released after the last reader."""
        self.readers[register] -= 1
        if not self.readers[register]:
            del self.readers[register]
            if self.owner[register] is LEAVING:
                self._release([register], "leaving")

    def reads_done(self, sources: Iterable[int]) -> None:
        """Counts one reader less of each source: a reading row has planned its first step, or the row ends.

        Args:
            sources: for each row, its `source` until now; 0 for none.
        """
        for register in sources:
            if register:
                self.end_read(register)

    def left_by(self, sources: Iterable[int]) -> int:
        """Returns how many states would be released if these rows ended before their next step.

        Args:
            sources: for each row, its `source`; 0 for none.
        """
        reads = Counter(filter(None, sources))
        return sum(self.owner[register] is LEAVING and self.readers[register] == n for register, n in reads.items())

    # Handles

    def require(self, states: Iterable[Snapshot]) -> None:
        """Raises an error unless all handles are valid.

        Raises:
            StaleHandle: a snapshot was dropped.
            InvalidArgument: an entry is not a snapshot.
        """
        for state in states:
            if not isinstance(state, Snapshot) or type(state.register) is not int:
                raise InvalidArgument(f"{state!r} is no snapshot: use the handles of publish(), end() and park()")
            if not self.has(state):
                inside = self._file.first_holder <= state.register < self._file.count
                now = self.generation[state.register] if inside else 0
                raise StaleHandle(f"snapshot in register {state.register}", state.generation, now)

    def require_foreign(self, states: Sequence[Snapshot]) -> None:
        """Refuses states that belong to the prefix cache.

        Args:
            states: handles that a caller wants to drop or to resume.

        Raises:
            InvalidArgument: the prefix cache owns one of the states.
        """
        for state in states if self.held["cached"] else ():
            if isinstance(state, Snapshot) and self.has(state) and self.kind(state.register) == "cached":
                raise InvalidArgument(
                    f"{state} is the prefix cache's: it drops it when the slot is needed, and finds it by its prefix"
                )

    def has(self, state: Snapshot) -> bool:
        """Returns whether a handle is valid."""
        register = state.register
        if type(register) is not int or not 0 <= register < self._file.count:
            return False
        held = self.state(register)
        return held is state or held == state

    def droppable(self, given: Sequence[Snapshot | None]) -> tuple[Sequence[Snapshot], list[int]]:
        """Returns the states that are not None, and their registers. They must be published, and none may come twice.

        Raises:
            StaleHandle: a snapshot was dropped before.
            InvalidArgument: a snapshot is named twice, the prefix cache owns it, or an entry is not a snapshot.
        """
        states: Any = given
        try:  # fast path for the common case: all entries are published snapshots
            registers = list(map(REGISTER, states))
            valid = all(map(is_, map(self.held["snapshot"].get, registers), states))
        except (AttributeError, TypeError):
            valid = False
        if not valid:
            states = [state for state in given if state is not None]
            self.require_foreign(states)
            self.require(states)
            registers = list(map(REGISTER, states))
        if len(set(registers)) != len(registers):
            raise InvalidArgument("a snapshot is named twice")
        return states, registers

    # Looking at holders

    def of(self, *kinds: str) -> Iterator[Snapshot]:
        """Yields the states of owners of these kinds, kind by kind, in the order in which the owners got them."""
        for kind in kinds:
            yield from list(self.held[kind].values())

    def miscounts(self) -> list[str]:
        """Returns a sentence for each error in the readers, the free holders and the kinds of owners."""
        faults, first = [], self._file.first_holder
        reads = Counter(self._file.source[self._file.source > 0].tolist())
        if self.readers != reads:
            faults.append(f"snapshot registers are pinned {dict(self.readers)}, and first steps read {dict(reads)}")
        owned = [register for register, owner in enumerate(self.owner) if owner is not None]
        if sorted([*self._free, *owned]) != list(range(first, self._file.count)):
            faults.append(
                f"{len(self._free)} free registers and {len(owned)} snapshots are not the {self._file.count - first} "
                "registers of snapshots"
            )
        kinds = {register: kind for kind, states in self.held.items() for register in states}
        if kinds != {register: self.kind(register) for register in owned}:
            faults.append(f"the kinds of the states are noted as {kinds}, and their owners are of others")
        return faults

    def name(self, register: int) -> str:
        """Returns a name for the state in a holder, for audits."""
        state = self.state(register)
        return f"snapshot {register} of {state.length} tokens" if state else f"holder {register} (given up)"
