"""The command buffer: ownership changes recorded on the host, submitted together. Knows no plane.

One submit is one asynchronous upload, one ownership launch and, where bytes are due, one data launch; the batch of the
next plan travels along. Phases run in the order move, release, claim, write, data; recording an operation on a register
that this order would carry out too early submits first, so the order of record is always the order of effect.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol
from weakref import WeakMethod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from memstate.errors import EmptyRegister, InvalidArgument, OutOfSlots, RegisterInUse
from memstate.kernels.tables import HEADER_INTS, REGISTERS_PER_ROW, ZERO_SOURCE, Section
from memstate.ledger import Ledger
from memstate.registers import Ints, Longs, RegisterFile
from memstate.upload import UploadRing

PAIRS = (Section.MOVES, Section.WRITES, Section.DATA, Section.BATCH)
MOVES, RELEASES, CLAIMS, DATA = (
    int(phase) for phase in (Section.MOVES, Section.RELEASES, Section.CLAIMS, Section.DATA)
)  # as plain numbers: an enumeration costs a microsecond a look
FEW = 8  # registers that a loop looks at sooner than numpy
Indices = Sequence[int] | NDArray[np.integer]


class DataMover(Protocol):
    """Carries out the data section of a packet over the planes that the caller has."""

    def __call__(self, slots: Tensor, packet: Tensor, *, copied: int, zeroed: int) -> None: ...


class CommandBuffer:
    """Records moves, releases, claims, cell writes, zeros and copies on registers.

    run_data: moves the bytes (a pool does); None for a register file without planes.
    """

    def __init__(self, registers: RegisterFile, run_data: DataMover | None = None) -> None:
        self.registers = registers
        self.ring = UploadRing(registers.backend)
        self.submits = 0
        self.ledger: Ledger | None = None
        registers.allocator.submit_before_use(self.submit)
        self._run_data = run_data
        self._first: list[WeakMethod[Callable[[], None]]] = []
        self._latest = np.full(registers.count, -1, np.int8)  # the last phase that names a register in this buffer
        self._reads = np.zeros(registers.count, bool)  # registers that a copy of this buffer reads
        self._writer = np.full(registers.cells.numel(), -1, np.int32)  # which write of this buffer named a cell last
        self._writes = 0
        self._overwrites = False
        self._columns: dict[int, list[tuple[Longs, Longs]]] = {}
        self._clear()

    def _clear(self) -> None:
        self._columns = {section: [] for section in Section}
        self._latest.fill(-1)
        self._reads.fill(False)
        self._writer.fill(-1)
        self._writes = 0
        self._overwrites = False

    def before_submit(self, call: Callable[[], None]) -> None:
        """Makes `call`, a bound method, come before whatever a submit sends: work that belongs to the step submitted
        last. Held weakly, as whoever has it has this buffer too; in the order given.
        """
        self._first.append(WeakMethod(call))

    def prepare(self) -> None:
        """Makes the calls that come before a submit, without one: then every state is where its register says. Syncs:
        no.
        """
        for method in self._first:
            if call := method():
                call()

    def named(self, registers: Indices) -> bool:
        """Whether something is recorded and not submitted that changes one of these registers, or reads its state."""
        regs = self._known(registers, "named")
        return bool((self._latest[regs] >= 0).any() or self._reads[regs].any())

    @property
    def pending(self) -> bool:
        """Whether something is recorded and not submitted."""
        return any(self._columns.values())

    def move(self, targets: Indices, sources: Indices) -> None:
        """Moves slot and label from each source register to its target; the sources read (0, 0) after.

        Raises: RegisterInUse, EmptyRegister, InvalidArgument; nothing recorded then.
        """
        to, of = self._distinct(targets, "move"), self._distinct(sources, "move")
        if len(to) != len(of):
            raise InvalidArgument(f"move: {len(to)} targets for {len(of)} sources")
        if not to.size:
            return
        if _overlap(to, of):
            raise InvalidArgument("move: a register is target and source at once; record the moves one after the other")
        self._require_empty("move", to)
        self._require_held("move", of)
        self._order(np.concatenate([to, of]), MOVES)
        r = self.registers
        r.held[to], r.labels[to] = True, r.labels[of]
        r.held[of], r.labels[of] = False, 0
        self._columns[MOVES].append((to, of))
        self._note("move", to, of)

    def release(self, registers: Indices) -> int:
        """Empties registers and frees their slots; empty ones are skipped. Returns the number of slots that become
        free.

        Raises: InvalidArgument; nothing recorded then.
        """
        regs = self._distinct(registers, "release")
        regs = regs[self.registers.held[regs]]
        if not regs.size:
            return 0
        self._order(regs, RELEASES)
        self._note("release", regs)
        self.registers.held[regs] = False
        self.registers.labels[regs] = 0
        self.registers.allocator.free += len(regs)
        self._columns[RELEASES].append((regs, regs))
        return len(regs)

    def claim(self, registers: Indices) -> None:
        """Fills empty registers with the lowest free slots, in the order given.

        Raises: OutOfSlots, RegisterInUse, InvalidArgument; nothing recorded then.
        """
        regs = self._distinct(registers, "claim")
        self._require_empty("claim", regs)
        self.registers.allocator.confirm(len(regs))
        if len(regs) > self.registers.allocator.free:
            raise OutOfSlots(len(regs), self.registers.allocator.free)
        if not regs.size:
            return
        self._order(regs, CLAIMS)
        self.registers.held[regs] = True
        self.registers.labels[regs] = 0
        self.registers.allocator.free -= len(regs)
        self._columns[CLAIMS].append((regs, regs))
        self._note("claim", regs)

    def write(self, addresses: Indices, values: Indices) -> None:
        """Sets cells of the register file's columns; the last value recorded for a cell wins."""
        cells, content = np.asarray(addresses, np.int64), np.asarray(values, np.int64)
        if content.shape not in ((), cells.shape):
            raise InvalidArgument(f"write: {content.size} values for {cells.size} cells")
        content = np.broadcast_to(content, cells.shape)
        if not cells.size:
            return
        size = self.registers.cells.numel()
        if cells.min() < 0 or cells.max() >= size or abs(content).max() > 2**31 - 1:
            raise InvalidArgument(
                f"write: cells {cells.min()}..{cells.max()} of {size}, values {content.tolist()}: expected int32"
            )
        serial = np.arange(self._writes, self._writes + cells.size)
        before = (self._writer[cells] >= 0).any()
        self._writer[cells] = serial
        self._writes += cells.size
        self._overwrites |= bool(before or (self._writer[cells] != serial).any())
        self._columns[Section.WRITES].append((cells, content))

    def zero(self, registers: Indices) -> None:
        """Zeroes the states in registers. Raises: EmptyRegister, InvalidArgument; nothing recorded then."""
        self._data(self._distinct(registers, "zero"), None)

    def copy(self, targets: Indices, sources: Indices) -> None:
        """Copies states, and what they stand for, between registers. Raises: EmptyRegister, InvalidArgument; nothing
        recorded then.
        """
        of, to = self._known(sources, "copy"), self._distinct(targets, "copy")
        if len(to) != len(of):
            raise InvalidArgument(f"copy: {len(to)} targets for {len(of)} sources")
        if _overlap(to, of):
            raise InvalidArgument(
                "copy: a register is target and source at once; record the copies one after the other"
            )
        self._require_held("copy", of)
        self._data(to, of)

    def _data(self, to: Longs, of: Longs | None) -> None:
        self._require_held("zero" if of is None else "copy", to)
        if not to.size:
            return
        if self._reads[to].any() or (of is not None and (self._latest[of] == DATA).any()):
            self.submit()
        self._order(to, DATA)
        if of is not None:
            self._reads[of] = True
            self.registers.labels[to] = self.registers.labels[of]
        self._columns[Section.DATA].append((to, np.full(len(to), ZERO_SOURCE, np.int64) if of is None else of))

    def _note(self, what: str, registers: Longs, sources: Longs | None = None) -> None:
        if self.ledger is not None:
            self.ledger.note(what, self.submits + 1, registers.tolist(), None if sources is None else sources.tolist())

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """Notes in the ledger, where there is one, what a launch other than a packet's changes inside."""
        before = self.registers.held.copy() if self.ledger is not None else None
        yield
        if self.ledger is not None and before is not None:
            self.ledger.look(what, self.submits, before)

    def _order(self, regs: Longs, phase: int) -> None:
        """Submits what stands if carrying out `phase` together with it would turn the order of record around."""
        if regs.size <= FEW:
            late = any(self._latest[r] >= phase or (phase < DATA and self._reads[r]) for r in regs.tolist())
        else:
            late = bool((self._latest[regs] >= phase).any() or (phase < DATA and self._reads[regs].any()))
        if late:
            self.submit()
        self._latest[regs] = phase

    def submit(self, batch: tuple[Ints, Ints] | None = None) -> tuple[Tensor, Tensor] | None:
        """Sends everything recorded: one upload, then at most two launches; nothing where nothing is recorded.

        batch: rows and tokens of the next plan, int32 `n`, which travel in the same upload; returned as device tensors
        valid until the next submit. Syncs: no.
        """
        recorded = self.pending
        self.prepare()
        if not recorded and batch is None:
            return None
        if batch is not None:
            self._columns[Section.BATCH].append((batch[0].astype(np.int64), batch[1].astype(np.int64)))
        packet, spans = self._pack()
        sent = self.ring.send(packet)
        data = [int(source) for _, sources in self._columns[Section.DATA] for source in sources]
        self._clear()
        if recorded:
            self.submits += 1
            self.registers.ownership(sent)
            if data and self._run_data:
                zeroed = data.count(ZERO_SOURCE)
                self._run_data(self.registers.table.slots, sent, copied=len(data) - zeroed, zeroed=zeroed)
        if batch is None:
            return None
        start, size = spans[Section.BATCH]
        padded = (size + 3) // 4 * 4
        return sent[start : start + size], sent[start + padded : start + padded + size]

    def discard(self) -> None:
        """Forgets what is recorded: only for a reset, which makes everything free on both sides."""
        self._clear()

    def _pack(self) -> tuple[Ints, dict[int, tuple[int, int]]]:
        """The packet of `memstate.kernels.tables`: header, one or two columns a section, each padded to 16 bytes."""
        header = np.zeros(HEADER_INTS, np.int32)
        parts: list[Ints] = [header]
        spans = {}
        at = HEADER_INTS
        for section, entries in self._columns.items():
            first, second = (
                (np.concatenate(column) for column in zip(*entries, strict=True))
                if entries
                else (np.zeros(0, int),) * 2
            )
            if section is Section.WRITES and self._overwrites:
                _, newest = np.unique(first[::-1], return_index=True)
                first, second = first[::-1][newest], second[::-1][newest]
            size = len(first)
            header[section], header[8 + section] = size, at
            spans[section] = (at, size)
            for column in (first, second) if section in PAIRS else (first,):
                padded = np.zeros((size + 3) // 4 * 4, np.int32)
                padded[:size] = column
                parts.append(padded)
                at += len(padded)
        return np.concatenate(parts), spans

    def _distinct(self, registers: Indices, operation: str) -> Longs:
        regs = self._known(registers, operation)
        if len(set(regs.tolist())) != regs.size:
            raise InvalidArgument(f"{operation}: a register is named twice in {regs.tolist()}")
        return regs

    def _known(self, registers: Indices, operation: str) -> Longs:
        given = np.asarray(registers)
        if given.size and given.dtype.kind not in "iu":
            raise InvalidArgument(f"{operation}: registers {registers!r}, expected integers")
        regs = given.astype(np.int64)
        least, most = _range(regs)
        if regs.size and not (least >= REGISTERS_PER_ROW and most < self.registers.count):
            raise InvalidArgument(
                f"{operation}: registers {least}..{most}, expected {REGISTERS_PER_ROW}..{self.registers.count - 1}"
            )
        return regs

    def _require_empty(self, operation: str, regs: Longs) -> None:
        if self.registers.held[regs].any():
            raise RegisterInUse(operation, int(regs[self.registers.held[regs]][0]))

    def _require_held(self, operation: str, regs: Longs) -> None:
        if not self.registers.held[regs].all():
            raise EmptyRegister(operation, int(regs[~self.registers.held[regs]][0]))


def _overlap(one: Longs, other: Longs) -> bool:
    return not set(one.tolist()).isdisjoint(other.tolist())


def _range(regs: Longs) -> tuple[int, int]:
    if regs.size > FEW:
        return int(regs.min()), int(regs.max())
    listed = regs.tolist()
    return min(listed, default=0), max(listed, default=0)
