"""Starts a manager over: with nothing, or with what is certain after an interrupted call.

The device's registers say which states are there. The host adds whose they are, except where the interrupted call or a
change that was not sent could have left a register different on both sides. All requests end.
"""

from collections import Counter
from collections.abc import Hashable, Sequence, Set
from typing import NamedTuple

import numpy as np
from torch import Tensor

from memstate.checks import counts, sequence
from memstate.engine.report import Reports
from memstate.errors import Asleep, InvalidArgument
from memstate.requests.handles import Snapshot
from memstate.requests.holdings import KINDS, PUBLISHED, Owner

# These calls can have put KV into the prefix cache that the open step must still write.
PUBLISHING = frozenset(("publish", "release", "retract", "cancel"))


class Recovered(NamedTuple):
    """What a `recover` ended, and what it kept.

    Attributes:
        ended: names of the requests that have ended, by row.
        lost: published snapshots whose handles are stale now. What the prefix cache and sessions lost is not listed.
        snapshots: published snapshots that stay.
        cached: number of states that stay in the prefix cache.
        in_sessions: number of states that stay in sessions.

    Example:
        >>> import torch, memstate as ms
        >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
        >>> mem = ms.StateManager(layout, slots=8, max_requests=4)
        >>> rows = mem.admit([ms.Request("a")])
        >>> mem.recover().ended, mem.free_slots
        (['a'], 8)
    """

    ended: list[Hashable]
    lost: list[Snapshot]
    snapshots: list[Snapshot]
    cached: int
    in_sessions: int


class Sure(NamedTuple):
    """What host and device agree on. Of it, each owner keeps what it still has.

    Attributes:
        slots: register -> (slot, label).
        states: kind of owner -> register -> state. Owners of a kind that is missing keep nothing.
        pages: KV pages that are not sure.
        held: slots that the caller holds by id.
    """

    slots: dict[int, tuple[int, int]]
    states: dict[str, dict[int, Snapshot]]
    pages: Set[int]
    held: Sequence[int]


