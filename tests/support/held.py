"""Collects all data of a manager that a refused call must leave unchanged."""

import memstate as ms
from tests.support import inside, owners


def held(mem: ms.StateManager) -> tuple[object, ...]:
    """Returns slots, pages, rows, pins, the prefix cache and all sessions as plain data."""
    assert mem.prefix is not None
    table, talks = inside.registers(mem).table, owners.sessions(mem).opened.values()
    leases = [(talk.path, list(talk.own), list(talk.kept), talk.opened, talk.since) for talk in talks]
    sessions = [{name: each[name] for name in each.keys() - {"age", "idle"}} for each in owners.sessions(mem).inspect()]
    tree = [
        (salt, id(node), node.end, node.snapshot, node.leases, node.evicted, node.uses, list(node.pages))
        for salt, node in mem.prefix.tree.walk()
    ]
    return (
        mem.prefix.inspect(), tree, owners.nodes(mem.prefix), mem.prefix.stats(), dict(mem.prefix.leases),
        sessions, leases, list(owners.kv_pages(mem).holders),
        dict(owners.holdings(mem).readers),
        owners.free(mem), mem.free_slots, mem.free_pages, mem.stats().rows_used, table.cells.tolist(),
        table.bitmap.tolist(),
    )  # fmt: skip
