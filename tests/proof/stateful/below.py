"""What a caller does with what lies below the device: polls, flushes, and empties it."""

from tests.proof.stateful.hosting import Hosting
from tests.support.shelves import Key


class Below(Hosting):
    """Host memory, storage and prefetches of one rank."""

    def poll(self) -> None:
        """All that moves by itself."""
        self.write_due()
        self.advance()
        if self.settings.storing:
            self.write()
            self.poll_fetches()

    def flush(self) -> None:
        model = self.model
        model.submit()
        self.due = []
        for shelf in reversed(self.shelves):
            self.enqueue(shelf, shelf.items)  # what failed before, once more
        self._write_all()
        entries, room = list(model.stated), max(1, self.states.records // 2)
        for at in range(0, len(entries), room):
            chosen = entries[at : at + room]
            self.keep(chosen)
            self._write_all()
            for entry in chosen:
                keys = self.keys(entry.tokens, entry.salt)
                if not (self.states.get(keys[-1]) and self._has_pages(keys)):
                    self.keep([entry])
                    self._write_all()

    def _has_pages(self, keys: list[Key]) -> bool:
        return not self.pages or all(self.pages.get(key) for key in keys)

    def _write_all(self) -> None:
        self.settle()
        while self.settings.storing and (self.queue or self.writing):
            self.write()
            self.wait(self.writing)
            self.write()

    def clear(self) -> None:
        self.due, self.off = [], True
        self.settle()
        self.off = False
        for fetch in list(self.fetches):
            self._end(fetch, "cancelled")
        self.wait([job for job in self.jobs if job.fetch and job.begun])
        self._collect()
        for _, item in self.queue:
            item.stored = False
        self.queue.clear()
        self.wait(self.writing)
        self.write()
        for shelf in self.shelves:
            shelf.evict(len(shelf.items))
