"""Drives a manager beside its model: draws arguments, says which errors a call may raise, and compares both sides."""

from array import array
from collections import Counter, deque, namedtuple
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import TailRecord
from memstate.tokens import encode_keys, ids
from tests.proof.stateful.below import Below
from tests.proof.stateful.cache import Start, Talk
from tests.proof.stateful.ledger import COLUMNS, OF_TAILS, Kept, Row, Text
from tests.proof.stateful.memory import Lower, Memory, raw, same
from tests.proof.stateful.model import Model, Planned
from tests.proof.stateful.parked import Away
from tests.proof.stateful.settings import Digits, Settings
from tests.support import inside, owners
from tests.support.build import build
from tests.support.fetches import Fetched

Faults = set[type[ms.MemstateError]]
REFUSED = object()  # what `attempt` returns for a call that raised an expected error


@dataclass(eq=False)
class Flight:
    """A planned step, of the manager and of the model.

    tokens: tokens of each entry. accepted: number of real tokens of each entry. written: whether the device has these
    numbers.
    """

    step: ms.Step
    planned: Planned
    tokens: list[list[int]]
    accepted: list[int]
    written: bool = False


@dataclass(frozen=True)
class Foreign:
    """Handles of another manager."""

    rows: tuple[ms.Row, ...]
    snapshot: ms.Snapshot
    step: ms.Step


# What comparisons show by name. A node has its tokens and pages from the root on.
Node = namedtuple("Node", "salt tokens pages register length evicted leases")
Held = namedtuple("Held", "tokens registers pages row")
Listed = namedtuple("Listed", "id running closing tokens states pages priority age idle ttl parted")
Published = namedtuple("Published", "register length pages")


@cache
def foreign() -> Foreign:
    """Returns handles of another manager, which no program drives."""
    mem = build(Settings().layout, slots=12, max_requests=9, tracking=ms.Redirect(2), overlap=False,
                          backend="reference", tail=1)  # fmt: skip
    rows = mem.admit([ms.Request(name) for name in "abcdefghi"])
    for _ in range(2):
        mem.settle(step := mem.plan([rows[0]]))
    (snapshot,) = mem.end([rows[0]], keep="handle")
    assert snapshot
    return Foreign(tuple(rows[1:]), snapshot, step)


LARGE = 2**40 + 1  # an id that does not fit 32 bits, such as the hash of an image
STEMS: tuple[Text, ...] = (
    (0, 1, 2, 0, 1, 1, 2, 2, 0, 0, 1, 2, 1, 0),
    (0, 1, 2, 0, 1, 1, 2, 1, LARGE, 0, 2, 2, 0, 1),
    (2, 0, 0, 1, LARGE, 1, 0, 0, 2, 1, 1, 2, 0, LARGE),
)  # fmt: skip
NO_TOKENS: tuple[Any, ...] = ([], [0.5], [[1, 2]], [2**64], "text", 5, torch.zeros(2))
SALTS = (None, None, None, "salt")

Handles = list[Any]


