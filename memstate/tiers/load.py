"""Hits below the device: finds them, counts what loading takes, and loads them before rows start. Knows no row.

A loaded state becomes a cached one. All requests that found it share one load, and start from it as from any other
cached state.
"""

from collections.abc import Sequence

from memstate.prefix import Match, PrefixCache
from memstate.prefix.tree import Node
from memstate.requests.page_table import PageTable
from memstate.tiers.host.cache import CachedRecord
from memstate.tiers.host.tier import Hit
from memstate.tiers.manager import TierManager
from memstate.tiers.prefetch.fetch import Fetch
from memstate.tokens import Prompt


class Loader:
    """Finds hits, keeps them while room is made, and loads them.

    Args:
        tiers: What lies below the device.
        cache: The prefix cache that takes the loaded states.
        pages: KV pages of rows.

    Attributes:
        hold: Keeps the records of a hit until `release`.
        release: Ends `hold`.
        require_own: Refuses a prefetch that is another manager's; see `TierManager.require_own`.
    """

    def __init__(self, tiers: TierManager, cache: PrefixCache, pages: PageTable) -> None:
        self._tiers, self._cache, self._page_size = tiers, cache, pages.page_size
        self.hold, self.release, self.require_own = tiers.host.pin, tiers.host.unpin, tiers.require_own

    def find(self, prompt: Prompt, match: Match, known: int, fetch: Fetch | None) -> Hit | None:
        """Finds a hit that reaches further than the device's match and `known` tokens.

        At least the prompt's last token is left to compute. Several ranks take what they have agreed on with `fetch`,
        or nothing.

        Args:
            prompt: The prompt.
            match: What the device has.
            known: Tokens of a state that the request has elsewhere.
            fetch: The request's prefetch, None for none.

        Returns:
            The hit, None for none.

        Raises:
            InvalidArgument: The prefetch was begun for another prompt.
            Asleep: The memory that the hit would go to is released.
        """
        known = max(known, match.length)
        agreed = self._tiers.agreed
        hit = self._tiers.find(prompt, match, known) if agreed is None else agreed.get(fetch, prompt, match, known)
        if hit is not None:
            self._tiers.require_awake("admit")
        return hit

    def begun(self, fetches: Sequence[Fetch]) -> None:
        """Notes that the requests of these prefetches have rows now: what ranks agreed on for them is forgotten.

        Args:
            fetches: Their prefetches.
        """
        agreed, prefetcher = self._tiers.agreed, self._tiers.prefetcher
        for fetch in fetches:
            if not fetch.done and prefetcher is not None:
                prefetcher.note_late(fetch)
            if agreed is not None:
                agreed.forget(fetch)

    def bring(self, loads: Sequence[tuple[Prompt, Match, Hit]]) -> list[tuple[Node, bool]]:
        """Makes hits cached states of the device, whose bytes are on their way.

        Call it only where there is room, and everything is awake. The policies do not know yet of these nodes, nor of
        the KV that is loaded with some.

        Args:
            loads: Prompts, each with what the device has of it and the hit.

        Returns:
            The nodes, each with whether KV was loaded too.
        """
        nodes: list[tuple[Node, bool]] = []
        states: list[tuple[int, Hit]] = []
        pages: list[tuple[int, CachedRecord]] = []
        distinct = {hit.state.key: (prompt, hit) for prompt, _, hit in loads}
        for prompt, hit in sorted(distinct.values(), key=lambda each: each[1].length):
            node, had, fresh = self._cache.insert_loaded(prompt.head(hit.length))
            assert node.snapshot is not None
            nodes.append((node, had * self._page_size < hit.length))
            states.append((node.snapshot.register, hit))
            pages += zip(fresh, hit.pages[had - hit.first :], strict=bool(fresh))
        self._tiers.host.bring(states, pages)
        self._tiers.note([(hit, match.length) for _, match, hit in loads])
        return nodes
