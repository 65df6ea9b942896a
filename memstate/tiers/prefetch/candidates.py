"""Finds the page ends that one rank could start a prompt from, given storage, host memory and free records."""

from collections.abc import Sequence

import numpy as np

from memstate.tiers.host.cache import RecordCache
from memstate.tiers.prefetch.fetch import Bits, End, Fetch, Hits, deepest
from memstate.tiers.prefetch.reading import Answer, Question


class Candidates:
    """Finds the candidates of prefetches and reserves host memory for the deepest.

    Args:
        kv: Host cache of KV pages, None where KV is the caller's.
        states: Host cache of states, None where KV alone is enough.
        page_size: Tokens of a page.
        threshold: Tokens that a prefetch must gain.
        ranks: Number of ranks.
    """

    def __init__(
        self, kv: RecordCache | None, states: RecordCache | None, page_size: int, threshold: int, ranks: int
    ) -> None:
        self._kv, self._states, self._page_size = kv, states, page_size
        self._threshold, self._ranks = threshold, ranks

    def question(self, fetch: Fetch) -> Question:
        """Returns what to ask storage: the pages and states that are nowhere else."""
        keys, kv, states = fetch.keys, self._kv, self._states
        pages = [page for page in range(fetch.kv_pages, fetch.pages) if kv is not None and keys[page] not in kv]
        gaining = range(self._first(fetch, self._threshold), fetch.pages + 1)
        ends = [end for end in gaining if states is not None and keys[end - 1] not in states]
        return Question(keys, pages, ends)

    def claim(self, fetch: Fetch, asked: Sequence[int], answer: Answer) -> tuple[Bits, int]:
        """Claims host memory for the deepest candidate that fits. Changes `fetch.hits` and `fetch.reservation`.

        Args:
            fetch: The prefetch.
            asked: Pages that storage was asked for.
            answer: What storage has.

        Returns:
            The candidates, bool `page`, and the deepest end with memory enough, in pages.
        """
        hits = fetch.hits = self._hits(fetch, asked, answer)
        most = deepest(hits.ends)
        ends = self._claim(fetch, hits, most) if most else hits.ends
        if not deepest(ends):
            fetch.reservation.release()
            fetch.blame(End.NO_ROOM if most else End.MISSED, "")
        return ends, most

    def _hits(self, fetch: Fetch, asked: Sequence[int], answer: Answer) -> Hits:
        keys, pages = fetch.keys, np.arange(fetch.pages)
        kv, states = self._kv, self._states
        here = (pages < fetch.kv_pages) | np.array([kv is None or key in kv for key in keys])
        stated = np.array([states is None or key in states for key in keys])
        reached, able = here.copy(), stated.copy()
        reached[list(asked[: answer.found])] = True
        able[[end - 1 for end in answer.ends]] = True
        able &= np.logical_and.accumulate(reached) & (pages + 1 >= self._first(fetch, 1))
        return Hits(here, stated, able & (pages + 1 >= self._first(fetch, self._threshold)), able)

    def _first(self, fetch: Fetch, least: int) -> int:
        """Returns the first page end that gains so many tokens, and at least one."""
        return -(-(fetch.covered + max(least, 1)) // self._page_size)

    def _claim(self, fetch: Fetch, hits: Hits, most: int) -> Bits:
        kv, states, reservation = self._kv, self._states, fetch.reservation
        stated = np.flatnonzero(hits.able & hits.states) + 1
        reservation.pin(range(fetch.kv_pages, most), stated[stated <= most].tolist())
        ends = hits.cut(kv.room() if kv is not None else 0, states is None or states.room() > 0)
        if self._reads_state(hits, ends) and not reservation.claim_state():
            ends &= hits.states
        if not reservation.claim_pages(hits.missing(deepest(ends))) and kv is not None:
            # Some of what could be evicted is being copied: what is free has to do, and nothing more is evicted.
            ends &= hits.cut(max(0, kv.pool.free - kv.reserve), True)
            reservation.claim_pages(hits.missing(deepest(ends)))
            if self._reads_state(hits, ends) and reservation.state is None and not reservation.claim_state():
                ends &= hits.states
        reservation.trim(deepest(ends), self._reads_state(hits, ends))
        return ends

    def _reads_state(self, hits: Hits, ends: Bits) -> bool:
        """Tells whether a state must be read. With several ranks it may be that of an end before the last one."""
        end = deepest(ends)
        return end > 0 and bool((ends & ~hits.states)[end - 1 if self._ranks == 1 else 0 :].any())
