"""Declares the attributes of a manager, and the checks at the start of its calls."""

import threading
from typing import Any

import torch

from memstate.checks import NotCopied
from memstate.engine.admission import Admission
from memstate.engine.ages import Ages
from memstate.engine.chaos import Faults, NoFaults
from memstate.engine.pool import StatePool
from memstate.engine.stepping import Stepping
from memstate.errors import Asleep, InvalidArgument, MemstateError
from memstate.guard import Guard
from memstate.kernels.dispatch import Backend
from memstate.prefix import PrefixCache
from memstate.prefix.room import Room
from memstate.prefix.sessions import Sessions
from memstate.requests.holdings import Holdings
from memstate.requests.marks import Marks
from memstate.requests.page_table import PageTable
from memstate.requests.steps import StepLog
from memstate.requests.table import RequestTable
from memstate.requests.tracking.mirror import Mirror
from memstate.showing import Shown
from memstate.slots.allocator import SlotAllocator
from memstate.slots.commands import CommandBuffer
from memstate.slots.journal import Change
from memstate.slots.registers import RegisterFile
from memstate.state.memory import Memory
from memstate.state.planes import Planes
from memstate.streams import WorkStream
from memstate.tiers import TierManager

# Public attributes that the constructor sets, once.
FIXED = frozenset(("backend", "forward", "layout", "overlap", "planes", "pool", "prefix", "tiers", "tracking"))


class Parts(NotCopied, Shown):
    """The attributes of a manager. The constructor of `StateManager` sets them; the public ones are read-only."""

    backend: Backend
    planes: Planes
    pool: StatePool
    prefix: PrefixCache | None
    tiers: TierManager | None
    _faults: Faults | NoFaults
    _allocator: SlotAllocator
    _registers: RegisterFile
    _commands: CommandBuffer
    _table: RequestTable
    _ages: Ages
    _pages: PageTable
    _mirror: Mirror
    _holdings: Holdings
    _sessions: Sessions
    _room: Room
    _cache: PrefixCache
    _admission: Admission
    _stepping: Stepping
    _marks: Marks
    _log: StepLog
    _memory: Memory
    _stream: WorkStream
    _guard: Guard
    _thread: int | None

    def __setattr__(self, name: str, value: Any) -> None:
        self._require_free(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._require_free(name)
        super().__delattr__(name)

    def _require_free(self, name: str) -> None:
        """Refuses to change a public attribute.

        Raises:
            AttributeError: the attribute is set already, or the manager computes it.
        """
        if isinstance(getattr(type(self), name, None), property):
            raise AttributeError(f"mem.{name} cannot be reassigned: the manager computes it")
        if name in FIXED and name in self.__dict__:
            raise AttributeError(
                f"mem.{name} cannot be reassigned: all parts of the manager use the object that it has; change what "
                "is in it, or build another StateManager"
            )

    @property
    def changes(self) -> list[Change]:
        """The last changes of owners, oldest first.

        The argument `journal` of the manager limits their number. With `journal=0` the list is empty.
        """
        journal = self._commands.journal
        return list(journal.changes) if journal else []

    def use_stream(self, stream: "torch.cuda.Stream") -> None:
        """Moves the device work of the manager to another stream, behind all its work so far.

        All calls come on one stream, except lengths, counts, `stats` and `scrub_null`. The first call decides which; on
        another current stream the others raise InvalidArgument. `use_stream` makes the new stream wait for the old one.
        It does not make the new stream current: make the next calls under `torch.cuda.stream(stream)`.

        Only the forward may run on another stream, ordered by events of the caller.

        Args:
            stream: a stream of the manager's device.

        Raises:
            InvalidArgument: not a stream of this device, or the current stream captures a CUDA graph; nothing changed.

        Syncs: no.
        """
        self._require_thread()
        self._allocator.stream.use(stream)

    def _enter(self) -> None:
        """Lets a public call in: the door of all calls. What can refuse a call is asked only where it might."""
        if self._stepping.replaying is not None:
            self._require_no_replay()
        if self._thread is not None or self._stream.matters:
            self._require_caller()
        if self._guard.call:
            self._guard.require_whole()
        if self._memory.asleep:
            raise Asleep()
        if self._thread is not None:
            self._require_owners()

    def _require_owners(self) -> None:
        """Requires that every state has the owner that its holder names; see `Recount`."""

    def _require_no_replay(self) -> None:
        """Refuses a call that the replay of a plan makes."""
        if self._stepping.replaying is not None and not self._guard.interrupted:
            raise InvalidArgument(
                "this call comes inside the replay of a plan, while the manager changes: only launch and scrub_null "
                "can be called there; make this call after the plan"
            )

    def _require_caller(self) -> None:
        """Refuses a call from another thread, on another stream, or inside a graph capture."""
        self._require_thread()
        self._allocator.stream.require()

    def _require_thread(self) -> None:
        if self._thread is not None and self._thread != threading.get_ident():
            raise MemstateError(f"a manager is driven by one thread ({self._thread}), this is {threading.get_ident()}")
