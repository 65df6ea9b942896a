"""Benchmarks the host time of a match and of an insert in the prefix cache. Production code runs, without a device.

A match makes a key of a list of tokens, follows it through the tree, and notes the use. An insert adds the pages of a
request and the state at their end to the tree, and evicts states and pages above the limits. Slot, register and pages
of the request are allocated before; changes are submitted after, once for all rows of a step. Neither is timed. Before
an insert the policies learn of the uses, as in a step.

A long prompt is timed as a request: admit, a plan and a publication for each chunk, and end. Its launches do nothing.
"""

import random
from collections import defaultdict
from collections.abc import Collection, Iterator
from itertools import count, islice

from memstate.cli.traces import BLOCK
from memstate_tools.bench import radix_peer
from memstate_tools.bench.prefix_prompt import LongPrompt
from memstate_tools.bench.prefix_sides import CacheSides, Key, PrefixSide
from memstate_tools.bench.task import Measured, Setting, Task
from memstate_tools.traces.make import make

TREES = (  # (nodes, pages of a key, tokens of a page)
    (1000, 32, 1), (10_000, 32, 1), (100_000, 32, 1), (1000, 8, 1), (1000, 512, 1), (200, 8000, 1),
    (1000, 64, 16), (10_000, 64, 16), (1000, 512, 16), (200, 8000, 16),
    (1000, 16, 64), (10_000, 16, 64), (1000, 128, 64), (200, 2000, 64),
)  # fmt: skip
TOY_TREES = ((100, 8, 1), (1000, 8, 1), (100, 32, 4))
PROMPTS = tuple((tokens, size) for size in (16, 64) for tokens in (8192, 128_000))  # (tokens, tokens of a page)
TOY_PROMPTS = ((256, 16),)
# branches of a trunk, and leaves of a branch; trunk, branch and leaf have a quarter, a quarter and a half of a key
FORKS = 4
KEYS, NODES = FORKS**2, 1 + FORKS + FORKS**2  # keys and nodes of one trunk
CHAT, TOY_CHAT = (4000, 256, 4096), (64, 8, 512)  # requests (the first half warms up the cache), states, pages
# matches and inserts of a tree, and the largest number of tokens in all of them
MATCHES, INSERTS, MOST = 2048, 256, 2**23
TOY_MATCHES, TOY_INSERTS = 32, 8
SAMPLE = 128  # keys that are also searched naively


class _Tree:
    """A tree of one shape and any size: groups of keys with common beginnings, shuffled; each key has a state."""

    def __init__(self, setting: Setting, peers: Collection[str], nodes: int, pages: int, size: int) -> None:
        self.setting, self.peers, self.pages, self.size = setting, peers, pages, size
        self.random, self.ids = random.Random(f"{nodes} {pages}"), count(1)
        self.families = -(-nodes // NODES)
        self.case = f"{nodes} nodes, {pages * size} tokens, pages of {size}"

    def check(self) -> str:
        """Makes and fills the trees, and compares the matches of a sample of keys with a naive search."""
        pages = self.pages
        self.keys = [key for _ in range(self.families) for key in self._family()]
        self.random.shuffle(self.keys)
        distinct = self.families * (pages // 4 * (1 + FORKS) + pages // 2 * KEYS)
        self.sides = CacheSides(self.case, self.peers, len(self.keys), distinct + 2 * pages, pages, self.size)
        self.sides.take(self.keys, self.sides.fill)
        known = set(map(tuple, self.keys))
        sample = [self._variant(key) for key in self.random.choices(self.keys, k=self._fewer(SAMPLE))]
        self.sides.take(sample, lambda name, side, key: self.sides.agree(name, side, key, known))
        return ""

    def measure(self) -> list[Measured]:
        """Times matches of known keys, and inserts of keys whose first half is known. Each insert evicts a state."""
        sizes = self.setting.sizes((MATCHES, INSERTS), (TOY_MATCHES, TOY_INSERTS))
        matches, inserts = map(self._fewer, sizes)
        known, half = self.random.choices(self.keys, k=matches), self.pages // 2
        new = [key[: half * self.size] + self._fresh(half) for key in self.random.choices(self.keys, k=inserts)]
        self.sides.take(known, self.sides.match)
        self.sides.take(new, self.sides.insert)
        return self.sides.figures(self.setting)

    def _fewer(self, calls: int) -> int:
        return min(calls, MOST // (self.pages * self.size))

    def _fresh(self, pages: int) -> Key:
        return list(islice(self.ids, pages * self.size))

    def _family(self) -> Iterator[Key]:
        trunk = self._fresh(self.pages // 4)
        for _ in range(FORKS):
            branch = trunk + self._fresh(self.pages // 4)
            for _ in range(FORKS):
                yield branch + self._fresh(self.pages // 2)

    def _variant(self, key: Key) -> Key:
        """Returns a known key or its beginning, with or without new tokens after it."""
        cut = self.random.randint(0, self.pages)
        known = self.random.choice((key, key[: cut * self.size]))
        return known + self._fresh(self.random.randint(not known, self.pages))


def _chat(setting: Setting, peers: Collection[str]) -> Task:
    """Returns the task of the synthetic conversations of `memstate trace chat`, with room for some of their states."""
    requests, states, pages = setting.sizes(CHAT, TOY_CHAT)
    cut = [list(each.hash_ids[: each.input_length // BLOCK]) for each in make("chat", requests, 0)]
    keys, case = [key for key in cut if key], f"chat, S={states}"
    longest, left = max(map(len, keys)), list(peers)

    def check() -> str:
        """Compares every side with a naive search, with room for all keys, and requires that no slot is leaked."""
        some, known = keys[: 2 * SAMPLE], defaultdict[str, set[tuple[int, ...]]](set)
        sides = CacheSides(case, peers, len(some), sum(map(len, some)), longest)

        def act(name: str, side: PrefixSide, key: Key) -> None:
            sides.agree(name, side, key, known[name])
            side.insert(key)
            known[name].add(tuple(key))

        sides.take(some, act)
        left[:] = sides.peers
        leaked = {name: n for name, ours in sides.ours.items() if (n := ours.leaked())}
        return f"leaked slots: {leaked}" if leaked else ""

    def measure() -> list[Measured]:
        """Times the match and the insert of each request once the cache is full."""
        sides = CacheSides(case, left, states, pages, longest)
        sides.take(keys, sides.request)
        return sides.figures(setting, warm=len(keys) // 2)

    return Task(f"prefix, {case}", check, measure)


def tasks(setting: Setting) -> Iterator[Task]:
    """Yields the tasks of a trace in steady state, of trees of several sizes and key lengths, and of long prompts."""
    peers = [radix_peer.NAME] if radix_peer.can_run(setting, "prefix", radix_peer.load) else []
    yield _chat(setting, peers)
    for shape in setting.sizes(TREES, TOY_TREES):
        tree = _Tree(setting, peers, *shape)
        yield Task(f"prefix, {tree.case}", tree.check, tree.measure)
    yield from (LongPrompt(setting, *prompt).task() for prompt in setting.sizes(PROMPTS, TOY_PROMPTS))
