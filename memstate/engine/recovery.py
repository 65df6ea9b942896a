"""Empties a manager after an interrupted call, or keeps the states on which host and device agree.

The device's registers say which states exist, and the host knows their owners. A register is not trusted if the
interrupted call or an unsent change can have left it different on host and device. All requests end.
"""

from collections import Counter
from collections.abc import Hashable, Sequence, Set
from typing import NamedTuple

import numpy as np
from torch import Tensor

from memstate.checks import counts, sequence
from memstate.engine.recount import Recount
from memstate.engine.verbs import Parts
from memstate.errors import InvalidArgument
from memstate.requests.handles import Snapshot
from memstate.requests.holdings import KINDS, PUBLISHED, Owner

# These calls can give the prefix cache KV that the open step must still write.
PUBLISHING = frozenset(("publish", "end", "cancel"))


class Recovered(NamedTuple):
    """The requests that `recover` has ended, and the states that it has kept or lost.

    Attributes:
        ended: ids of the requests that have ended, in the order of their rows. Parked requests are lost and not listed.
        lost: published snapshots whose handles are stale now. Lost states of the prefix cache and of sessions are not
            listed.
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
    """The states on which host and device agree. Each owner keeps the states that belong to it.

    Attributes:
        slots: register -> (slot, label).
        states: kind of owner -> register -> state. Owners of a kind that is missing keep nothing.
        pages: KV pages whose contents are not certain.
        held: slots that the caller holds by id.
    """

    slots: dict[int, tuple[int, int]]
    states: dict[str, dict[int, Snapshot]]
    pages: Set[int]
    held: Sequence[int]


NOTHING = Sure({}, {}, frozenset(), ())


class Recovery:
    """Makes a manager usable again after an interrupted call.

    Args:
        parts: the parts of the manager.
        recount: asks the owners what they hold.
    """

    def __init__(self, parts: Parts, recount: Recount) -> None:
        self._parts, self._recount = parts, recount

    def recover(self, held: Tensor | Sequence[int], keep: bool) -> Recovered:
        """See `StateManager.recover`."""
        parts = self._parts
        if not isinstance(keep, bool):
            raise InvalidArgument(f"keep={keep!r}: expected True or False")
        held = sequence("slots", held.tolist() if isinstance(held, Tensor) else held, "recover(held=[1, 2])")
        if held and not keep:
            raise InvalidArgument(f"held={held} with keep=False, which makes every slot free: leave one of them out")
        if keep and not parts.guard.call:
            with parts.guard.changing("recover"):
                parts.commands.submit()
        sure = self._sure(held) if keep else NOTHING
        ended = [parts.table.ids[row] for row in np.flatnonzero(parts.table.used).tolist()]
        published = list(parts.holdings.of("snapshot"))
        with parts.guard.mending("recover"):
            self._start_over(sure, "ended by recover()")
            parts.cache.drop_bare_leaves()
        stays = list(parts.holdings.of("snapshot"))
        lost = [state for state in published if state not in stays]
        return Recovered(ended, lost, stays, parts.cache.states, parts.sessions.held)

    def _sure(self, held: Sequence[int]) -> Sure:
        """Returns the states on which host and device agree. Changes nothing."""
        parts = self._parts
        device = parts.registers.on_host()
        slots, labels = device.table.slots.numpy(), device.table.labels.numpy()
        free = device.allocator.free_slots()
        by_id = counts("held", held, len(held)).tolist()
        capacity, first = parts.allocator.capacity, parts.registers.first_holder
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
        sure = inside & ~parts.commands.unsure()
        sure[:first] = False
        registers = [r for r in np.flatnonzero(sure).tolist() if taken[slots[r]] == 1 and not free[slots[r]]]
        unsure = parts.commands.unsure_pages()
        states = {kind: dict[int, Snapshot]() for kind in KINDS}
        for r in registers:
            if (state := parts.holdings.state(r)) and state.length == labels[r] and unsure.isdisjoint(state.pages):
                states[parts.holdings.kind(r)][r] = state
        if parts.stepping.open is not None and (parts.stepping.promised or parts.guard.call in PUBLISHING):
            del states["cached"]  # the open step must still write their KV
        return Sure({r: (int(slots[r]), int(labels[r])) for r in registers}, states, unsure, by_id)

    def _start_over(self, sure: Sure, how: str) -> None:
        """Forgets everything except `sure`.

        The notes of what is unsure are forgotten last, so that an interrupted `recover` can be called again.
        """
        parts = self._parts
        parts.table.reset(how)
        if parts.tiers is not None:
            parts.tiers.reset()
        parts.sessions.keep(sure.states.get("session"), sure.pages)
        parts.cache.keep(sure.states.get("cached"), sure.pages)
        parts.marks.reset()
        published = sure.states.get("snapshot", {}).values()
        owners: list[tuple[Snapshot, Owner]] = [(state, PUBLISHED) for state in published]
        # in reverse: of sessions that share a state, the first one owns it
        owners += [(state, session) for session in reversed(parts.sessions.opened.values()) for state in session.kept]
        owners += [(node.snapshot, node) for _, node in parts.cache.tree.walk() if node.snapshot]
        there = {state.register: sure.slots[state.register] for state, _ in owners}
        parts.registers.reset(there)
        parts.allocator.reset([slot for slot, _ in there.values()] + list(sure.held))
        parts.holdings.restart(owners)
        parts.pages.reset(Counter(page for each in self._recount.walk() for page in each.pages))
        parts.stepping.reset()
        parts.commands.discard()
