"""Plans on random register files: kernel and reference agree bit for bit, and both follow the model."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from memstate.kernels import tables
from memstate.kernels.dispatch import Backend
from memstate.kernels.reference import tracking as reference
from memstate.kernels.tables import Count, Registers, StepMarks, StepRecord, Strategy, TailRecord
from memstate.slots.allocator import SlotAllocator
from memstate.slots.registers import RegisterFile
from tests.proof.stateful.ledger import Row
from tests.proof.stateful.model import Entry, Model
from tests.proof.stateful.settings import Settings
from tests.support.packets import Packet, bits

POISON = 0x5A5A5A5A
NO_LIMIT = 2**31 - 1
VARIANTS = {
    "none": (Strategy.NONE, 0, False), "ping-pong with one lane": (Strategy.PING_PONG, 1, False),
    "ping-pong": (Strategy.PING_PONG, 2, False), "lazy": (Strategy.LAZY, 2, False),
    "lazy in place": (Strategy.LAZY, 2, True), "redirect": (Strategy.REDIRECT, 1, False),
}  # fmt: skip
BATCHES = (0, 1, 2, 31, 32, 33, 64, 129, 256, 257)


def set_free(table: Registers, free: Sequence[int]) -> None:
    """Makes exactly these slots free."""
    table.bitmap.copy_(torch.tensor(bits(free, table.capacity), dtype=torch.int32))
    table.counters[Count.FREE] = len(free)


class RandomFile:
    """A register file in a possible random state: each slot is free, in one register, or held by id."""

    def __init__(self, rng: random.Random, backend: Backend, batch: int, lanes: int) -> None:
        self.rng, self.every = rng, rng.choice((1, 2, 4, 7))
        self.rows = batch + rng.randint(0, 5)
        holders = rng.randint(1, 6)
        self.capacity = 3 * self.rows + holders + rng.randint(1, 70)
        allocator = SlotAllocator(self.capacity, backend, reserve=rng.choice((0, 0, 1, 3)))
        self.file = RegisterFile(allocator, self.rows, holders)
        ids = rng.sample(range(1, self.capacity + 1), self.capacity)
        slots, labels = [0] * self.file.count, [0] * self.file.count
        columns = {name: [0] * (self.rows + 1) for name in ("tracked", "source")}
        for register in range(self.file.first_holder, self.file.count):
            slots[register], labels[register] = ids.pop(), rng.randint(1, 3 * self.every)
        for row in range(1, self.rows + 1):
            if rng.random() < 0.1:
                continue  # this row is not in use
            live = 3 * row
            slots[live] = ids.pop()
            labels[live] = rng.choice((0, 1, self.every - 1, self.every, rng.randint(0, 4 * self.every)))
            for lane in range(live + 1, live + 1 + lanes):
                if rng.random() < 0.6:
                    slots[lane], labels[lane] = ids.pop(), rng.choice((0, rng.randint(0, 4 * self.every)))
            length = labels[live]
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
        """Returns a model with the state of this file."""
        table = self.file.table
        settings = Settings(
            name, self.every, lane_count=lanes or None, overwrite=overwrite, slots=self.capacity, rows=self.rows,
            reserve=int(table.counters[Count.RESERVE]), snapshots=self.file.count - self.file.first_holder,
        )  # fmt: skip
        model = Model(settings, [1] * (self.rows + 1))
        slots, labels = table.slots.tolist(), table.labels.tolist()
        model.slot = {register: slot for register, slot in enumerate(slots) if slot}
        model.label = {register: labels[register] for register in model.slot}
        model.free = set(self.free())
        model.agree()
        for number, (tracked, source) in enumerate(zip(table.tracked.tolist(), table.source.tolist(), strict=True)):
            if slots[3 * number]:
                row = Row(number, 1, "", tracked=tracked, source=source)
                model.rows[number] = row
        return model

    def free(self) -> list[int]:
        words = self.file.table.bitmap.tolist()
        return [slot for slot in range(1, self.file.table.capacity + 1) if words[slot // 32] >> (slot % 32) & 1]


def copy_of(registers: Registers) -> Registers:
    """Returns a copy of the registers that shares no memory with them."""
    cells = registers.cells.clone()
    columns = [cells[c.storage_offset() : c.storage_offset() + c.numel()] for c in registers[:4]]
    return Registers(*columns, cells, registers.bitmap.clone(), registers.counters.clone(), registers.capacity)


def stale_record(batch: int, like: Tensor) -> StepRecord:
    """Returns a record of a step that is full of poison, in place of the values of an earlier step."""
    return StepRecord(*(numbers([POISON] * batch, like) for _ in StepRecord._fields))


def stale_marks(room: int, like: Tensor) -> StepMarks:
    return StepMarks(*(numbers([POISON] * size, like) for size in (1, room, room, room)))


def numbers(values: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=like.device)


def batch_packet(
    columns: Sequence[Sequence[int]], limit: int, like: Tensor, marks: Sequence[tuple[int, int, int]] = ()
) -> Tensor:
    """Returns a packet with a batch, as columns of rows and tokens, and marks (entry, offset, register)."""
    return Packet(batch=list(zip(*columns, strict=True)), marks=list(marks), limit=limit).pack(like.device)


def same(left: Registers, right: Registers) -> bool:
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in ("cells", "bitmap", "counters"))


def random_batch(rng: random.Random, file: RandomFile, batch: int) -> tuple[list[int], list[int]]:
    """Returns rows in random order among padding, and the tokens of each. Padding can be a number of no row."""
    real = rng.sample(range(1, file.rows + 1), rng.randint(batch // 2, batch))
    none = (0, -1, -(2**31), file.rows + 1, 2**30, 2**31 - 1)
    rows = rng.sample(real + [rng.choice(none) for _ in range(batch - len(real))], batch)
    return rows, [rng.choice((1, 1, 1, 2, file.every, 0)) for _ in rows]


def random_marks(rng: random.Random, file: RandomFile, batch: int) -> list[tuple[int, int, int]]:
    """Returns random marks, often none. Their registers are holders or register 0."""
    holders = range(file.file.first_holder, file.file.count)
    places = {(rng.randrange(batch), rng.randint(1, 9)) for _ in range(rng.choice((0, 1, 3, 40)) if batch else 0)}
    return [(entry, offset, rng.choice([0, *holders])) for entry, offset in sorted(places)]


def assert_follows(model: Model, file: RandomFile) -> None:
    """Checks registers, columns and free slots against the model."""
    table = file.file.table
    slots, labels = table.slots.tolist(), table.labels.tolist()
    held = {register: (slot, labels[register]) for register, slot in enumerate(slots) if slot}
    assert held == {register: (slot, model.label[register]) for register, slot in model.slot.items()}
    assert file.free() == sorted(model.free) and int(table.counters[Count.FREE]) == len(model.free)
    tracked, source = table.tracked.tolist(), table.source.tolist()
    for number, row in model.rows.items():
        assert (tracked[number], source[number] > 0) == (row.tracked, row.source > 0)


def assert_recorded(record: StepRecord, entries: Sequence[Entry]) -> None:
    for name in ("read", "write", "snapshot"):
        assert getattr(record, name).tolist() == [getattr(entry, name) for entry in entries], name
    assert record.tokens.tolist() == [len(entry.tokens) for entry in entries]
    assert record.rows.tolist() == [entry.row.number if entry.row else 0 for entry in entries]


def assert_marked(marks: StepMarks, table: Registers, given: Sequence[tuple[int, int, int]]) -> None:
    """Checks that the step has exactly these marks, with the slots of their registers."""
    slots = table.slots.tolist()
    assert marks.count.tolist() == [len(given)]
    expected = [[entry, offset, slots[register]] for entry, offset, register in given]
    assert torch.stack(marks[1:], 1).tolist() == expected + [[POISON] * 3] * (marks.entry.numel() - len(given))


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

        rules = tables.Rules(strategy, lanes, file.every, in_place, pad=rng.choice((0, -1)))
        given, room = random_marks(rng, file, batch), rng.choice((64, 2))
        packet = batch_packet((rows, tokens), limit, table.cells, given)
        packet[: tables.Section.BATCH] = 3  # numbers of changes that ownership has already made
        there, marks, others = packet.clone(), stale_marks(room, table.cells), stale_marks(room, table.cells)
        backend.plan(table, packet, record, marks, rules)
        reference.plan(other, there, expected, others, rules)
        assert same(table, other) and torch.equal(packet, there)
        assert not packet[: tables.Section.BATCH].any() and packet[tables.Section.BATCH] == batch
        assert packet[tables.Section.MARKS] == 0 and packet[tables.LIMIT_CELL] == limit
        assert all(torch.equal(*columns) for columns in zip((*record, *marks), (*expected, *others), strict=True))
        assert_marked(marks, table, given[:room])
        for column in record[2:5] if rules.pad else ():
            assert not (column == 0).any(), "a slot or the number that stands for none"
            column[column == rules.pad] = 0

        pairs = zip(rows, tokens, strict=True)
        entries = model.plan([(model.rows.get(row) if n > 0 else None, [7] * n) for row, n in pairs], limit).entries
        assert_follows(model, file)
        assert_recorded(record, entries)
        after = table.counters.tolist()
        assert after[Count.DEGRADED] - before[Count.DEGRADED] == model.degraded
        assert after[Count.CLAIMED] - before[Count.CLAIMED] == before[Count.FREE] - after[Count.FREE]
        written = [slot for e in entries for slot in (e.write, e.snapshot) if slot]
        assert len(set(written)) == len(written)


@pytest.mark.parametrize("strategy", [Strategy.NONE, Strategy.LAZY], ids=["none", "lazy"])
def test_a_launch_with_the_same_arguments_takes_the_marks_of_each_packet(strategy: Strategy, backend: Backend) -> None:
    """The same arguments are those of a captured launch.

    A repeat without an upload, or for another batch size, has no marks.
    """
    file = RandomFile(random.Random(4), backend, 3, 2)
    table, holder = file.file.table, file.file.first_holder
    record, marks = stale_record(3, table.cells), stale_marks(8, table.cells)
    packet, rules = stale_record(64, table.cells).rows, tables.Rules(strategy, 2, 4, False)

    def launch(batch: int, *given: tuple[int, int, int]) -> None:
        sent = batch_packet(([1, 2, 3][:batch], [4] * batch), 0, table.cells, given)
        packet[: len(sent)] = sent
        backend.plan(table, packet, record, marks, rules)

    launch(3, (0, 1, holder), (0, 4, 0), (2, 3, holder))
    assert_marked(marks, table, [(0, 1, holder), (0, 4, 0), (2, 3, holder)])
    for _ in range(2):
        backend.plan(table, packet, record, marks, rules)
        assert marks.count.tolist() == [0]
    marks.slot.fill_(POISON), marks.entry.fill_(POISON), marks.offset.fill_(POISON)
    launch(3, (1, 2, holder))
    assert_marked(marks, table, [(1, 2, holder)])
    launch(2, (1, 2, holder))
    assert marks.count.tolist() == [0] and packet[tables.Section.MARKS] == 0


def test_each_launch_has_the_interval_of_its_rules(backend: Backend) -> None:
    """Launches that differ in the interval alone share a compiled kernel, except for intervals beyond 32 bits."""
    for every in (1, 3, 16, 2**32 + 1):
        file = RandomFile(random.Random(5), backend, 3, 2)
        table, other = file.file.table, copy_of(file.file.table)
        records, marks = [stale_record(3, table.cells) for _ in "ab"], stale_marks(1, table.cells)
        packet = batch_packet(([1, 2, 3], [1] * 3), NO_LIMIT, table.cells)
        rules = tables.Rules(Strategy.LAZY, 2, every, False)
        reference.plan(other, packet.clone(), records[0], marks, rules)
        backend.plan(table, packet, records[1], marks, rules)
        assert same(table, other) and all(torch.equal(*columns) for columns in zip(*records, strict=True))


def test_tokens_are_counted_once_for_rows_in_any_order(backend: Backend) -> None:
    """A plan with tails first counts the accepted tokens of the batch before, whose rows have another order."""
    batch, rng = 60, random.Random(6)
    file = RandomFile(rng, backend, batch, 2)
    rules, every = tables.Rules(Strategy.NONE, 0, 8, False, tail=3), list(range(1, batch + 1))
    sides = []
    for table in (file.file.table, copy_of(file.file.table)):
        pending, newest = torch.zeros_like(table.source), torch.zeros_like(table.source)
        record = stale_record(batch, table.cells)
        columns = [numbers([0] * size, table.cells) for size in (*[batch] * 5, 1)]
        sides.append((table._replace(pending=pending, newest=newest), record, TailRecord(record.rows, *columns)))
    marks = stale_marks(1, file.file.table.cells)
    for rows in (every, every[::-1], rng.sample(every, batch)):
        for launch, (table, record, tails) in zip((backend.plan, reference.plan), sides, strict=True):
            packet = batch_packet((rows, [1 + row % 2 for row in rows]), NO_LIMIT, table.cells)
            packet[tables.DEFER_CELL] = 99
            launch(table, packet, record, marks, rules, tails)
        mine, theirs = ((table.cells, table.pending, *record, *tails) for table, record, tails in sides)
        assert all(map(torch.equal, mine, theirs))
    assert int(sides[0][0].pending.max()) == 4


@pytest.mark.sample(1)
@pytest.mark.parametrize("variant", ["none", "lazy in place", "redirect"])
def test_more_rows_than_lanes_follow_the_rules(backend: Backend, variant: str) -> None:
    """A program plans 1024 rows at a time. The next 1024 get the slots that are left, and what is left of the limit."""
    batch, rng = 1300, random.Random(variant)
    strategy, lanes, in_place = VARIANTS[variant]
    file = RandomFile(rng, backend, batch, lanes)
    owned = set(file.file.table.slots.tolist())
    set_free(file.file.table, [slot for slot in range(1, file.capacity + 1) if slot not in owned])
    rows, tokens = random_batch(rng, file, batch)
    rules = tables.Rules(strategy, lanes, file.every, in_place)
    for limit in (3, NO_LIMIT):
        here = file.file.table
        there, record = copy_of(here), stale_record(batch, here.cells)
        other = stale_record(batch, here.cells)
        packet = batch_packet((rows, tokens), limit, here.cells)
        marks = stale_marks(1, here.cells)
        backend.plan(here, packet.clone(), record, marks, rules)
        reference.plan(there, packet, other, marks, rules)
        assert same(here, there) and all(map(torch.equal, record, other))
