"""Reads the figures of a manager from another thread, while its loop runs.

The loop takes no lock and pays nothing for it: a reader looks again if a call changed something meanwhile, which
`Guard` tells. Knows no exporter.
"""

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from threading import RLock
from typing import TypeVar
from weakref import ref

import memstate
from memstate import logs
from memstate.engine.manager import StateManager
from memstate.guard import Guard
from memstate.metrics import steps
from memstate.metrics.tenants import UNKNOWN, Holding, Tenant, holdings
from memstate.stats import Stats

LOG = logs.logger("metrics")
PATIENCE = 0.25  # seconds that a reader waits for a moment between two calls
PAUSE = 0.0005
Read = TypeVar("Read")


@dataclass(frozen=True)
class Reading:
    """The figures of one manager at one moment between two calls.

    Attributes:
        stats: all counts.
        about: what the manager is, such as its strategy.
        tenants: what tenants hold; empty unless they are asked for. If the walk over the prefix cache takes longer than
            any moment between two calls, they are those of the last walk that did not.
        steps: host time of its calls; None unless it is timed.
        age: seconds since the moment.
        interrupted: whether an exception ended a call in the middle. The other figures are of a moment before it.
    """

    stats: Stats
    about: Mapping[str, str]
    tenants: Mapping[str, Holding]
    steps: steps.StepTimes | None
    age: float
    interrupted: bool


def between_calls(guard: Guard, look: Callable[[], Read], patience: float = PATIENCE) -> Read | None:
    """Calls a function that changes nothing, and returns its result from a moment when no call changed anything.

    Args:
        guard: what every call of the manager enters while it changes something.
        look: the function; called again where a call came between.
        patience: seconds.

    Returns:
        The result. None: there was no such moment in time.
    """
    until = time.monotonic() + patience
    while True:
        entered = guard.entered
        if not guard.call:
            try:
                found = look()
            except Exception:
                if not guard.call and guard.entered == entered:
                    raise
            else:
                if not guard.call and guard.entered == entered:
                    return found
        if time.monotonic() > until:
            return None
        time.sleep(PAUSE)


class Source:
    """A manager whose figures are exported. It does not keep the manager alive.

    Make it in the thread of the manager's loop.

    Args:
        mem: the manager.
        tenant: names the tenant of a salt; None: tenants are not counted. A salt for which it raises is of the tenant
            "unknown", and the log says so.
        top: largest number of tenants that are named.
        timed: whether to time the calls of the manager.

    Raises:
        Broken: an earlier call was interrupted.
        InvalidArgument: the calls are timed already.
    """

    def __init__(self, mem: StateManager, tenant: Tenant | None, top: int, timed: bool) -> None:
        self._mem, self._tenant, self._top = ref(mem), tenant, top
        self._failed = ""  # the error of `tenant` in this read
        self._told = logs.Repeats(LOG)
        self._about = {
            "version": memstate.__version__, "strategy": repr(mem.tracking), "backend": mem.backend.name,
            "device": str(mem.backend.device), "slot_bytes": str(mem.layout.bytes_per_slot),
        }  # fmt: skip
        self.rank = str(mem.tiers.settings.rank if mem.tiers is not None else 0)
        mem._parts.guard.require_whole()
        self._last, self._one = (time.monotonic(), self._look(mem)), RLock()
        self._timing = steps.start(mem) if timed else None

    def read(self) -> Reading | None:
        """Returns the figures of now, or, if the loop leaves no moment between two calls, the last ones.

        Readers wait for each other, so that no counter of one is less than that of a reader before.

        Returns:
            The figures. None: the manager is gone.

        Syncs: no.
        """
        with self._one:
            return self._read()

    def _read(self) -> Reading | None:
        mem = self._mem()
        if mem is None:
            return None
        guard = mem._parts.guard
        broken = bool(guard.call) and guard.interrupted
        began = time.monotonic()
        found = between_calls(guard, lambda: self._look(mem), 0.0 if broken else PATIENCE)
        if found is None and self._tenant is not None and not broken:  # perhaps only the walk takes too long
            stats = between_calls(guard, mem.stats)
            found = (stats, self._last[1][1]) if stats is not None else None
        if found is not None:
            self._last = began, found
        taken, (stats, tenants) = self._last
        times = self._timing.read() if self._timing is not None else None
        age = 0.0 if found is not None else time.monotonic() - taken
        if self._failed:
            self._told.event(logging.WARNING, "tenant failed", why=self._failed)
            self._failed = ""
        return Reading(stats, self._about, tenants, times, age, broken)

    def _look(self, mem: StateManager) -> tuple[Stats, Mapping[str, Holding]]:
        return mem.stats(), holdings(mem, self._name, self._top) if self._tenant is not None else {}

    def _name(self, salt: Hashable) -> str:
        """Returns the name of a tenant, as UTF-8 can write it."""
        assert self._tenant is not None
        try:
            return str(self._tenant(salt)).encode(errors="backslashreplace").decode()
        except Exception as error:  # or one salt would cost all figures
            self._failed = type(error).__name__  # its message could hold the salt
            return UNKNOWN

    def close(self) -> None:
        """Ends the timing of calls."""
        if self._timing is not None:
            self._timing.stop()
