"""Hits below the device: what bringing them up takes, and bringing them up before rows start from them. Knows no row.

A state that comes up becomes a cached one, so that all requests that found it share its way; from there on they start
as from any other.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from memstate.prefix import Match, PrefixCache
from memstate.prefix.tree import Node
from memstate.requests.page_table import PageTable
from memstate.tiers.host.cache import CachedRecord
from memstate.tiers.host.tier import Hit
from memstate.tiers.manager import TierManager
from memstate.tiers.prefetch.fetch import Fetch
from memstate.tokens import BYTES


@dataclass(eq=False)
class LowerHit:
    """A hit of one request. match: what the device has. held: it is kept until it is let go."""

    key: bytes
    salt: Hashable
    match: Match
    hit: Hit
    held: bool = False

    @property
    def head(self) -> bytes:
        """The tokens that the state stands for."""
        return self.key[: self.hit.length * BYTES]


class NoLoader:
    """Stands in for a loader where nothing lies below the device: it finds nothing."""

    def require_awake(self) -> None:
        """Raises: Asleep, where what is loaded has nowhere to go."""

    def find(self, key: bytes, salt: Hashable, match: Match, known: int, fetch: Fetch | None) -> LowerHit | None:
        """Finds a hit that reaches further than the device's match and `known` tokens."""
        return None

    def begun(self, fetches: Sequence[Fetch | None]) -> None:
        """Notes that the requests of these prefetches have their rows."""

    def hold(self, hits: Sequence[LowerHit]) -> None:
        """Keeps what was found, here and on the device, until `release`."""

    def release(self, hits: Sequence[LowerHit]) -> None:
        """Ends `hold`, where there was one."""

    def alone(self, hits: Sequence[LowerHit | None]) -> list[LowerHit]:
        """Returns the hits whose states no other of them starts from."""
        return []

    def needs(self, hits: Sequence[LowerHit]) -> tuple[int, int]:
        """Returns the slots and pages that loading takes, each state and page once."""
        return 0, 0

    def bring(self, hits: Sequence[LowerHit]) -> list[tuple[Node, bool]]:
        """Makes hits cached states of the device, whose bytes are on their way."""
        return []


class Loader(NoLoader):
    """Finds hits, keeps them while room is made, and brings them up."""

    def __init__(self, tiers: TierManager, cache: PrefixCache, pages: PageTable) -> None:
        self._tiers, self._cache, self._page_size = tiers, cache, pages.page_size

    def require_awake(self) -> None:
        """Raises: Asleep, where what comes up has nowhere to go."""
        self._tiers.require_awake("admit")

    def find(self, key: bytes, salt: Hashable, match: Match, known: int, fetch: Fetch | None) -> LowerHit | None:
        """A hit that reaches further than the device's match and `known` tokens that are known elsewhere. At least a
        prompt's last token is left to compute. Several ranks take what they have agreed on with `fetch`, or nothing.
        Raises: InvalidArgument.
        """
        known = max(known, match.length)
        if self._tiers.agreed is None:
            hit = self._tiers.find(key, salt, match, known, len(key) // BYTES - 1)
        else:
            hit = self._tiers.agreed.get(fetch, key, salt, match, known)
        return LowerHit(key, salt, match, hit) if hit else None

    def begun(self, fetches: Sequence[Fetch | None]) -> None:
        """The requests of these prefetches have their rows."""
        agreed = self._tiers.agreed
        for fetch in fetches:
            if fetch is not None and agreed is not None:
                agreed.forget(fetch)

    def hold(self, promotions: Sequence[LowerHit]) -> None:
        """Keeps what was found, here and on the device, until `let_go`."""
        for promotion in promotions:
            promotion.held = True
            self._tiers.host.pin([promotion.hit])
            if promotion.match.found is not None:
                self._cache.tree.lease(promotion.match.found.reach)

    def release(self, promotions: Sequence[LowerHit]) -> None:
        """Ends `hold`, where there was one."""
        for promotion in promotions:
            if promotion.held:
                promotion.held = False
                self._tiers.host.unpin([promotion.hit])
                if promotion.match.found is not None:
                    self._cache.tree.unlease(promotion.match.found.reach)

    def alone(self, promotions: Sequence[LowerHit | None]) -> list[LowerHit]:
        """Those whose states nobody else among them starts from."""
        users = Counter(promotion.hit.state.key for promotion in promotions if promotion)
        return [promotion for promotion in promotions if promotion and users[promotion.hit.state.key] == 1]

    def needs(self, promotions: Sequence[LowerHit]) -> tuple[int, int]:
        """Slots and pages that bringing these up takes, each state and page once."""
        states = {promotion.hit.state.key for promotion in promotions}
        pages = {entry.key for promotion in promotions for entry in promotion.hit.pages}
        return len(states), len(pages)

    def bring(self, promotions: Sequence[LowerHit]) -> list[tuple[Node, bool]]:
        """Makes what was found cached states of the device, whose bytes are on their way. The policies do not know yet
        of these nodes, nor of the KV that has come with some. Only where there is room, and everything is awake.
        """
        nodes: list[tuple[Node, bool]] = []
        states: list[tuple[int, Hit]] = []
        pages: list[tuple[int, CachedRecord]] = []
        distinct = {promotion.hit.state.key: promotion for promotion in promotions}
        for promotion in sorted(distinct.values(), key=lambda each: each.hit.length):
            hit = promotion.hit
            node, had, fresh = self._cache.insert_loaded(promotion.head, promotion.salt, hit.length)
            assert node.snapshot is not None
            nodes.append((node, had * self._page_size < hit.length))
            states.append((node.snapshot.register, hit))
            pages += zip(fresh, hit.pages[had - hit.first :], strict=bool(fresh))
        self._tiers.host.bring(states, pages)
        self._tiers.note([(promotion.hit, promotion.match.length) for promotion in promotions])
        return nodes
