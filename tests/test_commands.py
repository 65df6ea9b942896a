"""The command buffer: the order of record is the order of effect, misuse changes nothing, and slots in hand share the pool."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from memstate import (
    EmptyRegister,
    InvalidArgument,
    MemstateError,
    OutOfSlots,
    Plane,
    RegisterInUse,
    SlotAllocator,
    StateLayout,
    StatePool,
    Storage,
)
from memstate.commands import CommandBuffer
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import Registers, Section
from memstate.registers import RegisterFile
from tests.scan import scan_registers

CAPACITY, ROWS, HOLDERS = 6, 2, 3
USABLE = list(range(3, 3 * (ROWS + 1) + HOLDERS))
LAYOUT = StateLayout([Plane("s", (4,), torch.float32)], layers=2)
POISON = 99.0


def require_unordered(packet: list[int]) -> None:
    """Within a phase entries happen at once on a GPU: none may name what another one changes."""
    columns = {}
    for section in Section:
        n, start = packet[section], packet[8 + section]
        second = start + (n + 3) // 4 * 4
        columns[section] = (packet[start : start + n], packet[second : second + n])
    (to, of), (data, sources) = columns[Section.MOVES], columns[Section.DATA]
    for names in (to + of, columns[Section.RELEASES][0], columns[Section.CLAIMS][0], columns[Section.WRITES][0], data):
        assert len(set(names)) == len(names)
    assert not set(data) & set(sources)


class Bench:
    """A register file with bytes behind it, all of them poison."""

    def __init__(self, backend: Backend) -> None:
        self.allocator = SlotAllocator(CAPACITY, backend)
        self.storage = Storage(LAYOUT, CAPACITY, backend)
        self.storage.planes["s"].fill_(POISON)
        self.pool = StatePool(self.allocator, self.storage)
        self.file = RegisterFile(self.allocator, ROWS, HOLDERS)
        self.buffer = CommandBuffer(self.file, self.pool.run_data)
        carry_out = backend.ownership

        def guarded(table: Registers, packet: Tensor) -> None:
            require_unordered(packet.tolist())
            carry_out(table, packet)

        backend.ownership = guarded  # type: ignore[method-assign]

    def fill(self, register: int, content: float, label: int) -> None:
        """Gives a register a slot with known bytes and a label, as if a step had written it."""
        self.buffer.claim([register])
        self.buffer.submit()
        self.storage.planes["s"][:, int(self.file.table.slots[register])] = content
        self.file.table.labels[register] = label
        self.file.labels[register] = label

    def content(self, register: int) -> float:
        state = self.storage.planes["s"][:, int(self.file.table.slots[register])]
        assert (state == state.reshape(-1)[0]).all()
        return float(state.reshape(-1)[0])

    def picture(self) -> tuple[object, ...]:
        """Everything that a refused operation must leave alone."""
        file = self.file
        packet, _ = self.buffer._pack()
        device = (file.cells.tolist(), self.allocator.bitmap.tolist(), self.allocator.counters.tolist())
        host = (file.held.tolist(), file.labels.tolist(), self.allocator.free, self.buffer.submits)
        return device, host, packet.tolist(), self.storage.planes["s"].tolist()


@pytest.fixture
def bench(backend: Backend) -> Bench:
    return Bench(backend)


class Oracle:
    """What registers hold, told one operation after the other: register -> (content, label); content None is undefined."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[float | None, int]] = {}
        self.cells = dict.fromkeys(range(3 * (ROWS + 1)), 0)

    def refuses(self, operation: str, to: list[int], of: list[int]) -> bool:
        held = self.held
        if operation == "write":
            return False
        twice = len(set(to)) != len(to)
        if operation == "claim":
            return twice or any(r in held for r in to) or len(to) > CAPACITY - len(held)
        if operation == "release":
            return twice
        if operation == "zero":
            return twice or any(r not in held for r in to)
        unequal = len(to) != len(of) or bool(set(to) & set(of))
        if operation == "copy":
            return twice or unequal or any(r not in held for r in [*to, *of])
        return twice or unequal or len(set(of)) != len(of) or any(r in held for r in to) or any(r not in held for r in of)

    def apply(self, operation: str, to: list[int], of: list[int]) -> None:
        held = self.held
        if operation == "claim":
            held.update(dict.fromkeys(to, (None, 0)))
        if operation == "release":
            for register in to:
                held.pop(register, None)
        if operation == "zero":
            held.update({register: (0.0, held[register][1]) for register in to})
        if operation == "copy":
            held.update({target: held[source] for target, source in zip(to, of, strict=True)})
        if operation == "move":
            held.update({target: held.pop(source) for target, source in zip(to, of, strict=True)})
        if operation == "write":
            self.cells.update((register - 3, value) for register, value in zip(to, of, strict=False))


