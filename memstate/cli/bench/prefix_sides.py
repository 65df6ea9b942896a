"""Whose prefix caches are measured, ours and the peers, and what is timed of each. Knows no trace and no tree."""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from statistics import median
from typing import Protocol

import numpy as np

from memstate.cli.bench import radix_peer
from memstate.cli.bench.entry import Figure
from memstate.cli.bench.task import Setting
from memstate.cli.replay import REGISTERS, ROW, Rig
from memstate.prefix import Prefix
from memstate.prefix.cache import NO_MATCH, NO_NODE, Insertion, Lease
from memstate.prefix.policies.names import POLICIES
from memstate.tokens import encode

OURS = ("lru", "return-rate")  # what the peers do, and the default
BATCH = 32  # calls in a row before it is another's turn: what disturbs the machine disturbs all

Key = list[int]
Keys = Sequence[Key]


def seconds(act: Callable[[], object]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


class Differs(Exception):
    """What is measured does not do what it should."""


class Side(Protocol):
    """Whoever keeps prefixes."""

    @property
    def held(self) -> tuple[int, int]:
        """States and pages in use."""
        ...

    def match(self, ids: Key) -> int:
        """Blocks up to the deepest state; notes the use."""
        ...

    def insert(self, ids: Key) -> float:
        """Takes what was matched last, with a state at its end, and evicts what is too many; returns the seconds of
        both, allocation left out.
        """
        ...


Act = Callable[[str, Side, Key], object]


class Ours:
    """The library's cache under one policy. looked: seconds of the last match before anything was noted."""

    def __init__(self, states: int, pages: int, longest: int, policy: str) -> None:
        of_states, of_pages = POLICIES[policy]
        prefix = Prefix(of_states(), of_pages and of_pages(), most_states=states)
        self.rig = Rig(prefix, states, pages, longest)
        self._key, self._match, self.looked = b"", NO_MATCH, 0.0

    @property
    def held(self) -> tuple[int, int]:
        """States and pages in use."""
        return len(self.rig.cache.nodes), self.rig.cache.tree.total_pages

    def match(self, ids: Key) -> int:
        """Blocks up to the deepest state; notes the use, as a request's admission does."""
        begin = time.perf_counter()
        self._key = encode(ids)
        self._match = self.rig.cache.match(self._key, None, len(ids))
        self.looked = time.perf_counter() - begin
        self.rig.cache.use(Lease(NO_NODE, None, self._match, {}))  # one that keeps nothing: an insert may never come
        return self._match.length

    def insert(self, ids: Key) -> float:
        """Inserts what was matched last, with a state at its end; returns the seconds of that and of evictions."""
        cache, pages, row = self.rig.cache, self.rig.pages, np.array([ROW])
        lease, shared = cache.hold(self._match, None), cache.pages(self._match)
        fresh = len(ids) - len(shared)
        spent = seconds(lambda: cache.evict_pages(fresh - pages.allocator.free))
        pages.start(row, [shared], [fresh])
        cache.unpin(lease)
        self.rig.state(REGISTERS[0], len(ids))
        insertion = Insertion(lease, self._key, pages.of(ROW), REGISTERS[0], len(ids), True)
        self.rig.commands.submit()  # the state is computed by then
        spent += seconds(lambda: cache.insert([insertion]))
        self.rig.commands.release(REGISTERS)
        pages.end(row)
        cache.release(lease)
        return spent

    def stated(self) -> set[tuple[int, ...]]:
        """Every prefix that has a state, put together node by node."""
        paths = (reversed(list(node.path())) for node in self.rig.cache.nodes.values())
        return {tuple(np.frombuffer(b"".join(step.key for step in path), np.int64).tolist()) for path in paths}


class Sides:
    """Those who take the same course in turns. A peer that fails leaves: that takes nothing from the others."""

    def __init__(self, case: str, peers: Collection[str], states: int, pages: int, longest: int) -> None:
        self.case, self.ours = case, {name: Ours(states, pages, longest, name) for name in OURS}
        self.peers: dict[str, Side] = {}
        for name in peers:
            try:
                self.peers[name] = radix_peer.SglangCache(states, pages, longest, radix_peer.CORES[name])
            except Exception as error:
                self._leave(name, error)

    def take(self, keys: Keys, act: Act) -> None:
        """Lets everybody act on every key. Raises: what one of ours raises."""
        for turn in range(-(-len(keys) // BATCH)):
            sides = [*self.ours.items(), *self.peers.items()]
            first = turn % len(sides)  # another one each time: who is first finds the keys cold
            for name, side in sides[first:] + sides[:first]:
                try:
                    for key in keys[turn * BATCH : (turn + 1) * BATCH]:
                        act(name, side, key)
                except Exception as error:
                    if name in self.ours:
                        raise
                    self._leave(name, error)

    def _leave(self, name: str, error: Exception) -> None:
        self.peers.pop(name, None)
        why = str(error) if isinstance(error, Differs) else f"raises {type(error).__name__}: {error}"
        print(f"prefix, {self.case}: peer {' '.join(f'{name} {why}'.split())[:300]}", file=sys.stderr)


class Times:
    """Seconds of every call, by what was called and whose it was.

    match: the key made of a list, followed through the tree, and the use noted; look: the same without the note, which
    no peer can be asked for; insert: see `Side`.
    """

    def __init__(self) -> None:
        self.spent: dict[str, defaultdict[str, list[float]]] = {
            op: defaultdict(list) for op in ("look", "match", "insert")
        }

    def match(self, name: str, side: Side, key: Key) -> None:
        """Times a match."""
        self.spent["match"][name].append(seconds(lambda: side.match(key)))
        if isinstance(side, Ours):
            self.spent["look"][name].append(side.looked)

    def insert(self, name: str, side: Side, key: Key) -> None:
        """Times an insert; the match before it is not timed."""
        side.match(key)
        self.spent["insert"][name].append(side.insert(key))

    def request(self, name: str, side: Side, key: Key) -> None:
        """Times a match and the insert that follows."""
        self.match(name, side, key)
        self.spent["insert"][name].append(side.insert(key))

    def entries(self, setting: Setting, sides: Sides, warm: int = 0) -> list[Figure]:
        """Medians of all calls but the first `warm`: each of ours beside each peer that is left."""
        found = []
        for op, spent in self.spent.items():
            there = {**sides.ours, **sides.peers}
            value = {name: median(calls[warm:]) * 1e6 for name, calls in spent.items() if name in there}
            for name in sides.ours:
                alone = (op, setting.case(f"{sides.case}, {name}"), value[name], "host us")
                beside = [(peer, value[peer], value[name] / value[peer]) for peer in sides.peers if peer in value]
                found += [Figure(*alone, *each) for each in beside] or [Figure(*alone)]
        return found
