"""A manager beside its model: calls that raise what they may raise, and everything compared after each of them."""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.proof.stateful.ledger import COLUMNS
from tests.proof.stateful.lower import Lower
from tests.proof.stateful.memory import Memory, raw, same
from tests.proof.stateful.model import Model, Planned
from tests.proof.stateful.rows import Kept, Row
from tests.proof.stateful.settings import Settings
from tests.proof.stateful.talking import Talk
from tests.support import inside, owners
from tests.support.build import build
from tests.support.fetches import Fetched

Faults = set[type[ms.MemstateError]]
REFUSED = object()  # the answer of a call that raised what it had to


@dataclass(eq=False)
class Flight:
    """A planned step on both sides. tokens: those of each entry; windows: of a speculative one."""

    step: ms.Step
    planned: Planned
    tokens: list[list[int]]
    windows: dict[str, Tensor]


@dataclass(frozen=True)
class Foreign:
    """Handles of another manager."""

    rows: tuple[ms.Row, ...]
    snapshot: ms.Snapshot
    step: ms.Step
    window: ms.Step


@cache
def foreign() -> Foreign:
    """Handles of a manager that no program drives."""
    mem = build(Settings().layout, slots=12, max_requests=9, tracking=ms.Redirect(2), overlap=False,
                          backend="reference", speculation=True)  # fmt: skip
    rows = mem.admit([ms.Request(name) for name in "abcdefghi"])
    for _ in range(2):
        mem.settle(step := mem.plan([rows[0]]))
    (snapshot,) = mem.end([rows[0]], keep="handle")
    assert snapshot
    window = mem.plan([rows[1]], 2, window=True)
    mem.cancel(window)
    return Foreign(tuple(rows[1:]), snapshot, step, window)


