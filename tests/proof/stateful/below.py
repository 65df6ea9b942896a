"""Models the tiers: which states and KV pages go to host memory and storage, and which come back.

It calls no code of memstate, and knows keys of records but no bytes. tests/support/model_prefetch.py models prefetches.
"""

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.proof.stateful.cache import Entry, Found
from tests.proof.stateful.ledger import Kept, Later, Row, Text
from tests.proof.stateful.parked import Parking
from tests.support.fetches import Job
from tests.support.model_prefetch import Prefetches
from tests.support.shelves import Item, Key, Shelf

if TYPE_CHECKING:
    from tests.proof.stateful.model import Model

BATCH = 32  # records of one write
Due = list[tuple[int, Item]]  # (register or page, the item that gets its bytes)
SHARE = 0.25  # share of the records of a shelf that writes may pin


@dataclass(frozen=True)
class Hit:
    """A state in host memory that is longer than any on the device. first: the first KV page that the device lacks."""

    length: int
    first: int
    state: Item
    pages: Sequence[Item]


@dataclass(eq=False)
class Way:
    """A transfer of records between device and host memory.

    registers: those that get loaded states. awaited: whether the work stream has waited for the load.
    """

    parts: list[tuple[Shelf, list[Item]]]
    registers: Sequence[int] = ()
    awaited: bool = False


@dataclass
class Planes:
    """The records in storage, by kind and key, and their faults.

    broken: every call fails. forgetful: every `exists` call fails, because its answer is too short by one name.
    """

    records: set[tuple[str, Key]] = field(default_factory=set)
    faults: dict[tuple[str, Key], str] = field(default_factory=dict)
    broken: bool = False
    forgetful: bool = False

    def has(self, kind: str, key: Key) -> bool:
        return (kind, key) in self.records

    def fault(self, kind: str, key: Key) -> str:
        return self.faults.get((kind, key), "")

    def put(self, kind: str, keys: Sequence[Key]) -> list[bool]:
        if self.broken:
            return [False] * len(keys)
        done = [self.faults.get((kind, key)) != "denied" for key in keys]
        for key, well in zip(keys, done, strict=True):
            if well:
                self.add(kind, key)
        return done

    def add(self, kind: str, key: Key) -> None:
        """Adds a record, in place of one that stands for another length."""
        self.records.add((kind, key))
        if self.fault(kind, key) == "foreign":
            del self.faults[kind, key]


