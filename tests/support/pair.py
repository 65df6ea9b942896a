"""A manager and the model of its rules, side by side: everything that both know must be equal, down to the bytes.

Memory that nobody may depend on is poison, and stays poison.
"""

from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import memstate as ms
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Count
from tests.support.build import build
from tests.support.ledger import History, Register
from tests.support.model import Entry, Model, Row, Rules
from tests.support.planes import LAYOUT, Planes


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
    end: int = 2**31  # tokens from here on are of a dead step


@dataclass(eq=False)
class Flight:
    """A planned step on both sides."""

    step: ms.Step
    entries: list[Entry]
    tenants: list[Tenant | None]


class Pair:
    """A manager beside its model, and what their owner knows; `look` compares them."""

    def __init__(
        self,
        rules: Rules,
        overlap: bool,
        backend: Backend,
        *,
        capacity: int,
        rows: int,
        snapshots: int,
        direct: bool,
        reserve: int = 0,
        page: int = 1,
        pages: int = 0,
    ) -> None:
        self.model = Model(rules, capacity=capacity, nodes=snapshots, direct=direct, reserve=reserve, page=page)
        self.mem = build(
            LAYOUT,
            slots=capacity,
            max_requests=rows,
            tracking=strategy(rules),
            device=backend.device,
            backend=backend.name,
            max_batch=rows + 2,
            snapshots=snapshots,
            overlap=overlap,
            reserve=reserve,
            direct_hits=direct,
            pages=pages,
            page_size=page,
            pages_per_row=64 if pages else 0,
        )
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
        self.last_generation: dict[int, int] = {}  # of each row's last tenant

    @property
    def free_pages(self) -> int:
        return self.page_count - len(+self.users)

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """Launches by op, uploads and syncs of what runs inside."""
        spent: Counter[str] = Counter()
        counts = self.mem.backend.counts
        before = counts.launches | Counter(uploads=counts.uploads, syncs=counts.syncs)
        yield spent
        spent.update((counts.launches | Counter(uploads=counts.uploads, syncs=counts.syncs)) - before)

    def look(self) -> None:
        """Compares everything that both sides know, host, device and bytes, without sending what is recorded."""
        model, mem = self.model, self.mem
        assert mem.free_slots == model.free_count and mem.free_pages == self.free_pages
        held = {self._number(register): model.known[register] for register in model.held}
        assert {int(r): int(mem._registers.labels[r]) for r in mem._registers.held.nonzero()[0]} == held
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
        if not model.pending_columns:
            self._look_at_columns()
        self._look_at_bytes()

    def _look_at_registers(self) -> None:
        model, table = self.model, self.mem._registers.table
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
        model, table = self.model, self.mem._registers.table
        rows = [model.rows.get(number, Row(number)) for number in range(self.row_count + 1)]
        assert table.tracked.tolist() == [row.tracked for row in rows]
        assert table.snapshot_at.tolist() == [row.snapshot_at for row in rows]
        assert table.source.tolist() == [self._number(row.source) if row.source else 0 for row in rows]
        generation = table.generation.tolist()
        assert all(generation[tenant.handle.index] == tenant.handle.generation for tenant in self.tenants)
        assert all(generation[row] > last for row, last in self.last_generation.items())
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
        moving, pending = {entry.row for entry in self.unrun}, model.pending
        for snap, history in self.snaps.items():
            slot = model.slot["node", snap.register]
            if slot and ("node", snap.register) not in pending:  # the move has been carried out
                assert model.content[slot] == history and len(history) == snap.length
        for tenant in (tenant for tenant in self.tenants if tenant.row not in moving):
            for register in [("live", tenant.row.number), *model.lanes(tenant.row)]:
                if model.label[register] and register not in pending:
                    assert model.content[model.slot[register]] == tuple(tenant.fed[: model.label[register]])

    @staticmethod
    def _number(register: Register) -> int:
        kind, index = register
        return index if kind == "node" else 3 * index + {"live": 0, "lane 0": 1, "lane 1": 2}[kind]