class Machine:
    """A manager, its model and its memory. `handles` and `snaps` are the handles that a caller keeps."""

    salts: tuple[Any, ...] = ()  # salt of the last drawn prompt, if it was taken from a tier

    _same = staticmethod(same)

    def __init__(self, settings: Settings, backend: Backend) -> None:
        s = self.settings = settings
        self.memory = Memory(settings, backend.device)
        self.lower = Lower(settings, backend) if s.tiered else None
        with self.memory.fenced() if s.memory == "fenced" else nullcontext():
            self.mem = build(
                s.layout, slots=s.slots, max_requests=s.rows, preallocated=s.preallocated, max_batch=s.max_batch,
                tracking=s.tracking, overlap=s.overlap, in_place=s.in_place,
                direct_hits=s.direct_hits, grid=s.grid or None, packed=s.packed, pad=s.pad, tail=s.tail,
                snapshots=s.snapshots,
                reserve=s.reserve, pages=s.pages, ends=True,
                page_size=s.page_size,
                pages_per_row=s.pages_per_row, tensors=self.memory.tensors, debug=s.debug,
                backend=backend.name, device=backend.device, prefix=s.cache,
                tiers=self.lower.tiers if self.lower else None,
                sessions=s.sessions(lambda: self.model.seconds),
            )  # fmt: skip
        self.memory.attach(self.mem)
        self.model = Model(settings, owners.table(self.mem).generation.tolist())
        if self.lower:
            Below(self.model)
            self.lower.attach(self.mem, self.model, self.memory)
        self.model.choose = self._chosen
        self.handles: dict[ms.Row, Row] = {}
        self.snaps: dict[ms.Snapshot, Kept] = {}
        self.cached: dict[ms.Snapshot, Kept] = {}  # handles of states that the cache owns
        self.talks: dict[ms.Session, Talk] = {}
        self.parked: dict[ms.Parked, Away] = {}
        self.over: deque[ms.Parked] = deque(maxlen=2)  # handles that have ended
        self.closed: deque[ms.Session] = deque(maxlen=2)
        self.gone: deque[ms.Row] = deque(maxlen=4)
        self.dropped: deque[ms.Snapshot] = deque(maxlen=4)
        self.flights: list[Flight] = []
        self.planned_last: list[Any] | None = None  # the batch that was planned last
        self.settled: deque[ms.Step] = deque(maxlen=3)
        self.fetches: dict[ms.tiers.Fetch, Fetched] = {}
        self.asleep = False
        self.in_gap = False  # whether a step is planned whose forward is not launched
        self.asked: deque[tuple[ms.slots.readback.Readback, list[list[int]]]] = deque(
            maxlen=5
        )  # (answer of read_slots, expected slots once known)
        self.fed = 1000  # the next new token
        self.calls = 0
        self.errors: Counter[str] = Counter()
        self.store: Tensor | None = None  # storage of the vectors that all steps share
        self.registers = file = inside.registers(self.mem)
        self.columns = COLUMNS + OF_TAILS if s.tail else COLUMNS
        columns = {n: getattr(file.table, n) for n in ("slots", "labels", *self.columns)}
        columns |= {"pages": file.page_table}
        self.starts = {name: column.storage_offset() for name, column in columns.items()}
        self.expected = np.zeros(file.cells.numel(), np.int32)
        self.look()

    @property
    def max_batch(self) -> int:
        return self.settings.max_batch or self.settings.row_count

    def attempt(
        self, faults: Faults, call: Callable[[], Any], numbers: Mapping[type, tuple[int, ...]] | None = None
    ) -> Any:
        """Returns the answer of a call. With `faults`, the call must raise one of them; then returns REFUSED.

        numbers: error -> the numbers that it must carry: requested, free and, for slots, evictable.
        """
        self.calls += 1
        if self.asleep:
            faults = {ms.Asleep}
        try:
            answer = self.called(call)
        except ms.MemstateError as error:
            names = [fault.__name__ for fault in faults]
            assert type(error) in faults, f"raised {type(error).__name__}: {error}; expected {names or 'no error'}"
            if numbers and type(error) in numbers:
                told = [getattr(error, name) for name in ("requested", "free", "evictable") if hasattr(error, name)]
                assert told == list(numbers[type(error)]), f"{error}: expected {numbers[type(error)]}"
            self.errors[type(error).__name__] += 1
            self.look()
            return REFUSED
        assert not faults, f"answered {answer!r}, expected {[fault.__name__ for fault in faults]}"
        return answer

    def called(self, call: Callable[[], Any]) -> Any:
        """Makes a call of the manager. Proofs replace this method."""
        return call()

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Yields a counter. After the block, it has its launches by op, uploads and synchronisations."""
        spent, counts = Counter[str](), self.mem.backend.counts
        before = counts.launches | Counter(uploads=counts.uploads, syncs=counts.syncs)
        yield spent
        spent.update((counts.launches | Counter(uploads=counts.uploads, syncs=counts.syncs)) - before)

    # The comparison

    def look(self) -> None:
        """Compares with the model: counts of the host, raw tensors of the device, and every byte. Sends nothing."""
        model, mem, registers = self.model, self.mem, self.registers
        count = model.register_count
        held, known = [register in model.held for register in range(count)], _dense(model.known, count)
        self._same("held on the host", registers.held.tolist(), held, self._register)
        self._same("labels on the host", registers.labels.tolist(), known, self._register)
        rows = [model.rows.get(number) for number in range(model.row_count + 1)]
        for name in self.columns:
            noted = getattr(registers, name).tolist()  # that of a free row is read again only if it is `tracked`
            unread = noted if name == "tracked" else [0] * len(rows)
            told = [getattr(row, name) if row else old for row, old in zip(rows, unread, strict=True)]
            self._same(f"{name} on the host", noted, told)
        confirmed = owners.table(mem).confirmed.tolist()
        self._same("confirmed", [confirmed[row.number] for row in rows if row], [row.confirmed for row in rows if row])
        self._look_at_the_cells()
        self._look_at_the_rest()
        self._look_at_who_has_what()
        if self.lower:
            self.lower.learn(self.parked)
            self.lower.look(self.fetches)
        model.snapshots_are_true()
        for slots, told in self.asked:
            assert slots.ready == bool(told), "slots are read back before, or after, what they wait for"
            if slots.ready:
                self._same("slots read back", slots.wait().tolist(), told[0])
        if not self.asleep:
            self.memory.look(model.content, model.stirred, model.tails)
            if self.settings.tail:
                self.memory.look_at_rings(model.rings)
            model.stirred.clear()

    def _look_at_the_cells(self) -> None:
        """Compares registers, columns and page table with the model. The cells between them must be unchanged."""
        model, seen, told = self.model, raw(self.registers.cells), self.expected
        count = model.register_count
        columns = {
            "slots": _dense(model.slot, count), "labels": _dense(model.label, count),
            **{name: model.columns[name] for name in self.columns},
            "pages": [page for row in model.page_cells for page in row],
        }  # fmt: skip
        for name, numbers in columns.items():
            told[self.starts[name] : self.starts[name] + len(numbers)] = numbers
        if not np.array_equal(seen, told):
            for name, numbers in columns.items():
                seen_here = seen[self.starts[name] : self.starts[name] + len(numbers)].tolist()
                self._same(name, seen_here, numbers, *[self._register] * (name in ("slots", "labels")))
            raise AssertionError("cells between the columns have changed")

    def _look_at_the_rest(self) -> None:
        model, mem = self.model, self.mem
        words = raw(mem.pool.allocator.bitmap).tolist()
        free = sum(1 << slot for slot in model.free)
        self._same("bitmap", sum((word % 2**32) << (32 * i) for i, word in enumerate(words)), free)
        told = [len(model.free), self.settings.reserve, model.claimed, model.released, model.degraded, *[0] * 11]
        self._same("device counters", raw(mem.pool.allocator.counters).tolist(), told)
        if self.store is not None:
            store = raw(self.store).reshape(model.vectors.shape)
            if not np.array_equal(store, model.vectors):
                self._same("step vectors", store[:, :8].tolist(), model.vectors[:, :8].tolist())
                raise AssertionError("step vectors beyond the batch have changed")
        if self.settings.tail:
            for name, column, told in zip(
                TailRecord._fields[1:], mem._parts.log.tails[1:], model.of_tails, strict=True
            ):
                self._same(f"{name} of tails", raw(column).tolist(), told[: column.numel()].tolist())
        stats = mem.stats()
        kinds = [0, 0, 0]
        for register in model.held:
            kinds[2 if register >= model.first_holder else register % 3 > 0] += 1
        told = [
            self.settings.slots, model.free_count, kinds[0], kinds[1], kinds[2], model.row_count, len(model.rows),
            self.settings.pages, model.free_pages, model.snapshots, model.refused_claims, model.published,
            model.dropped, model.refused, model.missed, model.copied, model.zeroed, model.packets,
        ]  # fmt: skip
        seen = [
            stats.capacity, stats.free, stats.held_by_live, stats.held_by_lanes,
            stats.held_by_snapshots + stats.held_by_sessions, stats.rows,
            stats.rows_used, stats.pages, stats.pages_free, stats.snapshots, stats.degraded, stats.published,
            stats.dropped, stats.refused, stats.missed, stats.copied_bytes, stats.zeroed_bytes, stats.packets,
        ]  # fmt: skip
        self._same("stats", seen, told)

    def _look_at_who_has_what(self) -> None:
        """Compares with the model: owners by name, users of each page, sessions, and each node of the cache."""
        model, mem = self.model, self.mem
        mem._reports._recount.require_owners()
        self._same("owners", mem._reports.owners(), {register: self.owner(register) for register in model.held})
        users = [int(n) for n in owners.kv_pages(mem).holders]
        self._same("holders of pages", users, _dense(model.page_users, self.settings.pages + 1))
        opened = owners.sessions(mem).opened.items()
        texts = {h.id: ids((s.prompt.head(s.start) if s.row else s.prompt).key).tobytes() for h, s in opened}
        kept = {h.id: Held(texts[h.id], [one.register for one in s.kept], list(s.pages), s.row) for h, s in opened}
        self._same("sessions", kept, {
            talk.name: Held(encoded(talk.text), [one.register for one in talk.kept], talk.pages,
                            talk.row.number if talk.row else 0) for talk in model.talks})  # fmt: skip
        self._same("listed sessions", [
            Listed(one.session.id, one.running, one.closing, one.tokens, one.states, one.pages, one.priority, one.age,
             one.idle, one.ttl, one.parted) for one in mem.sessions.infos()
        ], [
            Listed(talk.name, bool(talk.row), talk.closing, talk.kept[0].length if talk.kept else 0, len(talk.kept),
             len(talk.pages), talk.priority, model.seconds - talk.opened,
             0 if talk.row else model.seconds - talk.since, talk.ttl, talk.parted) for talk in model.talks
        ])  # fmt: skip
        if mem.prefix is not None:
            told = sorted(
                Node(*self.place_of(one), one.pages, *((one.state.register, one.state.length) if one.state else (0, 0)),
                     one.evicted, model.leased(one)) for one in model.entries
            )  # fmt: skip
            self._same("cache", _nodes(mem.prefix), told)
            self._same("superseded states", mem.prefix.superseded_states, model.superseded_states)
            stats = asdict(mem.stats().prefix)
            tokens = sum(n for name, n in stats.items() if name == "hit_tokens" or name.startswith("lost_"))
            self._same("tokens looked up", tokens, stats["prompt_tokens"])
            gone = sum(stats.pop(name) for name in [*stats] if name.startswith("gone_"))
            self._same("states that went", gone, stats["evicted_states"])
            seen = {name: n for name, n in stats.items() if n}
            self._same("stats of the cache", seen, {name: n for name, n in model.prefix_stats().items() if n})

    def place_of(self, entry: Any) -> tuple[str, bytes]:
        """Returns how memstate names the salt and the tokens of an entry of the model's cache."""
        return repr(entry.salt), encoded(self.names(entry.tokens, fill=True))

    def owner(self, register: int) -> tuple[str, str]:
        """Returns kind and name of the owner of a register."""
        model, (number, part) = self.model, divmod(register, 3)
        if register < model.first_holder:
            what = ("live", "lane 0", "lane 1")[part]
            return what.split()[0], f"row {number} (request {model.rows[number].name!r}) {what}"
        one = model.kept[register]
        talk = next((talk for talk in model.talks if one in talk.kept), None)
        if talk:
            return "session", f"session {talk.name!r} ({one.length} tokens)"
        if any(entry.state is one for entry in model.stated):
            return "cached", f"cached prefix of {one.length} tokens in register {register}"
        for row in model.rows.values():
            for kept, kind in row.marks:
                if kept is one:
                    return "mark", f"row {row.number} ({kind} of {one.length} tokens)"
        return "snapshot", f"snapshot {register} of {one.length} tokens"

    def _register(self, register: int) -> str:
        """Returns the name of a register: part and row, or its owner."""
        number, part = divmod(register, 3)
        if register < self.model.first_holder:
            return f"row {number} {('live', 'lane 0', 'lane 1')[part]}"
        return self.owner(register)[1] if register in self.model.kept else f"holder {register}"

    def _chosen(self, free: set[int], length: int) -> int:
        """Returns the holder among `free` that memstate has already taken for a snapshot of this length."""
        taken = [one for one in sorted(free) if one in owners.states(self.mem)]
        return next((one for one in taken if owners.states(self.mem)[one].length == length), min(taken or free))

    # The handles that a caller keeps

    def note_rows(self, rows: Collection[ms.Row], tenants: Collection[Row]) -> None:
        self._same("rows", [(row.index, row.generation) for row in rows], [(t.number, t.generation) for t in tenants])
        self.handles.update(zip(rows, tenants, strict=True))

    def forget_rows(self, rows: Collection[ms.Row]) -> None:
        for row in rows:
            del self.handles[row]
            self.gone.append(row)

    def note_snaps(self, snaps: Collection[ms.Snapshot | None], kept: Collection[Kept | None]) -> None:
        seen = [snap and Published(snap.register, snap.length, snap.pages) for snap in snaps]
        self._same("snapshots", seen, [one and Published(one.register, one.length, one.pages) for one in kept])
        for snap, one in zip(snaps, kept, strict=True):
            if snap and one:
                (self.cached if one.owner == "cached" else self.snaps)[snap] = one

    def stale(self) -> list[ms.Snapshot]:
        """Returns the handles of states that the cache has evicted."""
        return [
            snap for snap, one in self.cached.items() if self.model.kept.get(one.register) is not one or one.dropped
        ]

    def note_step(self, flight: Flight) -> None:
        self.flights.append(flight)
        if self.store is None:
            rows = flight.step.rows
            self.store = torch.empty(0, dtype=torch.int32, device=rows.device).set_(rows.untyped_storage())

    def forget_step(self, flight: Flight) -> None:
        self.flights.remove(flight)
        self.settled.append(flight.step)

    def tokens(self, n: int) -> list[int]:
        """Returns n tokens that no row had before."""
        self.fed += n
        return list(range(self.fed - n, self.fed))

    def feed(self, row: Row, length: int, n: int) -> list[int]:
        """Returns the tokens of a row's next step: the rest of its prompt, then tokens that its `taste` decides."""
        if row.prompt is None:
            return self.tokens(n)
        return [*row.prompt[length : length + n], *[(at * at + row.taste) % 3 for at in
                range(max(length, len(row.prompt)), length + n)]]  # fmt: skip

    # Drawn arguments: handles, most of them valid, and tokens with many equal prefixes

    def bad_row(self, d: Digits) -> Any:
        """Draws an invalid handle: of another manager, of a row that has ended, or no handle at all."""
        gone = [row for row in self.gone if row not in self.handles]
        return d.pick(*foreign().rows[:: len(foreign().rows) - 1], *gone, 3, "row")

    def draw_rows(self, d: Digits, most: int = 9) -> Handles:
        rows: Handles = sorted(self.handles, key=lambda row: self.handles[row].finished)
        how, rows = d(8), rows[:most]
        if how == 1:
            rows = [rows[d(len(rows))]] if rows else []
        elif how == 2:
            rows = [row for row in rows if d(2)]
        elif how == 3:
            rows.reverse()
        elif how == 4:
            rows = sorted(rows, key=lambda _: d(8))
        bad = d(40)
        if bad in (1, 2):
            rows.insert(d(len(rows) + 1), self.bad_row(d))
        elif bad == 3 and rows:
            rows.append(rows[0])
        return rows

    def row_faults(self, rows: Handles, padding: bool = False) -> Faults:
        faults: Faults = set()
        for row in rows:
            if isinstance(row, ms.Row):
                if row.index > self.model.row_count:
                    faults.add(ms.InvalidArgument)
                elif row not in self.handles:
                    faults.add(ms.StaleHandle)
            elif not (padding and row is None):
                faults.add(ms.InvalidArgument)
        named = [row for row in rows if row in self.handles and not (padding and self.handles[row].finished)]
        if len(set(named)) < len(named):
            faults.add(ms.InvalidArgument)
        return faults

    def draw_salt(self, d: Digits) -> Any:
        salts, self.salts = self.salts, ()
        return d.pick(*(salts * 6 + SALTS))

    @property
    def longest(self) -> int:
        """Largest number of tokens of a prompt."""
        width = self.settings.page_size * self.settings.pages_per_row
        return min(24, max(1, width - 4)) if self.settings.pages else 24

    def draw_prompt(self, d: Digits, talk: Talk | None = None) -> Text:
        """Draws a prompt: the first tokens of an earlier text, and a few more tokens."""
        if talk and d(5):
            base: Text = d.pick(talk.told, talk.told, talk.told, talk.text, talk.told[: d(len(talk.told) + 1)])
        else:
            if self.lower and d(2) and (texts := self.lower.texts(d)):
                self.salts, text = d.pick(*[((salt,), tokens) for salt, tokens in texts])
                return (*text, *[d(3) for _ in range(1 + d(4))])[: self.longest]
            there = [one.tokens for one in (*self.model.entries[-2:], *self.model.stated[-3:])]
            base = d.pick(STEMS[d(3)], *there)
            base = base[: len(base) - d.pick(0, 0, 0, 1, 2, d(len(base) + 1))]
        tail = tuple(d(3) for _ in range(d(4)))
        return (base[: self.longest - len(tail)] + tail) or (0,)

    # Names of texts: tokens, or keys of whole pages

    def names(self, text: Text, fill: bool = False) -> list[int]:
        """Returns the names of a text. fill: keys as the numbers that memstate has for them, one for each token."""
        size = self.settings.page_size
        if not self.settings.keyed:
            return list(text)
        keys = [key_of(text[:end]) for end in range(size, len(text) + 1, size)]
        return ids(encode_keys(keys, size)).tolist() if fill else keys

    def spell(self, d: Digits, text: Text) -> Any:
        """Returns the names of a text in one of the types that memstate accepts."""
        if self.settings.keyed:
            names = self.names(text)
            return d.pick(list(names), tuple(names), np.array(names, np.int64), on_host(names))
        return spelled(d, text)

    def naming(self, given: Any) -> dict[str, Any]:
        """Returns names as the argument of a call."""
        return {"keys" if self.settings.keyed else "tokens": given}

    def draw_extent(self, d: Digits, prompt: Text) -> tuple[Text, int | None]:
        """Draws the part of a prompt that a request names, and for how many tokens the caller has KV, or None."""
        named = prompt[: self.model.nameable(len(prompt))]
        if self.settings.keyed:
            named = named[: self.model.nameable(d.pick(len(named), len(named), d(len(named) + 1)))]
        most = len(named)
        return named, d.pick(None, most, most, d(most + 1), 0) if self.settings.kv else None

    def reached(self, named: Text, reach: int | None) -> int | None:
        """Returns the number of tokens whose KV the caller has; None if the caller does not say."""
        return len(named) if reach is None and self.settings.keyed else reach

    def draw_request(self, d: Digits, name: str) -> tuple[ms.Request, Start, Faults]:
        """Draws a request. Returns it, its start in the model, and the errors that its admission may raise."""
        ways = ("new", "new", "resume", "prompt", "prompt", "turn") if self.settings.prefix else (
            "new", "new", "new", "resume", "resume", "resume", "prompt", "turn")  # fmt: skip
        how = d.pick(*ways)
        if self.parked and d(3):
            handle, size, told = d.pick(*self.parked), d.pick(None, 0, 3 * d(9)), d(2) == 1
            talks = [session for session, talk in self.talks.items() if not talk.row] if d(3) == 1 else []
            snapshot_at = [self.settings.unit * d(9)] if d(3) == 1 else ()
            return self.start_parked(name, handle, size, told, d.pick(*talks) if talks else None, snapshot_at)
        if how in ("prompt", "turn"):
            return self.draw_prompted(d, name, turn=how == "turn")
        faults: Faults = set()
        resume: Any = d.pick(*self.snaps) if how == "resume" and self.snaps else None
        length: Any = d.pick(0, 0, d(5), d(9), 3 * d(9))
        snapshot_at: Any = d.pick([], [(resume.length if resume else 0) + self.settings.unit * d(9) + d(2)])
        wrong = d(50)
        if wrong == 1:
            resume = d.pick(foreign().snapshot, *self.dropped, *self.cached, "snapshot")
        elif wrong == 2:
            length = d.pick(-1, 2**31, True, 1000)
        elif wrong == 3:
            snapshot_at = d.pick([-1], [True], [1.5], 8, "8", None)
        start = Start(name, wants=self.wants(snapshot_at))
        if resume is not None:
            start.origin = self.snaps.get(resume)
            if start.origin:
                start.length, start.shared = resume.length, resume.pages
            else:  # a request resumes a cached state by its tokens, not by a handle
                there = resume in self.cached and resume not in self.stale()
                void = isinstance(resume, ms.Snapshot) and not there
                faults.add(ms.StaleHandle if void else ms.InvalidArgument)
        faults |= self._of_sizes(length, snapshot_at, start)
        return ms.Request(name, length, resume, snapshot_at), start, faults

    def start_parked(
        self, name: str, handle: Any, size: int | None, told: bool, session: Any = None, snapshot_at: Any = ()
    ) -> tuple[ms.Request, Start, Faults]:
        """Returns a request that goes on from a parked one, its start, and its errors.

        told: whether it has tokens; a turn of a session always has.
        """
        away, talk = self.parked.get(handle), self.talks.get(session)
        if away is None:
            return ms.Request(name, resume=handle), Start(name), {ms.StaleHandle}
        text = away.rest if told or away.known or (talk and away.rest) else ()
        prompt = text if text or talk else None
        start = Start(name, length=len(away.text), shared=away.pages, prompt=prompt, salt=away.salt, parked=away)
        start.given, start.talk, start.wants = text, talk, self.wants(snapshot_at, *([len(text)] if text else []))
        faults = self._of_sizes(max(len(text) if size is None else size, start.length), snapshot_at, start)
        tokens, salt = (list(text), away.salt) if text else (None, None)
        request = ms.Request(name, size, handle, snapshot_at, tokens=tokens, salt=salt, session=session)
        return request, start, faults | (self._session_faults(session, {ms.InvalidArgument}) if session else set())

    def wants(self, lengths: Any, most: int = 2**31) -> list[tuple[int, str]]:
        """Returns the marks that a request names, ascending, rounded down to whole pages and the grid."""
        named = lengths if isinstance(lengths, list | tuple) else ()
        ends = {n - n % self.settings.unit for n in named if isinstance(n, int) and n <= most}
        return [(at, "named") for at in sorted(ends) if at > 0]

    def _of_sizes(self, length: Any, snapshot_at: Any, start: Start) -> Faults:
        if not isinstance(snapshot_at, list | tuple) or any(
            type(n) is not int or not 0 <= n < 2**31 for n in (length, *snapshot_at)
        ):  # fmt: skip
            return {ms.InvalidArgument}
        start.size = length
        return {ms.InvalidArgument} if self.settings.pages and self.model.too_wide(length) else set()

    def draw_prompted(self, d: Digits, name: str, turn: bool) -> tuple[ms.Request, Start, Faults]:
        faults: Faults = set()
        idle = [session for session, talk in self.talks.items() if not talk.row]
        kept = [session for session in idle if self.talks[session].kept]
        session: Any = d.pick(*idle, *kept * 4) if turn and idle else None
        talk = self.talks.get(session)
        prompt, salt = self.draw_prompt(d, talk), self.draw_salt(d)
        if talk and talk.told and d(8):
            salt = talk.salt
        length = d.pick(None, None, None, len(prompt) + d(4), d(len(prompt)))
        page = self.settings.unit
        snapshot_at = d.pick((), (), [page * d(9) + d(2)], (page * d(9), page * d(9), page * d(9)))
        named, reach = self.draw_extent(d, prompt)
        length = len(prompt) if self.settings.keyed else length
        tokens: Any = self.spell(d, named)
        resume: Any = None
        wrong = d(40)
        if wrong == 1:
            tokens = d.pick(*NO_TOKENS[self.settings.keyed :])  # an empty list of keys is valid
            faults.add(ms.InvalidArgument)
        elif wrong == 2:
            busy = [session for session, talk in self.talks.items() if talk.row]
            session, talk = d.pick("session", *busy, *self.closed, ms.Session("nobody's", 0)), None
            known = isinstance(session, ms.Session) and session not in self.talks
            faults.add(ms.StaleHandle if known and not self.settings.keyed else ms.InvalidArgument)
        elif wrong == 3 and session:
            tokens = None
            faults.add(ms.InvalidArgument)
        elif wrong == 4 and session and self.snaps:
            resume = next(iter(self.snaps))
            faults.add(ms.InvalidArgument)
        elif wrong == 5 and self.settings.kv:
            reach = d.pick(-1, len(named) + 1, True)
            faults.add(ms.InvalidArgument)
        elif wrong == 6 and self.settings.keyed:
            length = d.pick(None, len(named) - 1, -1)
            faults.add(ms.InvalidArgument)
        if session and wrong != 5:
            reach = None
        start = Start(name, wants=self.wants(snapshot_at, len(prompt)), prompt=prompt, salt=salt, talk=talk)
        start.given, start.reach = named, self.reached(named, reach)
        faults |= self._of_sizes(len(prompt) if length is None else length, snapshot_at, start)
        if not faults:
            self.model.look_up(start)
        named_by = self.naming(tokens)
        request = ms.Request(name, length, resume, snapshot_at, salt=salt, session=session, reach=reach, **named_by)
        return request, start, faults

    # Tokens of rows

    def known(self, row: Row) -> Text:
        """Returns the text of a row, then the rest of its prompt."""
        return row.text + (row.prompt or ())[len(row.text) :]

    def tell(self, d: Digits, rows: Handles) -> tuple[list[Any], list[Text], Faults]:
        """Draws tokens of rows for the cache. Returns the argument, the texts that it means, and possible errors."""
        faults: Faults = set()
        keys = []
        for row in rows:
            tenant = self.handles.get(row)
            text = self.known(tenant) if tenant else ()
            text = d.pick(text, text, text, text, text[: d(len(text) + 1)], (*text, 7, 7))
            keys.append(text[: self.model.nameable(len(text))])
        given: Any = [self.spell(d, key) for key in keys]
        wrong = d(40)
        if wrong == 1:
            given = d.pick(given[1:], [*given, [1]], 3)
            if given == 3 or len(given) != len(rows):
                faults.add(ms.InvalidArgument)
        elif wrong == 2 and rows:
            given = [*given[:-1], d.pick(*NO_TOKENS[1:], None)]
            last = self.handles.get(rows[-1])
            if given[-1] is None and last and last.given and (self.settings.prefix or last.talk):
                keys[-1] = last.given
            elif rows[-1] is not None:
                faults.add(ms.InvalidArgument)
        elif wrong == 3 and self.settings.keyed and keys and keys[-1]:
            last = self.handles.get(rows[-1])
            if last and last.given:  # the given keys then differ from the keys of the prompt
                given = [*given[:-1], self.spell(d, (9, *keys[-1][1:]))]
                faults.add(ms.InvalidArgument)
        turns = [row is None or (row in self.handles and self.handles[row].talk) for row in rows]
        if not self.settings.prefix and not all(turns):
            faults.add(ms.ConfigurationError)
        return given, keys, faults


