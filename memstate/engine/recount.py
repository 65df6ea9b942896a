"""Asks the owners of rows, pages, pins, leases and states what they hold, and names the counts that are wrong.

The audit in `memstate.slots.audit` compares registers with the bitmap. This module checks what only the host keeps.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from memstate.checks import shown
from memstate.engine.world import Verbs
from memstate.errors import LeakFound
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.prefix.conversation import Conversation
from memstate.prefix.lease import NO_NODE
from memstate.prefix.tree import Node
from memstate.requests.handles import Snapshot
from memstate.requests.holdings import LEAVING, PUBLISHED, Marked, Owner
from memstate.slots.inspect import Inspection
from memstate.slots.registers import RegisterFile


class OwnerHoldings(NamedTuple):
    """The states, pages and leases that one owner reports.

    Attributes:
        owner: the owner as in `Holdings.owner`. A row has no holders, so the row number stands for it.
        states: the states of the owner in holders.
        pages: the KV pages of the owner.
        lease: the last node of the path in the prefix cache that the owner leases.
    """

    owner: Owner | int
    states: Sequence[Snapshot] = ()
    pages: Sequence[int] = ()
    lease: Node = NO_NODE


class Recount(Verbs):
    """Finds counts of the host that do not agree with their owners, or with the device.

    It changes nothing.

    Args:
        world: the tables of the manager.
    """

    def walk(self) -> Iterator[OwnerHoldings]:
        """Yields what each owner has, by asking the owner.

        Published and leaving states have no owner that can be asked: for them, `Holdings` answers.
        """
        leases = self._cache.leases
        for row in np.flatnonzero(self._table.used).tolist():
            yield OwnerHoldings(row, (), self._pages.of(row), leases[row].node if row in leases else NO_NODE)
        for row, states in self._marks.kept.items():
            for state in states:
                yield OwnerHoldings(Marked(row, self._marks.kind(state)), [state])
        for session in self._sessions.opened.values():
            yield OwnerHoldings(session, self._sessions.owned(session), session.pages, session.path)
        if self._tiers is not None:
            yield OwnerHoldings(PUBLISHED, (), [part.index for part in self._tiers.parked.above])
        for _, node in self._cache.tree.walk():
            yield OwnerHoldings(node, [node.snapshot] if node.snapshot else (), node.pages)
        for owner in (PUBLISHED, LEAVING):
            for state in self._holdings.of(owner.holds):
                yield OwnerHoldings(owner, [state], state.pages)

    def miscounts(self, seen: Inspection, names: dict[int, tuple[str, str]], read: RegisterFile) -> list[str]:
        """Returns a sentence for each count that is wrong.

        Args:
            seen: registers and bitmap of the device, after all recorded changes.
            names: register -> (kind, owner), for the registers that hold a slot according to the host.
            read: the register file that `seen` was read from.
        """
        held = list(self.walk())
        return [
            *self._table.miscounts(),
            *self._wrong_rows(),
            *self._pages.allocator.miscounts(Counter(page for each in held for page in each.pages)),
            *self._wrong_owners(held),
            *self._wrong_holders(),
            *self._sessions.miscounts(),
            *self._cache.tree.miscounts(Counter(each.lease for each in held if each.lease is not NO_NODE)),
            *(self._tiers.miscounts() if self._tiers is not None else ()),
            *self._wrong_labels(seen, names),
            *self._wrong_tails(read),
            *(self._pages.miscounts(read.page_table.cpu().numpy()) if self._pages.allocator.pages else ()),
        ]

    def _wrong_rows(self) -> list[str]:
        """Returns the faults of rows: without a request but with slots or the like, or with a request but no slot."""
        held = self._file.held[: self._file.first_holder].reshape(-1, REGISTERS_PER_ROW)
        has = {
            "slots": np.flatnonzero(held.any(1)).tolist(),
            "KV pages": self._pages.held,
            "a lease": self._cache.leases,
            "a turn of a session": self._sessions.by_row,
            "states at marks": self._marks.rows,
            "a first read": np.flatnonzero(self._file.source).tolist(),
            "tokens in a tail": np.flatnonzero(self._file.pending + self._file.newest).tolist(),
        }
        used = set(np.flatnonzero(self._table.used).tolist())
        faults = [f"row {row} has {what} and no request" for what, rows in has.items() for row in set(rows) - used]
        return faults + [f"row {row} has a request and no slot" for row in sorted(used) if not held[row, 0]]

    def require_owners(self) -> None:
        """Raises an error unless each state has the owner that `Holdings` names. In debug mode every call checks this.

        Raises:
            LeakFound: a state has another owner.
        """
        if wrong := self._wrong_owners(list(self.walk())):
            raise LeakFound("; ".join(wrong))

    def _wrong_owners(self, held: Sequence[OwnerHoldings]) -> list[str]:
        """Returns the faults of owners: states with another owner than in `Holdings`, or wrong counts in it."""
        holdings, seen, faults = self._holdings, dict[int, Owner | int](), list[str]()
        kept = {register: state for states in holdings.held.values() for register, state in states.items()}
        for each in held:
            for state in each.states:
                register = state.register
                if register in seen:
                    both = f"{self._name_of(each.owner, state)} and {self._name_of(seen[register], state)}"
                    faults.append(f"{both} both have the state in register {register}")
                seen[register] = each.owner
                there = kept.get(register)
                if holdings.owner[register] != each.owner or (there is not state and there != state):
                    name = self._name_of(each.owner, state)
                    faults.append(f"{name} has the state in register {register}, noted is {self.named(register)}")
        owned = {register: owner for register, owner in enumerate(holdings.owner) if owner is not None}
        faults += [
            f"register {register} is noted for {self.named(register)}, which does not have it"
            for register in sorted(owned.keys() - seen.keys())
        ]
        return faults + holdings.miscounts()

    def named(self, register: int) -> str:
        """Returns a name for the owner of a holder, for messages."""
        owner, state = self._holdings.owner[register], self._holdings.state(register)
        return self._holdings.name(register) if owner is None or state is None else self._name_of(owner, state)

    def _name_of(self, owner: Owner | int, state: Snapshot) -> str:
        """Returns a name for the owner of a state, for messages."""
        if isinstance(owner, int):
            return f"row {owner} (request {shown(self._table.ids[owner])})"
        if isinstance(owner, Node):
            return f"cached prefix of {owner.end * self._pages.page_size} tokens in register {state.register}"
        if isinstance(owner, Conversation):
            return f"session {shown(owner.handle.id)} ({state.length} tokens)"
        if isinstance(owner, Marked):
            return f"row {owner.row} ({owner.kind} of {state.length} tokens)"
        return self._holdings.name(state.register)

    def _wrong_holders(self) -> list[str]:
        """Returns the faults of holders: a slot without an owner, an owner without a slot, or another length."""
        first, states = self._file.first_holder, self._holdings.held.values()
        held = set((np.flatnonzero(self._file.held[first:]) + first).tolist())
        kept = {register: state for by in states for register, state in by.items()}
        faults = [f"{self._holdings.name(register)} has no slot" for register in sorted(kept.keys() - held)]
        faults += [f"register {register} holds a slot and no snapshot" for register in sorted(held - kept.keys())]
        labels = self._file.labels
        return faults + [
            f"{self._holdings.name(register)} has a state of {labels[register]} tokens"
            for register, each in kept.items()
            if register in held and labels[register] != each.length
        ]

    def _wrong_labels(self, seen: Inspection, names: dict[int, tuple[str, str]]) -> list[str]:
        """Returns the differences between host and device in the lengths of states and in the number of free slots."""
        there = np.array(seen.labels)
        known = self._file.held & ~np.isin(np.arange(len(there)) // REGISTERS_PER_ROW, [*self._file.undecided])
        wrong = np.flatnonzero(known & (self._file.labels != there)).tolist()
        faults = [
            f"{names[register][1]}: {self._file.labels[register]} tokens for the host, {there[register]} for the device"
            for register in wrong
        ]
        free, least = sum(seen.free[1:]), bool(self._file.undecided)  # undecided: the host holds slots back
        allocator = self._file.allocator
        if not allocator.unconfirmed and (free < allocator.free if least else free != allocator.free):
            faults.append(f"{allocator.free} slots are counted as free, {free} are")
        return faults

    def _wrong_tails(self, read: RegisterFile) -> list[str]:
        """Returns the differences between host and device in the number of tokens in tails.

        The device adds the accepted tokens of the newest step in the next plan, so they are added here. Rows of other
        steps with drafts that are not accepted yet are left out. Finished rows are left out, too: a step in flight
        leaves tokens in their tails, which nobody reads.
        """
        file, of_tails = self._file, self._log.tails
        if of_tails is None or read.table.pending is None or read.table.newest is None:
            return []
        pending, in_tail = read.table.pending.cpu().numpy().copy(), read.table.newest.cpu().numpy()
        entries, steps = int(of_tails.batch), self._log.unsettled
        newest = steps[-1] if steps and self._log.is_last(steps[-1]) else None  # None: settled or cancelled
        untold = {row for step in steps if step.drafted and step is not newest for row in step.numbers.tolist()}
        rows, accepted = of_tails.rows[:entries].cpu().numpy(), of_tails.accepted[:entries].cpu().numpy()
        counted = newest.after - newest.before if newest is not None else accepted
        pending[rows] += np.clip(counted, 0, in_tail[rows]).astype(int)
        return [
            f"row {row}: {file.pending[row]} and {file.newest[row]} tokens in its tail for the host, "
            f"{pending[row]} and {in_tail[row]} for the device"
            for row in np.flatnonzero((file.pending != pending) | (file.newest != in_tail)).tolist()
            if row not in untold and not file.undecided and not self._table.finished[row]
        ]
