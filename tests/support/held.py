"""What a refusal may not change."""

import memstate as ms
from tests.support import owners


def held(mem: ms.StateManager) -> tuple[object, ...]:
    """Slots, pages, rows, pins, the prefix cache and all sessions as plain data."""
    assert mem.prefix is not None
    table, talks = mem._registers.table, mem._sessions.opened.values()
    leases = [(talk.path, list(talk.own), list(talk.kept), talk.opened, talk.since) for talk in talks]
    sessions = [{name: each[name] for name in each.keys() - {"age", "idle"}} for each in mem._sessions.inspect()]
    tree = [
        (salt, id(node), node.end, node.snapshot, node.leases, node.evicted, node.uses, list(node.pages))
        for salt, node in mem.prefix.tree.walk()
    ]
    return (
        mem.prefix.inspect(), tree, owners.nodes(mem.prefix), mem.prefix.stats(), dict(mem.prefix.leases),
        sessions, list(mem._sessions.idling), leases, list(mem._pages.allocator.holders),
        list(owners.holdings(mem).readers),
        owners.free(mem), mem.free_slots, mem.free_pages, mem._table.free, table.cells.tolist(),
        table.bitmap.tolist(),
    )  # fmt: skip
