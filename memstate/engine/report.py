"""Reports what a manager knows: figures, owners by name, and everything as plain data.

It changes nothing.
"""

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np

from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.slots.inspect import Inspection, inspect
from memstate.stats import Stats

if TYPE_CHECKING:
    from memstate.engine.manager import StateManager

PER_ROW = REGISTERS_PER_ROW


def stats(mem: "StateManager") -> Stats:
    """Builds the result of `StateManager.stats`."""
    held, rows_end = mem._registers.held, mem._registers.first_holder
    live = int(held[:rows_end:PER_ROW].sum())
    asked, traffic = mem.backend.counts, mem.planes.traffic
    return Stats(
        capacity=mem._allocator.capacity,
        free=mem._allocator.free,
        held_by_live=live,
        held_by_lanes=int(held[:rows_end].sum()) - live,
        held_by_snapshots=int(held[rows_end:].sum()) - mem._sessions.held,
        held_by_sessions=mem._sessions.held,
        rows=mem._table.rows,
        rows_used=mem._table.rows - mem._table.free,
        pages=mem._pages.allocator.pages,
        pages_free=mem._pages.allocator.free,
        snapshots=mem._mirror.snapshots,
        degraded=mem._mirror.degraded,
        published=mem._snapshots.published,
        dropped=mem._snapshots.dropped,
        refused=mem._snapshots.refused + mem._sessions.refused,
        copied_bytes=traffic.copied,
        zeroed_bytes=traffic.zeroed,
        packets=mem._commands.packets,
        uploads=asked.uploads,
        upload_bytes=asked.upload_bytes,
        upload_waits=mem._commands.ring.waits,
        launches=asked.total_launches,
        syncs=asked.syncs,
        prefix=mem.prefix.stats() if mem.prefix is not None else None,
        tiers=mem.tiers.stats() if mem.tiers is not None else None,
    )


def inspection(mem: "StateManager", names: dict[int, tuple[str, str]]) -> Inspection:
    """Builds the result of `StateManager.inspect`.

    Args:
        mem: the manager.
        names: (kind, name) of owners by register.
    """
    tags = {
        register: f"@{mem._registers.labels[register]}"
        if register >= mem._registers.first_holder
        else str(mem._table.ids[register // PER_ROW])
        for register in names
    }
    rows = [
        {
            "row": row,
            "id": str(mem._table.ids[row]),
            "length": int(mem._mirror.lengths(np.array([row]))[0]),
            "confirmed": int(mem._table.confirmed[row]),
            "finished": bool(mem._table.finished[row]),
            "unsettled": int(mem._table.unsettled[row]),
        }
        for row in np.flatnonzero(mem._table.used).tolist()
    ]
    return inspect(
        mem._registers, names, tags, rows=rows, prefix=mem._cache.inspect(),
        sessions=mem._sessions.inspect(), changes=list(map(str, mem.changes)),
        stats=asdict(stats(mem)), waiting=mem._commands.waiting,
    )  # fmt: skip


def owner(mem: "StateManager", register: int) -> tuple[str, str]:
    """Builds the result of `StateManager.owner`."""
    if register < mem._registers.first_holder:
        row, part = divmod(register, PER_ROW)
        what = ("live", "lane 0", "lane 1")[part]
        return what.split()[0], f"row {row} (request {mem._table.ids[row]!r}) {what}"
    if node := mem._cache.nodes.get(register):
        return "cached", f"cached prefix of {node.end * mem._pages.page_size} tokens in register {register}"
    if name := mem._sessions.owner(register):
        return "session", name
    return "snapshot", mem._snapshots.name(register)
