"""Serves a trace as an engine does: makes the calls of a decode loop on a manager, but the forward computes nothing.

Each iteration admits requests, plans one chunk for each row, settles, publishes the states of prompts, and ends rows.
Launches do nothing; the host counts every slot. As nothing is computed, one step decodes up to the next boundary. The
replay assumes a forward that can store a state at every token.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from memstate.cli.replay.requests import UnitRequest, Units
from memstate.cli.traces import BLOCK
from memstate.engine.manager import StateManager
from memstate.engine.settings import Forward, Pages
from memstate.errors import OutOfPages, OutOfSlots
from memstate.kernels.dispatch import OPS
from memstate.prefix import Match, Prefix
from memstate.prefix.placement import Placement
from memstate.requests.handles import Request, Row
from memstate.requests.tracking import Redirect
from memstate.state.layout import Plane, StateLayout

LAYOUT = StateLayout((Plane("state", (1,), torch.float32),), layers=1)
ROOM = 8  # slots for each running request, beside those of the cache


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Settings of the loop.

    Args:
        chunk: Largest number of tokens of a prefill chunk.
        every: Tokens between two states of decode, a multiple of a block.
        placement: Name of the placement, one of `memstate.cli.policies.PLACEMENTS` with a number in place of N.
        running: Requests that run at a time.
    """

    chunk: int = 8192
    every: int = BLOCK
    placement: str = "ends"
    running: int = 1


DEFAULT = Loop()


