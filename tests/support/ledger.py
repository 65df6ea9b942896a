"""A register file and its command buffer as plain dictionaries: what is recorded, and what has been carried out.

Every slot carries the token history it stands for instead of bytes, so a wrong slot or a wrong label shows as a wrong
history. A slot of unknown content carries None: nobody may depend on it. Shares no code with the library.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

Register = tuple[str, int]  # ("live" | "lane 0" | "lane 1", row) or ("node", any name)
History = tuple[int, ...]
MOVE, RELEASE, CLAIM, DATA = range(4)  # phases of the command buffer, in the order they run


@dataclass
class Buffer:
    """Recorded and not yet carried out."""

    moves: list[tuple[Register, Register]] = field(default_factory=list)
    releases: list[Register] = field(default_factory=list)
    claims: list[Register] = field(default_factory=list)
    data: list[tuple[Register, Register | None]] = field(default_factory=list)  # source None: zero
    columns: bool = False  # request columns to write
    phase: dict[Register, int] = field(default_factory=dict)  # the last phase that names a register

    @property
    def pending(self) -> bool:
        return bool(self.phase) or self.columns


class Ledger:
    """Slots 1..capacity, the lowest free one first, and the registers that hold them."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.copied = self.zeroed = 0  # slots
        self.reset()

    def reset(self) -> None:
        self.slot: Counter[Register] = Counter()  # on the device
        self.label: Counter[Register] = Counter()
        self.free = set(range(1, self.capacity + 1))
        self.content: dict[int, History | None] = dict.fromkeys(self.free)
        self.held: set[Register] = set()  # on the host: what holds once the buffer is carried out
        self.known: Counter[Register] = Counter()
        self.free_count = self.capacity
        self.buffer, self.complete = Buffer(), list[Buffer]()

    @property
    def pending(self) -> set[Register]:
        """Registers that something recorded names."""
        return {register for buffer in (*self.complete, self.buffer) for register in buffer.phase}

    @property
    def pending_columns(self) -> bool:
        return any(buffer.columns for buffer in (*self.complete, self.buffer))

    @property
    def packets(self) -> int:
        """That carry what is recorded."""
        return len(self.complete) + self.buffer.pending

    def _record(self, phase: int, registers: Iterable[Register]) -> None:
        registers = list(registers)
        latest = [self.buffer.phase.get(register, -1) for register in registers]
        if any(at > phase or at == phase == MOVE for at in latest):
            self.complete.append(self.buffer)
            self.buffer = Buffer()
        self.buffer.phase |= dict.fromkeys(registers, phase)

    def _move(self, pairs: Sequence[tuple[Register, Register]]) -> None:
        self._record(MOVE, [register for pair in pairs for register in pair])
        self.buffer.moves += pairs
        for target, source in pairs:
            assert target not in self.held and source in self.held
            self.held ^= {target, source}
            self.known[target] = self.known.pop(source, 0)

    def _release(self, registers: Iterable[Register]) -> None:
        registers = [register for register in registers if register in self.held]
        self._record(RELEASE, registers)
        self.buffer.releases += registers
        self._forget(registers)

    def _forget(self, registers: Sequence[Register]) -> None:
        self.held -= set(registers)
        self.free_count += len(registers)
        for register in registers:
            self.known.pop(register, None)

    def submit(self) -> None:
        """Carries out what is recorded, buffer by buffer."""
        recorded, self.buffer, self.complete = [*self.complete, self.buffer], Buffer(), []
        for buffer in recorded:
            self._carry_out(buffer)
        assert {r for r, slot in self.slot.items() if slot} == self.held and len(self.free) == self.free_count
        assert +self.label == +self.known

    def _carry_out(self, buffer: Buffer) -> None:
        """Moves, releases, claims, then zeros and copies."""
        for target, source in buffer.moves:
            self.slot[target], self.label[target] = self.slot.pop(source), self.label.pop(source, 0)
        for register in buffer.releases:
            self._free(register)
        for register in buffer.claims:
            self._take(register)
        for target, origin in buffer.data:
            self.content[self.slot[target]] = () if origin is None else self.content[self.slot[origin]]
            self.label[target] = 0 if origin is None else self.label[origin]
            self.zeroed += origin is None
            self.copied += origin is not None

    def _free(self, register: Register) -> None:
        slot = self.slot.pop(register)
        self.label.pop(register, None)
        self.free.add(slot)
        self.content[slot] = None

    def _take(self, register: Register) -> None:
        assert not self.slot[register]
        self.slot[register] = min(self.free)
        self.free.remove(self.slot[register])
        self.label[register] = 0
