"""Notices calls that an exception ended while they changed something. The manager is then broken."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

from memstate import logs
from memstate.errors import Broken

LOG = logs.logger("guard")
AnyError = TypeVar("AnyError", bound=BaseException)


class Guard:
    """Knows the call that changes something now, or that an exception ended in the middle.

    A call checks its arguments first. Then it enters the guard, makes its changes, and leaves the guard. If an
    exception ends the call inside the guard, the guard stays closed: every later call raises `Broken`. It does not
    matter where the exception came from, and no code needs to run after it: a call that did not leave is noticed by the
    next one. Calls do not nest.

    Attributes:
        call: name of the call inside the guard; "" if none is.
        why: the exception that ended it in the middle; "" if none did.
        registers: registers that this call changed, in arrays or sequences.
        pages: KV pages that this call took from the free ones.
        entered: calls that have entered the guard since the start. Another thread that finds `call` empty and the same
            number before and after a look at the manager has seen no half of a call.

    Example:
        >>> guard = Guard()
        >>> with guard.changing("plan"):
        ...     pass
        >>> guard.require_whole()
    """

    def __init__(self) -> None:
        self.call = self.why = ""
        self._orderly: BaseException | None = None
        self.entered = 0
        self.registers: list[object] = []
        self.pages: list[Iterable[int]] = []

    def require_whole(self) -> None:
        """Requires that no call ended in the middle.

        Raises:
            Broken: one did.
        """
        if self.call:
            raise Broken(self.call, self.why)

    @property
    def interrupted(self) -> bool:
        """Whether an exception has left the guard, so that the call does not run any more."""
        return bool(self.why)

    def changing(self, call: str) -> "Changing":
        """Returns the context in which a call makes its changes. A call that comes often keeps it.

        Args:
            call: name of the public call.
        """
        return Changing(self, call)

    def orderly(self, error: AnyError) -> AnyError:
        """Returns the error, after noting that the call has left everything in order, so that the guard opens.

        Args:
            error: the error that the call is about to raise.
        """
        self._orderly = error
        return error

    @contextmanager
    def mending(self, call: str) -> Iterator[None]:
        """Closes the guard for a call that puts everything right; opens it at the end.

        The interrupted call and what it changed stay known until then, so that a second try can follow.

        Args:
            call: name of the public call.
        """
        self.call = self.call or call
        self.entered += 1
        yield
        self.call = self.why = ""

    def leave(self, error: BaseException) -> None:
        """Ends a call with an error. The guard opens only if the call has left everything in order."""
        harmless, self._orderly = error is self._orderly, None
        if harmless:
            self.call = ""
        else:
            self.why = repr(error)
            logs.event(LOG, logging.ERROR, "interrupted", call=self.call, why=self.why)


class Changing:
    """The inside of a guard, for one call. It can be entered again and again.

    Args:
        guard: the guard.
        call: name of the public call.
    """

    __slots__ = ("_call", "_guard")

    def __init__(self, guard: Guard, call: str) -> None:
        self._guard, self._call = guard, call

    def __enter__(self) -> None:
        guard = self._guard
        if guard.call:
            guard.require_whole()
        guard.registers.clear()
        guard.pages.clear()
        guard.call, guard.why = self._call, ""
        guard.entered += 1  # behind `call`: a reader sees one of them

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._guard.call = ""
        else:
            self._guard.leave(error)
