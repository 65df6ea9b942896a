"""Who gets a row: first come, first served, several at once, from the longest known prefix. Knows no step, no slot."""

from collections.abc import Sequence

from memstate.demo.config import DemoConfig
from memstate.demo.meter import Meter
from memstate.demo.sabotage import Sabotage
from memstate.demo.shelf import Shelf
from memstate.demo.work import Work
from memstate.engine import StateManager
from memstate.errors import MemstateError, OutOfPages, OutOfRows, OutOfSlots
from memstate.holders import Snapshot
from memstate.requests import Request


class Admission:
    """The queue in front of a manager.

    Running out of something is back-pressure: snapshots make way where that is enough, or the request waits.
    """

    def __init__(
        self, config: DemoConfig, mem: StateManager, shelf: Shelf, meter: Meter, sabotage: Sabotage | None
    ) -> None:
        self.config, self.mem, self.shelf, self.meter, self.sabotage = config, mem, shelf, meter, sabotage
        self.waiting: list[Work] = []

    def admit(self, running: Sequence[Work]) -> list[Work]:
        """Admits as many waiting requests as fit, in order; returns them.

        Raises: OutOfSlots, OutOfPages where nothing runs, nothing can be dropped, and not even the first fits.
        """
        taken = {work.place for work in running}
        places = [place for place in range(self.config.batch) if place not in taken]
        batch = self.waiting[: len(places)]
        if batch and self.sabotage:
            self.shelf.witness.look_now()  # what is published so far is seen as it was
            self.mem.submit()
        while batch:
            hits = [self.shelf.find(work.tokens) for work in batch]
            requests = [self._request(work, hit) for work, hit in zip(batch, hits, strict=True)]
            try:
                rows = self.mem.admit(requests)
            except (OutOfRows, OutOfSlots, OutOfPages) as short:
                if not self._make_way(short):
                    if len(batch) == 1 and not running and not isinstance(short, OutOfRows):
                        raise
                    self._refuse(batch.pop(), type(short).__name__.removeprefix("OutOf").lower())
                continue
            for work, row, place, hit, request in zip(batch, rows, places, hits, requests, strict=False):
                self._count(work, hit)
                work.start(row, place, hit.length if hit else 0, request.want)
                if hit and self.sabotage:
                    self.sabotage.strike(hit, work)
            del self.waiting[: len(batch)]
            return batch
        return []

    def _request(self, work: Work, hit: Snapshot | None) -> Request:
        return Request(work.name, len(work.tokens), hit, self._want(work, hit.length if hit else 0))

    def _want(self, work: Work, start: int) -> int:
        """The last whole page of the system prompt while nobody has published it, or else of the own prompt."""
        page = self.config.page_size
        system = len(work.conversation.system) // page * page
        if start < system and not self.shelf.holds(work.tokens[:system]):
            return system
        prompt = work.prompt // page * page
        return prompt if prompt > start else 0

    def _make_way(self, short: MemstateError) -> bool:
        """Drops the oldest snapshots if that can help; returns whether it is worth trying again."""
        if isinstance(short, OutOfSlots):
            missing = short.requested - short.free
            return missing <= len(self.shelf.entries) and self.shelf.drop_oldest(missing) > 0
        return isinstance(short, OutOfPages) and self.shelf.drop_oldest(1) > 0

    def _refuse(self, work: Work, short_of: str) -> None:
        """Counts a request that has to wait, once for each thing it waits for."""
        if short_of not in work.waited_for:
            work.waited_for.add(short_of)
            self.meter.refused[short_of] += 1

    def _count(self, work: Work, hit: Snapshot | None) -> None:
        self.meter.admissions += 1
        self.meter.prompt_tokens += len(work.tokens)
        if hit:
            self.meter.resumed += 1
            self.meter.prefix_hit_tokens += hit.length