class Below(Prefetches):
    """Host memory of one rank, with its writes to storage and its prefetches from there."""

    states: Shelf
    storage: "Planes"

    def __init__(self, model: "Model") -> None:
        s = self.settings = model.settings
        self.model = model
        model.below, model.before_packet = self, self.prepare
        pages = Shelf("kv", s.host_pages, int(s.host_pages * s.host_reserve)) if s.pages else None
        states = Shelf("state", s.host_slots, int(s.host_slots * s.host_reserve))
        super().__init__(s.page_size, s.prefetch, pages, states, Planes())
        self.rows = Shelf("row", s.host_slots, 0) if s.tails else None
        self.shelves = [shelf for shelf in (self.states, self.pages, self.rows) if shelf]
        self.parking = Parking(self)
        # for each page and each token in it: all tokens up to and including this token
        self.kv: list[list[Text | None]] = [[None] * s.page_size for _ in range(s.pages + 1)]
        self.figures: Counter[str] = Counter()
        self.loads: list[Way] = []
        self.backups: list[Way] = []
        self.due: list[tuple[Entry, Kept]] = []
        self.queue: deque[tuple[Shelf, Item]] = deque()
        self.writing: list[Job] = []
        self.off = False  # whether evicted states are lost instead of saved
        self.unwritten: set[int] = set()  # pages that the open step completes

    def keys(self, tokens: Text, salt: Hashable) -> list[Key]:
        size = self.settings.page_size
        return [(salt, tokens[: end * size]) for end in range(1, len(tokens) // size + 1)]

    # The engine's KV

    def of_page(self, tokens: Text) -> list[Text | None]:
        """Returns for each token of the last page all tokens up to it."""
        return [tokens[:end] for end in range(len(tokens) - self.settings.page_size + 1, len(tokens) + 1)]

    def lose_kv(self) -> None:
        """Makes the KV of free pages undefined."""
        for page, places in enumerate(self.kv):
            if not self.model.page_users[page] and page not in self.parking.leaving:
                places[:] = [None] * len(places)

    # From host memory to the device

    def find(self, tokens: Text, salt: Hashable, match: Found, known: int) -> Hit | None:
        """Returns the longest usable state in host memory, if it is longer than `known`, the longest on the device."""
        size = self.settings.page_size
        keys = self.keys(tokens[: max(0, len(tokens) - 1)], salt)
        if not self.states.items:
            return None
        first, reach, pages = match.kv // size, len(keys), []
        if self.pages:
            reach = first
            while reach < len(keys) and (item := self.pages.get(keys[reach])):
                pages.append(item)
                reach += 1
        for end in range(reach, max(match.length, known) // size, -1):
            if state := self.states.get(keys[end - 1]):
                return Hit(end * size, min(first, end), state, pages[: max(0, end - first)])
        return None

    def _touch(self, keys: Sequence[Key]) -> None:
        self.states.touch(keys[-1:])
        if self.pages:
            self.pages.touch(keys)

    def hold(self, hit: Hit, by: int = 1) -> None:
        Shelf.pin([hit.state, *hit.pages], by)

    def bring(self, registers: Sequence[int], hits: Sequence[Hit], ids: Sequence[int], pages: Sequence[Item]) -> None:
        model = self.model
        for hit in hits:
            self._touch(self.keys(hit.state.key[1], hit.state.key[0]))

        def begin() -> None:
            for register, hit in zip(registers, hits, strict=True):
                for contents in model.content.values():
                    contents[model.slot[register]] = hit.state.key[1]
            for page, item in zip(ids, pages, strict=True):
                self.kv[page] = self.of_page(item.key[1])
            self._move(of, "in")
            self.loads.append(Way(of, registers))

        of = [(self.states, [hit.state for hit in hits])]
        if self.pages:
            of.append((self.pages, list(pages)))
        for _, items in of:
            Shelf.pin(items)
        model.then(Later(begin, lambda: [Shelf.pin(items, -1) for _, items in of] and None, ids))

    def _move(self, parts: list[tuple[Shelf, list[Item]]], way: str) -> None:
        for shelf, items in parts:
            self.figures[f"{shelf.kind} {way}"] += len(items)

    def moved(self, parts: list[tuple[Shelf, list[Item]]], way: str, registers: Sequence[int] = ()) -> None:
        """Notes a transfer that begins now. way: "out" or "in"."""
        self._move(parts, way)
        (self.loads if way == "in" else self.backups).append(Way(parts, registers))

    def planned(self, rows: Sequence[tuple[Row, int, int]]) -> None:
        """Notes the pages that a step completes. Their bytes are wrong until the forward of the step is launched.

        rows: (row, length before the step, length after it).
        """
        size, self.parking.parting = self.settings.page_size, False
        self.unwritten = {page for row, before, after in rows for page in row.pages[before // size : after // size]}

    def prepare(self) -> None:
        """Notes that a packet will be sent, or a callback runs. On the device, it runs after all loads."""
        for load in self.loads:
            load.awaited = True

    def require_arrived(self, slot: int) -> None:
        """Asserts that no load into a slot is under way. Called before memstate itself reads the slot."""
        for load in self.loads:
            slots = [self.model.slot.get(register) for register in load.registers]
            assert load.awaited or slot not in slots, f"slot {slot} is read before its state has arrived"

    # From the device to host memory

    def added(self, entry: Entry) -> None:
        if self.settings.write == "through" and entry.state:
            self.due.append((entry, entry.state))

    def used(self, entry: Entry) -> None:
        if self.settings.write == "selective" and entry.uses == 2 and entry.state:
            self.due.append((entry, entry.state))

    def given_up(self, entries: Iterable[Entry]) -> None:
        """Saves states that the device evicts."""
        if not self.off:
            self.keep([entry for entry in entries if entry.uses or self.settings.write != "selective"])

    def keep(self, entries: Iterable[Entry]) -> None:
        states: Due = []
        pages: Due = []
        for entry in entries:
            assert entry.state
            keys = self.keys(entry.tokens, entry.salt)
            kept = not self.pages or self._keep_pages(self.pages, entry, keys, pages)
            kept = kept and self._keep_state(self.states, entry, states)
            self.figures["refused"] += not kept
            self._touch(keys)
        self._send([(self.states, states), (self.pages, pages)])

    @staticmethod
    def _keep_state(shelf: Shelf, entry: Entry, due: Due) -> bool:
        if shelf.get(key := (entry.salt, entry.tokens)):
            return True
        if record := shelf.take(1):
            assert entry.state
            due.append((entry.state.register, item := shelf.add(key, *record)))
            Shelf.pin([item])
        return bool(record)

    def _keep_pages(self, shelf: Shelf, entry: Entry, keys: Sequence[Key], due: Due) -> bool:
        present = [item for key in keys if (item := shelf.get(key))]
        missing = [at for at, key in enumerate(keys) if not shelf.get(key)]
        late = set(self.unwritten if self.model.fencing else ()).union(
            *[each.pages for each in self.model.queue if isinstance(each, Later)]
        )
        if late & {entry.pages[at] for at in missing}:
            return False
        Shelf.pin(present)
        records = shelf.take(len(missing))
        Shelf.pin(present, -1)
        if len(records) < len(missing):
            return False
        for at, record in zip(missing, records, strict=True):
            due.append((entry.pages[at], item := shelf.add(keys[at], record)))
            Shelf.pin([item])
        return True

    def _send(self, given: Sequence[tuple[Shelf | None, Due]]) -> None:
        model = self.model
        packed = {register for shelf, due in given if shelf is not self.pages for register, _ in due}
        named = any(model.named(register) for register in packed)
        if named:  # pages are saved now, states only after the changes that name them were sent
            self._send([(shelf, due) for shelf, due in given if shelf is self.pages])
            given = [(shelf, due) for shelf, due in given if shelf is not self.pages]
        parts = [(shelf, [item for _, item in due]) for shelf, due in given if shelf and due]
        if not parts:
            return
        for _, items in parts:
            for item in items:
                item.filled = False

        def fill() -> None:
            for shelf, due in given:
                for of, item in due:
                    tokens, item.filled = item.key[1], True
                    if shelf is self.pages:
                        assert self.kv[of] == self.of_page(tokens), f"page {of} is not that of {item}"
                        continue
                    self.require_arrived(model.slot[of])
                    for contents in model.content.values():
                        assert contents[model.slot[of]] == tokens, f"{item} is another state"
            self._move(parts, "out")
            self.backups.append(Way(parts))

        def forget() -> None:
            for shelf, items in parts:
                Shelf.pin(items, -1)
                for item in items:
                    shelf.items.remove(item)
                    shelf.give(item.record)
                    shelf.evicted += 1  # after a reset, all items count as evicted

        if named:
            model.then(Later(fill, forget), packed)
        else:
            fill()

    def write_due(self) -> None:
        due = [(entry, state) for entry, state in self.due if entry.state is state]
        self.due = [(entry, state) for entry, state in due if self.model.named(state.register)]
        self.keep([entry for entry, state in due if (entry, state) not in self.due])

    def advance(self) -> None:
        """Completes all loads and saves. Before the call, the test waits for the real transfers."""
        loads, self.loads = self.loads, []
        backups, self.backups = self.backups, []
        for way in (*loads, *backups):
            for _, items in way.parts:
                Shelf.pin(items, -1)
        for wanted in (self.pages, self.states):  # KV first, because a state without its KV is useless
            for shelf, items in [part for way in backups for part in way.parts if part[0] is wanted]:
                self.enqueue(shelf, [item for item in items if shelf.get(item.key) is item])

    def enqueue(self, shelf: Shelf, items: Iterable[Item]) -> None:
        for item in items:
            if self.settings.storing and not self.off and not item.stored:
                item.stored = True
                self.queue.append((shelf, item))

    # From host memory to storage

    def write(self) -> None:
        """Ends the writes that are done, and begins new ones."""
        for job in [job for job in self.writing if job.ended]:
            self.writing.remove(job)
            Shelf.pin(job.items, -1)
            for item, well in zip(job.items, job.result, strict=True):
                item.stored = well
                self.figures["written" if well else "write_failed"] += 1
        while self.queue:
            shelf = self.queue[0][0]
            room = max(1, int(shelf.records * SHARE)) - sum(
                len(job.items) for job in self.writing if job.shelf is shelf
            )
            batch: list[Item] = []
            while self.queue and self.queue[0][0] is shelf and len(batch) < min(BATCH, room):
                _, item = self.queue.popleft()
                if shelf.get(item.key) is item:
                    batch.append(item)
                else:
                    self.figures["write_missed"] += 1
            if not batch:
                break
            Shelf.pin(batch)
            keys, kind = [item.key for item in batch], shelf.kind
            job = Job(lambda kind=kind, keys=keys: self._put(kind, keys), None, shelf, items=batch)  # type: ignore[misc]
            self.writing.append(self.submit(job))

    def _put(self, kind: str, keys: Sequence[Key]) -> list[bool]:
        self.calls.append(("put", [(kind, key) for key in keys]))
        return self.storage.put(kind, keys)

    def wait(self, jobs: Iterable[Job]) -> None:
        """Runs jobs to their end."""
        for job in [job for job in self.jobs if job in list(jobs) and not job.ended]:
            self.finish(job)

    # Calls

    def poll(self) -> None:
        """Does what `mem.poll` does: advances saves, loads, writes and prefetches."""
        self.write_due()
        self.parking.advance()
        self.advance()
        if self.settings.storing:
            self.write()
            self.poll_fetches()

    def flush(self) -> None:
        model = self.model
        model.submit()
        self.due = []
        for shelf in reversed(self.shelves):
            self.enqueue(shelf, shelf.items)  # retries failed writes
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
        self.advance()
        while self.settings.storing and (self.queue or self.writing):
            self.write()
            self.wait(self.writing)
            self.write()

    def clear(self) -> None:
        self.due, self.off = [], True
        self.parking.clear()
        self.advance()
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
