"""Reads the figures of a manager from another thread, while its loop runs.

The loop takes no lock and loses no time: if `Guard` says that a call changed something while a reader read, the reader
reads again. Knows no exporter.
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
PATIENCE = 0.25  # seconds for which a reader waits until no call runs
PAUSE = 0.0005  # seconds between two tries
Read = TypeVar("Read")


@dataclass(frozen=True)
class Reading:
    """The figures of one manager at one moment at which no call ran.

    Attributes:
        stats: all counts.
        about: properties of the manager, such as its strategy.
        tenants: what each tenant holds, by its name; empty unless tenants are counted. This can be older than `stats`:
            it is from the last walk over the prefix cache that no call disturbed.
        steps: host time of the manager's calls; None unless they are timed.
        age: seconds since that moment.
        interrupted: whether an exception ended a call in the middle. Then the other figures are from before that call.
    """

    stats: Stats
    about: Mapping[str, str]
    tenants: Mapping[str, Holding]
    steps: steps.StepTimes | None
    age: float
    interrupted: bool


def between_calls(guard: Guard, look: Callable[[], Read], patience: float = PATIENCE) -> Read | None:
    """Calls a function that reads a manager, and repeats this until no call changes the manager meanwhile.

    Args:
        guard: the manager's guard.
        look: the function. It must not change anything.
        patience: seconds after which it gives up.

    Returns:
        The result of the function. None: within `patience`, some call always disturbed it.
    """
    until = time.monotonic() + patience
    while True:
        entered = guard.entered
        if not guard.call:
            try:
                result = look()
            except Exception:
                if not guard.call and guard.entered == entered:
                    raise
            else:
                if not guard.call and guard.entered == entered:
                    return result
        if time.monotonic() > until:
            return None
        time.sleep(PAUSE)


class ExportedManager:
    """A manager whose figures are exported. It does not keep the manager alive.

    Make it in the thread of the manager's loop.

    Args:
        mem: the manager.
        tenant: function that returns the name of a salt's tenant; None: tenants are not counted. A salt for which it
            raises belongs to the tenant "unknown", and the log has the error.
        top: limit of the tenants that are named.
        timed: whether to time the calls of the manager.

    Raises:
        Broken: an earlier call was interrupted.
        InvalidArgument: the calls are timed already.
    """

    def __init__(self, mem: StateManager, tenant: Tenant | None, top: int, timed: bool) -> None:
        self._mem, self._tenant, self._top = ref(mem), tenant, top
        self._failed = ""  # type of the last exception of `tenant`, until it is logged
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
        """Returns the present figures or, if calls always disturb the reading, the last ones.

        Only one thread reads at a time, so that no counter is ever smaller for a later reader.

        Returns:
            The figures. None: the manager has been deleted.

        Syncs: no.
        """
        with self._one:
            return self._read()

    def _read(self) -> Reading | None:
        if (mem := self._mem()) is None:
            return None
        guard = mem._parts.guard
        broken = bool(guard.call) and guard.interrupted
        began = time.monotonic()
        figures = between_calls(guard, lambda: self._look(mem), 0.0 if broken else PATIENCE)
        if figures is None and self._tenant is not None and not broken:  # try without the walk for tenants
            stats = between_calls(guard, mem.stats)
            figures = (stats, self._last[1][1]) if stats is not None else None
        if figures is not None:
            self._last = began, figures
        taken, (stats, tenants) = self._last
        times = self._timing.read() if self._timing is not None else None
        age = 0.0 if figures is not None else time.monotonic() - taken
        if self._failed:
            self._told.event(logging.WARNING, "tenant failed", why=self._failed)
            self._failed = ""
        return Reading(stats, self._about, tenants, times, age, broken)

    def _look(self, mem: StateManager) -> tuple[Stats, Mapping[str, Holding]]:
        return mem.stats(), holdings(mem, self._name, self._top) if self._tenant is not None else {}

    def _name(self, salt: Hashable) -> str:
        """Returns the name of a salt's tenant, in characters that UTF-8 can encode."""
        assert self._tenant is not None
        try:
            return str(self._tenant(salt)).encode(errors="backslashreplace").decode()
        except Exception as error:  # one bad salt must not hide all figures
            self._failed = type(error).__name__  # not the message, which could contain the salt
            return UNKNOWN

    def close(self) -> None:
        """Ends the timing of calls."""
        if self._timing is not None:
            self._timing.stop()
