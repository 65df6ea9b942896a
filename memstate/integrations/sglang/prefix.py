"""The prefix cache as a part, for an engine that owns its KV pages and slots and names them by ids.

The tree, the policies and the order of eviction are those of a manager's cache. This part never frees anything itself:
it returns the ids of evicted pages and states, and the engine frees them. If a policy raises during a change, later
calls raise `Broken` until `reset`.
"""

import logging
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from memstate import logs
from memstate.checks import NotCopied, is_count, require_salt, shown
from memstate.errors import InvalidArgument, LeakFound
from memstate.guard import Guard
from memstate.prefix.contents import KEYS, Contents
from memstate.prefix.policies import Place
from memstate.prefix.settings import Prefix
from memstate.prefix.tree import Found, Node
from memstate.requests.handles import Snapshot
from memstate.stats import PrefixStats
from memstate.tokens import BYTES, SaltedTokens, Tokens, encode

LOG = logs.logger("prefix")


class Gone(NamedTuple):
    """Ids that the cache gives back to the engine, because it has evicted them.

    Attributes:
        pages: Ids of KV pages.
        states: Ids of states.
    """

    pages: list[int]
    states: list[int]


class PrefixChange(NamedTuple):
    """A change of the cache: a prefix that was stored, or ids that were removed.

    Attributes:
        stored: True if a prefix was stored, False if ids were removed.
        salt: The prefix's salt; None for a removal, which only names ids.
        length: Tokens of the prefix; 0 for a removal.
        pages: Ids of the pages that were stored or removed.
        states: Ids of the states that were stored or removed.
    """

    stored: bool
    salt: Hashable
    length: int
    pages: list[int]
    states: list[int]


