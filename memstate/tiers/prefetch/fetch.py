"""One prefetch: what it is after, how far it is, and what of it could be used. Knows no thread and no other prefetch.

ASKING --- storage has answered ---> PROPOSED -- all ranks agree on a length ---> READING
   |            host memory is claimed  |  on none: everything is given back        |  read, stopped, or beyond
   v                                    v                                           v  hope
  DONE <------------------------------ DONE <---- all ranks agree on what came --- ARRIVED
"""

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memstate.tiers.host.pool import RecordPool
from memstate.tiers.prefetch.reading import Answer, Question
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
    """How a prefetch ended on this rank. Its `length` is the same on all ranks."""

    COMPLETE = "complete"  # all that was agreed on
    PARTIAL = "partial"  # some of it
    SHORT = "short"  # too little was missing to begin with
    LIMITED = "limited"  # others were after too many tokens
    MISSED = "missed"  # storage has too little, or what it had was not what it should be
    NO_ROOM = "no_room"  # host memory has too little
    STOPPED = "stopped"  # before anything usable had arrived
    FAILED = "failed"  # storage does not work
    DISAGREED = "disagreed"  # another rank could not
    CANCELLED = "cancelled"
    LOST = "lost"  # the ranks no longer agree on anything


class Hits(NamedTuple):
    """What a prefetch could have, one bool per page.

    Attributes:
        here: The page's KV need not be read.
        states: The state at the page's end need not be read.
        ends: A request could start at the page's end once the rest is read.
        able: The same, also where it gains less than the threshold.
    """

    here: Bits
    states: Bits
    ends: Bits
    able: Bits

    def cut(self, room: int, state_room: bool) -> Bits:
        """Returns the ends that host memory has room for.

        Args:
            room: Pages that fit.
            state_room: Whether a state fits.
        """
        ends = self.ends & (np.cumsum(~self.here) <= room)
        return ends if state_room else ends & self.states

    def missing(self, end: int) -> list[int]:
        """Returns the pages up to an end that must be read."""
        pages: list[int] = np.flatnonzero(~self.here[:end]).tolist()
        return pages


def deepest(ends: Bits) -> int:
    """Returns the pages up to the last end, 0 where there is none."""
    at = np.flatnonzero(ends)
    return int(at[-1]) + 1 if at.size else 0


@dataclass(eq=False)
class Op:
    """An operation that a thread runs for a prefetch.

    Attributes:
        fetch: The prefetch.
        job: Its work in a thread.
        pool: The pool of the records that it fills, None for a question.
        records: The records that it fills.
        pages: The pages that it reads; empty for a question or a state.
    """

    fetch: "Fetch"
    job: Job = field(default_factory=Job)
    pool: RecordPool | None = None
    records: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)


class Fetch:
    """A handle on a prefetch, as `StateManager.prefetch` returns it.

    Attributes:
        tokens: Tokens that it fetches; fewer once host memory or another rank has less.
        keys: Digests of the pages that it fetches.
        covered: Tokens that the request could start from without it.
        began: Start in seconds of the prefetcher's clock.
        done: Whether it is over.
        length: Tokens that a request can start from once it is done, from device and host memory, unless they are
            evicted.
        outcome: How it ended, None before.
        why: What went wrong first, or what was too little; "" for nothing.
    """

    def __init__(
        self, number: int, tokens: int, keys: list[bytes], covered: int, kv_pages: int, reservation: Reservation,
        began: float,
    ) -> None:  # fmt: skip
        self.number, self.pages = number, len(keys)  # bits of a vote, whatever it is after
        self.tokens, self.keys, self.covered, self.kv_pages = tokens, keys, covered, kv_pages
        self.reservation, self.began = reservation, began
        self.phase, self.length, self.why = Phase.ASKING, covered, ""
        self.outcome: End | None = None
        self.missing = tokens - covered  # to begin with
        self.stop = False  # this rank wants it stopped
        self.over = False  # threads need not go on
        self.vote: Bits | None = None
        self.asked_in = 0  # the last in which the ranks were asked about it
        self.answer: Answer | None = None
        self.reason: End | None = None  # of this rank, for having nothing
        self.question: Question
        self.hits: Hits
        self._arrived: Bits
        self._targets: Bits  # ends whose states are in host memory
        self._run = self._bad = 0  # pages: arrived without a gap; the first that will not arrive
        self._state: bool | None = None  # whether the state at the end has arrived; None: it may still

    def __repr__(self) -> str:
        how = self.outcome or self.phase.name.lower()
        return f"Fetch({self.covered}..{self.tokens} tokens, {how}, {self.length} usable)"

    @property
    def done(self) -> bool:
        """Whether it is over."""
        return self.phase is Phase.DONE

    @property
    def end(self) -> int:
        """Pages that it fetches."""
        return len(self.keys)

    def blame(self, reason: End, why: str) -> None:
        """Notes why this rank has less than it might; the first reason counts."""
        self.reason, self.why = self.reason or reason, self.why or why

    def begin(self) -> None:
        """Begins to read, now that all ranks agree on one end."""
        self.phase, self.vote = Phase.READING, None
        self._arrived, self._bad = self.hits.here.copy(), self.end
        self._state = None if self.reservation.state is not None else True
        self._targets = self.hits.able[: self.end] & self.hits.states[: self.end]
        self._advance()

    def note(self, pages: list[int], arrived: int) -> None:
        """Notes that pages were read, of which the first `arrived` are sound. No pages: the state was read."""
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
        """Whether what is still being read cannot help: all has arrived, or a page before it will not."""
        goal = deepest(self._reachable(self._bad, self._state is not False))
        return self._run >= goal and not (goal == self.end and self._state is None)

    def usable(self) -> Bits:
        """Returns the page ends that a request could start from with what has arrived: bool `page`."""
        ends = np.zeros(self.pages, bool)
        reach = self._reachable(self._run, self._state is True)
        ends[: reach.size] = reach
        return ends

    def _reachable(self, run: int, state: bool) -> Bits:
        """Returns the ends up to a page whose state is in host memory; the state of the last end is read."""
        ends = self._targets[:run].copy()
        if run == self.end:
            ends[-1:] = state
        return ends
