"""Counts what each tenant holds: slots, KV pages and tokens, by the salts of prompts. Knows no exporter."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

import numpy as np

from memstate.engine.manager import StateManager
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.tokens import BYTES

OTHER, UNKNOWN = "other", "unknown"
Tenant = Callable[[Hashable], str]


@dataclass
class Holding:
    """What one tenant holds.

    Attributes:
        slots: slots of running requests, cached states and sessions.
        pages: KV pages. A page that two tenants hold counts for both.
        tokens: tokens of prompts and answers whose KV or state it holds. Tokens that requests share count once.
    """

    slots: int = 0
    pages: int = 0
    tokens: int = 0

    def add(self, slots: int, pages: int, tokens: int) -> None:
        """Adds to the three figures.

        Args:
            slots: number of slots.
            pages: number of KV pages.
            tokens: number of tokens.
        """
        self.slots, self.pages, self.tokens = self.slots + slots, self.pages + pages, self.tokens + tokens


def holdings(mem: StateManager, tenant: Tenant, most: int) -> Mapping[str, Holding]:
    """Returns what each of the largest tenants holds.

    A node of the prefix cache counts once, however many requests share it. Each request or session adds its own slots,
    and those of its pages and tokens that are not in the cache. Published handles, slots claimed by id, and requests
    without tokens have no salt: they belong to the tenant "unknown".

    Args:
        mem: the manager. Nothing may change it during the call.
        tenant: function that returns the name of a salt's tenant. It must not raise.
        most: limit of the tenants that are named; all others together are "other".

    Syncs: no.
    """
    tenants: defaultdict[str, Holding] = defaultdict(Holding)
    beyond: defaultdict[str, set[int]] = defaultdict(set)  # tenant -> its pages that are not in the tree
    cache, file, size = mem._parts.cache, mem._parts.registers, mem.pages.size
    names: dict[Hashable, str] = {}

    def name_of(salt: Hashable) -> str:
        if salt not in names:
            names[salt] = tenant(salt)
        return names[salt]

    in_tree: set[int] = set()
    for salt, node in cache.tree.walk():
        if not node.ghost:
            in_tree.update(node.pages)
            tenants[name_of(salt)].add(node.snapshot is not None, len(node.pages), len(node.key) // BYTES)
    sessions = mem._parts.sessions
    for session in sessions.opened.values():
        if session.kept:
            name = name_of(session.prompt.salt)
            # After `recover`, a session has no lease: count which of its pages are in the tree.
            shared = session.path.end or sum(page in in_tree for page in session.pages)
            tenants[name].add(len(sessions.owned(session)), 0, max(0, session.length - shared * size))
            beyond[name].update(session.pages[shared:])
    for row in np.flatnonzero(mem._parts.table.used).tolist():
        lease = cache.leases.get(row)
        name, shared = (name_of(lease.prompt.salt), lease.node.end) if lease is not None else (UNKNOWN, 0)
        slots = int(file.held[REGISTERS_PER_ROW * row : REGISTERS_PER_ROW * (row + 1)].sum())
        length = int(mem._parts.mirror.lengths(np.array([row]))[0])
        tenants[name].add(slots + len(mem._parts.marks.kept.get(row, ())), 0, max(0, length - shared * size))
        beyond[name].update(mem._parts.pages.of(row)[shared:])
    for name, pages in beyond.items():
        tenants[name].pages += len(pages)
    pool = mem._parts.pages.allocator
    slots = mem._parts.allocator.capacity - mem._parts.allocator.free - sum(each.slots for each in tenants.values())
    pages_left = pool.pages - pool.free - sum(each.pages for each in tenants.values()) if pool.pages else 0
    if slots > 0 or pages_left > 0:
        tenants[UNKNOWN].add(max(0, slots), max(0, pages_left), 0)
    return _largest(tenants, most)


def _largest(tenants: Mapping[str, Holding], most: int) -> dict[str, Holding]:
    """Returns the tenants with the largest shares of slots or KV pages, and all others together as "other"."""
    slots, pages = (max(1, sum(getattr(each, what) for each in tenants.values())) for what in ("slots", "pages"))
    part = {name: max(each.slots / slots, each.pages / pages) for name, each in tenants.items()}
    order = sorted(tenants.items(), key=lambda each: (-part[each[0]], -each[1].slots, -each[1].tokens, each[0]))
    kept = dict(order[:most])
    for _, holding in order[most:]:
        kept.setdefault(OTHER, Holding()).add(holding.slots, holding.pages, holding.tokens)
    return kept
