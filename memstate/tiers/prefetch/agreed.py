"""What several ranks have agreed to start requests from, kept until these requests are admitted. Knows no rank.

Host memory differs from rank to rank, because threads and copies pin what they work on. A record that one rank evicts
may still be on another. So a rank starts a request from what all ranks had when they agreed, or from its device's
states, which are the same everywhere.
"""

from memstate.errors import InvalidArgument
from memstate.prefix import Match
from memstate.tiers.host.tier import Hit, HostTier
from memstate.tiers.prefetch.fetch import Fetch
from memstate.tokens import Prompt


class AgreedHits:
    """Keeps the hits of finished prefetches, pinned.

    Args:
        host: Host memory.
        page_size: Tokens of a KV page.

    Attributes:
        hits: The hits that are kept, each with one pin, by prefetch.
    """

    def __init__(self, host: HostTier, page_size: int) -> None:
        self._host, self._page_size = host, page_size
        self.hits: dict[Fetch, Hit] = {}

    def ended(self, fetch: Fetch) -> None:
        """Keeps what has just been agreed on, before other records can take its place.

        Args:
            fetch: The finished prefetch.
        """
        keys = fetch.keys[: fetch.length // self._page_size]
        if fetch.length <= fetch.covered:
            return
        if hit := self._host.agreed_hit(fetch.length, keys, min(fetch.kv_pages, len(keys))):
            self.hits[fetch] = hit
            self._host.pin(hit)

    def get(self, fetch: Fetch | None, prompt: Prompt, match: Match, known: int) -> Hit | None:
        """Returns what a request starts from, None for nothing.

        A hit of at most `known` tokens counts for nothing. So does one where the device has evicted KV that was not
        fetched because the device had it.

        Args:
            fetch: The request's prefetch, None for none.
            prompt: The prompt.
            match: What the device has.
            known: Tokens that the request has a state for already.

        Raises:
            InvalidArgument: The prefetch was begun for another prompt.
        """
        hit = self.hits.get(fetch) if fetch is not None else None
        if hit is None or hit.length <= known or match.kv_length < hit.first * self._page_size:
            return None
        digests = self._host.digests(prompt, match)
        at = hit.length // self._page_size
        if digests[at - 1 : at] != [hit.state.key]:
            raise InvalidArgument(f"{fetch} was begun for other tokens or another salt than the request's")
        return hit

    def forget(self, fetch: Fetch) -> None:
        """Ends the pin of a prefetch whose request has been admitted or will not come.

        Args:
            fetch: The prefetch; without a hit, nothing happens.
        """
        if hit := self.hits.pop(fetch, None):
            self._host.unpin(hit)

    def reset(self) -> None:
        """Forgets all hits. Host memory is emptied right after."""
        self.hits = {}