@dataclass(frozen=True)
class InUnits(Placement):
    """Lets a placement count tokens while the manager counts units.

    Args:
        placement: The placement, which counts tokens.
        units: The unit of the manager.
    """

    placement: Placement
    units: Units

    def marks(self, match: Match, page_size: int) -> dict[int, str]:
        """See `Placement.marks`."""
        by = self.units.tokens
        lengths = {name: by * getattr(match, name) for name in ("tokens", "length", "kv_length", "evicted_length")}
        marks = self.placement.marks(replace(match, **lengths), by * page_size)
        return {length // by: kind for length, kind in marks.items()}


@dataclass
class Tally:
    """Counts of one part of a replay. Lengths are in units, hits and misses in blocks.

    Attributes:
        requests: Requests admitted.
        asked: Blocks of their prompts.
        hits: Blocks that lie before the state from which their request starts, and that earlier prompts had.
        answer_hits: Blocks that lie before that state and belong to earlier answers.
        filed: States that the cache took, by kind.
        misses: Blocks that are computed, by reason.
        forwards: Chunks of prompts that steps computed.
        turns: Requests that go on from the answer of an earlier request.
        recomputed: Tokens of the earlier request and its answer that turns compute again.
        match_seconds: Seconds of each match.
        file_seconds: For each request, seconds of all its publishes and of its end.
    """

    requests: int = 0
    asked: int = 0
    hits: int = 0
    answer_hits: int = 0
    filed: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    forwards: int = 0
    turns: int = 0
    recomputed: int = 0
    match_seconds: list[float] = field(default_factory=list)
    file_seconds: list[float] = field(default_factory=list)


@dataclass(eq=False)
class AdmittedRequest:
    """A request that runs.

    Attributes:
        request: Its prompt and answer, in units.
        row: The row in which it runs.
        tally: The counts that it adds to.
        length: Units that its state stands for.
        seconds: Seconds of its publishes so far.
    """

    request: UnitRequest
    row: Row
    tally: Tally
    length: int
    seconds: float = 0.0


class Serving:
    """A manager, and a loop that serves requests in order.

    Args:
        prefix: Settings of the prefix cache; `most_states` is set.
        requests: The requests to serve, in this order.
        units: The unit in which the manager counts lengths.
        loop: Settings of the loop; its placement is that of `prefix`.
        first: Index of the first request that counts; earlier requests warm up the cache.
        pages: Number of KV pages.

    Attributes:
        mem: The manager that serves the requests.
        tallies: Counts of the requests before `first`, and of the others.
        admitted: Requests admitted so far.
        longest_wait: Most steps that a request waited while a row was free.
    """

    def __init__(
        self, prefix: Prefix, requests: Sequence[UnitRequest], units: Units, loop: Loop, *, first: int, pages: int
    ) -> None:
        assert prefix.most_states is not None
        # a prefix cache needs at least two pages per row
        per_row = max(2, *(-(-len(request.tokens) // units.per_block) for request in requests))
        self._units, self._chunk, self._every = units, loop.chunk // units.tokens, loop.every // units.tokens
        self.mem = StateManager(
            LAYOUT, slots=prefix.most_states + ROOM * loop.running, max_requests=loop.running,
            tracking=Redirect(self._every), pages=Pages(size=units.per_block, count=pages, per_row=per_row),
            prefix=prefix, forward=Forward(grid=1), backend="reference",
        )  # fmt: skip
        for op in OPS:
            setattr(self.mem.backend, op, lambda *_: None)
        self._first, self._most = first, loop.running
        self._waiting, self._running = deque(requests), list[AdmittedRequest]()
        self.tallies = Tally(), Tally()
        self._count_filed(prefix.states)
        self.admitted = self.longest_wait = self._waited = 0

    def _count_filed(self, policy: Any) -> None:
        added = policy.added

        def count(node: object, kind: str) -> None:
            self._filing.filed[kind] += 1
            added(node, kind)

        policy.added, self._filing = count, self.tallies[0]

    @property
    def leaked(self) -> int:
        """Number of slots that are not free and that neither the cache nor a row holds."""
        assert self.mem.prefix is not None
        stats = self.mem.stats()
        owned = self.mem.prefix.states + stats.held_by_live + stats.held_by_lanes
        return stats.capacity - stats.free - owned

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self._waiting or self._running)

    def turn(self) -> None:
        """Makes one iteration of the loop."""
        while self._waiting and len(self._running) < self._most and self._admit():
            pass
        if not self._running:  # only requests with empty prompts were waiting, and they get no row
            return
        rows = [one.row for one in self._running]
        step = self.mem.plan(rows, [self._tokens(one) for one in self._running])
        self.mem.settle(step)
        for one, length in zip(self._running, step.after.tolist(), strict=True):
            one.tally.forwards += one.length < one.request.prompt
            self._publish(one, length)
        for one in self._running:
            if one.length == len(one.request.tokens):
                self._release(one)
        self._running = [one for one in self._running if one.length < len(one.request.tokens)]

    def _admit(self) -> bool:
        """Admits the next request. Returns whether it was admitted."""
        request = self._waiting[0]
        tally = self.tallies[request.at >= self._first]
        if not request.prompt:
            tally.requests += 1
            self._leave_queue()
            return True
        if any(one.request.at == request.follows for one in self._running):
            return False  # the prompt contains the answer of a request that still runs: wait for it
        prompt = request.tokens[: request.prompt]
        begin = time.perf_counter()
        match = self.mem.match(prompt)
        seconds = time.perf_counter() - begin
        try:
            asked = Request(request.at, tokens=prompt, length=len(request.tokens), kind=request.kind)
            row = self.mem.admit([asked])[0]
        except (OutOfSlots, OutOfPages):
            if not self._running:
                raise
            self._waited += 1
            self.longest_wait = max(self.longest_wait, self._waited)
            return False
        self._leave_queue()
        per, length = self._units.per_block, self.mem.info(row).length
        hits = length // per
        tally.requests += 1
        tally.match_seconds.append(seconds)
        tally.asked += request.asked
        tally.hits += min(hits, request.known)
        tally.answer_hits += max(0, hits - request.known)
        tally.misses.update({reason: lost // per for reason, lost in match.lost.items()})
        tally.misses["not_filled"] += request.asked - request.filled
        if request.follows is not None:
            tally.turns += 1
            tally.recomputed += max(0, request.common - length * self._units.tokens)
        self._running.append(AdmittedRequest(request, row, tally, length))
        return True

    def _leave_queue(self) -> None:
        self._waiting.popleft()
        self.admitted += 1
        self._waited = 0

    def _tokens(self, one: AdmittedRequest) -> int:
        """Returns the tokens of a row in the next step: a chunk of its prompt, or its answer up to a boundary."""
        if one.length < one.request.prompt:
            return self.mem.chunk(one.row, self._chunk)
        return min((one.length // self._every + 1) * self._every, len(one.request.tokens)) - one.length

    def _publish(self, one: AdmittedRequest, length: int) -> None:
        """Files the states and the KV of a prompt after each chunk. Those of an answer are filed when the row ends."""
        before, one.length = one.length, length
        if before < one.request.prompt and length < len(one.request.tokens):
            self._filing, begin = one.tally, time.perf_counter()
            self.mem.publish([one.row], keep="cache", tokens=[one.request.tokens[:length]])
            one.seconds += time.perf_counter() - begin

    def _release(self, one: AdmittedRequest) -> None:
        self._filing, begin = one.tally, time.perf_counter()
        self.mem.end([one.row], keep="cache", tokens=[one.request.tokens])
        one.tally.file_seconds.append(one.seconds + time.perf_counter() - begin)
