"""Admits requests in order of arrival, several at once, each from its longest known prefix."""

import time
from collections.abc import Sequence

from memstate.engine.manager import StateManager
from memstate.errors import OutOfPages, OutOfRows, OutOfSlots
from memstate.requests.handles import Request, Row, Session, Snapshot
from memstate_tools.demo.config import DemoConfig
from memstate_tools.demo.meter import Meter
from memstate_tools.demo.peek import session_snapshots
from memstate_tools.demo.sabotage import Sabotage
from memstate_tools.demo.transcript import Witness
from memstate_tools.demo.work import Work

NAP_S = 0.0005  # seconds of sleep if nothing can run before storage answers


class DemoQueue:
    """The queue in front of a manager, and the sessions of the first conversations.

    If slots, pages or rows run out, memstate evicts cached states by itself, or the request waits. A session is opened
    with the first turn of its conversation and closed after the last.
    """

    def __init__(
        self, config: DemoConfig, mem: StateManager, meter: Meter, witness: Witness, sabotage: Sabotage | None
    ) -> None:
        assert mem.prefix is not None  # every engine of the demo has a prefix cache
        self.config, self.mem, self.cache = config, mem, mem.prefix
        self.meter, self.witness, self.sabotage = meter, witness, sabotage
        self.waiting: list[Work] = []
        self._tiers = mem.tiers if mem.tiers is not None and mem.tiers.prefetcher is not None else None
        self._sessions: dict[int, Session] = {}

    def admit(self, running: Sequence[Work]) -> list[Work]:
        """Admits as many waiting requests as fit, in order, and returns them.

        Raises:
            OutOfSlots: No request runs, nothing can be given up, and the first request needs more slots.
            OutOfPages: No request runs, nothing can be given up, and the first request needs more KV pages.
            OutOfRows: No request runs, and there is no row.
        """
        taken = {work.place for work in running}
        places = [place for place in range(self.config.batch) if place not in taken]
        batch = self._fetched(self.waiting[: len(places)])
        if batch and self.sabotage:
            self.witness.look_now()  # reads the published states before sabotage changes them
            self.mem.submit()
        while batch:
            sessions = [self.session_of(work) for work in batch]
            if self.sabotage:
                self.sabotage.strike(batch, sessions)
            requests = [
                Request(work.name, len(work.tokens), resume=work.parked, tokens=work.tokens, session=session)
                for work, session in zip(batch, sessions, strict=True)
            ]
            try:
                rows = self.mem.admit(requests)
            except (OutOfRows, OutOfSlots, OutOfPages) as short:
                if self.sabotage:
                    self.sabotage.undo()
                if len(batch) > 1 or running:
                    self._refuse(batch.pop(), type(short).__name__.removeprefix("OutOf").lower())
                elif isinstance(short, OutOfRows) or not self.give_way():
                    raise
                continue
            for work, row, place in zip(batch, rows, places, strict=False):
                work.start(row, place, self._count(work, row), self.config.page_size)
            if self.sabotage:
                self.sabotage.landed()
            del self.waiting[: len(batch)]
            return batch
        return []

    def give_way(self) -> bool:
        """Clears the cache, even the state from which the first request would start. Called if no request can go on.

        Returns:
            Whether slots or pages became free, so that another try makes sense.
        """
        before = self.mem.free_slots, self.mem.free_pages
        self.cache.clear()
        freed = (self.mem.free_slots, self.mem.free_pages) != before
        self.meter.gave_way["cache cleared"] += freed
        return freed

    def nap(self) -> None:
        """Sleeps, so that threads of storage can work, if the first request waits for them."""
        if self._tiers is not None:
            time.sleep(NAP_S)

    def session_of(self, work: Work) -> Session | None:
        """Returns the session of a request's conversation, opened if needed; None if the conversation has none."""
        number = work.conversation.number
        if number < self.config.sessions and number not in self._sessions:
            self._sessions[number] = self.mem.sessions.open(f"conversation {number}")
        return self._sessions.get(number)

    def kept(self, work: Work) -> list[Snapshot]:
        """Returns the states that the session of a request's conversation keeps now."""
        session = self._sessions.get(work.conversation.number)
        return session_snapshots(self.mem, session) if session else []

    def close_session(self, work: Work) -> None:
        """Closes the session of a request's conversation, if it has one."""
        if session := self._sessions.pop(work.conversation.number, None):
            self.mem.sessions.close(session)

    def _fetched(self, waiting: list[Work]) -> list[Work]:
        """Begins a prefetch for each request. Returns the requests before the first one whose prefetch is not over."""
        if self._tiers is None:
            return waiting
        for work in waiting:
            if work.fetch is None and work.parked is None:
                work.fetch = self.mem.prefetch(work.tokens, session=self.session_of(work))
        ready = 0
        while ready < len(waiting) and ((fetch := waiting[ready].fetch) is None or self._tiers.ready(fetch)):
            ready += 1
        return waiting[:ready]

    def _refuse(self, work: Work, short_of: str) -> None:
        """Counts a request that has to wait: once for each resource (slots, pages, rows) that it waits for."""
        if short_of not in work.waited_for:
            work.waited_for.add(short_of)
            self.meter.refused[short_of] += 1

    def _count(self, work: Work, row: Row) -> int:
        """Counts an admission. Returns the number of tokens that the request starts with."""
        start, cached = self.mem.info(row).length, self.cache.leases[row.index].match.snapshot
        if work.parked is not None:
            return start
        self.meter.admissions += 1
        self.meter.prompt_tokens += len(work.tokens)
        self.meter.prefix_hit_tokens += start
        self.meter.resumed += start > 0
        if cached:  # a state that the row took over is no longer in the cache
            self.meter.read_cached += self.cache.has(cached)
        self.meter.session_hit_tokens += 0 if cached else start
        return start
