"""Microseconds of the host to look a prompt up in the prefix cache and to insert one: production code, no device.

A match makes a key of a list of block ids, follows it through the tree, and tells the policies. An insert takes a
request's pages and the state at its end into the tree, and evicts what is too many. Slot, register and pages of the
request were allocated before. What is recorded is submitted after, once for all rows of a step. Neither is timed.
"""

import random
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import count, islice

from memstate.cli.bench import radix_peer
from memstate.cli.bench.clock import Clock
from memstate.cli.bench.prefix_sides import BATCH, Key, Ours, Side, Sides, Times
from memstate.cli.bench.task import Differs, Figure, Setting, Task
from memstate.cli.traces import BLOCK
from memstate.cli.traces.make import make

TREES = ((1000, 32), (10_000, 32), (100_000, 32), (1000, 8), (1000, 64), (1000, 512))  # nodes, pages of a key
TOY_TREES = ((100, 8), (1000, 8), (100, 32))
FORKS = 4  # a trunk has so many branches, a branch so many leaves: keys of a quarter, a quarter and a half
KEYS, NODES = FORKS**2, 1 + FORKS + FORKS**2  # of one trunk
CHAT, TOY_CHAT = (4000, 256, 4096), (64, 8, 512)  # requests, the first half of which warms up; states; pages
MATCHES, INSERTS = 2048, 256
TOY_MATCHES, TOY_INSERTS = 32, 8
SAMPLE = 128  # keys that a naive search is asked for as well


class _Tree:
    """A tree of one shape, whatever its size: families of keys, in no order, with a state at the end of each."""

    def __init__(self, setting: Setting, peers: Collection[str], nodes: int, pages: int) -> None:
        self.setting, self.peers, self.pages = setting, peers, pages
        self.case, self.families = f"{nodes} nodes, {pages} pages", -(-nodes // NODES)
        self.random, self.ids = random.Random(f"{nodes} {pages}"), count(1)

    def check(self) -> str:
        """Grows the trees; a sample of keys must be found as far as a naive search finds them."""
        keys = self.keys = [key for _ in range(self.families) for key in self._family()]
        self.random.shuffle(keys)
        distinct = self.families * (self.pages // 4 * (1 + FORKS) + self.pages // 2 * KEYS)
        self.sides = Sides(self.case, self.peers, len(keys), distinct + 2 * self.pages, self.pages)
        self.sides.take(keys, _fill)
        known = set(map(tuple, keys))
        sample = [self._variant(key) for key in self.random.choices(keys, k=SAMPLE)]
        self.sides.take(sample, lambda name, side, key: _agree(name, side, key, known))
        sizes = {name: (ours.rig.cache.tree.nodes, *ours.held) for name, ours in self.sides.ours.items()}
        expected = (NODES * self.families, len(keys), distinct)
        return "" if set(sizes.values()) == {expected} else f"nodes, states and pages {sizes}, expected {expected}"

    def measure(self, clock: Clock) -> list[Figure]:
        """Matches of known keys; inserts of keys of which the first half is known, each of which evicts a state."""
        matches, inserts = (TOY_MATCHES, TOY_INSERTS) if self.setting.toy else (MATCHES, INSERTS)
        known = self.random.choices(self.keys, k=matches)
        new = [
            key[: self.pages // 2] + self._fresh(self.pages // 2) for key in self.random.choices(self.keys, k=inserts)
        ]
        times = Times()
        self.sides.take(known, times.match)
        self.sides.take(new, times.insert)
        return times.entries(self.setting, self.sides)

    def _fresh(self, n: int) -> Key:
        return list(islice(self.ids, n))

    def _family(self) -> Iterator[Key]:
        trunk = self._fresh(self.pages // 4)
        for _ in range(FORKS):
            branch = trunk + self._fresh(self.pages // 4)
            for _ in range(FORKS):
                yield branch + self._fresh(self.pages // 2)

    def _variant(self, key: Key) -> Key:
        """A key, one that begins with it, a beginning of it, or one that goes on differently somewhere."""
        cut = self.random.randint(0, len(key))
        known = self.random.choice((key, key[:cut]))
        return known + self._fresh(self.random.randint(not known, self.pages))


class _Chat:
    """The synthetic conversations of `memstate trace chat`, with room for some of their states."""

    def __init__(self, setting: Setting, peers: Collection[str]) -> None:
        self.setting, self.peers = setting, peers
        requests, self.states, self.pages = TOY_CHAT if setting.toy else CHAT
        self.case = f"chat, S={self.states}"
        cut = [list(each.hash_ids[: each.input_length // BLOCK]) for each in make("chat", requests, 0)]
        self.keys = [key for key in cut if key]
        self.longest = max(map(len, self.keys))

    def check(self) -> str:
        """Compares every side with a naive search; with little room, none may keep too much.

        With little room ours must find whatever they keep, and lose no slot.
        """
        some = self.keys[: 2 * SAMPLE]
        known: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)
        states, pages = self.states // 16 + 1, self.longest + BATCH

        def with_room(name: str, side: Side, key: Key) -> None:
            _agree(name, side, key, known[name])
            side.insert(key)
            known[name].add(tuple(key))

        def with_little(name: str, side: Side, key: Key) -> None:
            if isinstance(side, Ours):
                _agree(name, side, key, side.stated())
            else:
                side.match(key)
            side.insert(key)
            if side.held[0] > states or side.held[1] > pages:
                raise Differs(f"{name} holds {side.held} states and pages, {(states, pages)} are allowed")

        sides = Sides(self.case, self.peers, len(some), sum(map(len, some)), self.longest)
        sides.take(some, with_room)
        sides = Sides(self.case, sides.peers, states, pages, self.longest)
        sides.take(some, with_little)
        self.peers = tuple(sides.peers)
        leaked = {name: n for name, ours in sides.ours.items() if (n := ours.rig.leaked())}
        return f"leaked slots: {leaked}" if leaked else ""

    def measure(self, clock: Clock) -> list[Figure]:
        """Every request's match and insert, once the cache is full."""
        sides = Sides(self.case, self.peers, self.states, self.pages, self.longest)
        times = Times()
        sides.take(self.keys, times.request)
        return times.entries(self.setting, sides, warm=len(self.keys) // 2)


def _fill(name: str, side: Side, key: Key) -> None:
    side.match(key)
    side.insert(key)


def _agree(name: str, side: Side, key: Key, known: Collection[tuple[int, ...]]) -> None:
    """Raises: Differs where a search of all beginnings of the key, the longest first, finds something else."""
    found, naive = side.match(key), next((n for n in range(len(key), 0, -1) if tuple(key[:n]) in known), 0)
    if found != naive:
        raise Differs(f"{name} finds {found} of {len(key)} blocks, a naive search {naive}")


def _told(check: Callable[[], str]) -> str:
    try:
        return check()
    except Differs as error:
        return str(error)


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields a trace at steady state, then trees of several sizes and keys of several lengths."""
    peers = [name for name in radix_peer.CORES if setting.compares(name)]
    try:
        if peers:
            radix_peer.load()
    except ImportError as error:
        print(f"prefix: measured without {', '.join(peers)}: {error}", file=sys.stderr)
        peers = []
    chat = _Chat(setting, peers)
    yield Task(f"prefix, {chat.case}", partial(_told, chat.check), chat.measure)
    for nodes, pages in TOY_TREES if setting.toy else TREES:
        tree = _Tree(setting, peers, nodes, pages)
        yield Task(f"prefix, {tree.case}", partial(_told, tree.check), tree.measure)
