"""Makes a register file with real slots for tests of the command buffer, and checks each submitted packet."""

import torch
from torch import Tensor

from memstate import Plane, Planes, SlotAllocator, StateLayout
from memstate.engine.pool import StatePool
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import ZERO_SOURCE, Registers, Section
from memstate.slots.commands import CommandBuffer
from memstate.slots.packet import Packet
from memstate.slots.registers import RegisterFile

CAPACITY, ROWS, HOLDERS = 6, 2, 3
CELLS = 2 * (ROWS + 1)  # cells of the columns `tracked` and `source`
USABLE = list(range(3, 3 * (ROWS + 1) + HOLDERS))
LAYOUT = StateLayout([Plane("s", (4,), torch.float32)], layers=2)
POISON = 99.0


def require_unordered(packet: list[int]) -> None:
    """Checks that no entry of a section names what another entry of it changes: a GPU runs them at the same time."""
    columns = {}
    for section in Section:
        n, start = packet[section], packet[8 + section]
        second = start + (n + 3) // 4 * 4
        columns[section] = (packet[start : start + n], packet[second : second + n])
    data, sources = columns[Section.DATA]
    moves = list(zip(*columns[Section.MOVES], strict=True))
    before = [register for to, of in moves if to > 0 for register in (to, of)]
    behind = [register for to, of in moves if to < 0 for register in (-to, of)]
    last = behind + columns[Section.CLAIMS][0]
    for names in (before, columns[Section.RELEASES][0], last, columns[Section.WRITES][0], data):
        assert len(set(names)) == len(names)
    assert not set(data) & set(sources)


class Bench:
    """A register file, a command buffer, and slots that hold poison."""

    def __init__(self, backend: Backend) -> None:
        self.allocator = SlotAllocator(CAPACITY, backend)
        self.storage = Planes(LAYOUT, CAPACITY, backend)
        self.storage["s"].fill_(POISON)
        self.pool = StatePool(self.allocator, self.storage)
        self.file = RegisterFile(self.allocator, ROWS, HOLDERS)
        self.buffer = CommandBuffer(self.file, self.pool.run_data)
        carry_out = backend.ownership

        def guarded(table: Registers, packet: Tensor) -> None:
            require_unordered(packet.tolist())
            carry_out(table, packet)

        backend.ownership = guarded  # type: ignore[method-assign]

    def fill(self, register: int, content: float, label: int) -> None:
        """Claims a slot for a register, and sets its bytes and its label as a step would."""
        self.buffer.claim([register])
        self.buffer.submit()
        self.storage["s"][:, int(self.file.table.slots[register])] = content
        self.file.table.labels[register] = label
        self.file.labels[register] = label

    def content(self, register: int) -> float:
        state = self.storage["s"][:, int(self.file.table.slots[register])]
        assert (state == state.reshape(-1)[0]).all()
        return float(state.reshape(-1)[0])

    def observe(self) -> tuple[object, ...]:
        """Returns everything that a refused operation must leave unchanged."""
        file = self.file
        device = (file.cells.tolist(), self.allocator.bitmap.tolist(), self.allocator.counters.tolist())
        host = (file.held.tolist(), file.labels.tolist(), self.allocator.free, self.buffer.packets)
        return device, host, recorded(self.buffer), self.storage["s"].numpy(force=True).tobytes()


def recorded(buffer: CommandBuffer) -> list[object]:
    """Returns the entries that are recorded and not submitted yet."""
    return [entry.encode().tolist() if isinstance(entry, Packet) else entry for entry in buffer.queue]


def perform(bench: Bench, operation: str, to: list[int], of: list[int]) -> None:
    if operation == "write":  # writes cells of the columns `tracked` and `source`
        pairs = list(zip(to, of, strict=False))
        places = [divmod((register - 3) % CELLS, ROWS + 1) for register, _ in pairs]
        cells = [bench.file.starts[("tracked", "source")[column]] + row for column, row in places]
        bench.buffer.write(cells, [value for _, value in pairs])
    elif operation in ("copy", "move"):
        getattr(bench.buffer, operation)(to, of)
    elif operation == "zero":  # recorded as `claim` records it
        if to:
            bench.buffer._require_held("zero", to)
            bench.buffer._record(Section.DATA, to, [ZERO_SOURCE] * len(to), to)
    else:
        getattr(bench.buffer, operation)(to)