@cache
def key_of(text: Text) -> int:
    """Returns the key of a block, which names all tokens up to its end."""
    return int.from_bytes(blake2b(encoded(text), digest_size=7).digest())


def encoded(tokens: Collection[int]) -> bytes:
    return np.array(list(tokens), np.int64).tobytes()


def placed(cache: ms.prefix.PrefixCache) -> Iterator[tuple[tuple[str, bytes], Any]]:
    """Yields each node of the tree of the cache, with its salt and its tokens from the root on."""
    whole: dict[object, bytes] = {}
    for salt, node in cache.tree.walk():
        whole[node] = whole.get(node.parent, b"") + ids(node.key).tobytes()
        yield (repr(salt), whole[node]), node


def _nodes(cache: ms.prefix.PrefixCache) -> list[Node]:
    """Returns the nodes of the tree of the cache, each with its tokens and pages from the root on."""
    whole: dict[object, tuple[bytes, list[int]]] = {}
    nodes = []
    for salt, node in cache.tree.walk():
        key, pages = whole.get(node.parent, (b"", []))
        whole[node] = key + ids(node.key).tobytes(), [*pages, *node.pages]
        state = node.snapshot
        at = state.register if state else 0, state.length if state else 0
        nodes.append(Node(repr(salt), *whole[node], *at, node.evicted, node.leases))
    return sorted(nodes)


def _dense(numbers: Mapping[int, int], count: int) -> list[int]:
    return [numbers.get(i, 0) for i in range(count)]


def on_host(numbers: Sequence[int]) -> Tensor:
    """Returns numbers as a tensor, whatever the default device of the process is."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def spelled(d: Digits, tokens: Text) -> Any:
    """Returns tokens as one of the types that memstate accepts."""
    how = d(8)
    if how == 1:
        return tokens
    if how == 2:
        kind = d.pick(np.int64, np.int16, np.int32, np.uint64)
        return np.array(tokens, kind if max(tokens, default=0) < LARGE else np.int64)
    if how == 3:
        return on_host(tokens)
    if how == 4:
        return array("q", tokens)
    return list(tokens)
