"""Refuses calls of a manager that come at a wrong time, from another thread, or on another stream."""

import sys
import threading
from collections.abc import Callable

from memstate.engine.stepping import Stepping
from memstate.errors import Asleep, InvalidArgument, MemstateError
from memstate.guard import Guard
from memstate.state.memory import Memory
from memstate.streams import WorkStream

# Prefixes of the modules that call functions of the caller inside the guard: those of policies, stores and replays.
INSIDE = ("memstate.engine.", "memstate.prefix.", "memstate.tiers.")


class Door:
    """Checks at the start of each call whether the call is allowed.

    Args:
        guard: knows an interrupted call.
        stepping: knows whether a plan replays a graph.
        stream: the stream of the manager.
        memory: the memory of the states.
        check: function that each call runs first in debug mode; None: no debug mode. Debug mode allows one thread only.
    """

    def __init__(
        self, guard: Guard, stepping: Stepping, stream: WorkStream, memory: Memory, check: Callable[[], None] | None
    ) -> None:
        self._guard, self._stepping, self._stream, self._memory, self._check = guard, stepping, stream, memory, check
        self._thread = threading.get_ident() if check is not None else None

    def enter(self) -> None:
        """Raises an error unless a call may now change something, or use the device."""
        if self._stepping.replaying is not None:
            self.require_no_replay()
        if self._check is not None or self._stream.matters:
            self.require_caller()
        if self._guard.call:
            self._guard.require_whole()
        if self._memory.asleep:
            raise Asleep()
        if self._check is not None:
            self._check()

    def require_whole(self) -> None:
        """Raises an error unless a call may now read what the host knows."""
        self.require_no_replay()
        self._guard.require_whole()

    def require_no_replay(self) -> None:
        """Refuses a call that comes from inside the replay of a plan."""
        if self._stepping.replaying is not None and not self._guard.interrupted:
            raise InvalidArgument(
                "this call comes inside the replay of a plan, while the manager changes: only launch and "
                "device.scrub_null can be called there; make this call after the plan"
            )

    def require_caller(self) -> None:
        """Refuses a call from another thread, on another stream, or inside a graph capture."""
        self.require_thread()
        self._stream.require()

    def require_outside(self, call: str) -> None:
        """Refuses a call that comes from inside another call of the manager, such as from a policy or a replay.

        Args:
            call: name of the call, for the error.

        Raises:
            InvalidArgument: the call comes from inside another call; nothing changed.
        """
        frame = sys._getframe(2) if self._guard.call and not self._guard.interrupted else None
        while frame is not None:
            if str(frame.f_globals.get("__name__")).startswith(INSIDE):
                raise InvalidArgument(f"{call}() inside {self._guard.call}(), which still runs: call it afterwards")
            frame = frame.f_back

    def require_thread(self) -> None:
        """Refuses a call from another thread, in debug mode."""
        if self._thread is not None and self._thread != threading.get_ident():
            raise MemstateError("debug=True: a manager is driven by one thread: make it in the thread that drives it")

    def require_awake(self) -> None:
        """Refuses a call that needs the bytes of states while they sleep."""
        if self._memory.asleep:
            raise Asleep()
