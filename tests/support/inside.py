"""The way of the tests into parts that own nothing: register file, command buffer, tables of records.

`tests.support.owners` leads to the tables of owners, and `mem.pool.allocator` is public.
"""

from typing import Any

import memstate as ms
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import RegisterFile
from memstate.tiers.host.cache import RecordCache
from memstate.tiers.host.packing import Packing, RecordTable


def registers(mem: ms.StateManager) -> RegisterFile:
    """The registers of a manager: host mirror, and `table` on the device."""
    return mem._parts.registers


def commands(of: ms.StateManager | ms.prefix.PrefixCache) -> CommandBuffer:
    """The recorded changes of owners, and what sends them."""
    return of._parts.commands if isinstance(of, ms.StateManager) else of._commands


def record_table(packing: Packing) -> RecordTable:
    """Where the pieces of a record lie in the planes."""
    return packing._table


def records(worker: Any) -> RecordCache:
    """The host memory of a worker of vLLM."""
    return worker._cache