class Recovery(Reports):
    """The calls of a manager that put it right."""

    def reset(self) -> None:
        """Frees every slot, row and page, and makes every handle stale. Works after an interrupted call, too.

        Registers, the page table and the columns of all rows become zero. Host memory becomes
        empty. The bytes of states and the records in storage stay. After a reset, do not launch the forward of a step
        that was planned before it.

        Raises:
            Asleep: the states sleep; nothing changed.

        Syncs: yes.
        """
        self._require_caller()
        self._require_awake()
        with self._guard.mending("reset"):
            self._start_over(Sure({}, {}, frozenset(), ()), "ended by reset()")

    def recover(self, held: Tensor | Sequence[int] = ()) -> Recovered:
        """Puts the manager right after an interrupted call, and keeps what was published.

        If an exception that memstate did not raise on purpose leaves a call, such as MemoryError, KeyboardInterrupt or
        an error of your policy, the call was completed, or it changed nothing, or it was interrupted while it changed
        something. In the last case every later call that changes something raises `Broken`, except `close`, `reset` and
        `recover`.

        `recover` reads the device's registers. It keeps published snapshots, idle sessions and the states and KV of
        the prefix cache, as far as they are certain: what the interrupted call touched, and changes that were not sent
        to the device, are lost. All requests end, and their handles and steps are stale. Sessions with a running turn
        become empty. Host memory becomes empty; storage stays. Admit the requests again: they start from what is
        cached.

        After it, do not launch the forward of a step that was planned before it. End transfers that write to slots of
        requests first. You can call `recover` at any time, and again if it was interrupted itself.

        Args:
            held: slots that you hold by id, from `pool.claim`. All other slots without an owner become free.

        Returns:
            What was ended and what was kept.

        Raises:
            Asleep: the states sleep; nothing changed.
            InvalidArgument: a slot of `held` is out of range, named twice, free or owned; nothing changed.

        Syncs: yes.
        """
        self._require_caller()
        self._require_awake()
        if not self._guard.call:
            with self._guard.changing("recover"):
                self._commands.submit()
        sure = self._sure(held)
        ended = [self._table.ids[row] for row in np.flatnonzero(self._table.used).tolist()]
        published = list(self._holdings.of("snapshot"))
        with self._guard.mending("recover"):
            self._start_over(sure, "ended by recover()")
            self._cache.drop_bare_leaves()
        stays = list(self._holdings.of("snapshot"))
        lost = [snap for snap in published if snap not in stays]
        return Recovered(ended, lost, stays, self._cache.states, self._sessions.held)

    def _require_awake(self) -> None:
        if self.planes.asleep:
            raise Asleep()

    def _sure(self, held: Tensor | Sequence[int]) -> Sure:
        """Returns what host and device agree on. Changes nothing."""
        device = self._registers.on_host()
        slots, labels = device.table.slots.numpy(), device.table.labels.numpy()
        free = device.allocator.free_slots()
        given = sequence("slots", held.tolist() if isinstance(held, Tensor) else held, "recover(held=[1, 2])")
        by_id = counts("held", given, len(given)).tolist()
        capacity, first = self._allocator.capacity, self._registers.first_holder
        inside = (slots > 0) & (slots <= capacity)
        taken = Counter(slots[inside].tolist())
        named = Counter(by_id)
        if wrong := sorted(
            slot for slot, n in named.items() if n > 1 or not 0 < slot <= capacity or free[slot] or taken[slot]
        ):
            raise InvalidArgument(
                f"held: slots {wrong} are named twice, not within 1..{capacity}, free already, or owned by a request "
                "or a snapshot: leave them out"
            )
        sure = inside & ~self._commands.unsure()
        sure[:first] = False
        registers = [r for r in np.flatnonzero(sure).tolist() if taken[slots[r]] == 1 and not free[slots[r]]]
        unsure = self._commands.unsure_pages()
        states = {kind: dict[int, Snapshot]() for kind in KINDS}
        for r in registers:
            if (state := self._holdings.state(r)) and state.length == labels[r] and unsure.isdisjoint(state.pages):
                states[self._holdings.kind(r)][r] = state
        if self._stepping.open is not None and (self._stepping.promised or self._guard.call in PUBLISHING):
            del states["cached"]  # the open step has still to write KV
        return Sure({r: (int(slots[r]), int(labels[r])) for r in registers}, states, unsure, by_id)

    def _start_over(self, sure: Sure, how: str) -> None:
        """Forgets everything else. What an interrupted call left unsure is forgotten last, for a second try."""
        self._table.reset(how)
        if self.tiers is not None:
            self.tiers.reset()
        self._sessions.keep(sure.states.get("session"), sure.pages)
        self._cache.keep(sure.states.get("cached"), sure.pages)
        self._marks.reset()
        published = sure.states.get("snapshot", {}).values()
        owners: list[tuple[Snapshot, Owner]] = [(state, PUBLISHED) for state in published]
        owners += [(state, session) for session in self._sessions.opened.values() for state in session.kept]
        owners += [(node.snapshot, node) for _, node in self._cache.tree.walk() if node.snapshot]
        there = {state.register: sure.slots[state.register] for state, _ in owners}
        self._registers.reset(there)
        self._allocator.reset([slot for slot, _ in there.values()] + list(sure.held))
        self._holdings.restart(owners)
        self._pages.reset(Counter(page for each in self._walk() for page in each.pages))
        self._stepping.reset()
        self._commands.discard()

    def check(self) -> None:
        """Raises an error for the first fault that the device counted.

        It first sends the recorded changes that do not wait for a forward.

        Raises:
            DoubleRelease: a slot was released that was free already.
            DeviceFault: the device counted another invalid operation.

        Syncs: yes.
        """
        self._enter()
        self.pool.check()