@dataclass(eq=False)
class PrefixHit:
    """A cached prefix: the match of a prompt, or the end of an insertion.

    Attributes:
        length: Tokens that the state stands for; a request can start behind them.
        state: Id of the state; None if no state matches.
        branch: Tokens whose KV is cached, if they are more than `length`: a state at this length is worth keeping. None
            if the KV ends at `length`.
        locks: Number of locks on the hit.
    """

    length: int
    state: int | None
    branch: int | None
    locks: int = 0
    reads: int = field(default=0, repr=False)  # number of locks that, after `read`, no longer keep the state
    _node: Node | None = field(default=None, repr=False)
    _matched: Found | None = field(default=None, repr=False)
    _tokens: int = field(default=0, repr=False)
    _part: "PrefixPart | None" = field(default=None, repr=False)
    _era: int = field(default=0, repr=False)

    @property
    def pages(self) -> list[int]:
        """Ids of the prefix's KV pages. Lock the hit before: an evicted prefix has no pages."""
        if self._part is None or self._node is None:
            return []
        return self._part._contents.tree.pages_to(self._node)[: self.length // self._part._size].tolist()


class Inserted(NamedTuple):
    """The result of an insertion.

    Attributes:
        had: Tokens whose KV was cached before. The given pages of these tokens still belong to the engine.
        kept: Whether the cache took the state. Otherwise it still belongs to the engine.
        gone: Ids that were evicted to make room.
        end: Hit of the inserted prefix. A request that continues from here must lock it, and unlock its earlier hit.
    """

    had: int
    kept: bool
    gone: Gone
    end: PrefixHit


class _Lent:
    """A `Keeper` of ids that the engine has lent to the cache. Collects those that the cache gives back."""

    def __init__(self, page_size: int) -> None:
        self.page_size, self.pages = page_size, KEYS // page_size
        self.gone = Gone([], [])
        self.nodes: dict[int, Node] = {}  # state -> its node
        self.locks: Counter[int] = Counter()  # state -> number of its locks, if it has any

    def free(self) -> int:
        return len(self.gone.pages)

    def release(self, pages: Sequence[int]) -> None:
        self.gone.pages.extend(pages)

    def held(self) -> Collection[int]:
        return self.nodes

    def owner(self, state: int) -> Node | None:
        return self.nodes.get(state)

    def readers(self) -> Counter[int]:
        return self.locks

    def end(self, states: Sequence[Snapshot]) -> None:
        self.gone.states.extend(state.register for state in states)
        for state in states:
            del self.nodes[state.register]

    def read(self, state: int, by: int) -> None:
        self.locks[state] += by
        if not self.locks[state]:
            del self.locks[state]


class PrefixPart(NotCopied):
    """Finds states and KV again by token prefix. The engine owns both and names them by its own ids.

    Args:
        page_size: Tokens of a KV page.
        settings: Policies and limits. `placement` and `evict` have no effect here.
        heard: Function that is called after each change, for example to tell routers. Its errors are only logged.

    Raises:
        InvalidArgument: `page_size` is not a whole number from 1 on.

    Example:
        >>> cache = PrefixPart(page_size=2)
        >>> cache.insert([1, 2, 3, 4], pages=[10, 11], state=7).kept
        True
        >>> hit = cache.match([1, 2, 3, 4, 5])
        >>> hit.length, hit.pages, hit.state
        (4, [10, 11], 7)
        >>> cache.evict(pages=2)
        Gone(pages=[10, 11], states=[7])
    """

    def __init__(
        self, page_size: int, settings: Prefix | None = None, heard: Callable[[PrefixChange], None] | None = None
    ) -> None:  # fmt: skip
        if not is_count(page_size) or page_size < 1:
            raise InvalidArgument(f"page_size={page_size!r}: expected tokens of a page, 1 or more")
        self._lent, self._guard = _Lent(page_size), Guard()
        self._contents = Contents(settings or Prefix(), self._lent)
        self._size, self._heard, self._uses = page_size, heard, 0
        self._told, self._era = logs.Repeats(LOG), 0

    def reset(self) -> None:
        """Forgets all prefixes. All ids belong to the engine again, and earlier hits are refused.

        Syncs: no.
        """
        with self._guard.mending("reset"):
            self._era, self._lent.gone = self._era + 1, Gone([], [])
            self._contents.keep(None)
            self._lent.nodes.clear()
            self._lent.locks.clear()

    def __repr__(self) -> str:
        tree = self._contents.tree
        return f"PrefixPart({self._contents.states} states, {tree.total_pages} pages, {tree.leased_pages} locked)"

    def match(self, tokens: Tokens, salt: Hashable = None, leave: int = 1) -> PrefixHit:
        """Looks a prompt up. Changes nothing, so the match can be evicted before it is locked.

        Args:
            tokens: The prompt.
            salt: Keeps prefixes of tenants apart.
            leave: Number of last tokens of the prompt that are always computed; the hit ends before them.

        Returns:
            The longest cached prefix with a state.

        Raises:
            InvalidArgument: The tokens or the salt are not valid.

        Syncs: no.
        """
        require_salt(salt)
        key = encode(tokens)
        matched = self._contents.tree.find(SaltedTokens(key, salt), max(len(key) // BYTES - leave, 0) // self._size)
        node = matched.stated
        length, kv = (node.end if node else 0) * self._size, matched.kv * self._size
        state = node.snapshot.register if node and node.snapshot else None
        return PrefixHit(
            length, state, kv if kv > length else None, 0, 0, node, matched, len(key) // BYTES, self, self._era
        )

    def lock(self, hit: PrefixHit) -> None:
        """Locks a hit until `unlock`, and notes that a request starts from it.

        Args:
            hit: A hit of `match`. It can be locked more than once.

        Raises:
            InvalidArgument: The hit's state was evicted (then match again), or another cache returned the hit.

        Syncs: no.
        """
        self._require_own(hit)
        node, matched = hit._node, hit._matched
        if node is not None:
            gone = hit.state is not None and self._lent.owner(hit.state) is not node
            if gone or not self._contents.tree.has(node):
                raise InvalidArgument(f"{hit} has been evicted since it was matched: match again")
        with self._guard.changing("lock"):
            if node is not None:
                self._contents.tree.lease(node)
                self._read(hit, 1)
            hit.locks += 1
            if matched is not None and hit.locks == 1:
                self._contents.hear(matched, hit._tokens)
                if node is not None:
                    node.uses += 1

    def read(self, hit: PrefixHit) -> None:
        """Notes that a request with a lock has read the hit's state. From now on, its lock keeps only the KV.

        Args:
            hit: A locked hit. Call at most once for each lock.

        Raises:
            InvalidArgument: No lock keeps the hit's state, or another cache returned the hit.

        Syncs: no.
        """
        self._require_own(hit)
        if hit.reads == hit.locks:
            raise InvalidArgument(f"{hit} is not locked, or its state has been read by all that locked it")
        hit.reads += 1
        self._read(hit, -1)

    def _read(self, hit: PrefixHit, readers: int) -> None:
        if hit.state is not None:
            self._lent.read(hit.state, readers)

    def unlock(self, hit: PrefixHit, drop: bool = True) -> Gone:
        """Ends one lock of a hit.

        Args:
            hit: A locked hit.
            drop: Whether to evict KV that no request can use any more, unless the policy keeps it.

        Returns:
            Ids that were evicted.

        Raises:
            InvalidArgument: The hit is not locked, or another cache returned it.

        Syncs: no.
        """
        self._require_own(hit)
        if not hit.locks:
            raise InvalidArgument(f"{hit} is not locked")
        with self._guard.changing("unlock"):
            hit.locks -= 1
            if hit.reads:
                hit.reads -= 1
            else:
                self._read(hit, -1)
            if hit._node is not None:
                self._contents.tree.unlease(hit._node)
                if drop:
                    self._contents.drop_bare(hit._node)
            return self._given()

    def insert(self, tokens: Tokens, pages: Sequence[int], state: int | None = None, salt: Hashable = None) -> Inserted:
        """Inserts the KV of a prefix, and its state if the policy admits it.

        Args:
            tokens: Tokens of whole pages.
            pages: Ids of the KV pages, one for each page of tokens.
            state: Id, 1 or more, of the state after all these tokens. None if there is no state.
            salt: Keeps prefixes of tenants apart.

        Returns:
            The tokens that were cached before, whether the state was taken, and what was evicted.

        Raises:
            InvalidArgument: The tokens, pages, state or salt do not fit; nothing changed.

        Syncs: no.
        """
        self._guard.require_whole()
        require_salt(salt)
        key, contents = encode(tokens), self._contents
        unit = BYTES * self._size
        if len(key) % unit or len(pages) != len(key) // unit or not key:
            raise InvalidArgument(
                f"{len(key) // BYTES} tokens and {len(pages)} pages of {self._size}: expected whole ones, an id each"
            )
        sound = isinstance(pages, range) and pages[0] >= 0 < pages.step
        if not (sound or (set(map(type, pages)) <= {int} and min(pages) >= 0) or all(is_count(page) for page in pages)):
            raise InvalidArgument(f"pages {shown(pages)}: expected ids, whole numbers of 0 or more")
        if not sound and (len(set(pages)) < len(pages) or max(pages) >> 63):
            raise InvalidArgument(f"pages {shown(pages)}: expected each id once, of 63 bits")
        numbers = np.arange(pages.start, pages.stop, pages.step) if isinstance(pages, range) else None
        ids = array("q", pages if numbers is None else numbers.tobytes())
        if state is not None and (not is_count(state) or not state or state in self._lent.nodes):
            raise InvalidArgument(f"state {shown(state)}: expected an id from 1 on that the cache does not have")
        if contents.heard:
            with self._guard.changing("insert"):
                contents.learn()
        matched = contents.tree.find(SaltedTokens(key, salt))
        above = matched.stated.end if matched.stated else 0
        new = state is not None and above != len(pages)
        # a policy may raise: nothing has changed yet
        kept = new and contents.state_policy.admits(Place(len(pages), above, "end"))
        with self._guard.changing("insert"):
            node, had = contents.tree.insert(SaltedTokens(key, salt), ids)
            if had < len(pages):
                contents.grown(node)
            if kept:
                assert state is not None
                self._uses += 1
                node.snapshot, node.evicted = Snapshot(state, self._uses, len(key) // BYTES), False
                self._lent.nodes[state] = node
                contents.state_policy.added(node, "end")
            if self._heard and (kept or had < len(pages)):
                came = [state] if kept and state is not None else []
                self._tell(PrefixChange(True, salt, len(key) // BYTES, list(pages[had:]), came))
            if contents.settings.most_states is not None:
                contents.tree.lease(node)  # so that the KV stays when the state is evicted
                contents.evict_states(contents.states - contents.settings.most_states)
                contents.tree.unlease(node)
            there = node.snapshot.register if node.snapshot else None
            end = PrefixHit(len(key) // BYTES, there, None, _node=node, _part=self, _era=self._era)
            return Inserted(had * self._size, kept, self._given(), end)

    def evict(self, pages: int = 0, states: int = 0) -> Gone:
        """Evicts the least valuable pages and states that are not locked.

        Args:
            pages: Number of pages to free. If a leaf gives up pages, its state is evicted, too.
            states: Number of states to free. Their KV may be evicted, too.

        Returns:
            Ids that were evicted. They are fewer than asked for if too many are locked.

        Raises:
            InvalidArgument: A number is not a whole number of 0 or more.

        Syncs: no.
        """
        for number in (pages, states):
            if not is_count(number):
                raise InvalidArgument(f"evict({number!r}): expected a number, 0 or more")
        with self._guard.changing("evict"):
            self._contents.evict_states(states)
            self._contents.evict_pages(max(pages - self._lent.free(), 0))
            return self._given()

    @property
    def evictable(self) -> tuple[int, int]:
        """Numbers of pages and states that are not locked."""
        return self._contents.evictable_pages, self._contents.evictable_states

    @property
    def held(self) -> tuple[int, int]:
        """Numbers of cached pages and states."""
        return self._contents.tree.total_pages, self._contents.states

    def path(self, hit: PrefixHit) -> list[Hashable]:
        """Returns the nodes of a hit's prefix, the first one first. Requests with a common prefix share nodes."""
        path: list[Hashable] = [*hit._node.path()] if hit._node else []
        return path[::-1]

    def all_pages(self) -> list[int]:
        """Returns the ids of all cached KV pages."""
        return [page for _, node in self._contents.tree.walk() for page in node.pages]

    def check(self) -> None:
        """Checks the counts. Call it only while nothing is locked.

        Raises:
            LeakFound: A state or page is locked, or a count is wrong.
        """
        wrong = self._contents.tree.miscounts(Counter())
        wrong += [f"state {state} is locked" for state in self._lent.locks]
        if wrong:
            raise LeakFound("; ".join(wrong))

    def stats(self) -> PrefixStats:
        """Returns figures of what is cached now. The figures do not count lookups, because the engine counts them.

        Syncs: no.
        """
        return self._contents.stats()

    def _given(self) -> Gone:
        gone, self._lent.gone = self._lent.gone, Gone([], [])
        if self._heard and (gone.pages or gone.states):
            self._tell(PrefixChange(False, None, 0, *gone))
        return gone

    def _tell(self, change: PrefixChange) -> None:
        assert self._heard is not None
        try:
            self._heard(change)
        except Exception as error:
            self._told.event(logging.ERROR, "not heard", why=f"{type(error).__name__}: {error}")

    def _require_own(self, hit: PrefixHit) -> None:
        self._guard.require_whole()
        if hit._part is not self or hit._era != self._era:
            raise InvalidArgument(f"{hit} is of another cache, or of before reset(): expected what match() returned")
