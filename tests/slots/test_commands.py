"""The command buffer: changes take effect in the order in which they are recorded, despite phases and early submits."""

import random

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from memstate import MemstateError, SlotAllocator
from memstate.kernels.dispatch import Backend
from memstate.slots.commands import Action, CommandBuffer
from memstate.slots.packet import Packet
from memstate.slots.registers import RegisterFile
from tests.support.command_bench import CAPACITY, CELLS, USABLE, Bench, perform
from tests.support.scan import scan_registers


@pytest.fixture
def bench(backend: Backend) -> Bench:
    return Bench(backend)


class Oracle:
    """A model that applies one operation after the other: register -> (content, label); content None is undefined."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[float | None, int]] = {}
        self.cells = dict.fromkeys(range(CELLS), 0)

    def refuses(self, operation: str, to: list[int], of: list[int]) -> bool:
        held = self.held
        if operation == "claim":
            return any(r in held for r in to) or len(to) > CAPACITY - len(held)
        if operation == "zero":
            return any(r not in held for r in to)
        if operation == "copy":
            return any(r not in held for r in [*to, *of])
        return operation == "move" and (any(r in held for r in to) or any(r not in held for r in of))

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
            self.cells.update(((register - 3) % CELLS, value) for register, value in zip(to, of, strict=False))


# Pairs of target and source; operations on targets alone leave the sources out.
pairs = st.lists(
    st.tuples(st.sampled_from(USABLE), st.sampled_from(USABLE)), max_size=2, unique_by=(lambda p: p[0], lambda p: p[1])
)
kinds = st.sampled_from(["claim", "claim", "release", "zero", "copy", "copy", "move", "move", "write"])
scripts = st.lists(st.tuples(kinds, pairs), max_size=20)


def test_B36c_order_of_record_is_order_of_effect(backend: Backend) -> None:
    """Registers, labels, bytes and counts are as if each operation had run alone, in order. The host knows them."""

    quick = backend.name == "reference"  # on other backends, Hypothesis takes too long to shrink a failure

    @given(start=st.sets(st.sampled_from(USABLE), max_size=5), script=scripts, early=st.sets(st.integers(0, 19)))
    @settings(max_examples=120 if quick else 5, deadline=None, phases=set(Phase) - (set() if quick else {Phase.shrink}))
    def run(start: set[int], script: list[tuple[str, list[tuple[int, int]]]], early: set[int]) -> None:
        bench, oracle = Bench(Backend(backend.name, backend.device)), Oracle()
        for register in sorted(start):
            bench.fill(register, float(register), 10 * register)
            oracle.held[register] = (float(register), 10 * register)
        for at, (operation, named) in enumerate(script):
            step(bench, oracle, operation, [to for to, _ in named], [of for _, of in named])
            if at in early:
                bench.buffer.submit()
        bench.buffer.submit()
        scan_registers(bench.file)
        expected = {r: content for r, (content, _) in oracle.held.items() if content is not None}
        assert {r: bench.content(r) for r in expected} == expected
        table = bench.file.table
        columns = [cell for column in (table.tracked, table.source) for cell in column.tolist()]
        assert columns == list(oracle.cells.values())
        bench.allocator.check()

    run()


def step(bench: Bench, oracle: Oracle, operation: str, to: list[int], of: list[int]) -> None:
    """Records one operation and compares what the host believes. A refused operation must raise, and change nothing.

    The library never names a register as target and as source of one operation.
    """
    if operation in ("copy", "move") and set(to) & set(of):
        return
    if oracle.refuses(operation, to, of):
        before = bench.observe()
        with pytest.raises(MemstateError):
            perform(bench, operation, to, of)
        assert bench.observe() == before
    else:
        perform(bench, operation, to, of)
        oracle.apply(operation, to, of)
    file = bench.file
    assert {r for r in range(file.count) if file.held[r]} == set(oracle.held)
    assert {r: int(file.labels[r]) for r in oracle.held} == {r: label for r, (_, label) in oracle.held.items()}
    assert bench.allocator.free == CAPACITY - len(oracle.held)


def test_B36c_chains_of_moves(bench: Bench) -> None:
    bench.fill(3, 1.0, 1)
    bench.buffer.move([4], [3])
    bench.buffer.move([9], [4])
    bench.buffer.claim([3])
    bench.buffer.move([10, 4], [9, 3])
    bench.buffer.submit()
    seen = scan_registers(bench.file)
    assert seen.labels == {10: 1, 4: 0}
    assert bench.content(10) == 1.0


def test_a_turn_that_ends_and_one_that_comes_fit_in_one_packet(bench: Bench) -> None:
    """Registers 3 to 5 are those of a row, the others are holders. A third move of a register takes a second packet."""
    for register in (3, 4, 9, 10):
        bench.fill(register, float(register), register)
    sent = bench.buffer.packets
    bench.buffer.move([11], [3])
    bench.buffer.release([4])
    bench.buffer.move([3, 4], [9, 10])
    bench.buffer.claim([5])
    bench.buffer.move([9], [11])
    bench.buffer.submit()
    assert scan_registers(bench.file).labels == {3: 9, 4: 10, 5: 0, 9: 3}
    assert [bench.content(register) for register in (3, 4, 9)] == [9.0, 10.0, 3.0]
    assert bench.buffer.packets - sent == 2


def test_B36c_a_state_that_a_copy_reads_is_released_behind_it(bench: Bench) -> None:
    for register in (3, 6):
        bench.fill(register, float(register), register)
    sent = bench.buffer.packets
    bench.buffer.copy([6], [3])
    bench.buffer.release([3])
    bench.buffer.submit()
    assert bench.content(6) == 3.0 and scan_registers(bench.file).labels == {6: 3}
    assert bench.buffer.packets - sent == 2


def test_B36c_moves_in_any_order_are_those_of_a_dict(backend: Backend, generator: torch.Generator) -> None:
    """The kernel runs 256 moves at a time; the first packet has 500, and 500 behind them."""
    rng = random.Random(generator.initial_seed())
    file = RegisterFile(SlotAllocator(1000, backend), rows=300, snapshots=600)
    buffer, everything = CommandBuffer(file), range(3, file.count)
    held = {register: register for register in rng.sample(everything, 1000)}  # register -> label
    buffer.claim([*held], [*held])
    buffer.submit()
    for at in range(40):
        full = rng.sample([*held], len(held))
        empty = [register for register in everything if register not in held]
        if at % 10 == 9:
            buffer.release(full[:100])
            held = {register: held[register] for register in full[100:]}
        else:
            n = 500 if at < 2 else rng.randint(1, 500)
            pairs = list(zip(rng.sample(empty, n), full[:n], strict=True))
            buffer.move([to for to, _ in pairs], [of for _, of in pairs])
            held |= {to: held.pop(of) for to, of in pairs}
        if at in (1, 39) or (at and rng.random() < 0.3):
            moved = [to for packet in buffer.queue if isinstance(packet, Packet) for _, to, *_ in packet.operations]
            assert at > 1 or [(len(to), max(to) < 0) for to in moved] == [(500, False), (500, True)]
            buffer.submit()
            assert scan_registers(file).labels == held
    file.allocator.check()


def test_B36c_the_last_value_written_to_a_cell_wins_also_within_one_call(bench: Bench) -> None:
    (cell,) = bench.file.address("tracked", [1])
    bench.buffer.write([cell, cell], [1, 2])
    bench.buffer.write([cell], [3])
    bench.buffer.write([cell, cell, cell + 1], [4, 5, 6])
    bench.buffer.submit()
    assert bench.file.table.tracked.tolist() == [0, 5, 6]
    bench.buffer.write([cell, cell], [7, 8])
    bench.buffer.submit()
    assert bench.file.table.tracked.tolist() == [0, 8, 6]
    bench.buffer.write([cell, cell + 1] * 100, [*range(200)])  # two cells get many values each; the last one counts
    bench.buffer.submit()
    assert bench.file.table.tracked.tolist() == [0, 198, 199]


def test_G1_the_first_change_of_a_fenced_register_waits_and_all_behind_it(bench: Bench) -> None:
    for register in (3, 6, 9):
        bench.fill(register, float(register), register)
    buffer, table = bench.buffer, bench.file.table
    buffer.fence(np.array([3]))
    sent = buffer.packets
    buffer.release([6])
    buffer.release([3])
    buffer.claim([6])
    buffer.submit()
    assert table.slots.tolist()[6] == 0 and table.slots.tolist()[3] != 0, "only what is in front of the fence was sent"
    assert buffer.packets - sent == 1 and buffer.withheld == (1, 1) and len(buffer.waiting) == 1
    assert bench.allocator.free == CAPACITY - 2
    buffer.submit()
    assert buffer.packets - sent == 1 and table.slots.tolist()[3] != 0
    buffer.lift()
    buffer.submit()
    assert buffer.packets - sent == 2 and not buffer.waiting
    scan_registers(bench.file)
    bench.allocator.check()


def test_G1_what_reads_a_register_that_the_forward_has_still_to_write_waits(bench: Bench) -> None:
    """An action may read a fenced register only if the forward only reads it, too."""
    for register in (3, 6):
        bench.fill(register, float(register), register)
    buffer, done = bench.buffer, list[int]()
    buffer.fence(np.array([3]), np.array([6]))
    assert buffer.named([6]) and not buffer.named([3])
    for register in (3, 6, 3):
        buffer.then(Action(lambda register=register: done.append(register)), [register])  # type: ignore[misc]
    assert done == [3] and len(buffer.waiting) == 2, "and what is behind one that waits"
    buffer.lift()
    assert not buffer.named([6])
    buffer.submit()
    assert done == [3, 6, 3]
    buffer.fence(np.array([3]))
    buffer.then(Action(lambda: done.append(9)), [6])
    assert done[3:] == [9], "the next forward does not write it"
    buffer.lift()


@pytest.mark.parametrize("change", ["move from", "copy from", "copy to", "release", "label"])
def test_G1_every_change_of_a_fenced_register_waits(bench: Bench, change: str) -> None:
    for register in (3, 6):
        bench.fill(register, float(register), register)
    buffer = bench.buffer
    before = bench.file.table.slots.tolist(), bench.file.table.labels.tolist(), bench.content(3), bench.content(6)
    buffer.fence(np.array([3]))
    {
        "move from": lambda: buffer.move([9], [3]),
        "copy from": lambda: buffer.copy([6], [3]),
        "copy to": lambda: buffer.copy([3], [6]),
        "release": lambda: buffer.release([3]),
        "label": lambda: buffer.label([3], [7]),
    }[change]()
    buffer.submit()
    assert (*[column.tolist() for column in bench.file.table[:2]], bench.content(3), bench.content(6)) == before
    assert buffer.waiting
    done: list[int] = []
    buffer.then(Action(lambda: done.append(1)))
    assert not done
    buffer.lift()
    buffer.submit()
    assert done == [1] and not buffer.queue
    scan_registers(bench.file)
