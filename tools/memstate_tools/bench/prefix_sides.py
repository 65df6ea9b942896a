"""The prefix caches that a benchmark measures, ours and SGLang's, and their timed calls, for any keys."""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from statistics import mean, median
from typing import Protocol

from memstate.cli.policies import prefix_of
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.prefix import PrefixCache
from memstate.prefix.lease import NO_MATCH, NO_NODE, Lease
from memstate.requests.holdings import Holdings
from memstate.requests.page_table import PageTable
from memstate.slots.allocator import SlotAllocator
from memstate.slots.audit import audit
from memstate.slots.commands import CommandBuffer
from memstate.slots.inspect import inspect
from memstate.slots.registers import RegisterFile
from memstate.tokens import EMPTY, SaltedTokens, encode
from memstate_tools.bench import radix_peer
from memstate_tools.bench.clock import cpu_seconds
from memstate_tools.bench.task import Differs, Measured, Setting, peer_left, take_turns

OURS = ("lru", "return-rate")  # "lru": the policy of the peer; "return-rate": our default
BATCH = 32  # calls of one side in a row, few enough that a disturbance of the machine reaches all sides

ROW = 1
REGISTERS = [*range(REGISTERS_PER_ROW * ROW, REGISTERS_PER_ROW * (ROW + 1))]

Key = list[int]


class PrefixSide(Protocol):
    """A prefix cache: ours or the peer's."""

    @property
    def held(self) -> tuple[int, int]:
        """Number of states and of pages in use."""
        ...

    def match(self, ids: Key) -> int:
        """Returns the tokens up to the deepest state of a key, and notes the use."""
        ...

    def insert(self, ids: Key) -> float:
        """Inserts the key that was matched last, with a state at its end, and evicts states and pages above the limits.

        Returns:
            Seconds of insert and eviction, without allocation.
        """
        ...


class TimedCache:
    """The prefix cache of memstate with one policy and one row. It has memstate's tables but no planes."""

    def __init__(self, states: int, pages: int, longest: int, policy: str, size: int) -> None:
        self.allocator = SlotAllocator(states + REGISTERS_PER_ROW, Backend("reference", "cpu"))
        self.file = RegisterFile(self.allocator, ROW, 2 * states + 4, longest)
        self.commands = CommandBuffer(self.file)
        self.pages, self.size = PageTable(pages, size, self.commands), size
        self._holdings = Holdings(self.commands, self.pages.allocator)
        self.cache = PrefixCache(prefix_of(policy, states), self.commands, self.pages, self._holdings)
        self._prompt, self._match = EMPTY, NO_MATCH
        self.learned: list[float] = []  # for each match, the seconds in which the policies learned of it

    @property
    def held(self) -> tuple[int, int]:
        """Number of states and of pages in use."""
        return self.cache.states, self.cache.tree.total_pages

    def match(self, ids: Key) -> int:
        """Returns the tokens up to the deepest state of a key, and notes the use as an admission does."""
        self._prompt = SaltedTokens(encode(ids), None)
        self._match = self.cache.match(self._prompt, len(ids))
        # this lease keeps no pages, because the insert may never come
        self.cache.use(Lease(NO_NODE, EMPTY, self._match))
        return self._match.length

    def insert(self, ids: Key) -> float:
        """Inserts the key matched last, with a state at its end. Returns the seconds of insert and eviction."""
        cache, pages, row = self.cache, self.pages, [ROW]
        self.learned.append(cpu_seconds(cache.learn))
        lease = cache.hold(self._match, self._prompt)
        shared = cache.tree.pages_to(lease.node)
        fresh = len(ids) // self.size - len(shared)
        spent = cpu_seconds(lambda: cache.evict_pages(fresh - pages.allocator.free))
        pages.start(row, [shared], [fresh])
        if lease.match.snapshot:  # does what follows when a row's first step has read its state
            self._holdings.end_read(lease.match.snapshot.register)
        state, length = REGISTERS[0], len(ids)  # the label says that the state was computed
        self.commands.claim([state])
        self.file.labels[state] = length
        self.commands.write(self.file.address("labels", [state]), [length])
        self.commands.submit()
        filed = lease, self._prompt, length // self.size, pages.of(ROW), [(state, length, "end")]
        spent += cpu_seconds(lambda: cache.file([filed]))
        self.commands.release(REGISTERS)
        pages.end(row)
        cache.release(lease.node)
        return spent

    def leaked(self) -> int:
        """Returns the number of slots that are leaked, doubly owned, or owned but free. Changes are submitted first."""
        self.commands.submit()
        registers = [node.snapshot.register for node in self.cache.stated() if node.snapshot]
        named = {register: ("cached", f"register {register}") for register in registers}
        report = audit(inspect(self.file, named), named)
        return self.allocator.capacity - report.free - len(named) + len(report.double_owned) + len(report.lost)


