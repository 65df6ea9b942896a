"""Overwrites a state that a request is about to use. The comparison must then find a difference."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from memstate.engine.manager import StateManager
from memstate.requests.handles import Row, Session
from memstate_tools.demo.peek import session_hit, slot_and_label, state_bytes, states, write_state
from memstate_tools.demo.work import Work


class Target(NamedTuple):
    """A state that a request is about to start from.

    Attributes:
        work: The request that is about to start from it.
        register: Register of the state.
        length: Tokens of the state.
        cached: Whether the state is in the prefix cache; otherwise a session keeps it.
    """

    work: Work
    register: int
    length: int
    cached: bool


class Sabotage:
    """Replaces the state of the first hit whose request is going to generate tokens.

    If this request ends before it generates a token, the next hit is used. States in the prefix cache are chosen before
    states that a session kept.

    Args:
        kind: "swap" exchanges the bytes of the state and of another kept state. "stale" replaces the bytes by those of
            the state one token earlier.
        mem: The manager whose states are replaced.
        state_after: Returns the bytes of the state after some tokens, from the uncached run.
    """

    def __init__(self, kind: str, mem: StateManager, state_after: Callable[[Sequence[int]], bytes]) -> None:
        self.kind, self.mem, self.state_after = kind, mem, state_after
        self.strikes = self.strikes_at_sessions = 0
        self._victim: tuple[Work, Row, int] | None = None
        self._target: Target | None = None  # the replaced state, until its request has a row
        self._before: dict[int, bytes] = {}  # slot -> its bytes before the strike

    @property
    def _armed(self) -> bool:
        if self._victim is None:
            return True
        work, row, known = self._victim
        return work.row is not row and len(work.tokens) == known

    def strike(self, batch: Sequence[Work], sessions: Sequence[Session | None]) -> None:
        """Replaces a state from which one of these requests is about to start. All changes must have been submitted.

        Syncs: yes, if it replaces a state.
        """
        if not self._armed:
            return
        targets = [
            target
            for work, session in zip(batch, sessions, strict=True)
            if work.rule.cap and (target := self._target_of(work, session))
        ]
        for target in sorted(targets, key=lambda target: not target.cached):
            if self._spoil(target):
                self._target = target
                return

    def undo(self) -> None:
        """Restores the bytes of the last strike, because no request was admitted."""
        for slot, data in self._before.items():
            write_state(self.mem, slot, data)
        self._target, self._before = None, {}

    def landed(self) -> None:
        """Counts the last strike, because its request has a row."""
        if self._target:
            self.strikes += 1
            self.strikes_at_sessions += not self._target.cached
            self._victim = (self._target.work, self._target.work.handle, len(self._target.work.tokens))
        self._target, self._before = None, {}

    def _target_of(self, work: Work, session: Session | None) -> Target | None:
        match = self.mem.match(work.tokens)
        if session is not None:
            length, register = session_hit(self.mem, session, work.tokens)
            if length >= max(1, match.length):
                return Target(work, register, length, False)
        if match.snapshot is None or match.host_length > match.length:  # the request starts from a state in host memory
            return None
        return Target(work, match.snapshot.register, match.length, True)

    def _spoil(self, target: Target) -> bool:
        slot, _ = slot_and_label(self.mem, target.register)
        mine = state_bytes(self.mem.planes, slot)
        wrong = {slot: self.state_after(target.work.tokens[: target.length - 1])} if self.kind == "stale" else {}
        if self.kind == "swap":
            others = {other: state_bytes(self.mem.planes, other) for other in self._neighbours(target)}
            other = next((other for other, data in others.items() if data != mine), None)
            wrong = {slot: others[other], other: mine} if other is not None else {}
        self._before = {place: state_bytes(self.mem.planes, place) for place in wrong}
        for place, data in wrong.items():
            write_state(self.mem, place, data)
        return bool(wrong)

    def _neighbours(self, target: Target) -> list[int]:
        """Returns the slots of the other kept states, the nearest length first."""
        others = [one for one in states(self.mem) if one.register != target.register]
        others.sort(key=lambda one: abs(one.length - target.length))
        return [slot_and_label(self.mem, one.register)[0] for one in others]
