"""Notices calls that an exception ended while they changed something. The manager is then broken."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

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
        self.call = self._next = self._why = ""
        self._orderly: BaseException | None = None
        self.entered = 0
        self.registers: list[object] = []
        self.pages: list[int] = []

    def require_whole(self) -> None:
        """Requires that no call ended in the middle.

        Raises:
            Broken: one did.
        """
        if self.call:
            raise Broken(self.call, self._why)

    @property
    def interrupted(self) -> bool:
        """Whether an exception has left the guard, so that the call does not run any more."""
        return bool(self._why)

    def changing(self, call: str) -> Self:
        """Names the call for the `with` statement that follows.

        Args:
            call: name of the public call.
        """
        self._next = call
        return self

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
        self.call = self._why = ""

    def __enter__(self) -> Self:
        if self.call:
            self.require_whole()
        if self.registers:
            self.registers.clear()
        if self.pages:
            self.pages.clear()
        self.call, self._why = self._next, ""
        self.entered += 1  # behind `call`: a reader sees one of them
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.call = ""
            return
        harmless, self._orderly = error is self._orderly, None
        if harmless:
            self.call = ""
        else:
            self._why = repr(error)
            logs.event(LOG, logging.ERROR, "interrupted", call=self.call, why=self._why)