class CacheSides:
    """Caches of one size that get the same calls in turns. A peer that fails is removed; the others go on.

    Args:
        case: Name of the case, for messages and figures.
        peers: Names of the wanted peers.
        states: States that each side may keep.
        pages: Pages that each side may keep.
        longest: Pages of the longest key.
        size: Tokens of a page.
    """

    def __init__(self, case: str, peers: Collection[str], states: int, pages: int, longest: int, size: int = 1) -> None:
        self.case, self.most = case, (states, pages)
        self.ours = {name: TimedCache(states, pages, longest, name, size) for name in OURS}
        self.peers: dict[str, PrefixSide] = {}
        self.spent = {op: defaultdict[str, list[float]](list) for op in ("match", "insert")}
        for name in peers:
            try:
                self.peers[name] = radix_peer.SglangCache(states, pages, longest, size)
            except Exception as error:
                peer_left(f"prefix, {case}", name, error)

    def take(self, keys: Sequence[Key], act: Callable[[str, PrefixSide, Key], object]) -> None:
        """Calls `act` for every side and every key, `BATCH` keys of a side in a row. Raises the errors of our sides."""

        def calls(turn: int, name: str, side: PrefixSide) -> None:
            for key in keys[turn * BATCH : (turn + 1) * BATCH]:
                act(name, side, key)
            if side.held[0] > self.most[0] or side.held[1] > self.most[1]:
                raise Differs(f"{name} holds {side.held} states and pages, {self.most} are allowed")

        take_turns(self.ours, self.peers, -(-len(keys) // BATCH), calls, f"prefix, {self.case}")

    def fill(self, name: str, side: PrefixSide, key: Key) -> float:
        """Matches and inserts a key. Returns the seconds of the insert."""
        side.match(key)
        return side.insert(key)

    def match(self, name: str, side: PrefixSide, key: Key) -> None:
        """Times a match: it makes a key of a list, follows it through the tree, and notes the use."""
        self.spent["match"][name].append(cpu_seconds(lambda: side.match(key)))

    def insert(self, name: str, side: PrefixSide, key: Key) -> None:
        """Times an insert; the match before it is not timed."""
        self.spent["insert"][name].append(self.fill(name, side, key))

    def request(self, name: str, side: PrefixSide, key: Key) -> None:
        """Times a match and the insert after it."""
        self.match(name, side, key)
        self.spent["insert"][name].append(side.insert(key))

    def agree(self, name: str, side: PrefixSide, key: Key, known: Collection[tuple[int, ...]]) -> None:
        """Compares a match with a naive search, which tries all beginnings of the key from the longest on.

        Raises:
            Differs: The two find different lengths.
        """
        lengths = sorted({len(each) for each in known if len(each) <= len(key)}, reverse=True)
        length, naive = side.match(key), next((n for n in lengths if tuple(key[:n]) in known), 0)
        if length != naive:
            raise Differs(f"{name} finds {length} of {len(key)} tokens, a naive search {naive}")

    def figures(self, setting: Setting, warm: int = 0) -> list[Measured]:
        """Returns medians of all calls but the first `warm`: each of our policies beside each peer that is left."""
        figures: list[Measured] = []
        for op, spent in self.spent.items():
            value = {name: median(spent[name][warm:]) * 1e6 for name in (*self.ours, *self.peers)}
            peers = {name: value[name] for name in self.peers}
            for name in self.ours:
                figures += setting.rows(op, f"{self.case}, {name}", value[name], "host us", peers)
        for name, ours in self.ours.items():
            figures += setting.rows("learn", f"{self.case}, {name}", mean(ours.learned[warm:]) * 1e6, "host us", {})
        return figures