class Machine:
    """One manager, one model, one memory; `handles` and `snaps` are what a caller would keep."""

    _same = staticmethod(same)

    def __init__(self, settings: Settings, backend: Backend) -> None:
        s = self.settings = settings
        self.memory = Memory(settings, backend.device)
        self.lower = Lower(settings, backend) if s.tiered else None
        with self.memory.fenced() if s.memory == "fenced" else nullcontext():
            self.mem = build(
                s.layout, slots=s.slots, max_requests=s.rows, preallocated=s.preallocated, max_batch=s.max_batch,
                tracking=s.tracking, overlap=s.overlap, speculation=s.speculation, in_place=s.in_place,
                direct_hits=s.direct_hits, grid=s.grid or None, packed=s.packed, pad=s.pad, snapshots=s.snapshots,
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
            self.lower.attach(self.mem, self.model, self.memory)
        self.model.choose = self._chosen
        self.handles: dict[ms.Row, Row] = {}
        self.snaps: dict[ms.Snapshot, Kept] = {}
        self.cached: dict[ms.Snapshot, Kept] = {}  # handles to what is the cache's
        self.talks: dict[ms.Session, Talk] = {}
        self.closed: deque[ms.Session] = deque(maxlen=2)
        self.gone: deque[ms.Row] = deque(maxlen=4)
        self.dropped: deque[ms.Snapshot] = deque(maxlen=4)
        self.flights: list[Flight] = []
        self.planned_last: list[Any] | None = None  # the batch that was planned last
        self.settled: deque[ms.Step] = deque(maxlen=3)
        self.fetches: dict[ms.tiers.Fetch, Fetched] = {}
        self.asleep = False
        self.in_gap = False  # a step is planned, and its forward not launched
        self.asked: deque[tuple[ms.slots.readback.Readback, list[list[int]]]] = deque(
            maxlen=5
        )  # and what it must answer
        self.fed = 1000  # tokens so far, each another number
        self.calls = 0
        self.errors: Counter[str] = Counter()
        self.store: Tensor | None = None  # of the vectors of all steps, once there is a step
        self.registers = file = inside.registers(self.mem)
        columns = {n: getattr(file.table, n) for n in ("slots", "labels", *COLUMNS)} | {"pages": file.page_table}
        self.starts = {name: column.storage_offset() for name, column in columns.items()}
        self.expected = np.zeros(file.cells.numel(), np.int32)
        self.look()

    @property
    def max_batch(self) -> int:
        return self.settings.max_batch or self.settings.row_count

    def attempt(
        self, faults: Faults, call: Callable[[], Any], numbers: Mapping[type, tuple[int, ...]] | None = None
    ) -> Any:
        """The answer of a call; where something is wrong with it, it must raise one of `faults` and nothing else.

        numbers: what back-pressure has to say was requested, is free, and of slots what can be dropped.
        """
        self.calls += 1
        if self.asleep:
            faults = {ms.Asleep}
        try:
            answer = call()
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

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Launches by op, uploads and synchronisations of what runs inside."""
        spent, counts = Counter[str](), self.mem.backend.counts
        before = counts.launches | Counter(uploads=counts.uploads, syncs=counts.syncs)
        yield spent
        spent.update((counts.launches | Counter(uploads=counts.uploads, syncs=counts.syncs)) - before)

    # Everything that both sides know

    def look(self) -> None:
        """Compares the host's counts, the raw tensors of the device and every byte; sends nothing."""
        model, mem, registers = self.model, self.mem, self.registers
        count = model.register_count
        held, known = _dense(model.held_marks(), count), _dense(model.known, count)
        self._same("held on the host", registers.held.tolist(), held)
        self._same("labels on the host", registers.labels.tolist(), known)
        rows = [model.rows.get(number) for number in range(model.row_count + 1)]
        for name in COLUMNS:
            told = [getattr(row, name) if row else 0 for row in rows]
            self._same(f"{name} on the host", getattr(registers, name).tolist(), told)
        confirmed = owners.table(mem).confirmed.tolist()
        self._same("confirmed", [confirmed[row.number] for row in rows if row], [row.confirmed for row in rows if row])
        self._look_at_the_cells()
        self._look_at_the_rest()
        self._look_at_who_has_what()
        if self.lower:
            self.lower.look(self.fetches)
        model.snapshots_are_true()
        for found, told in self.asked:
            assert found.ready == bool(told), "slots are read back before, or after, what they wait for"
            if found.ready:
                self._same("slots read back", found.wait().tolist(), told[0])
        if not self.asleep:
            self.memory.look(model.content, model.stirred)
            model.stirred.clear()

    def _look_at_the_cells(self) -> None:
        """The one tensor of registers, columns and page table, with what lies between them."""
        model, seen, told = self.model, raw(self.registers.cells), self.expected
        count = model.register_count
        columns = {
            "slots": _dense(model.slot, count), "labels": _dense(model.label, count), **model.columns,
            "pages": [page for row in model.page_cells for page in row],
        }  # fmt: skip
        for name, numbers in columns.items():
            told[self.starts[name] : self.starts[name] + len(numbers)] = numbers
        if not np.array_equal(seen, told):
            for name, numbers in columns.items():
                self._same(name, seen[self.starts[name] : self.starts[name] + len(numbers)].tolist(), numbers)
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
        """Owners by name, holders of each page, sessions, and the cache node by node."""
        model, mem = self.model, self.mem
        mem._reports._recount.require_owners()
        self._same("owners", mem._reports.owners(), {register: self.owner(register) for register in model.held})
        users = [int(n) for n in owners.kv_pages(mem).holders]
        self._same("holders of pages", users, _dense(model.page_users, self.settings.pages + 1))
        kept = {
            h.id: (s.prompt.key, [one.register for one in s.kept], s.pages, s.row)
            for h, s in owners.sessions(mem).opened.items()
        }
        self._same("sessions", kept, {
            talk.name: (encoded(talk.text), [one.register for one in talk.kept], talk.pages, talk.row.number if talk.row
                        else 0) for talk in model.talks})  # fmt: skip
        self._same("listed sessions", [
            (one.session.id, one.running, one.closing, one.tokens, one.states, one.pages, one.priority, one.age,
             one.idle, one.ttl) for one in mem.sessions.infos()
        ], [
            (talk.name, bool(talk.row), talk.closing, talk.kept[0].length if talk.kept else 0, len(talk.kept),
             len(talk.pages), talk.priority, model.seconds - talk.opened,
             0 if talk.row else model.seconds - talk.since, talk.ttl) for talk in model.talks
        ])  # fmt: skip
        if mem.prefix is not None:
            told = sorted(
                (repr(one.salt), encoded(one.tokens), one.pages, *((one.state.register, one.state.length) if one.state
                 else (0, 0)), one.evicted, model.leased(one)) for one in model.entries
            )  # fmt: skip
            self._same("cache", _nodes(mem.prefix), told)
            stats = asdict(mem.stats().prefix)  # type: ignore[arg-type]
            found = sum(n for name, n in stats.items() if name == "hit_tokens" or name.startswith("lost_"))
            self._same("tokens looked up", found, stats["prompt_tokens"])
            gone = sum(stats.pop(name) for name in [*stats] if name.startswith("gone_"))
            self._same("states that went", gone, stats["evicted_states"])
            seen = {name: n for name, n in stats.items() if n}
            self._same("stats of the cache", seen, {name: n for name, n in model.prefix_stats().items() if n})

    def owner(self, register: int) -> tuple[str, str]:
        """Kind and name of who has a register."""
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

    def _chosen(self, free: set[int], length: int) -> int:
        """Which of some holders the library has taken; it is done already."""
        taken = [one for one in sorted(free) if one in owners.states(self.mem)]
        return next((one for one in taken if owners.states(self.mem)[one].length == length), min(taken or free))

    # What a caller keeps

    def note_rows(self, rows: Collection[ms.Row], tenants: Collection[Row]) -> None:
        self._same("rows", [(row.index, row.generation) for row in rows], [(t.number, t.generation) for t in tenants])
        self.handles.update(zip(rows, tenants, strict=True))

    def forget_rows(self, rows: Collection[ms.Row]) -> None:
        for row in rows:
            del self.handles[row]
            self.gone.append(row)

    def note_snaps(self, snaps: Collection[ms.Snapshot | None], kept: Collection[Kept | None]) -> None:
        seen = [snap and (snap.register, snap.length, snap.pages) for snap in snaps]
        self._same("snapshots", seen, [one and (one.register, one.length, one.pages) for one in kept])
        for snap, one in zip(snaps, kept, strict=True):
            if snap and one:
                (self.cached if one.owner == "cached" else self.snaps)[snap] = one

    def stale(self) -> list[ms.Snapshot]:
        """Handles to what the cache had once."""
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
        """Tokens that nobody has had before."""
        self.fed += n
        return list(range(self.fed - n, self.fed))

    def feed(self, row: Row, length: int, n: int) -> list[int]:
        """What a row is fed in its next step: the rest of its prompt, then what others may be fed as well."""
        if row.prompt is None:
            return self.tokens(n)
        return [*row.prompt[length : length + n], *[(at * at + row.taste) % 3 for at in
                range(max(length, len(row.prompt)), length + n)]]  # fmt: skip


def encoded(tokens: Collection[int]) -> bytes:
    return np.array(list(tokens), np.int64).tobytes()


def _nodes(cache: ms.prefix.PrefixCache) -> list[tuple[object, ...]]:
    """What the tree holds, each node with all that leads to it."""
    whole: dict[object, tuple[bytes, list[int]]] = {}
    found = []
    for salt, node in cache.tree.walk():
        key, pages = whole.get(node.parent, (b"", []))
        whole[node] = key + node.key, pages + node.pages
        state = node.snapshot
        at = state.register if state else 0, state.length if state else 0
        found.append((repr(salt), *whole[node], *at, node.evicted, node.leases))
    return sorted(found)


def _dense(numbers: Mapping[int, int], count: int) -> list[int]:
    return [numbers.get(i, 0) for i in range(count)]
