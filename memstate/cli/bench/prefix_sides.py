"""The prefix caches that are measured, ours and the peer, and what is timed of each. Knows no trace and no tree."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from statistics import median
from typing import Protocol

from memstate.cli.bench import radix_peer
from memstate.cli.bench.clock import host_seconds
from memstate.cli.bench.task import Differs, Figure, Setting, peer_left, take_turns
from memstate.cli.policies import prefix_of
from memstate.cli.replay.by_hand import REGISTERS, ROW, Rig
from memstate.prefix.lease import NO_MATCH, NO_NODE, Lease
from memstate.tokens import EMPTY, Prompt, encode

OURS = ("lru", "return-rate")  # what the peer does, and the default
BATCH = 32  # calls in a row before it is another's turn: what disturbs the machine disturbs all

Key = list[int]


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


class Ours:
    """The library's cache under one policy."""

    def __init__(self, states: int, pages: int, longest: int, policy: str) -> None:
        self.rig = Rig(prefix_of(policy, states), states, pages, longest)
        self._prompt, self._match = EMPTY, NO_MATCH

    @property
    def held(self) -> tuple[int, int]:
        """States and pages in use."""
        return self.rig.cache.states, self.rig.cache.tree.total_pages

    def match(self, ids: Key) -> int:
        """Returns the blocks up to the deepest state; notes the use, as a request's admission does."""
        self._prompt = Prompt(encode(ids), None)
        self._match = self.rig.cache.match(self._prompt, len(ids))
        self.rig.cache.use(Lease(NO_NODE, EMPTY, self._match))  # one that keeps nothing: an insert may never come
        return self._match.length

    def insert(self, ids: Key) -> float:
        """Inserts what was matched last, with a state at its end; returns the seconds of that and of evictions."""
        cache, pages, row = self.rig.cache, self.rig.pages, [ROW]
        lease = cache.hold(self._match, self._prompt)
        shared = cache.tree.pages_to(lease.node)
        fresh = len(ids) - len(shared)
        spent = host_seconds(lambda: cache.evict_pages(fresh - pages.allocator.free))
        pages.start(row, [shared], [fresh])
        self.rig.read(lease)
        self.rig.state(REGISTERS[0], len(ids))
        filed = lease, self._prompt, pages.of(ROW), [(REGISTERS[0], len(ids), "end")]
        self.rig.commands.submit()  # the state is computed by then
        spent += host_seconds(lambda: cache.file([filed]))
        self.rig.commands.release(REGISTERS)
        pages.end(row)
        cache.release(lease.node)
        return spent


class Sides:
    """Caches of one size that do the same in turns. A peer that fails leaves; the others go on.

    Args:
        case: For messages and figures.
        peers: Names of the peers wanted.
        states: States that each side may keep.
        pages: Pages that each side may keep.
        longest: Pages of the longest key.
    """

    def __init__(self, case: str, peers: Collection[str], states: int, pages: int, longest: int) -> None:
        self.case, self.most = case, (states, pages)
        self.ours = {name: Ours(states, pages, longest, name) for name in OURS}
        self.peers: dict[str, Side] = {}
        self.spent = {op: defaultdict[str, list[float]](list) for op in ("match", "insert")}
        for name in peers:
            try:
                self.peers[name] = radix_peer.SglangCache(states, pages, longest)
            except Exception as error:
                peer_left(f"prefix, {case}", name, error)

    def take(self, keys: Sequence[Key], act: Callable[[str, Side, Key], object]) -> None:
        """Lets every side act on every key, so many in a row; raises what one of ours raises."""

        def calls(turn: int, name: str, side: Side) -> None:
            for key in keys[turn * BATCH : (turn + 1) * BATCH]:
                act(name, side, key)
            if side.held[0] > self.most[0] or side.held[1] > self.most[1]:
                raise Differs(f"{name} holds {side.held} states and pages, {self.most} are allowed")

        take_turns(self.ours, self.peers, -(-len(keys) // BATCH), calls, f"prefix, {self.case}")

    def fill(self, name: str, side: Side, key: Key) -> float:
        """Matches and inserts a key. Returns the seconds of the insert."""
        side.match(key)
        return side.insert(key)

    def match(self, name: str, side: Side, key: Key) -> None:
        """Times a match: it makes a key of a list, follows it through the tree, and notes the use."""
        self.spent["match"][name].append(host_seconds(lambda: side.match(key)))

    def insert(self, name: str, side: Side, key: Key) -> None:
        """Times an insert; the match before it is not timed."""
        self.spent["insert"][name].append(self.fill(name, side, key))

    def request(self, name: str, side: Side, key: Key) -> None:
        """Times a match and the insert that follows."""
        self.match(name, side, key)
        self.spent["insert"][name].append(side.insert(key))

    def agree(self, name: str, side: Side, key: Key, known: Collection[tuple[int, ...]]) -> None:
        """Compares a match with a search of all beginnings of the key, the longest first.

        Raises:
            Differs: They find something else.
        """
        found, naive = side.match(key), next((n for n in range(len(key), 0, -1) if tuple(key[:n]) in known), 0)
        if found != naive:
            raise Differs(f"{name} finds {found} of {len(key)} blocks, a naive search {naive}")

    def figures(self, setting: Setting, warm: int = 0) -> list[Figure]:
        """Returns medians of all calls but the first `warm`: each of ours beside each peer that is left."""
        found: list[Figure] = []
        for op, spent in self.spent.items():
            value = {name: median(spent[name][warm:]) * 1e6 for name in (*self.ours, *self.peers)}
            peers = {name: value[name] for name in self.peers}
            for name in self.ours:
                found += setting.rows(op, f"{self.case}, {name}", value[name], "host us", peers)
        return found
