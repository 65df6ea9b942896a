"""Declares the attributes of a manager, and the checks at the start of its calls."""

import threading

from memstate.engine.pool import StatePool
from memstate.errors import Asleep, MemstateError
from memstate.kernels.dispatch import Backend
from memstate.prefix import PrefixCache
from memstate.prefix.sessions import Sessions
from memstate.requests.page_table import PageTable
from memstate.requests.snapshots import Snapshots
from memstate.requests.table import RequestTable
from memstate.requests.tracking.mirror import Mirror
from memstate.slots.allocator import SlotAllocator
from memstate.slots.commands import CommandBuffer
from memstate.slots.journal import Change
from memstate.slots.registers import RegisterFile
from memstate.state.planes import Planes
from memstate.tiers import TierManager


class Parts:
    """The attributes of a manager. The constructor of `StateManager` sets them."""

    backend: Backend
    planes: Planes
    pool: StatePool
    prefix: PrefixCache | None
    tiers: TierManager | None
    _allocator: SlotAllocator
    _registers: RegisterFile
    _commands: CommandBuffer
    _table: RequestTable
    _pages: PageTable
    _mirror: Mirror
    _snapshots: Snapshots
    _sessions: Sessions
    _cache: PrefixCache
    _thread: int | None

    @property
    def changes(self) -> list[Change]:
        """The last changes of owners, oldest first.

        The argument `journal` of the manager limits their number. With `journal=0` the list is empty.
        """
        journal = self._commands.journal
        return list(journal.changes) if journal else []

    def _enter(self) -> None:
        self._require_thread()
        if self.planes.asleep:
            raise Asleep()

    def _require_thread(self) -> None:
        if self._thread is not None and self._thread != threading.get_ident():
            raise MemstateError(f"a manager is driven by one thread ({self._thread}), this is {threading.get_ident()}")
