"""Slots, registers, columns and the packets of recorded changes, as dictionaries and lists. Knows no rule of tracking.

Two views: what the host says holds once everything recorded has been carried out (`held`, `known`, `free_count`), and
what the device has carried out (`slot`, `label`, `free`, `columns`, `content`). `submit` takes one to the other, as far
as nothing waits for a forward.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.proof.stateful.history import EMPTY, History
from tests.proof.stateful.settings import Settings

MOVE, RELEASE, CLAIM, WRITE, DATA = range(5)  # phases of a packet, in the order they run
State = History | None  # of a plane in a slot; None: nobody may depend on it
COLUMNS = ("tracked", "source")


class Op(NamedTuple):
    """One change. registers: that it changes; source: register that it reads; cell, value: what it writes."""

    phase: int
    registers: tuple[int, ...] = ()
    source: int | None = None
    cell: tuple[str, int, int] | None = None
    value: int = 0


@dataclass(eq=False)
class Packet:
    """Changes that are sent together. phase: the last one that names a register."""

    ops: list[Op] = field(default_factory=list)
    phase: dict[int, int] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)

    def add(self, op: Op) -> None:
        self.ops.append(op)
        for register in op.registers:
            self.phase[register] = DATA if op.phase == WRITE else op.phase
        if op.phase == DATA and op.source is not None:
            self.read.add(op.source)

    def names(self, register: int) -> bool:
        return register in self.phase or register in self.read

    @classmethod
    def of(cls, ops: Iterable[Op]) -> "Packet":
        packet = cls()
        for op in ops:
            packet.add(op)
        return packet


@dataclass(eq=False)
class Later:
    """What happens among packets."""

    run: Callable[[], None]
    forget: Callable[[], None] | None = None


class Ledger:
    """Registers are numbered as on the device: 3r, 3r + 1, 3r + 2 belong to row r, holders follow."""

    def __init__(self, settings: Settings, generations: Sequence[int]) -> None:
        self.settings = settings
        self.row_count, self.capacity = settings.row_count, settings.slots
        self.first_holder = 3 * (self.row_count + 1)
        self.register_count = self.first_holder + settings.holder_count
        self.generation = list(generations)  # of each row, as the host counts them
        self.columns = {name: [0] * (self.row_count + 1) for name in COLUMNS}
        self.packets = self.copied = self.zeroed = 0  # bytes
        self.content: dict[str, list[State]] = {part: [EMPTY, *[None] * self.capacity] for part in settings.parts}
        self.stirred: set[tuple[str, int]] = set()  # planes of slots that have lost a content since somebody looked
        self.before_packet: Callable[[], None] = lambda: None
        self.clear()

    def clear(self) -> None:
        """Every slot free and every register empty."""
        self.slot: dict[int, int] = {}
        self.label: dict[int, int] = {}
        self.free = set(range(1, self.capacity + 1))
        self.claimed = self.released = self.degraded = 0
        self.page_cells = [[0] * self.settings.pages_per_row for _ in range(self.row_count + 1)]
        for name in COLUMNS:
            self.columns[name] = [0] * (self.row_count + 1)
        for slot in self.free:
            self.lose(slot)
        self.held: set[int] = set()
        self.known: dict[int, int] = {}
        self.free_count = self.capacity
        self.discard()

    def discard(self) -> None:
        """Forgets what is recorded."""
        for entry in getattr(self, "queue", ()):
            if isinstance(entry, Later) and entry.forget:
                entry.forget()
        self.queue: list[Packet | Later] = []
        self.lift()

    # The fence

    def fence(self, slots: Iterable[int], unwritten: Iterable[int] = ()) -> None:
        """A forward that has not been launched uses these slots, and writes the states of these registers."""
        self.unwritten = set(unwritten)
        named = set(slots) - {0}
        self.fenced = {register for register, slot in self.slot.items() if slot in named}
        self.fencing = True

    def lift(self) -> None:
        self.fenced: set[int] = set()
        self.fencing = False
        self.unwritten: set[int] = set()
        self.waits: tuple[int, int] | None = None  # from this entry of the queue, and this change in it, on

    # Recording: a change that the order of phases would carry out too early begins another packet.

    def _last(self) -> Packet:
        if not self.queue or isinstance(self.queue[-1], Later):
            self.queue.append(Packet())
        last = self.queue[-1]
        assert isinstance(last, Packet)
        return last

    def _note(self, ops: Sequence[Op]) -> None:
        """Changes that are recorded together."""
        packet = self._last()
        named = {register for op in ops for register in op.registers}
        sources = {op.source for op in ops if op.phase == DATA and op.source is not None}
        phase = DATA if ops[0].phase == WRITE else ops[0].phase
        late = any(packet.phase.get(register, -1) >= phase for register in named) or packet.read & named
        if late or any(packet.phase.get(source) == DATA for source in sources):
            self.queue.append(packet := Packet())
        if self.waits is None and self.fenced & (named | sources):
            self.waits = len(self.queue) - 1, len(packet.ops)
        for op in ops:
            packet.add(op)

    def record_moves(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(target, source) each."""
        for target, source in pairs:
            assert target not in self.held and source in self.held
        if pairs:
            self._note([Op(MOVE, (target, source), source) for target, source in pairs])
        for target, source in pairs:
            self.held ^= {target, source}
            self.known[target] = self.known.pop(source)

    def record_releases(self, registers: Iterable[int]) -> None:
        """Those that hold nothing are skipped."""
        registers = [register for register in registers if register in self.held]
        if registers:
            self._note([Op(RELEASE, (register,)) for register in registers])
        for register in registers:
            self.held.remove(register)
            del self.known[register]
            self.free_count += 1

    def record_claims(self, registers: Sequence[int]) -> None:
        if registers:
            self._note([Op(CLAIM, (register,)) for register in registers])
        for register in registers:
            assert register not in self.held
            self.held.add(register)
            self.known[register] = 0
            self.free_count -= 1
        assert self.free_count >= 0

    def record_write(self, column: str, row: int, value: int, at: int = 0) -> None:
        """A cell of a column; `at`: which page of the row."""
        self._last().add(Op(WRITE, cell=(column, row, at), value=value))

    def record_labels(self, lengths: Sequence[tuple[int, int]]) -> None:
        """(register, what its state stands for) each."""
        if lengths:
            self._note([Op(WRITE, (register,), cell=("label", register, 0), value=n) for register, n in lengths])
        self.known.update(lengths)

    def record_zeros(self, registers: Sequence[int]) -> None:
        if registers:
            self._note([Op(DATA, (register,)) for register in registers])

    def record_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(target, source) each; a copy stands for what its source stands for."""
        if pairs:
            self._note([Op(DATA, (target,), source) for target, source in pairs])
        for target, source in pairs:
            self.known[target] = self.known[source]

    def named(self, register: int) -> bool:
        """Whether something is recorded that changes a register or reads its state, or a forward will write it."""
        return register in self.unwritten or any(
            isinstance(entry, Packet) and entry.names(register) for entry in self.queue
        )

    @property
    def pending(self) -> bool:
        return bool(self.queue)

    # Sending

    def submit(self) -> None:
        """Sends what does not wait for a forward."""
        if not self.queue:
            self.before_packet()
        at, ops = self.waits or (len(self.queue), 0)
        if ops:
            packet = self.queue[at]
            assert isinstance(packet, Packet)
            self.queue[at : at + 1] = [Packet.of(packet.ops[:ops]), Packet.of(packet.ops[ops:])]
            at += 1
        due, self.queue = self.queue[:at], self.queue[at:]
        self.waits = (0, 0) if self.waits else None
        for entry in due:
            self.carry_out(entry)
        if not self.queue:
            self.require_same()

    def submit_batch(self) -> bool:
        """Sends everything, and a batch with the last packet. Returns whether that packet has changes as well."""
        assert self.waits is None
        last = self._last()
        due, self.queue = self.queue, []
        for entry in due:
            self.carry_out(entry)
        self.require_same()
        return bool(last.ops)

    def require_same(self) -> None:
        """Nothing is recorded: the host says what the device has carried out."""
        assert set(self.slot) == self.held and len(self.free) == self.free_count and self.label == self.known

    def then(self, later: Later, reads: Iterable[int] = ()) -> None:
        """Behind everything recorded: now, unless that waits for a forward, or the forward writes what this reads."""
        if self.waits is None and self.unwritten & set(reads):
            self.waits = len(self.queue), 0
        if self.waits is None:
            self.submit()
            later.run()
        else:
            self.queue.append(later)

    def carry_out(self, entry: "Packet | Later") -> None:
        """Moves, releases, claims, writes, then zeros and copies."""
        if isinstance(entry, Later):
            entry.run()
            return
        self.before_packet()
        self.packets += bool(entry.ops)
        for op in sorted(entry.ops, key=lambda op: op.phase):
            [self._moved, self._released, self._claimed, self._written, self._filled][op.phase](op)

    def _moved(self, op: Op) -> None:
        (target, source) = op.registers
        self.slot[target], self.label[target] = self.slot.pop(source), self.label.pop(source)

    def _released(self, op: Op) -> None:
        self.let_go(*op.registers)

    def _claimed(self, op: Op) -> None:
        self.take(*op.registers)

    def _written(self, op: Op) -> None:
        assert op.cell
        column, row, at = op.cell
        if column == "label":
            self.label[row] = op.value
        elif column == "page":
            self.page_cells[row][at] = op.value
        else:
            self.columns[column][row] = op.value

    def _filled(self, op: Op) -> None:
        (target,) = op.registers
        to = self.slot[target]
        if op.source is None:
            self.zeroed += self.settings.slot_bytes()
        else:
            self.label[target] = self.label[op.source]
            self.copied += self.settings.slot_bytes()
        for states in self.content.values():
            states[to] = EMPTY if op.source is None else states[self.slot[op.source]]

    def slots_to_come(self) -> dict[int, int]:
        """What registers hold once everything recorded has been carried out."""
        slot, free = dict(self.slot), set(self.free)
        for entry in self.queue:
            ops = sorted(entry.ops, key=lambda op: op.phase) if isinstance(entry, Packet) else ()
            for op in ops:
                if op.phase == MOVE:
                    slot[op.registers[0]] = slot.pop(op.registers[1])
                elif op.phase == RELEASE:
                    free.add(slot.pop(op.registers[0]))
                elif op.phase == CLAIM:
                    slot[op.registers[0]] = min(free)
                    free.remove(min(free))
        return slot

    # What the device does at once.

    def let_go(self, register: int) -> None:
        slot = self.slot.pop(register)
        del self.label[register]
        self.free.add(slot)
        self.released += 1
        self.lose(slot)

    def lose(self, slot: int) -> None:
        """What a slot holds is nobody's any more."""
        for part, states in self.content.items():
            if states[slot] is not None:
                states[slot] = None
                self.stirred.add((part, slot))

    def take(self, register: int) -> int:
        """Fills an empty register with the lowest free slot."""
        assert register not in self.slot
        slot = min(self.free)
        self.free.remove(slot)
        self.slot[register], self.label[register] = slot, 0
        self.claimed += 1
        return slot

    def agree(self) -> None:
        """The host says what the device has carried out: after a plan or an accept, which change both at once."""
        assert not self.pending
        self.held, self.known, self.free_count = set(self.slot), dict(self.label), len(self.free)

    def held_marks(self) -> dict[int, bool]:
        return dict.fromkeys(self.held, True)

    def copy_content(self, to: int, of: int, parts: Iterable[str]) -> None:
        for part in parts:
            self.content[part][to] = self.content[part][of]
