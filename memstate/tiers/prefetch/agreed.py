"""What several ranks have agreed to start requests from, kept until these come. Knows no rank.

Host memory differs from rank to rank, because threads and copies pin what they work on; what one rank evicts, another
still has. So a rank starts a request from what all of them had when they agreed, or from its device's states, which
are the same everywhere.
"""

from collections.abc import Hashable

from memstate.errors import InvalidArgument
from memstate.prefix import Match
from memstate.tiers.host.tier import Hit, HostTier
from memstate.tiers.prefetch.fetch import Fetch


class AgreedHits:
    """Hits of prefetches that are over, pinned.

    page_size: tokens.
    """

    def __init__(self, host: HostTier, page_size: int) -> None:
        self._host, self._page_size = host, page_size
        self._hits: dict[Fetch, Hit] = {}

    def ended(self, fetch: Fetch) -> None:
        """Keeps what has just been agreed on, before anything else can take its place."""
        keys = fetch.keys[: fetch.length // self._page_size]
        if fetch.length <= fetch.covered:
            return
        if hit := self._host.agreed_hit(fetch.length, keys, min(fetch.kv_pages, len(keys))):
            self._hits[fetch] = hit
            self._host.pin([hit])

    def get(self, fetch: Fetch | None, key: bytes, salt: Hashable, match: Match, known: int) -> Hit | None:
        """What a request starts from: nothing, where that is no more than `known` tokens, or where the device has given
        up KV that was not fetched for that reason. Raises: InvalidArgument for another prompt's prefetch.
        """
        hit = self._hits.get(fetch) if fetch is not None else None
        if hit is None or hit.length <= known or match.kv_length < hit.first * self._page_size:
            return None
        digests = self._host.digests(key, salt, match)
        at = hit.length // self._page_size
        if digests[at - 1 : at] != [hit.state.key]:
            raise InvalidArgument(f"{fetch} was begun for other tokens or another salt than the request's")
        return hit

    def forget(self, fetch: Fetch) -> None:
        """The request of a prefetch has come, or will not come."""
        if hit := self._hits.pop(fetch, None):
            self._host.unpin([hit])

    def clear(self) -> None:
        """No request will come."""
        for fetch in list(self._hits):
            self.forget(fetch)
