"""Slots, registers, columns and the packet of recorded changes, as dictionaries and lists. Knows no rule of tracking.

Two views: what the host says holds once everything recorded has been carried out (`held`, `known`, `free_count`), and
what the device has carried out (`slot`, `label`, `free`, `columns`, `content`). `submit` takes one to the other.
"""

from collections.abc import Callable, Iterable, Sequence

from tests.stateful.history import EMPTY, History
from tests.stateful.settings import Settings

MOVE, RELEASE, CLAIM, DATA = range(4)  # phases of a packet, in the order they run; writes of cells come before the data
State = History | None  # of a plane in a slot; None: nobody may depend on it
COLUMNS = ("tracked", "want", "source", "generation")


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
        self.before_submit: Callable[[], None] = lambda: None
        self.clear()

    def clear(self) -> None:
        """Every slot free and every register empty."""
        self.slot: dict[int, int] = {}
        self.label: dict[int, int] = {}
        self.free = set(range(1, self.capacity + 1))
        self.claimed = self.released = self.degraded = 0
        self.page_cells = [[0] * self.settings.pages_per_row for _ in range(self.row_count + 1)]
        for name in ("tracked", "want", "source"):
            self.columns[name] = [0] * (self.row_count + 1)
        for slot in self.free:
            self.lose(slot)
        self.held: set[int] = set()
        self.known: dict[int, int] = {}
        self.free_count = self.capacity
        self.discard()

    def discard(self) -> None:
        """Forgets what is recorded."""
        self.moves: list[tuple[int, int]] = []
        self.releases: list[int] = []
        self.claims: list[int] = []
        self.data: list[tuple[int, int | None]] = []
        self.writes: dict[tuple[str, int, int], int] = {}
        self.phase: dict[int, int] = {}  # the last phase that names a register
        self.read_by_copy: set[int] = set()

    # Recording: an operation that the order of phases would carry out too early sends the packet first.

    def _in_order(self, registers: Iterable[int], phase: int) -> None:
        registers = list(registers)
        late = any(self.phase.get(register, -1) >= phase for register in registers)
        if late or (phase != DATA and self.read_by_copy & set(registers)):
            self.submit()
        for register in registers:
            self.phase[register] = phase

    def record_moves(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(target, source) each."""
        if pairs:
            self._in_order([register for pair in pairs for register in pair], MOVE)
        for target, source in pairs:
            assert target not in self.held and source in self.held
            self.held ^= {target, source}
            self.known[target] = self.known.pop(source)
            self.moves.append((target, source))

    def record_releases(self, registers: Iterable[int]) -> None:
        """Those that hold nothing are skipped."""
        registers = [register for register in registers if register in self.held]
        if registers:
            self._in_order(registers, RELEASE)
        for register in registers:
            self.held.remove(register)
            del self.known[register]
            self.free_count += 1
            self.releases.append(register)

    def record_claims(self, registers: Sequence[int]) -> None:
        if registers:
            self._in_order(registers, CLAIM)
        for register in registers:
            assert register not in self.held
            self.held.add(register)
            self.known[register] = 0
            self.free_count -= 1
            self.claims.append(register)
        assert self.free_count >= 0

    def record_write(self, column: str, row: int, value: int, at: int = 0) -> None:
        """A cell of a column; `at`: which page of the row."""
        self.writes[column, row, at] = value

    def record_zeros(self, registers: Sequence[int]) -> None:
        if registers:
            if self.read_by_copy & set(registers):
                self.submit()
            self._in_order(registers, DATA)
        self.data += [(register, None) for register in registers]

    def record_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(target, source) each; a copy stands for what its source stands for."""
        if pairs:
            targets, sources = [to for to, _ in pairs], {of for _, of in pairs}
            if self.read_by_copy & set(targets) or any(self.phase.get(source) == DATA for source in sources):
                self.submit()
            self._in_order(targets, DATA)
            self.read_by_copy |= sources
        for target, source in pairs:
            self.known[target] = self.known[source]
            self.data.append((target, source))

    def named(self, register: int) -> bool:
        """Whether something is recorded that changes a register or reads its state."""
        return register in self.phase or register in self.read_by_copy

    @property
    def pending(self) -> bool:
        return bool(self.moves or self.releases or self.claims or self.data or self.writes)

    def submit(self) -> None:
        """Carries out what is recorded: moves, releases, claims, writes, then zeros and copies."""
        pending = self.pending
        self.before_submit()
        self.packets += pending
        for target, source in self.moves:
            self.slot[target], self.label[target] = self.slot.pop(source), self.label.pop(source)
        for register in self.releases:
            self.let_go(register)
        for register in self.claims:
            self.take(register)
        for (column, row, at), value in self.writes.items():
            if column == "label":
                self.label[row] = value
            elif column == "page":
                self.page_cells[row][at] = value
            else:
                self.columns[column][row] = value
        for target, origin in self.data:
            to = self.slot[target]
            if origin is None:
                self.zeroed += self.settings.slot_bytes()
            else:
                self.label[target] = self.label[origin]
                self.copied += self.settings.slot_bytes()
            for states in self.content.values():
                states[to] = EMPTY if origin is None else states[self.slot[origin]]
        self.discard()
        assert set(self.slot) == self.held and len(self.free) == self.free_count and self.label == self.known

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
        """The host says what the device has carried out: after a plan or a settle, which change both at once."""
        assert not self.pending
        self.held, self.known, self.free_count = set(self.slot), dict(self.label), len(self.free)

    def held_marks(self) -> dict[int, bool]:
        return dict.fromkeys(self.held, True)

    def copy_content(self, to: int, of: int, parts: Iterable[str]) -> None:
        for part in parts:
            self.content[part][to] = self.content[part][of]
