"""Plan and settle on random register files: kernel and reference agree bit for bit, and both follow the model."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from memstate.kernels import tables
from memstate.kernels.dispatch import Backend
from memstate.kernels.reference import tracking as reference
from memstate.kernels.tables import Count, Registers, StepRecord, Strategy
from memstate.slots.allocator import SlotAllocator
from memstate.slots.registers import RegisterFile
from tests.proof.stateful.history import EMPTY
from tests.proof.stateful.model import Entry, Model, Planned
from tests.proof.stateful.rows import Row
from tests.proof.stateful.settings import Settings
from tests.support.packets import bits

POISON = 0x5A5A5A5A
NO_LIMIT = 2**31 - 1
VARIANTS = {
    "none": (Strategy.NONE, 0, False), "ping-pong with one lane": (Strategy.PING_PONG, 1, False),
    "ping-pong": (Strategy.PING_PONG, 2, False), "lazy": (Strategy.LAZY, 2, False),
    "lazy in place": (Strategy.LAZY, 2, True), "redirect": (Strategy.REDIRECT, 1, False),
}  # fmt: skip
BATCHES = (0, 1, 2, 31, 32, 33, 64, 129, 256, 257)


def set_free(table: Registers, free: Sequence[int]) -> None:
    """These slots are free, and no others."""
    table.bitmap.copy_(torch.tensor(bits(free, table.capacity), dtype=torch.int32))
    table.counters[Count.FREE] = len(free)


class RandomFile:
    """A register file in a state that can occur: every slot free, in one register, or in somebody's hand."""

    def __init__(self, rng: random.Random, backend: Backend, batch: int, lanes: int) -> None:
        self.rng, self.every = rng, rng.choice((1, 2, 4, 7))
        self.rows = batch + rng.randint(0, 5)
        holders = rng.randint(1, 6)
        self.capacity = 3 * self.rows + holders + rng.randint(1, 70)
        allocator = SlotAllocator(self.capacity, backend, reserve=rng.choice((0, 0, 1, 3)))
        self.file = RegisterFile(allocator, self.rows, holders)
        ids = rng.sample(range(1, self.capacity + 1), self.capacity)
        slots, labels = [0] * self.file.count, [0] * self.file.count
        columns = {name: [0] * (self.rows + 1) for name in ("tracked", "snapshot_at", "source", "generation")}
        for register in range(self.file.first_holder, self.file.count):
            slots[register], labels[register] = ids.pop(), rng.randint(1, 3 * self.every)
        for row in range(1, self.rows + 1):
            if rng.random() < 0.1:
                continue  # nobody lives here
            live = 3 * row
            slots[live] = ids.pop()
            labels[live] = rng.choice((0, 1, self.every - 1, self.every, rng.randint(0, 4 * self.every)))
            for lane in range(live + 1, live + 1 + lanes):
                if rng.random() < 0.6:
                    slots[lane], labels[lane] = ids.pop(), rng.choice((0, rng.randint(0, 4 * self.every)))
            columns["generation"][row] = rng.randint(1, 9)
            length = labels[live]
            columns["snapshot_at"][row] = rng.choice((0, 0, length, length + 1, length + rng.randint(0, 4)))
            columns["tracked"][row] = rng.choice((0, 0, length, length - 1, length + 1))
            if rng.random() < 0.15:
                columns["source"][row], labels[live] = self.file.first_holder + rng.randrange(holders), 0
        self._fill(slots, labels, columns, ids[: rng.choice((0, 1, len(ids) // 2, len(ids)))])

    def _fill(
        self, slots: Sequence[int], labels: Sequence[int], columns: dict[str, list[int]], free: Sequence[int]
    ) -> None:
        table = self.file.table
        set_free(table, free)
        table.counters[Count.RESERVE + 1 : Count.OFFENDER] = torch.randint(0, 9, (Count.OFFENDER - Count.CLAIMED,))
        for name, values in (("slots", slots), ("labels", labels), *columns.items()):
            getattr(table, name).copy_(torch.tensor(values, dtype=torch.int32))

    def model(self, name: str, lanes: int, overwrite: bool) -> Model:
        """The same file as the model sees it."""
        table = self.file.table
        settings = Settings(
            name, self.every, lane_count=lanes or None, overwrite=overwrite, slots=self.capacity, rows=self.rows,
            reserve=int(table.counters[Count.RESERVE]), snapshots=self.file.count - self.file.first_holder,
        )  # fmt: skip
        model = Model(settings, table.generation.tolist())
        slots, labels = table.slots.tolist(), table.labels.tolist()
        model.slot = {register: slot for register, slot in enumerate(slots) if slot}
        model.label = {register: labels[register] for register in model.slot}
        model.free = set(self.free())
        model.agree()
        columns = [column.tolist() for column in (table.generation, table.snapshot_at, table.tracked, table.source)]
        for number, (generation, snapshot_at, tracked, source) in enumerate(zip(*columns, strict=True)):
            if slots[3 * number]:
                row = Row(number, generation, "", snapshot_at, tracked=tracked, source=source)
                row.truth = {model.length(row): EMPTY}
                model.rows[number] = row
        return model

    def free(self) -> list[int]:
        words = self.file.table.bitmap.tolist()
        return [slot for slot in range(1, self.file.table.capacity + 1) if words[slot // 32] >> (slot % 32) & 1]


def copy_of(registers: Registers) -> Registers:
    """The same state in other memory."""
    cells = registers.cells.clone()
    columns = [cells[c.storage_offset() : c.storage_offset() + c.numel()] for c in registers[:6]]
    return Registers(*columns, cells, registers.bitmap.clone(), registers.counters.clone(), registers.capacity)


def stale_record(batch: int, like: Tensor) -> StepRecord:
    """What an earlier step left there must never be seen."""
    return StepRecord(*(numbers([POISON] * batch, like) for _ in StepRecord._fields))


def numbers(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def same(left: Registers, right: Registers) -> bool:
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in ("cells", "bitmap", "counters"))


def random_batch(rng: random.Random, file: RandomFile, batch: int) -> tuple[list[int], list[int]]:
    """Rows in any order between padding of both conventions, and their tokens; nothing to do is padding, too."""
    real = rng.sample(range(1, file.rows + 1), rng.randint(batch // 2, batch))
    rows = rng.sample(real + [rng.choice((0, -1, -7)) for _ in range(batch - len(real))], batch)
    return rows, [rng.choice((1, 1, 1, 2, file.every, 0)) for _ in rows]


def assert_follows(model: Model, file: RandomFile) -> None:
    """Registers, columns and free slots are what the model made of them."""
    table = file.file.table
    slots, labels = table.slots.tolist(), table.labels.tolist()
    held = {register: (slot, labels[register]) for register, slot in enumerate(slots) if slot}
    assert held == {register: (slot, model.label[register]) for register, slot in model.slot.items()}
    assert file.free() == sorted(model.free) and int(table.counters[Count.FREE]) == len(model.free)
    tracked, source = table.tracked.tolist(), table.source.tolist()
    for number, row in model.rows.items():
        assert (tracked[number], source[number] > 0) == (row.tracked, row.source > 0)


def assert_recorded(record: StepRecord, entries: Sequence[Entry], generation: list[int]) -> None:
    for name in ("read", "write", "snapshot", "after"):
        assert getattr(record, name).tolist() == [getattr(entry, name) for entry in entries], name
    assert record.tokens.tolist() == [len(entry.tokens) for entry in entries]
    assert record.rows.tolist() == [entry.row.number if entry.row else 0 for entry in entries]
    assert record.generation.tolist() == [generation[entry.row.number] if entry.row else 0 for entry in entries]


@pytest.mark.sample(24)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("batch", BATCHES)
def test_plan_is_the_rule_for_every_row(variant: str, batch: int, backend: Backend) -> None:
    strategy, lanes, in_place = VARIANTS[variant]
    for seed in range(2 if backend.name == "interpreter" else 6):
        rng = random.Random(f"{variant} {batch} {seed}")
        file = RandomFile(rng, backend, batch, lanes)
        table = file.file.table
        other, before = copy_of(table), table.counters.tolist()
        model = file.model(variant.split(" ")[0], lanes, in_place)
        rows, tokens = random_batch(rng, file, batch)
        limit = rng.choice((NO_LIMIT, NO_LIMIT, -1, 0, 1, batch // 4))
        record, expected = stale_record(batch, table.cells), stale_record(batch, table.cells)

        settings = (tables.Rules(strategy, lanes, file.every, in_place), limit)
        backend.plan(table, numbers(rows, table.cells), numbers(tokens, table.cells), record, *settings)
        reference.plan(other, numbers(rows, table.cells), numbers(tokens, table.cells), expected, *settings)
        assert same(table, other)
        assert all(torch.equal(*columns) for columns in zip(record, expected, strict=True))

        pairs = zip(rows, tokens, strict=True)
        entries = model.plan(
            [(model.rows.get(row) if n > 0 else None, [7] * n) for row, n in pairs], limit, False
        ).entries
        assert_follows(model, file)
        assert_recorded(record, entries, table.generation.tolist())
        after = table.counters.tolist()
        assert after[Count.DEGRADED] - before[Count.DEGRADED] == model.degraded
        assert after[Count.CLAIMED] - before[Count.CLAIMED] == before[Count.FREE] - after[Count.FREE]
        written = [slot for e in entries for slot in (e.write, e.snapshot) if slot]
        assert len(set(written)) == len(written)


@pytest.mark.parametrize("batch", BATCHES[1:])
def test_settle_releases_what_is_superseded_and_real(batch: int, backend: Backend) -> None:
    for seed in range(2 if backend.name == "interpreter" else 6):
        rng = random.Random(f"settle {batch} {seed}")
        file = RandomFile(rng, backend, batch, lanes=2)
        table = file.file.table
        other, model, before = copy_of(table), file.model("lazy", 2, True), table.counters.tolist()
        rows, _ = random_batch(rng, file, batch)
        rows = [max(row, 0) for row in rows]
        labels, generation = table.labels.tolist(), table.generation.tolist()
        some = [rng.choice((labels[3 * row], labels[3 * row] - 1, rng.randint(0, 5 * file.every))) for row in rows]
        after = [known if row else 0 for row, known in zip(rows, some, strict=True)]
        current = [row > 0 and rng.random() < 0.8 for row in rows]  # the others had another tenant in that step
        seen = [generation[r] - (not c) for r, c in zip(rows, current, strict=True)]
        columns = {"rows": rows, "after": after, "generation": seen}
        known = {name: numbers(values, table.cells) for name, values in columns.items()}
        record = stale_record(batch, table.cells)._replace(**known)
        finished = rng.choice((None, [rng.randint(0, 1) for _ in rows]))
        flags = None if finished is None else numbers(finished, table.cells)

        backend.settle(table, record, flags)
        reference.settle(other, record, flags)
        assert same(table, other)

        ended = finished or [0] * batch
        entries = [
            Entry(model.rows.get(row), after=end) if is_current else Entry()
            for row, end, is_current in zip(rows, after, current, strict=True)
        ]
        model.steps.append(step := Planned(entries, window=False, record=0))
        model.settle(step, [bool(over) for over in ended])
        assert_follows(model, file)
        assert int(table.counters[Count.RELEASED]) - before[Count.RELEASED] == len(model.free) - before[Count.FREE]


@pytest.mark.parametrize("variant", VARIANTS)
def test_B14_a_batch_of_padding_moves_nothing(variant: str, backend: Backend) -> None:
    strategy, lanes, in_place = VARIANTS[variant]
    file = RandomFile(random.Random(variant), backend, 40, lanes)
    table = file.file.table
    before, record = copy_of(table), stale_record(40, table.cells)
    rows = [0, -1, -3, 0] * 10
    rules, ones = tables.Rules(strategy, lanes, 1, in_place), numbers([1] * 40, table.cells)
    backend.plan(table, numbers(rows, table.cells), ones, record, rules, NO_LIMIT)
    backend.settle(table, record, None)
    assert same(table, before)
    assert all(column.tolist() == [0] * 40 for column in record)


@pytest.mark.parametrize("first_free", [3, 32 * 1024 - 1, 70_000 - 40])
def test_plan_finds_the_lowest_free_slots_of_a_large_pool(first_free: int, backend: Backend) -> None:
    """The scan reads 1024 words at a time; free slots may lie in any, and in two."""
    capacity, batch = 70_000, 33
    table = RegisterFile(SlotAllocator(capacity, backend), batch, 1).table
    free = list(range(first_free, capacity + 1, 5 if first_free == 3 else 1))[:batch]
    set_free(table, free)
    rows = list(range(1, batch + 1))
    table.slots[3::3][:batch] = numbers([s for s in range(1, capacity) if s not in free][:batch], table.cells)
    table.labels[3::3][:batch] = 4
    record = stale_record(batch, table.cells)
    rules, ones = tables.Rules(Strategy.REDIRECT, 1, 4, False), numbers([1] * batch, table.cells)
    backend.plan(table, numbers(rows[::-1], table.cells), ones, record, rules, NO_LIMIT)
    assert record.write.tolist() == free and int(table.bitmap.count_nonzero()) == 0
