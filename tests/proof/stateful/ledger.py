"""Models what slots, registers, rows, holders and pages hold, in dictionaries and lists, without rules of tracking.

There are two views of the registers. The host's view (`held`, `known`, `free_count`) includes all recorded changes. The
device's view (`slot`, `label`, `free`, `columns`, `content`) has only those that a packet has carried out. `submit`
sends all recorded changes that do not wait for a forward; if none waits, both views are then equal.

The content of a slot is a text: the tokens that its state stands for.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.proof.stateful.cache import Lease, Talk
    from tests.proof.stateful.settings import Settings

Text = tuple[int, ...]  # tokens
EMPTY: Text = ()
FILLED: Text = (-2,)  # a canary of debug mode, which the forward must overwrite

MOVE, RELEASE, CLAIM, WRITE, DATA = range(5)  # phases of a packet, in the order in which they run
State = Text | None  # content of a plane in a slot; None: undefined
COLUMNS = ("tracked", "source")
OF_TAILS = ("pending", "newest")  # columns that only rows with tails have


class Op(NamedTuple):
    """One recorded change.

    registers: the registers that it changes; -row for the memory of a row. source: the register that it reads, or -row.
    cell: the cell that it writes, as (column, row or register, place in the row's page table). value: the new number.
    """

    phase: int
    registers: tuple[int, ...] = ()
    source: int | None = None
    cell: tuple[str, int, int] | None = None
    value: int = 0


@dataclass(eq=False)
class Packet:
    """Changes of one upload. phase: register -> phase of its last change. read: registers that copies read."""

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
    """A callback between two packets of the queue.

    run: called when the packets before it were carried out. forget: called instead if the queue is discarded. pages: KV
    pages that it fills.
    """

    run: Callable[[], None]
    forget: Callable[[], None] | None = None
    pages: Collection[int] = ()


INT32_MAX = 2**31 - 1


@dataclass(eq=False)
class Row:
    """One request in a row. The next request in the same row is another object.

    text: all tokens so far. prompt: tokens of the prompt. given: the part of the prompt that the manager knows; a fork
    shares only its first tokens. longest: largest length of a mark, which is that of the prompt if the cache knows it.
    until: length of the prompt as marks know it, 0 if they do not. taste: seed of the tokens after the prompt. coming:
    (length, kind) of wanted marks. floor: length of the last kept mark. end: (length, kind, wanted length) of a mark
    whose state is still in the live slot. marks: (snapshot, kind) of kept marks, ascending. pending: number of real
    tokens in the tail that the state lacks. newest: number of tokens that the last step has put into the tail.
    """

    number: int
    generation: int
    name: object
    coming: list[tuple[int, str]] = field(default_factory=list)
    floor: int = 0
    end: tuple[int, str, int] | None = None
    marks: "list[tuple[Kept, str]]" = field(default_factory=list)
    tracked: int = 0
    source: int = 0  # register that the next step reads instead of live
    pending: int = 0
    newest: int = 0
    confirmed: int = 0
    unsettled: int = 0
    finished: bool = False
    pages: list[int] = field(default_factory=list)
    pin: int = 0  # register that the first step reads; it is kept until then
    text: Text = ()
    prompt: Text | None = None
    given: Text = ()
    longest: int = INT32_MAX
    until: int = 0
    taste: int = 0
    lease: "Lease | None" = None
    talk: "Talk | None" = None
    tail: Text = EMPTY  # tokens that are in the memory of the row after all planned steps

    @property
    def live(self) -> int:
        return 3 * self.number


@dataclass(eq=False)
class Kept:
    """A snapshot in a holder. owner: "snapshot", "cached", "session" or "mark"."""

    register: int
    length: int
    text: Text
    pages: tuple[int, ...] = ()
    owner: str = "snapshot"
    dropped: bool = False


class Ledger:
    """Slots, registers, rows, holders and pages on both sides, host and device.

    Registers are numbered as on the device: row r has 3r, 3r + 1 and 3r + 2; holders follow.
    """

    def __init__(self, settings: "Settings", generations: Sequence[int]) -> None:
        self.settings = settings
        self.row_count, self.capacity = settings.row_count, settings.slots
        self.first_holder = 3 * (self.row_count + 1)
        self.register_count = self.first_holder + settings.holder_count
        self.generation = list(generations)  # row -> generation
        self.columns = {name: [0] * (self.row_count + 1) for name in COLUMNS + OF_TAILS}
        self.packets = self.moving = 0  # moving: packets that carry data
        self.copied = self.zeroed = 0  # bytes
        self.tails: list[State] = [EMPTY, *[None] * self.row_count]  # row -> tokens in its memory
        self.rings: list[tuple[State, ...]] = [()] * (self.row_count + 1)  # row -> content of its tail; (): undefined
        self.published = self.dropped = self.refused = self.missed = 0
        self.content: dict[str, list[State]] = {part: [EMPTY, *[None] * self.capacity] for part in settings.parts}
        self.stirred: set[tuple[str, int]] = set()  # (plane, slot) that lost their content since the last `look`
        self.before_packet: Callable[[], None] = lambda: None
        # Chooses a holder among those that became free at the same time.
        self.choose: Callable[[set[int], int], int] = lambda free, length: min(free)
        self.clear()

    def clear(self) -> None:
        """Makes every slot free and every register empty."""
        self.slot: dict[int, int] = {}
        self.label: dict[int, int] = {}
        self.free = set(range(1, self.capacity + 1))
        self.claimed = self.released = self.degraded = 0
        self.page_cells = [[0] * self.settings.pages_per_row for _ in range(self.row_count + 1)]
        for name in self.columns:
            self.columns[name] = [0] * (self.row_count + 1)
        for slot in self.free:
            self.lose(slot)
        self.held: set[int] = set()
        self.known: dict[int, int] = {}
        self.free_count = self.capacity
        self.by_id: list[int] = []  # slots that the caller holds by id
        self.discard()
        self.rows: dict[int, Row] = {}
        self.kept: dict[int, Kept] = {}
        holders = range(self.first_holder, self.register_count)
        self.free_holders = [{register} for register in holders]  # sets that became free together, oldest first
        self.pins: Counter[int] = Counter()
        self.page_users: Counter[int] = Counter()

    def discard(self) -> None:
        """Forgets all recorded changes."""
        for entry in getattr(self, "queue", ()):
            if isinstance(entry, Later) and entry.forget:
                entry.forget()
        self.queue: list[Packet | Later] = []
        self.lift()

    # The fence

    def fence(self, slots: Iterable[int], unwritten: Iterable[int] = ()) -> None:
        """Fences the registers whose slots a forward uses that has not been launched.

        unwritten: registers whose states this forward stores.
        """
        self.unwritten = set(unwritten)
        named = set(slots) - {0}
        self.fenced = {register for register, slot in self.slot.items() if slot in named}
        self.fencing = True

    def lift(self) -> None:
        self.fenced: set[int] = set()
        self.fencing = False
        self.unwritten: set[int] = set()
        # the first change that waits for the forward, as (entry of the queue, change in the entry)
        self.waits: tuple[int, int] | None = None

    # Recording. In a packet, phases run in a fixed order. A change that would run too early begins another packet.

    def _last(self) -> Packet:
        if not self.queue or isinstance(self.queue[-1], Later):
            self.queue.append(Packet())
        last = self.queue[-1]
        assert isinstance(last, Packet)
        return last

    def _note(self, ops: Sequence[Op]) -> None:
        """Records changes of one phase in the last packet, or in a new one if they would run too early in the last.

        Moves that would run too early run with the claims, if that is not too early.
        """
        packet = self._last()
        named = {register for op in ops for register in op.registers}
        sources = {op.source for op in ops if op.phase == DATA and op.source is not None}
        phase = DATA if ops[0].phase == WRITE else ops[0].phase
        newest = max(packet.phase.get(register, -1) for register in named)
        if packet.read & named or any(packet.phase.get(source) == DATA for source in sources):
            newest = DATA
        if phase == MOVE <= newest < CLAIM:
            ops = [op._replace(phase=CLAIM) for op in ops]
        elif newest >= phase:
            self.queue.append(packet := Packet())
        if self.waits is None and self.fenced & (named | sources):
            self.waits = len(self.queue) - 1, len(packet.ops)
        for op in ops:
            packet.add(op)

    def record_moves(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Records moves; pairs: (target, source) registers."""
        for target, source in pairs:
            assert target not in self.held and source in self.held
        if pairs:
            self._note([Op(MOVE, (target, source), source) for target, source in pairs])
        for target, source in pairs:
            self.held ^= {target, source}
            self.known[target] = self.known.pop(source)

    def record_releases(self, registers: Iterable[int]) -> None:
        """Records releases; registers without a slot are skipped."""
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
        """Records a write to a cell of a column. at: place in the row, for the page table."""
        self._last().add(Op(WRITE, cell=(column, row, at), value=value))

    def record_labels(self, lengths: Sequence[tuple[int, int]]) -> None:
        """Records labels; lengths: (register, number of tokens that its state stands for)."""
        if lengths:
            self._note([Op(WRITE, (register,), cell=("label", register, 0), value=n) for register, n in lengths])
        self.known.update(lengths)

    def record_zeros(self, registers: Sequence[int]) -> None:
        if registers:
            self._note([Op(DATA, (register,)) for register in registers])

    def record_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Records copies of states with their labels; pairs: (target, source) registers."""
        if pairs:
            self._note([Op(DATA, (target,), source) for target, source in pairs])
        for target, source in pairs:
            self.known[target] = self.known[source]

    def record_rows(self, rows: Sequence[int], of: Sequence[int]) -> None:
        """Records that the memory of rows gets its initial pattern, or is copied from the rows `of`."""
        if self.settings.tails and rows:
            self._note([Op(DATA, (-row,), -of[at] if of else None) for at, row in enumerate(rows)])

    def named(self, register: int) -> bool:
        """Says whether a recorded change names or reads a register, or the open forward will store its state."""
        return register in self.unwritten or any(
            isinstance(entry, Packet) and entry.names(register) for entry in self.queue
        )

    # Sending

    def submit(self) -> None:
        """Sends the recorded changes that wait for no forward."""
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

    def submit_batch(self) -> tuple[bool, bool]:
        """Sends all changes, and a batch in the last packet. Returns whether this packet has changes, and data."""
        assert self.waits is None
        last = self._last()
        due, self.queue = self.queue, []
        for entry in due:
            self.carry_out(entry)
        self.require_same()
        return bool(last.ops), any(op.phase == DATA for op in last.ops)

    def require_same(self) -> None:
        """Asserts that both views are equal. Call this when no change waits."""
        assert set(self.slot) == self.held and len(self.free) == self.free_count and self.label == self.known

    def then(self, later: Later, reads: Iterable[int] = (), behind: bool = False) -> None:
        """Runs a callback after all recorded changes.

        It runs now, unless a change waits for the forward, or the forward stores the state of a register in `reads`.
        behind: it also waits if the forward only uses the slot of such a register.
        """
        fenced = self.unwritten | self.fenced if behind else self.unwritten
        if self.waits is None and fenced & set(reads):
            self.waits = len(self.queue), 0
        if self.waits is None:
            self.submit()
            later.run()
        else:
            self.queue.append(later)

    def carry_out(self, entry: "Packet | Later") -> None:
        """Carries out one packet in the order of its phases, or runs a callback."""
        self.before_packet()
        if isinstance(entry, Later):
            entry.run()
            return
        self.packets += bool(entry.ops)
        self.moving += any(op.phase == DATA for op in entry.ops)
        for op in sorted(entry.ops, key=lambda op: op.phase):
            self._do(op)

    def _do(self, op: Op) -> None:
        if len(op.registers) == 2:  # a move
            (target, source) = op.registers
            self.slot[target], self.label[target] = self.slot.pop(source), self.label.pop(source)
        elif op.phase == RELEASE:
            self.let_go(*op.registers)
        elif op.phase == CLAIM:
            self.take(*op.registers)
        elif op.phase == WRITE:
            column, row, at = op.cell
            if column == "label":
                self.label[row] = op.value
            elif column == "page":
                self.page_cells[row][at] = op.value
            else:
                self.columns[column][row] = op.value
        elif op.registers[0] < 0:
            self.tails[-op.registers[0]] = self.tails[-op.source] if op.source else EMPTY
            fresh: tuple[State, ...] = (EMPTY,) * self.settings.ring
            self.rings[-op.registers[0]] = self.rings[-op.source] if op.source else fresh
        elif op.source is None:
            self.zeroed += self.settings.slot_bytes()
            for states in self.content.values():
                states[self.slot[op.registers[0]]] = EMPTY
        else:
            (target,) = op.registers
            self.label[target] = self.label[op.source]
            self.copied += self.settings.slot_bytes()
            self.copy_content(self.slot[target], self.slot[op.source], self.content)

    def slots_to_come(self) -> dict[int, int]:
        """Returns register -> slot after all recorded changes."""
        slot, free = dict(self.slot), set(self.free)
        for entry in self.queue:
            ops = sorted(entry.ops, key=lambda op: op.phase) if isinstance(entry, Packet) else ()
            for op in ops:
                if len(op.registers) == 2:
                    slot[op.registers[0]] = slot.pop(op.registers[1])
                elif op.phase == RELEASE:
                    free.add(slot.pop(op.registers[0]))
                elif op.phase == CLAIM:
                    slot[op.registers[0]] = min(free)
                    free.remove(min(free))
        return slot

    # Changes that the device makes at once

    def let_go(self, register: int) -> None:
        slot = self.slot.pop(register)
        del self.label[register]
        self.free.add(slot)
        self.released += 1
        self.lose(slot)

    def lose(self, slot: int) -> None:
        """Makes the content of a slot undefined."""
        for part, states in self.content.items():
            if states[slot] is not None:
                states[slot] = None
                self.stirred.add((part, slot))

    def take(self, register: int) -> int:
        """Fills an empty register with the lowest free slot, and returns the slot."""
        assert register not in self.slot
        slot = min(self.free)
        self.free.remove(slot)
        self.slot[register], self.label[register] = slot, 0
        self.claimed += 1
        return slot

    @property
    def claimable(self) -> int:
        """Number of slots that can be claimed by id: those whose release waits for a forward cannot."""
        if not self.waits:
            return self.free_count
        at, sent = self.waits
        waiting = [op for entry in self.queue[at:] if isinstance(entry, Packet) for op in entry.ops][sent:]
        return max(0, self.free_count - sum(op.phase == RELEASE for op in waiting))

    def claim_by_id(self, n: int) -> list[int]:
        """Claims the n lowest free slots, and zeroes them. Returns their ids."""
        if not n:
            return []
        self.submit()
        slots = sorted(self.free)[:n]
        self.free -= set(slots)
        self.free_count -= n
        self.claimed += n
        for states in self.content.values():
            for slot in slots:
                states[slot] = EMPTY
        self.by_id += slots
        return slots

    def release_by_id(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.by_id.remove(slot)
            self.free.add(slot)
            self.lose(slot)
        self.free_count += len(slots)
        self.released += len(slots)

    def agree(self) -> None:
        """Makes the host's view equal to the device's, after a plan or an accept, which change both."""
        assert not self.queue
        self.held, self.known, self.free_count = set(self.slot), dict(self.label), len(self.free)

    def copy_content(self, to: int, of: int, parts: Iterable[str]) -> None:
        for part in parts:
            self.content[part][to] = self.content[part][of]

    # Pages: the lowest free page is taken first. A page without users is free.

    @property
    def free_pages(self) -> int:
        return self.settings.pages - sum(users > 0 for users in self.page_users.values())

    def pages_for(self, length: int) -> int:
        return -(-length // self.settings.page_size) if self.settings.pages else 0

    def too_wide(self, length: int) -> bool:
        return self.pages_for(length) > self.settings.pages_per_row

    def room(self, row: Row) -> int:
        """Returns the number of tokens that the row has pages for."""
        return len(row.pages) * self.settings.page_size if self.settings.pages else INT32_MAX

    def add_pages(self, row: Row, n: int) -> None:
        fresh = [page for page in range(1, self.settings.pages + 1) if not self.page_users[page]][:n]
        assert len(fresh) == n
        self.append_pages(row, fresh)

    def append_pages(self, row: Row, pages: Sequence[int]) -> None:
        self.page_users.update(pages)
        for page in pages:
            self.record_write("page", row.number, page, len(row.pages))
            row.pages.append(page)

    def extend(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        for row, length in zip(rows, lengths, strict=True):
            self.add_pages(row, max(0, self.pages_for(length) - len(row.pages)))

    # Rows

    @property
    def free_rows(self) -> list[int]:
        return [number for number in range(1, self.row_count + 1) if number not in self.rows]

    def lanes(self, row: Row) -> list[int]:
        return [row.live + 1 + lane for lane in range(self.settings.lanes)]

    def length(self, row: Row) -> int:
        return self.in_state(row) + row.pending

    def in_state(self, row: Row) -> int:
        """Returns the label of the state that the row's next step reads."""
        return self.known[row.source or row.live]

    def arrive(self, rows: Sequence[Row], texts: Sequence[Text]) -> None:
        """Notes that the states of these texts were written to the live slots from outside."""
        for row, text in zip(rows, texts, strict=True):
            row.confirmed, row.text = len(text), text
        self.record_labels([(row.live, row.confirmed) for row in rows])

    # Snapshots

    def floor(self, length: int) -> int:
        return length - length % self.settings.page_size

    def answer(self, row: Row, bound: int, ended: bool) -> int:
        """Returns the register of the state to publish; 0 for none.

        It has the largest label in 1..bound that fills whole pages. Among registers with this label, live comes first.
        """
        registers = [*([row.live] if ended else []), *self.lanes(row)]
        real = [one for one in registers if 1 <= self.known.get(one, 0) <= bound]
        whole = [one for one in real if self.known[one] % self.settings.unit == 0]
        return max(whole, key=lambda one: self.known[one], default=0)

    def marked(self, row: Row, bound: int, ended: bool) -> Kept | None:
        """Returns the longest kept mark of a row; None if a register of the row has a longer state to publish."""
        there = max((kept for kept, _ in row.marks if kept.length <= bound), key=lambda kept: kept.length, default=None)
        answer = self.answer(row, bound, ended)
        return there if there and not (answer and self.known[answer] > there.length) else None

    def publishable(self, rows: Sequence[Row], bounds: Sequence[int], ended: bool) -> list[bool]:
        """Returns for each row whether it publishes the state of a register, not a mark. This needs a free holder."""
        left, gets = sum(map(len, self.free_holders)), []
        for row, bound in zip(rows, bounds, strict=True):
            mine = bool(self.answer(row, bound, ended)) and not self.marked(row, bound, ended)
            gets.append(mine and left > 0)
            left -= gets[-1]
        return gets

    def publish(
        self, rows: Sequence[Row], bounds: Sequence[int], registers: Sequence[int], ended: bool
    ) -> list[Kept | None]:
        """Publishes rows. Returns a snapshot or None for each. registers: holders that memstate chose."""
        marks = [self.marked(row, bound, ended) for row, bound in zip(rows, bounds, strict=True)]
        unused, kept, pairs = list(registers), [], []
        for row, bound, gets, mark in zip(rows, bounds, self.publishable(rows, bounds, ended), marks, strict=True):
            if mark:
                unused.remove(mark.register)
                row.marks = [one for one in row.marks if one[0] is not mark]
                mark.owner, mark.pages = "snapshot", tuple(row.pages[: mark.length // self.settings.page_size])
                self.page_users.update(mark.pages)
                kept.append(mark)
                continue
            answer = self.answer(row, bound, ended)
            self.refused += bool(answer) and not gets
            if not gets:
                kept.append(None)
                continue
            length = self.known[answer]
            assert length <= row.confirmed and length % self.settings.unit == 0
            pages = tuple(row.pages[: length // self.settings.page_size])
            self.page_users.update(pages)
            snapshot = self.hold(unused.pop(0), length, row.text[:length], pages)
            pairs.append((snapshot.register, answer))
            kept.append(snapshot)
        assert not unused
        self.record_moves(pairs)
        self.published += len(pairs)
        return kept

    def next_holder(self, length: int) -> int:
        """Returns the holder that memstate will choose for a snapshot of `length` tokens."""
        return self.choose(self.free_holders[0], length)

    def hold(
        self, register: int, length: int, text: Text, pages: tuple[int, ...] = (), owner: str = "snapshot"
    ) -> Kept:
        """Uses a holder for a snapshot. It must be one of the holders that became free first."""
        assert register in self.free_holders[0], f"holder {register}, but {self.free_holders} are free, oldest first"
        self.free_holders[0].remove(register)
        self.free_holders = [group for group in self.free_holders if group]
        self.kept[register] = Kept(register, length, text, pages, owner)
        return self.kept[register]

    def drop(self, kept: Sequence[Kept]) -> None:
        gone = []
        for one in kept:
            one.dropped = True
            if not self.pins[one.register]:
                self.free_holders.append({one.register})
                gone.append(one)
        self._forget(gone)
        self.dropped += len(kept)

    def _forget(self, gone: Sequence[Kept]) -> None:
        self.record_releases([one.register for one in gone])
        for one in gone:
            del self.kept[one.register]
            self.page_users -= Counter(one.pages)

    @property
    def evictable(self) -> int:
        """Number of snapshots that the caller can drop or the cache can evict."""
        idle = [one for one in self.kept.values() if not one.dropped and not self.pins[one.register]]
        return sum(one.owner not in ("session", "mark") for one in idle)

    def pin(self, row: Row, register: int) -> None:
        self.pins[register] += 1
        row.pin = register

    def unpin(self, rows: Sequence[Row]) -> None:
        """Unpins states that first steps have read or will never read. Releases dropped states without pins."""
        together: set[int] = set()
        for row in rows:
            register, row.pin = row.pin, 0
            if register:
                self.pins[register] -= 1
                one = self.kept[register]
                if not self.pins[register] and one.dropped:
                    self._forget([one])
                    together.add(register)
        if together:
            self.free_holders.append(together)
