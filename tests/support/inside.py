"""Gives tests access to private parts of a manager: register file, command buffer and tables of records.

`tests.support.owners` gives access to the tables of owners. `mem.pool.allocator` is public.
"""

from typing import Any

import memstate as ms
from memstate.slots.commands import CommandBuffer
from memstate.slots.registers import RegisterFile
from memstate.tiers.host.cache import RecordCache
from memstate.tiers.host.packing import Packing, RecordTable


def registers(mem: ms.StateManager) -> RegisterFile:
    """Returns the register file of a manager: the mirror on the host, and `table` on the device."""
    return mem._parts.registers


def commands(of: ms.StateManager | ms.prefix.PrefixCache) -> CommandBuffer:
    """Returns the command buffer, which records changes of owners and submits them."""
    return of._parts.commands if isinstance(of, ms.StateManager) else of._commands


def record_table(packing: Packing) -> RecordTable:
    """Returns the table of the pieces of a record: where each lies in the planes."""
    return packing._table


def records(worker: Any) -> RecordCache:
    """Returns the host records of a worker of vLLM."""
    return worker._cache
