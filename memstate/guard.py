"""Notices that an exception ended a call while it changed something. Then the manager is broken."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from memstate import logs
from memstate.errors import Broken

LOG = logs.logger("guard")
AnyError = TypeVar("AnyError", bound=BaseException)


class Guard:
    """Knows the call that changes something now, or that an exception ended in the middle.

    A call checks its arguments first. Then it enters the guard, makes its changes, and leaves the guard. If an
    exception ends the call inside the guard, the guard stays closed: every later call raises `Broken`. This works for
    an exception at any line, and no code has to run after the exception: the next call sees that an earlier call did
    not leave the guard. Calls do not nest.

    Attributes:
        call: name of the call inside the guard; "" for none.
        why: the exception that ended this call in the middle; "" for none.
        registers: registers that this call has changed, in arrays or sequences.
        pages: KV pages that this call has claimed.
        entered: number of calls that have entered the guard since the start. Another thread may read the manager. If
            `call` is empty and `entered` the same before and after, no call changed anything meanwhile.

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
        """Raises an error if an exception ended an earlier call in the middle.

        Raises:
            Broken: there was such a call; the text names it.
        """
        if self.call:
            raise Broken(self.call, self.why)

    @property
    def interrupted(self) -> bool:
        """Whether an exception has left the guard, so that the call does not run any more."""
        return bool(self.why)

    def changing(self, call: str) -> "Changing":
        """Returns the context in which a call makes its changes. A frequent call can keep the context and reuse it.

        Args:
            call: name of the public call.
        """
        return Changing(self, call)

    def orderly(self, error: AnyError) -> AnyError:
        """Notes that a call that ends with this error has left everything in order, and returns the error.

        So the guard opens when the error leaves it.

        Args:
            error: the error that the call is about to raise.
        """
        self._orderly = error
        return error

    @contextmanager
    def mending(self, call: str) -> Iterator[None]:
        """Closes the guard for a call that repairs the manager, and opens it at the end.

        If the repair fails, the guard still knows the interrupted call and its changes, so the repair can be tried
        again.

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
    """The context of one call inside a guard. It can be entered many times.

    Args:
        guard: the guard that the call enters and leaves.
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
        guard.entered += 1  # after `call`: a reader in another thread sees at least one of the two changes

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._guard.call = ""
        else:
            self._guard.leave(error)
