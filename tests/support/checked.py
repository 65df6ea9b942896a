"""Checks a manager with KV pages and a prefix cache between two calls of a test loop."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import memstate as ms
from memstate.prefix.lease import NO_NODE
from memstate.prefix.tree import Node
from tests.support import inside, owners
from tests.support.planes import History, Planes
from tests.support.scan import row_problems, scan_registers

STALE = -1  # the content of a free KV page


def key_tokens(key: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(key, np.int64).tolist()
    return tokens


def prefix_of(node: Node) -> list[int]:
    """Returns the tokens from the root to a node's end."""
    return key_tokens(b"".join(step.key for step in reversed(list(node.path()))))


class Checked:
    """Compares slots, registers, pages, leases, pins and counters of a manager, and the bytes of its states and KV.

    Attributes:
        mem: The manager.
        planes: The bytes of its slots.
        page: Tokens of a KV page.
        kv: `page token` -> the token that was written there last.
    """

    mem: ms.StateManager
    planes: Planes
    page: int
    kv: Any

    def in_pages(self, pages: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether the pages hold the KV of these tokens. True if the manager has no pages."""
        if not owners.kv_pages(self.mem).pages:
            return True
        there: list[int] = self.kv[list(pages)].reshape(-1)[: len(tokens)].tolist()
        return there == list(tokens)

    def of_rows(self) -> dict[int, History]:
        """Returns slot -> tokens of its state, for the rows whose tokens the loop knows. Here: none."""
        return {}

    def look(self, idle: bool = False) -> None:
        """Submits, and checks the whole manager. idle: no request runs."""
        mem, content = self.mem, dict[int, History]()
        mem.submit()
        registers = scan_registers(inside.registers(mem))
        assert row_problems(mem) == []
        mem.audit().raise_if_leaking()
        mem.device.check()
        users = Counter(page for row in mem.rows for page in owners.pages_of(mem, row))
        for snap in [*owners.states(mem).values(), *owners.leaving(mem).values()]:
            users.update(snap.pages)
        for talk in owners.sessions(mem).opened.values():
            users.update(talk.pages)
            tokens = key_tokens(talk.prompt.key)
            assert not (talk.row and (talk.kept or talk.pages or talk.path is not NO_NODE))
            assert self.in_pages(talk.pages, tokens[: talk.kept[0].length] if talk.kept else [])
            content |= {registers.slots[snap.register]: tuple(tokens[: snap.length]) for snap in talk.kept}
        if mem.prefix is not None:
            cached = {registers.slots[node.snapshot.register]: tuple(prefix_of(node)) for node in mem.prefix.stated()}  # type: ignore[union-attr]
            users.update(self._look_at_tree(mem.prefix, idle))
            content |= cached
        assert not self.planes.wrong(content | self.of_rows()), "a state is not what its tokens say"
        holders = np.asarray(owners.kv_pages(mem).holders)
        assert {page: int(n) for page, n in enumerate(holders) if n} == dict(+users)
        assert mem.free_pages == len(holders) - 1 - len(+users)
        self.kv[holders == 0] = STALE
        if idle:
            assert not owners.pinned(mem) and not mem.rows

    def _look_at_tree(self, cache: "ms.prefix.PrefixCache", idle: bool) -> Iterable[int]:
        """Checks the tree, and returns the pages of all its nodes."""
        sessions, nodes = owners.sessions(self.mem).opened.values(), [node for _, node in cache.tree.walk()]
        ends = [*(lease.node for lease in cache.leases.values()), *(talk.path for talk in sessions)]
        leased, held = (
            Counter(node for end in ends for node in end.path()),
            [page for node in nodes for page in node.pages],
        )
        for node in nodes:
            tokens, own = prefix_of(node), len(node.key) // (8 * self.page)
            assert len(tokens) == node.end * self.page and own >= 1 and node.leases == leased[node]
            assert node.carriers == sum(not child.ghost for child in node.children.values())
            assert not (node.snapshot and node.evicted)
            if node.ghost:  # a node with only its tokens left
                assert not (node.pages or node.leases or node.snapshot or node.carriers)
            else:
                assert self.in_pages(cache.tree.pages_to(node), tokens)
            if node.snapshot:
                assert node.snapshot.length == len(tokens)
                assert int(inside.registers(self.mem).table.labels[node.snapshot.register]) == len(tokens)
        states = {node.snapshot.register: node for node in nodes if node.snapshot}
        assert states == owners.nodes(cache) and leased.keys() <= {*nodes}
        assert set(cache.tree.roots) == {salt for salt, _ in cache.tree.walk()}
        figures = self.mem.stats().prefix
        assert (figures.states, figures.nodes, figures.pages) == (len(states), len(nodes), len(held))
        assert figures.inserted + figures.loaded - figures.evicted_states == figures.states
        lost = figures.lost_no_sharing + figures.lost_evicted + figures.lost_no_snapshot
        assert figures.hit_tokens + lost == figures.prompt_tokens
        if idle:
            assert not leased and not cache.leases and figures.leased_pages == 0
            assert cache.evictable_states == len(states) and cache.evictable_pages == len(held)
        return held

    def empty(self) -> None:
        """Clears the cache, and checks that everything is free. No request may run, no session may be open."""
        self.look(idle=True)
        if (cache := self.mem.prefix) is not None:
            cache.clear()
            self.look(idle=True)
            assert cache.tree.nodes == cache.tree.total_pages == 0 and not cache.tree.roots
        stats, file = self.mem.stats(), inside.registers(self.mem)
        free = (self.mem.free_slots, self.mem.free_pages, owners.free(self.mem))
        assert free == (stats.capacity, stats.pages, file.holders)
