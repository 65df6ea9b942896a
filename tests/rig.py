"""A manager and the model of its rules, side by side over real planes: every operation is done twice and compared.

Memory that nobody may depend on is poison, and stays poison.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch

import memstate as ms
from memstate.kernels.tables import Count
from tests.ledger import History, Register
from tests.model import Entry, Model, Row, Rules
from tests.planes import LAYOUT, Planes

NO_LIMIT = 2**31 - 1


def strategy(rules: Rules) -> ms.Tracking:
    """The library's strategy of the same rules."""
    if rules.name == "lazy":
        return ms.LazyPingPong(rules.every, overwrite=rules.in_place)
    return {"none": ms.NoTracking, "ping-pong": ms.PingPong, "redirect": ms.Redirect}[rules.name](rules.every)


@dataclass(eq=False)
class Tenant:
    """A request as its owner knows it: every token fed to it, dead ones included, is the truth about its states."""

    handle: ms.Row
    row: Row
    fed: list[int]
    pages: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Flight:
    """A planned step on both sides."""

    step: ms.Step
    entries: list[Entry]
    tenants: list[Tenant | None]


class Rig:
    """A manager beside its model; `look` compares them."""

    def __init__(
        self, rules: Rules, overlap: bool, backend: str, device: torch.device | str, *, capacity: int, rows: int, holders: int,
        direct: bool, reserve: int = 0, page: int = 1, pages: int = 0,
    ) -> None:  # fmt: skip
        self.model = Model(rules, capacity=capacity, nodes=holders, direct=direct, reserve=reserve, page=page)
        self.mem = ms.StateManager(
            LAYOUT, slots=capacity, max_requests=rows, tracking=strategy(rules), device=device, backend=backend, max_batch=rows + 2,
            holders=holders, overlap=overlap, reserve=reserve, direct_hits=direct, pages=pages, page_size=page, pages_per_row=64 if pages else 0,
        )  # fmt: skip
        self.rules, self.overlap, self.row_count, self.page_count = rules, overlap, rows, pages
        self.planes = Planes(self.mem)
        self.poisoned = set(range(1, capacity + 1))
        self.tenants: list[Tenant] = []
        self.flights: deque[Flight] = deque()
        self.snaps: dict[ms.Snapshot, History] = {}
        self.pins: list[ms.Snapshot] = []  # dropped, and still to be read by the first step of a row
        self.users: Counter[int] = Counter()  # holders of each page
        self.unrun: list[Entry] = []  # of a planned step whose forward has not run
        self.degraded_before = 0  # the last reset

    def admit(self, requests: Sequence[ms.Request]) -> list[Tenant]:
        """Admits all or none; back-pressure is predicted with its numbers."""
        free, per_request = self.row_count - len(self.tenants), 1 + self.rules.admission
        fresh = [max(0, self._page_need(r.length) - len(r.resume.pages if r.resume else ())) for r in requests]
        refusal: type[ms.MemstateError] | None = None
        if len(requests) > free:
            refusal, numbers = ms.OutOfRows, (len(requests), free)
        elif sum(fresh) > self.free_pages:
            refusal, numbers = ms.OutOfPages, (sum(fresh), self.free_pages)
        elif per_request * len(requests) > self.model.free_count:
            refusal, numbers = ms.OutOfSlots, (per_request * len(requests), self.model.free_count)
        if refusal:
            with pytest.raises(refusal) as caught:
                self.mem.admit(requests)
            assert (caught.value.requested, caught.value.free) == numbers  # type: ignore[attr-defined]
            if refusal is ms.OutOfSlots:
                assert caught.value.evictable == sum(not self.model.pins[node] for node in self.model.kept)  # type: ignore[attr-defined]
            return []
        rows = self.mem.admit(requests)
        admitted = [
            (handle.index, request.want, ("node", request.resume.register) if request.resume else None)
            for handle, request in zip(rows, requests, strict=True)
        ]
        tenants = []
        for handle, row, request, n in zip(rows, self.model.admit(admitted), requests, fresh, strict=True):
            shared = list(request.resume.pages) if request.resume else []
            self.users.update(shared)
            tenants.append(
                Tenant(
                    handle,
                    row,
                    list(self.snaps[request.resume]) if request.resume else [],
                    [*shared, *self._claim_pages(n)],
                )
            )
        self.tenants += tenants
        return tenants

    # Pages: lowest first, shared with snapshots, free with their last holder.

    def _page_need(self, length: int) -> int:
        return -(-length // self.model.page) if self.page_count else 0

    @property
    def free_pages(self) -> int:
        return self.page_count - len(+self.users)

    def _claim_pages(self, n: int) -> list[int]:
        free = [page for page in range(1, self.page_count + 1) if not self.users[page]][:n]
        self.users.update(free)
        return free

    def extend(self, tenants: Sequence[Tenant], lengths: Sequence[int]) -> bool:
        """Pages for these lengths, for all or for none."""
        handles = [tenant.handle for tenant in tenants]
        needed = [max(0, self._page_need(length) - len(t.pages)) for t, length in zip(tenants, lengths, strict=True)]
        if sum(needed) > self.free_pages:
            with pytest.raises(ms.OutOfPages):
                self.mem.extend(handles, lengths)
            return False
        self.mem.extend(handles, lengths)
        for tenant, n in zip(tenants, needed, strict=True):
            tenant.pages += self._claim_pages(n)
        self.model.buffer.columns |= any(needed)
        return True

    def plan(self, batch: Sequence[tuple[Tenant | None, History]], limit: int = NO_LIMIT, run: bool = True) -> Flight:
        """Plans a step that feeds each tenant its tokens, and runs its forward unless it is to be cancelled."""
        entries = self.model.plan([(t.row if t else None, len(fed)) for t, fed in batch], limit)
        handles = [t.handle if t else None for t, _ in batch]
        with self.counted() as spent:
            step = self.mem.plan(handles, [len(fed) for _, fed in batch], limit=limit)
        assert spent["plan"] == 1 and spent["ownership"] <= 1 and spent["run_data"] <= 1 and spent["uploads"] <= 1
        assert sum(spent.values()) <= 4, f"a scheduler step costs {spent}"
        real = [fed if entry.row else () for entry, (_, fed) in zip(entries, batch, strict=True)]
        for name, column in (
            ("read", step.read),
            ("write", step.write),
            ("snapshot", step.snapshot),
            ("after", step.record.after),
        ):
            assert column.tolist() == [getattr(entry, name) for entry in entries], name
        assert step.rows.tolist() == [entry.row.number if entry.row else 0 for entry in entries]
        assert step.after.tolist() == step.record.after.tolist() and step.before.tolist() == [
            entry.before for entry in entries
        ]
        generations = [
            tenant.handle.generation if entry.row and tenant else 0
            for entry, (tenant, _) in zip(entries, batch, strict=True)
        ]
        assert step.record.generation.tolist() == generations
        self._unpin()
        self.unrun = entries
        self.look()  # nothing has written yet: zeros and copies must be done, and poison be where nobody looks
        for (tenant, _), fed in zip(batch, real, strict=True):
            if tenant:
                tenant.fed += fed
        if run:
            self.planes.forward(step, real)
            self.model.forward(entries, real)
            self.unrun = []
        flight = Flight(step, entries, [tenant for tenant, _ in batch])
        self.flights.append(flight)
        return flight

    def settle(self, finished: Sequence[bool] | None = None) -> Flight:
        """Settles the oldest step."""
        flight = self.flights.popleft()
        launched = self.model.settle(flight.entries, finished or [False] * len(flight.entries))
        with self.counted() as spent:
            self.mem.settle(flight.step, finished)
        assert spent["settle"] == launched and spent["uploads"] <= 2 and not spent["plan"] and not spent["syncs"]
        return flight

    def end(self, tenants: Sequence[Tenant], publish: bool | Sequence[int] = False) -> list[ms.Snapshot | None]:
        """Releases; publish: False, True or the key length of each."""
        snaps = self.mem.release([tenant.handle for tenant in tenants], publish)
        rows = [tenant.row for tenant in tenants]
        bounds = None if publish is False else [row.confirmed for row in rows]
        if bounds is not None and publish is not True:
            bounds = [min(bound, key) for bound, key in zip(bounds, publish, strict=True)]  # type: ignore[arg-type]
        self.model.end(rows, bounds, _nodes(snaps))
        self._ended(tenants, snaps)
        return snaps

    def publish(self, tenants: Sequence[Tenant]) -> list[ms.Snapshot | None]:
        snaps = self.mem.publish([tenant.handle for tenant in tenants])
        self.model.publish([t.row for t in tenants], [t.row.confirmed for t in tenants], _nodes(snaps))
        self._keep(tenants, snaps)
        return snaps

    def cancel(self, publish: bool = False) -> list[ms.Snapshot | None]:
        """Cancels the newest step; its rows end."""
        flight = self.flights.pop()
        snaps = self.mem.cancel(flight.step, publish=publish)
        ended = {
            t: snap
            for t, snap in zip(flight.tenants, snaps, strict=True)
            if t in self.tenants and t.row in [e.row for e in flight.entries]
        }
        self.model.cancel(flight.entries, _nodes(snaps), publish)
        self.unrun = []
        self._ended([t for t in ended if t], list(ended.values()))
        return snaps

    def drop(self, snaps: Sequence[ms.Snapshot]) -> None:
        self.mem.drop(snaps)
        nodes: list[Register] = [("node", snap.register) for snap in snaps]
        self.model.drop(nodes)
        self.pins += [snap for snap, node in zip(snaps, nodes, strict=True) if node in self.model.nodes]
        for snap in snaps:
            self.users.subtract(snap.pages if snap not in self.pins else ())
            if snap not in self.pins:
                del self.snaps[snap]

    def reset(self) -> None:
        self.mem.reset()
        self.model.reset()
        self.model.buffer.columns = True
        self.unrun, self.degraded_before = [], self.model.degraded
        self.tenants, self.pins = [], []
        for kept in (self.flights, self.snaps, self.users):
            kept.clear()

    def _ended(self, tenants: Sequence[Tenant], snaps: Sequence[ms.Snapshot | None]) -> None:
        self._keep(tenants, snaps)
        for tenant in tenants:
            self.tenants.remove(tenant)
            self.users.subtract(tenant.pages)
        self._unpin()

    def _unpin(self) -> None:
        for snap in [snap for snap in self.pins if ("node", snap.register) not in self.model.nodes]:
            self.pins.remove(snap)
            self.users.subtract(snap.pages)
            del self.snaps[snap]

    def _keep(self, tenants: Sequence[Tenant], snaps: Sequence[ms.Snapshot | None]) -> None:
        for tenant, snap in zip(tenants, snaps, strict=True):
            if snap:
                assert snap.length == self.model.known["node", snap.register]
                assert list(snap.pages) == (tenant.pages[: snap.length // self.model.page] if self.page_count else [])
                self.users.update(snap.pages)
                self.snaps[snap] = tuple(tenant.fed[: snap.length])

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Launches by op, uploads and syncs of what runs inside."""
        spent: Counter[str] = Counter()
        counts = self.mem.backend.counts
        before = counts.launches | Counter(uploads=counts.uploads, syncs=counts.syncs)
        yield spent
        spent.update((counts.launches | Counter(uploads=counts.uploads, syncs=counts.syncs)) - before)

    # Comparison.

    def look(self) -> None:
        """Compares everything that both sides know, host, device and bytes, without sending what is recorded."""
        model, mem = self.model, self.mem
        assert mem.free_slots == model.free_count and mem.free_pages == self.free_pages
        held = {self._number(register): model.known[register] for register in model.held}
        assert {int(r): int(mem.registers.labels[r]) for r in mem.registers.held.nonzero()[0]} == held
        stats = mem.stats()
        kinds = Counter(register[0].split()[0] for register in model.held)
        assert (stats.held_by_live, stats.held_by_lanes, stats.held_by_snapshots) == (
            kinds["live"],
            kinds["lane"],
            kinds["node"],
        )
        assert (stats.snapshots, stats.degraded) == (model.snapshots, model.degraded)
        moved = (stats.copied_bytes, stats.zeroed_bytes)
        assert moved == (model.copied * LAYOUT.bytes_per_slot, model.zeroed * LAYOUT.bytes_per_slot)
        for tenant in self.tenants:
            row = tenant.row
            assert (mem.length(tenant.handle), mem.confirmed(tenant.handle)) == (model.length(row), row.confirmed)
            assert mem.next_boundary(tenant.handle) == model.next_boundary(row)
            assert mem.slots_held(tenant.handle) <= self.rules.most_slots
        self._look_at_registers()
        if not model.buffer.columns:
            self._look_at_columns()
        self._look_at_bytes()

    def _look_at_registers(self) -> None:
        model, table = self.model, self.mem.registers.table
        slots, labels = [0] * table.slots.numel(), [0] * table.slots.numel()
        for register, slot in model.slot.items():
            slots[self._number(register)], labels[self._number(register)] = slot, model.label[register]
        assert table.slots.tolist() == slots
        assert table.labels.tolist() == labels
        words = table.bitmap.tolist()
        assert {slot for slot in range(32 * len(words)) if words[slot // 32] >> (slot % 32) & 1} == model.free
        counters = table.counters.tolist()
        assert counters[Count.FREE] == len(model.free)
        assert counters[Count.DEGRADED] == model.degraded - self.degraded_before
        assert not any(counters[Count.DOUBLE_RELEASE :])

    def _look_at_columns(self) -> None:
        model, table = self.model, self.mem.registers.table
        rows = [model.rows.get(number, Row(number)) for number in range(self.row_count + 1)]
        assert table.tracked.tolist() == [row.tracked for row in rows]
        assert table.want.tolist() == [row.want for row in rows]
        assert table.source.tolist() == [self._number(row.source) if row.source else 0 for row in rows]
        generation = table.generation.tolist()
        assert all(generation[tenant.handle.index] == tenant.handle.generation for tenant in self.tenants)
        if self.page_count:
            width = self.mem.page_table.shape[1]
            pages = {
                tenant.handle.index: [*tenant.pages, *[0] * (width - len(tenant.pages))] for tenant in self.tenants
            }
            assert self.mem.page_table.tolist() == [pages.get(row, [0] * width) for row in range(self.row_count + 1)]

    def _look_at_bytes(self) -> None:
        model = self.model
        unknown = {slot for slot, history in model.content.items() if history is None}
        assert not (touched := self.planes.touched(sorted(unknown & self.poisoned))), (
            f"slots {touched} changed under nobody's hand"
        )
        self.planes.poison(sorted(unknown - self.poisoned))
        self.poisoned = unknown
        content = {slot: history for slot, history in model.content.items() if history is not None}
        assert not (wrong := self.planes.wrong(content)), (
            f"slots {wrong} do not hold {[content[slot] for slot in wrong]}"
        )
        for snap, history in self.snaps.items():
            if slot := model.slot["node", snap.register]:  # the move has been carried out
                assert model.content[slot] == history and len(history) == snap.length
        moving = {entry.row for entry in self.unrun}
        for tenant in (tenant for tenant in self.tenants if tenant.row not in moving):
            for register in [("live", tenant.row.number), *model.lanes(tenant.row)]:
                if model.label[register] and register not in model.buffer.phase:
                    assert model.content[model.slot[register]] == tuple(tenant.fed[: model.label[register]])

    @staticmethod
    def _number(register: Register) -> int:
        kind, index = register
        return index if kind == "node" else 3 * index + {"live": 0, "lane 0": 1, "lane 1": 2}[kind]


def _nodes(snaps: Sequence[ms.Snapshot | None]) -> list[Register | None]:
    return [("node", snap.register) if snap else None for snap in snaps]
