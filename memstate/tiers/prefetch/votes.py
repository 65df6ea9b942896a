"""Exchanges the votes of ranks on prefetches: the page ends that each could use, and whether it wants to stop."""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from memstate.errors import AgreementLost
from memstate.tiers.prefetch.agreement import Ranks, Words
from memstate.tiers.prefetch.fetch import Bits, Fetch, Phase

ALL = -1  # a word with all bits set: it changes no word of another rank under AND
WORDS = 4096  # words of every exchange: always the same number, because gloo crashes if sizes differ
HEADER = 2  # words of the header of an exchange, and of the header of each prefetch in it
MOST_PAGES = (WORDS - 2 * HEADER) * 64  # limit of the pages of a prefetch: one bit for each


class Votes:
    """Sends this rank's votes, and reads those of all ranks.

    An exchange begins with a checksum of its prefetches, by which ranks notice that they have different prefetches.
    Then come, for each prefetch, two flags (whether this rank has voted, whether it wants to go on) and one bit for
    each page: whether a request could start at the page's end.

    Args:
        ranks: The ranks that agree.
        fetches: The prefetches, in the order in which they started.
        number: Number of the exchange, from 1 on.
    """

    def __init__(self, ranks: Ranks, fetches: Sequence[Fetch], number: int) -> None:
        chosen = _fitting(fetches)
        self._asked = [(fetch, fetch.phase) for fetch in chosen]
        self._check = zlib.crc32(np.array([(f.number, f.pages, f.covered) for f in chosen], np.int64).tobytes())
        words = [np.array([self._check, ~self._check], np.int64)]
        for fetch in chosen:
            fetch.asked_in = number
            words.append(self._words(fetch))
        sent = np.concatenate(words)
        self._exchange = ranks.exchange(np.pad(sent, (0, WORDS - sent.size)))

    @staticmethod
    def _words(fetch: Fetch) -> Words:
        bits = np.zeros(fetch.pages, bool) if fetch.vote is None else fetch.vote
        flags = np.array([0 if fetch.vote is None else ALL, 0 if fetch.stop else ALL], np.int64)
        packed = np.packbits(bits, bitorder="little")
        return np.concatenate([flags, np.pad(packed, (0, -packed.size % 8)).view(np.int64)])

    @property
    def done(self) -> bool:
        """Whether `verdicts` returns without waiting."""
        return self._exchange.done

    def verdicts(self) -> Iterator[tuple[Fetch, Phase, Bits | None, bool]]:
        """Yields the votes of all ranks together on each prefetch, in the order of the prefetches.

        Yields:
            The prefetch; its phase when the exchange began; the page ends that all ranks could use, bool `page`, None
            if a rank has not voted yet; and whether any rank wants to stop.

        Raises:
            AgreementLost: A rank does not answer, or has other prefetches.

        Syncs: waits for the slowest rank.
        """
        words = self._exchange.result()
        if words[0] != self._check or words[1] != ~self._check:
            raise AgreementLost("they started or cancelled different prefetches")
        words = words[HEADER:]
        for fetch, phase in self._asked:
            own = words[HEADER : _size(fetch)].view(np.uint8)
            ends = np.unpackbits(own, count=fetch.pages, bitorder="little").astype(bool) if words[0] else None
            yield fetch, phase, ends, not words[1]
            words = words[_size(fetch) :]


def _size(fetch: Fetch) -> int:
    return HEADER + -(-fetch.pages // 64)


def _fitting(fetches: Sequence[Fetch]) -> list[Fetch]:
    """Returns the prefetches whose votes fit one exchange, in the given order.

    If not all fit, those go first whose last vote is longest ago.
    """
    chosen, room = set(), WORDS - HEADER
    for fetch in sorted(fetches, key=lambda fetch: fetch.asked_in):
        room -= _size(fetch)
        if room < 0:
            break
        chosen.add(fetch)
    return [fetch for fetch in fetches if fetch in chosen]
