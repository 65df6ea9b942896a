"""Hits below the device: finds them, counts what loading takes, and loads them before rows start. Knows no row.

A loaded state becomes a cached one. All requests that found it share one load, and start from it as from any other
cached state.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from memstate.errors import InvalidArgument
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
    """A hit below the device, of one request.

    Attributes:
        key: Tokens of the prompt, encoded.
        salt: Salt of the prompt.
        match: What the device has.
        hit: What lies below the device.
        held: Whether it is kept, until `release`.
    """

    key: bytes
    salt: Hashable
    match: Match
    hit: Hit
    held: bool = False

    @property
    def head(self) -> bytes:
        """The tokens that the state stands for, encoded."""
        return self.key[: self.hit.length * BYTES]


class NoLoader:
    """Stands in for a loader where nothing lies below the device: it finds nothing."""

    def require_awake(self) -> None:
        """Refuses to load while the manager sleeps.

        Raises:
            Asleep: What is loaded has nowhere to go.
        """

    def require_own(self, fetch: Fetch) -> None:
        """Refuses a prefetch that is another manager's.

        Args:
            fetch: A request's prefetch.

        Raises:
            InvalidArgument: It is not what this manager's `prefetch` returned.
        """
        raise InvalidArgument(f"fetch={fetch!r}: this manager has no storage to fetch from: Tiers(store=) names one")

    def find(self, key: bytes, salt: Hashable, match: Match, known: int, fetch: Fetch | None) -> LowerHit | None:
        """Finds a hit that reaches further than the device's match and `known` tokens.

        Args:
            key: Tokens of the prompt, encoded.
            salt: Salt of the prompt.
            match: What the device has.
            known: Tokens of a state that the request has elsewhere.
            fetch: The request's prefetch, None for none.

        Returns:
            The hit, None for none.
        """
        return None

    def begun(self, fetches: Sequence[Fetch | None]) -> None:
        """Notes that the requests of these prefetches have their rows.

        Args:
            fetches: Prefetches, None for requests without one.
        """

    def hold(self, hits: Sequence[LowerHit]) -> None:
        """Keeps what was found, here and on the device, until `release`.

        Args:
            hits: What `find` returned.
        """

    def release(self, hits: Sequence[LowerHit]) -> None:
        """Ends `hold`, where there was one.

        Args:
            hits: What `find` returned.
        """

    def alone(self, hits: Sequence[LowerHit | None]) -> list[LowerHit]:
        """Returns the hits whose states no other of them starts from.

        Args:
            hits: What `find` returned; None is skipped.
        """
        return []

    def needs(self, hits: Sequence[LowerHit]) -> tuple[int, int]:
        """Returns the slots and pages that loading takes, each state and page once.

        Args:
            hits: What `find` returned.
        """
        return 0, 0

    def bring(self, hits: Sequence[LowerHit]) -> list[tuple[Node, bool]]:
        """Makes hits cached states of the device, whose bytes are on their way.

        Call it only where there is room, and everything is awake. The policies do not know yet of these nodes.

        Args:
            hits: What `find` returned.

        Returns:
            The nodes, each with whether KV was loaded too.
        """
        return []


class Loader(NoLoader):
    """Finds hits, keeps them while room is made, and loads them.

    Args:
        tiers: What lies below the device.
        cache: The prefix cache that takes the loaded states.
        pages: KV pages of rows.
    """

    def __init__(self, tiers: TierManager, cache: PrefixCache, pages: PageTable) -> None:
        self._tiers, self._cache, self._page_size = tiers, cache, pages.page_size

    def require_awake(self) -> None:
        """Refuses to load while the manager sleeps.

        Raises:
            Asleep: What is loaded has nowhere to go.
        """
        self._tiers.require_awake("admit")

    def require_own(self, fetch: Fetch) -> None:
        """Refuses a prefetch that is another manager's.

        Args:
            fetch: A request's prefetch.

        Raises:
            InvalidArgument: It is not what this manager's `prefetch` returned.
        """
        self._tiers.require_own(fetch)

    def find(self, key: bytes, salt: Hashable, match: Match, known: int, fetch: Fetch | None) -> LowerHit | None:
        """Finds a hit that reaches further than the device's match and `known` tokens.

        At least the prompt's last token is left to compute. Several ranks take what they have agreed on with `fetch`,
        or nothing.

        Args:
            key: Tokens of the prompt, encoded.
            salt: Salt of the prompt.
            match: What the device has.
            known: Tokens of a state that the request has elsewhere.
            fetch: The request's prefetch, None for none.

        Returns:
            The hit, None for none.

        Raises:
            InvalidArgument: The prefetch was begun for another prompt.
        """
        known = max(known, match.length)
        if self._tiers.agreed is None:
            hit = self._tiers.find(key, salt, match, known, len(key) // BYTES - 1)
        else:
            hit = self._tiers.agreed.get(fetch, key, salt, match, known)
        return LowerHit(key, salt, match, hit) if hit else None

    def begun(self, fetches: Sequence[Fetch | None]) -> None:
        """Notes that the requests of these prefetches have rows now: what ranks agreed on for them is forgotten.

        Args:
            fetches: Prefetches, None for requests without one.
        """
        agreed, prefetcher = self._tiers.agreed, self._tiers.prefetcher
        for fetch in fetches:
            if fetch is not None and not fetch.done and prefetcher is not None:
                prefetcher.note_late(fetch)
            if fetch is not None and agreed is not None:
                agreed.forget(fetch)

    def hold(self, hits: Sequence[LowerHit]) -> None:
        """Keeps what was found, here and on the device, until `release`.

        Args:
            hits: What `find` returned.
        """
        for lower in hits:
            lower.held = True
            self._tiers.host.pin([lower.hit])
            if lower.match.found is not None:
                self._cache.tree.lease(lower.match.found.reach)

    def release(self, hits: Sequence[LowerHit]) -> None:
        """Ends `hold`, where there was one.

        Args:
            hits: What `find` returned.
        """
        for lower in hits:
            if lower.held:
                lower.held = False
                self._tiers.host.unpin([lower.hit])
                if lower.match.found is not None:
                    self._cache.tree.unlease(lower.match.found.reach)

    def alone(self, hits: Sequence[LowerHit | None]) -> list[LowerHit]:
        """Returns the hits whose states no other of them starts from.

        Args:
            hits: What `find` returned; None is skipped.
        """
        users = Counter(lower.hit.state.key for lower in hits if lower)
        return [lower for lower in hits if lower and users[lower.hit.state.key] == 1]

    def needs(self, hits: Sequence[LowerHit]) -> tuple[int, int]:
        """Returns the slots and pages that loading takes, each state and page once.

        Args:
            hits: What `find` returned.
        """
        states = {lower.hit.state.key for lower in hits}
        pages = {entry.key for lower in hits for entry in lower.hit.pages}
        return len(states), len(pages)

    def bring(self, hits: Sequence[LowerHit]) -> list[tuple[Node, bool]]:
        """Makes hits cached states of the device, whose bytes are on their way.

        Call it only where there is room, and everything is awake. The policies do not know yet of these nodes, nor of
        the KV that is loaded with some.

        Args:
            hits: What `find` returned.

        Returns:
            The nodes, each with whether KV was loaded too.
        """
        nodes: list[tuple[Node, bool]] = []
        states: list[tuple[int, Hit]] = []
        pages: list[tuple[int, CachedRecord]] = []
        distinct = {lower.hit.state.key: lower for lower in hits}
        for lower in sorted(distinct.values(), key=lambda each: each.hit.length):
            hit = lower.hit
            node, had, fresh = self._cache.insert_loaded(lower.head, lower.salt, hit.length)
            assert node.snapshot is not None
            nodes.append((node, had * self._page_size < hit.length))
            states.append((node.snapshot.register, hit))
            pages += zip(fresh, hit.pages[had - hit.first :], strict=bool(fresh))
        self._tiers.host.bring(states, pages)
        self._tiers.note([(lower.hit, lower.match.length) for lower in hits])
        return nodes
