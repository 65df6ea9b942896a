"""The state of one prefetch: its tokens, its phase, and the records that have come. Knows no thread.

ASKING --- storage has answered ---> PROPOSED --- all ranks agree on a length ---> READING
   |          host memory is claimed    |  no common length: all is released          |  all is read, or it is stopped,
   v                                    v                                             v  or further reads are useless
  DONE                                 DONE <--- all ranks agree on what came ---- ARRIVED
"""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memstate.tiers.host.pool import RecordPool
from memstate.tiers.prefetch.reading import Question, StorageAnswer
from memstate.tiers.prefetch.reservation import Reservation
from memstate.tiers.workers import Job

Bits = NDArray[np.bool_]


class Phase(IntEnum):
    """The phase of a prefetch."""

    ASKING = 0
    PROPOSED = 1
    READING = 2
    ARRIVED = 3
    DONE = 4


class End(StrEnum):
    """How a prefetch ended on this rank. The `length` of a prefetch is the same on all ranks."""

    COMPLETE = "complete"  # all agreed tokens came
    PARTIAL = "partial"  # a part of the agreed tokens came
    SHORT = "short"  # not begun: it would save too few tokens
    LIMITED = "limited"  # not begun: other prefetches were fetching too many tokens
    MISSED = "missed"  # storage had too few records, or records with flaws
    NO_ROOM = "no_room"  # host memory had too little room
    STOPPED = "stopped"  # it was stopped before any usable record had arrived
    FAILED = "failed"  # calls of storage failed
    DISAGREED = "disagreed"  # another rank could not fetch
    CANCELLED = "cancelled"  # by a caller
    LOST = "lost"  # the ranks no longer agree on prefetches


class Hits(NamedTuple):
    """The pages and states that a prefetch could use. Each field is bool `page`, with one value per page.

    Attributes:
        here: Whether the page's KV need not be read: it is on the device or in host memory, or the caller manages KV.
        states: Whether the state at the page's end is in host memory already.
        ends: Whether a request could start at the page's end when the missing records up to there are read, and would
            gain at least the threshold.
        able: Like `ends`, but True as well where the request gains less than the threshold.
    """

    here: Bits
    states: Bits
    ends: Bits
    able: Bits

    def cut(self, room: int, state_room: bool) -> Bits:
        """Returns the page ends up to which host memory has room: `ends`, with the others set to False.

        Args:
            room: Number of pages that fit.
            state_room: Whether a state fits.
        """
        ends = self.ends & (np.cumsum(~self.here) <= room)
        return ends if state_room else ends & self.states

    def missing(self, end: int) -> list[int]:
        """Returns the pages before page end `end` that must be read."""
        pages: list[int] = np.flatnonzero(~self.here[:end]).tolist()
        return pages


def deepest(ends: Bits) -> int:
    """Returns the number of pages up to the last True, 0 if there is none."""
    at = np.flatnonzero(ends)
    return int(at[-1]) + 1 if at.size else 0


@dataclass(eq=False)
class FetchJob:
    """An operation that a thread runs for a prefetch: a question to storage, or a read.

    Attributes:
        fetch: The prefetch.
        job: The job that runs the operation.
        pool: The pool of the records that a read fills, None for a question.
        records: The records that a read fills.
        pages: The pages that are read; empty for a question and for the read of a state.
    """

    fetch: "Fetch"
    job: Job = field(default_factory=Job)
    pool: RecordPool | None = None
    records: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Fetch:
    """A handle on a prefetch, as `StateManager.prefetch` returns it.

    Attributes:
        tokens: The prefetch wants this many first tokens of the prompt. The number becomes smaller if host memory or
            another rank has less room.
        keys: Digests of the pages of these tokens.
        covered: Tokens of the state from which the request could start without the prefetch.
        began: When it began, in seconds of the prefetcher's clock.
        done: Whether it is over.
        length: Tokens of the state, on the device or in host memory, from which a request can start when `done`, unless
            the state or its KV is evicted first.
        outcome: How it ended, None until then.
        why: The first reason why it fetches less than it wanted; "" if there is none.
    """

    def __init__(
        self, number: int, tokens: int, keys: list[bytes], covered: int, kv_pages: int, reservation: Reservation,
        began: float,
    ) -> None:  # fmt: skip
        self.number, self.pages = number, len(keys)  # pages: bits of a vote; stays when `keys` is cut
        self.tokens, self.keys, self.covered, self.kv_pages = tokens, keys, covered, kv_pages
        self.reservation, self.began = reservation, began
        self.phase, self.length, self.why = Phase.ASKING, covered, ""
        self.outcome: End | None = None
        self.missing = tokens - covered  # tokens that it could save when it began
        self.stop = False  # whether this rank wants to stop the prefetch
        self.over = False  # whether threads may stop their work
        self.vote: Bits | None = None
        self.asked_in = 0  # number of the last exchange in which it had a vote
        self.answer: StorageAnswer | None = None
        self.reason: End | None = None  # why this rank fetches less than it wanted
        self.question: Question
        self.hits: Hits
        self._arrived: Bits
        self._targets: Bits  # page ends whose state is in host memory already
        self._run = self._bad = 0  # number of pages that arrived without a gap; the first page that will not arrive
        self._state: bool | None = None  # whether the state at the end has arrived; None: not known yet

    def __repr__(self) -> str:
        how = self.outcome or self.phase.name.lower()
        return f"Fetch({self.covered}..{self.tokens} tokens, {how}, {self.length} usable)"

    @property
    def done(self) -> bool:
        """Whether the prefetch is over."""
        return self.phase is Phase.DONE

    @property
    def end(self) -> int:
        """Number of first pages of the prompt that it wants."""
        return len(self.keys)

    def blame(self, reason: End, why: str) -> None:
        """Notes a reason why this rank fetches less than it wanted. Only the first reason is kept."""
        self.reason, self.why = self.reason or reason, self.why or why

    def begin(self) -> None:
        """Changes the phase to READING. Call it when all ranks have agreed on one page end."""
        self.phase, self.vote = Phase.READING, None
        self._arrived, self._bad = self.hits.here.copy(), self.end
        self._state = None if self.reservation.state is not None else True
        self._targets = self.hits.able[: self.end] & self.hits.states[: self.end]
        self._advance()

    def note(self, pages: list[int], arrived: int) -> None:
        """Notes that pages were read, the first `arrived` of them well. If `pages` is empty, the state was read."""
        if not pages:
            self._state = arrived == 1
            return
        self._arrived[pages[:arrived]] = True
        if arrived < len(pages):
            self._bad = min(self._bad, pages[arrived])
        self._advance()

    def _advance(self) -> None:
        while self._run < self.end and self._arrived[self._run]:
            self._run += 1

    @property
    def hopeless(self) -> bool:
        """Whether further reads are useless: all records have arrived, or a page before the missing ones never will."""
        goal = deepest(self._reachable(self._bad, self._state is not False))
        return self._run >= goal and not (goal == self.end and self._state is None)

    def usable(self) -> Bits:
        """Returns the page ends from which a request could start with the records that have arrived: bool `page`."""
        ends = np.zeros(self.pages, bool)
        reach = self._reachable(self._run, self._state is True)
        ends[: reach.size] = reach
        return ends

    def _reachable(self, run: int, state: bool) -> Bits:
        """Returns, for each of the first `run` page ends, whether a request could start there: bool `end`.

        Args:
            run: Number of pages that have arrived without a gap.
            state: Whether the state at the last end has arrived, or may still arrive.
        """
        ends = self._targets[:run].copy()
        if run == self.end:
            ends[-1:] = state
        return ends
