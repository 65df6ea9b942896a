"""Admits requests: first come, first served, several at once, from the longest known prefix. Knows no step, no slot."""

from collections.abc import Sequence

from memstate.cli.demo.config import DemoConfig
from memstate.cli.demo.meter import Meter
from memstate.cli.demo.sabotage import Sabotage
from memstate.cli.demo.streams import Streams
from memstate.cli.demo.tiers import Fetches
from memstate.cli.demo.transcript import Witness
from memstate.cli.demo.work import Work
from memstate.engine.manager import StateManager
from memstate.errors import OutOfPages, OutOfRows, OutOfSlots
from memstate.requests.handles import Request, Row


class Admission:
    """The queue in front of a manager.

    Running out of something is back-pressure: what is cached makes way by itself, or the request waits.
    """

    def __init__(
        self, config: DemoConfig, mem: StateManager, streams: Streams, meter: Meter, witness: Witness,
        sabotage: Sabotage | None,
    ) -> None:  # fmt: skip
        assert mem.prefix is not None  # every engine of the demo has one
        self.config, self.mem, self.cache, self.streams = config, mem, mem.prefix, streams
        self.meter, self.witness, self.sabotage = meter, witness, sabotage
        self.fetches = Fetches(mem, streams)
        self.waiting: list[Work] = []

    def admit(self, running: Sequence[Work]) -> list[Work]:
        """Admits as many waiting requests as fit, in order, and returns them.

        Raises:
            OutOfSlots: Nothing runs, nothing can be given up, and not even the first request fits.
            OutOfPages: Likewise, for KV pages.
            OutOfRows: Likewise, for rows.
        """
        taken = {work.place for work in running}
        places = [place for place in range(self.config.batch) if place not in taken]
        batch = self.fetches.arrived(self.waiting[: len(places)])
        if batch and self.sabotage:
            self.witness.look_now()  # what is published so far is seen as it was
            self.mem.submit()
        while batch:
            requests = [
                Request(work.name, len(work.tokens), tokens=work.tokens, session=self.streams.of(work))
                for work in batch
            ]
            if self.sabotage:
                self.sabotage.strike(batch, [request.session for request in requests])
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
        """Clears the cache, even of the state that the first request would start from, where none could go on.

        Returns:
            Whether it is worth trying again.
        """
        before = self.mem.free_slots, self.mem.free_pages
        self.cache.clear()
        freed = (self.mem.free_slots, self.mem.free_pages) != before
        self.meter.gave_way["cache cleared"] += freed
        return freed

    def _refuse(self, work: Work, short_of: str) -> None:
        """Counts a request that has to wait, once for each thing it waits for."""
        if short_of not in work.waited_for:
            work.waited_for.add(short_of)
            self.meter.refused[short_of] += 1

    def _count(self, work: Work, row: Row) -> int:
        """Counts an admission; returns the tokens that it starts with."""
        start, cached = self.mem.info(row).length, self.cache.leases[row.index].match.snapshot
        self.meter.admissions += 1
        self.meter.prompt_tokens += len(work.tokens)
        self.meter.prefix_hit_tokens += start
        self.meter.resumed += start > 0
        if cached:  # it is not there any more where the row took it over
            self.meter.read_cached += self.cache.has(cached)
        self.meter.session_hit_tokens += 0 if cached else start
        return start