def perform(bench: Bench, operation: str, to: list[int], of: list[int]) -> None:
    if operation == "write":  # columns tracked, want and source, by row: what an engine writes
        pairs = list(zip(to, of, strict=False))
        cells = [int(bench.file.address(("tracked", "want", "source")[r // 3 - 1], np.int64(r % 3))) for r, _ in pairs]
        bench.buffer.write(cells, [value for _, value in pairs])
    elif operation in ("copy", "move"):
        getattr(bench.buffer, operation)(to, of)
    else:
        getattr(bench.buffer, operation)(to)


registers = st.lists(st.sampled_from(USABLE), max_size=3, unique=True)
operations = st.lists(
    st.tuples(st.sampled_from(["claim", "release", "zero", "copy", "move", "write"]), registers, registers), max_size=14
)


@given(start=st.sets(st.sampled_from(USABLE), max_size=5), script=operations, early=st.sets(st.integers(0, 13), max_size=2))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_B36c_order_of_record_is_order_of_effect(backend: Backend, start, script, early) -> None:  # type: ignore[no-untyped-def]
    """Whatever the buffer does with phases and early submits: registers, labels, bytes and counts are those of doing
    one thing after the other, the host knows them at every moment, and what is refused leaves no trace."""
    bench, oracle = Bench(Backend(backend.name, backend.device)), Oracle()
    for register in sorted(start):
        bench.fill(register, float(register), 10 * register)
        oracle.held[register] = (float(register), 10 * register)
    for at, (operation, to, of) in enumerate(script):
        if oracle.refuses(operation, to, of):
            before = bench.picture()
            with pytest.raises(MemstateError):
                perform(bench, operation, to, of)
            assert bench.picture() == before
        else:
            perform(bench, operation, to, of)
            oracle.apply(operation, to, of)
        file = bench.file
        assert {r for r in range(file.count) if file.held[r]} == set(oracle.held)
        assert {r: int(file.labels[r]) for r in oracle.held} == {r: label for r, (_, label) in oracle.held.items()}
        assert bench.allocator.free == CAPACITY - len(oracle.held)
        if at in early:
            bench.buffer.submit()
    bench.buffer.submit()
    scan_registers(bench.file)
    expected = {r: content for r, (content, _) in oracle.held.items() if content is not None}
    assert {r: bench.content(r) for r in expected} == expected
    table = bench.file.table
    assert [c for column in (table.tracked, table.want, table.source) for c in column.tolist()] == list(oracle.cells.values())
    bench.allocator.check()


def test_B36c_publish_a_lane_claim_its_replacement_and_abort_the_row_in_one_go(bench: Bench) -> None:
    bench.fill(3, 1.0, 9)
    bench.fill(4, 2.0, 8)
    bench.buffer.move([9], [4])
    bench.buffer.claim([4])
    bench.buffer.release([3, 4, 5])
    bench.buffer.submit()
    assert scan_registers(bench.file).labels == {9: 8}
    assert bench.content(9) == 2.0


def test_B36c_copy_from_a_node_evict_it_and_reuse_its_slot(bench: Bench) -> None:
    """The evicted slot is claimed and zeroed by the same buffer: the copy must have read it before."""
    bench.fill(9, 7.0, 512)
    bench.buffer.claim([3])
    bench.buffer.copy([3], [9])
    bench.buffer.release([9])
    bench.buffer.claim(USABLE[1:6])
    bench.buffer.zero(USABLE[1:6])
    bench.buffer.submit()
    assert (bench.content(3), scan_registers(bench.file).labels[3]) == (7.0, 512)


def test_B36c_copies_of_copies_and_a_swap_through_a_third(bench: Bench) -> None:
    bench.fill(3, 1.0, 1)
    bench.fill(6, 2.0, 2)
    bench.buffer.claim([9, 10])
    bench.buffer.copy([9], [3])
    bench.buffer.copy([3], [6])
    bench.buffer.copy([6], [9])
    bench.buffer.copy([10], [6])
    bench.buffer.submit()
    assert [bench.content(r) for r in (3, 6, 9, 10)] == [2.0, 1.0, 1.0, 1.0]
    assert scan_registers(bench.file).labels == {3: 2, 6: 1, 9: 1, 10: 1}


def test_B36c_chains_of_moves(bench: Bench) -> None:
    bench.fill(3, 1.0, 1)
    bench.buffer.move([4], [3])
    bench.buffer.move([9], [4])
    bench.buffer.claim([3])
    bench.buffer.move([10, 4], [9, 3])
    bench.buffer.submit()
    found = scan_registers(bench.file)
    assert found.labels == {10: 1, 4: 0}
    assert bench.content(10) == 1.0


MISUSE = {
    "claim into a full register": (RegisterInUse, lambda b: b.claim([4, 3])),
    "claim beyond the pool": (OutOfSlots, lambda b: b.claim([4, 5, 7, 8])),
    "claim twice": (InvalidArgument, lambda b: b.claim([4, 4])),
    "claim for the null row": (InvalidArgument, lambda b: b.claim([0])),
    "claim for its lane": (InvalidArgument, lambda b: b.claim([4, 2])),
    "claim beyond the file": (InvalidArgument, lambda b: b.claim([12])),
    "claim a negative register": (InvalidArgument, lambda b: b.claim([-1])),
    "claim a fraction": (InvalidArgument, lambda b: b.claim([4.5])),
    "release twice": (InvalidArgument, lambda b: b.release([3, 3])),
    "release the null row": (InvalidArgument, lambda b: b.release([1])),
    "release beyond the file": (InvalidArgument, lambda b: b.release([12])),
    "move onto a full register": (RegisterInUse, lambda b: b.move([9], [3])),
    "move from an empty one": (EmptyRegister, lambda b: b.move([10], [4])),
    "move one to two": (InvalidArgument, lambda b: b.move([4, 5], [3])),
    "move two to one": (InvalidArgument, lambda b: b.move([4, 4], [3, 9])),
    "move in a circle": (InvalidArgument, lambda b: b.move([3, 9], [9, 3])),
    "move from the null row": (InvalidArgument, lambda b: b.move([4], [0])),
    "zero an empty register": (EmptyRegister, lambda b: b.zero([3, 4])),
    "zero the null row": (InvalidArgument, lambda b: b.zero([0])),
    "copy to an empty register": (EmptyRegister, lambda b: b.copy([4], [3])),
    "copy from an empty one": (EmptyRegister, lambda b: b.copy([3], [4])),
    "copy from the null row": (MemstateError, lambda b: b.copy([3], [0])),
    "copy from a negative register": (MemstateError, lambda b: b.copy([3], [-1])),
    "copy from beyond the file": (MemstateError, lambda b: b.copy([3], [12])),
    "copy onto itself": (InvalidArgument, lambda b: b.copy([3], [3])),
    "copy in a circle": (InvalidArgument, lambda b: b.copy([3, 9], [9, 3])),
    "copy two to one": (InvalidArgument, lambda b: b.copy([3, 3], [9, 11])),
    "write before the first cell": (MemstateError, lambda b: b.write([-1], [5])),
    "write behind the last": (MemstateError, lambda b: b.write([10**6], [5])),
    "write what does not fit": (MemstateError, lambda b: b.write([200], [2**31])),
    "write three values to two cells": (MemstateError, lambda b: b.write([200, 201], [1, 2, 3])),
}


@pytest.mark.parametrize("recorded", [False, True], ids=["nothing recorded", "something recorded"])
@pytest.mark.parametrize("case", MISUSE)
def test_G1_misuse_raises_and_changes_nothing(bench: Bench, case: str, recorded: bool) -> None:
    bench.fill(3, 1.0, 1)
    bench.fill(9, 2.0, 2)
    bench.fill(11, 3.0, 3)
    if recorded:  # a slot each way, so that an early submit would show
        bench.buffer.release([11])
        bench.buffer.claim([11])
    before = bench.picture()
    error, misuse = MISUSE[case]
    with pytest.raises(error):
        misuse(bench.buffer)
    assert bench.picture() == before
    bench.buffer.submit()
    scan_registers(bench.file)


def test_B36c_the_last_value_written_to_a_cell_wins_also_within_one_call(bench: Bench) -> None:
    cell = int(bench.file.address("want", np.int64(1)))
    bench.buffer.write([cell, cell], [1, 2])
    bench.buffer.write([cell], [3])
    bench.buffer.write([cell, cell, cell + 1], [4, 5, 6])
    bench.buffer.submit()
    assert bench.file.table.want.tolist() == [0, 5, 6]
    bench.buffer.write([cell, cell], [7, 8])
    bench.buffer.submit()
    assert bench.file.table.want.tolist() == [0, 8, 6]


@pytest.mark.parametrize("operation", ["claim", "release", "zero", "copy", "move", "write"])
def test_B3_B4_recording_nothing_sends_nothing(bench: Bench, operation: str) -> None:
    perform(bench, operation, [], [])
    bench.buffer.release([3])  # empty, so nothing to give back
    bench.buffer.submit()
    counts = bench.allocator.backend.counts
    assert (counts.total_launches, counts.uploads) == (0, 0)
