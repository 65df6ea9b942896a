"""The prefix caches that are measured, ours and the peers, and what is timed of each. Knows no trace and no tree."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from statistics import median
from typing import Protocol

import numpy as np

from memstate.cli.bench import radix_peer
from memstate.cli.bench.task import Figure, Setting, peer_left, take_turns
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
    """Returns how long a call takes."""
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


class Side(Protocol):
    """A prefix cache."""

    @property
    def held(self) -> tuple[int, int]:
        """States and pages in use."""
        ...

    def match(self, ids: Key) -> int:
        """Returns the blocks up to the deepest state; notes the use."""
        ...

    def insert(self, ids: Key) -> float:
        """Inserts what was matched last, with a state at its end, and evicts what is too many.

        Returns:
            The seconds of both, without allocation.
        """
        ...


Act = Callable[[str, Side, Key], object]


class Ours:
    """The library's cache under one policy.

    Attributes:
        looked: Seconds of the last match before anything was noted.
    """

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
        """Returns the blocks up to the deepest state; notes the use, as a request's admission does."""
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
        """Returns every prefix that has a state, put together node by node."""
        paths = (reversed(list(node.path())) for node in self.rig.cache.nodes.values())
        return {tuple(np.frombuffer(b"".join(step.key for step in path), np.int64).tolist()) for path in paths}


class Sides:
    """Caches that do the same in turns. A peer that fails leaves; the others go on."""

    def __init__(self, case: str, peers: Collection[str], states: int, pages: int, longest: int) -> None:
        self.case = case
        self.ours = {name: Ours(states, pages, longest, name) for name in OURS}
        self.peers: dict[str, Side] = {}
        for name in peers:
            try:
                self.peers[name] = radix_peer.SglangCache(states, pages, longest, radix_peer.CORES[name])
            except Exception as error:
                peer_left(f"prefix, {case}", name, error)

    def take(self, keys: Keys, act: Act) -> None:
        """Lets every side act on every key; raises what one of ours raises."""

        def calls(turn: int, name: str, side: Side) -> None:
            for key in keys[turn * BATCH : (turn + 1) * BATCH]:
                act(name, side, key)

        take_turns(self.ours, self.peers, -(-len(keys) // BATCH), calls, f"prefix, {self.case}")


class Times:
    """Seconds of every call, by what was called and whose it was.

    match makes a key of a list, follows it through the tree, and notes the use. look is the same without the note; no
    peer can be asked for it. insert: see `Side`.
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
        """Returns medians of all calls but the first `warm`: each of ours beside each peer that is left."""
        found = []
        for op, spent in self.spent.items():
            there = {**sides.ours, **sides.peers}
            value = {name: median(calls[warm:]) * 1e6 for name, calls in spent.items() if name in there}
            for name in sides.ours:
                alone = (op, setting.case(f"{sides.case}, {name}"), value[name], "host us")
                beside = [(peer, value[peer], value[name] / value[peer]) for peer in sides.peers if peer in value]
                found += [Figure(*alone, *each) for each in beside] or [Figure(*alone)]
        return found
