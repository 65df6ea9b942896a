"""Records ownership changes on the host, and sends them together in packets. This module does not know planes.

recording   move, release, claim ..   ->   queue [ packet | packet | action | packet ]   in the order of the calls
sending     each packet takes one asynchronous upload, one ownership launch, and one data launch if it moves bytes

The last packet before a plan also has the batch of the plan. It lies at a fixed address, so that a captured CUDA graph
can carry out the changes and the plan of every step.

Recording sends nothing, with one exception: a claim that needs slots released by id, which the device must confirm.

A packet runs its phases in the order move, release, claim, write, data. A move that would run too early in this order
runs with the claims: a row gives its states away, and takes others. Any other operation that would run too early starts
another packet. So changes always take effect in the order in which they were recorded.

Between the plan of a step and its forward, the command buffer marks (*fences*) the registers whose slots the step uses.
The first change of a fenced register waits for the forward, and so does every later change. `submit` sends only the
changes that were recorded before the first waiting change.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakMethod, ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate import lasting
from memstate.errors import EmptyRegister, OutOfSlots, RegisterInUse
from memstate.kernels.tables import ROW_CODE, ZERO_SOURCE
from memstate.slots.journal import Journal
from memstate.slots.packet import CLAIMS, DATA, MOVES, RELEASES, WRITES, Packet
from memstate.slots.registers import Longs, RegisterFile
from memstate.slots.upload import UploadRing, Views

STEP_ROOM = 1 << 14  # int32 of a step's packet, besides its batch
STEP_MARKS = 1 << 12  # largest number of marks of one step; a packet has room for them beside any batch


def step_ints(max_batch: int) -> int:
    """Returns the number of int32 in the packet of a step: a batch, and room for its marks and changes."""
    return STEP_ROOM + 2 * (max_batch + 3)


class DataMover(Protocol):
    """Copies and zeroes the states that a packet names, in the planes of the caller."""

    def __call__(self, slots: Tensor, packet: Tensor, *, copied: int, zeroed: int, replayed: bool = False) -> None:
        """Copies `copied` slots and zeroes `zeroed` slots, or only counts them if a graph has done so (`replayed`)."""


class Action(NamedTuple):
    """Work on the device that runs in order with the packets.

    Args:
        run: function that does the work.
        keeps: objects that must not be evicted before the work is done, for audits.
        pages: KV pages that the work fills.
        fills: registers whose states the work loads.
        owners: function that makes the same changes of owners in another register file.
        released: number of slots that the work frees.
    """

    run: Callable[[], None]
    keeps: Sequence[Any] = ()
    pages: Sequence[int] = ()
    fills: Sequence[int] = ()
    owners: Callable[[RegisterFile], None] | None = None
    released: int = 0


class CommandBuffer:
    """Records moves, releases, claims, cell writes, zeros and copies on registers, and sends them together.

    Callers compute registers and cells from valid handles. Each operation checks only that targets are empty and that
    sources hold a slot.

    Args:
        registers: the register file.
        run_data: copies and zeroes the bytes of states; None for a register file without planes.
        max_batch: entries of the largest batch of a plan.

    Attributes:
        queue: packets and actions that are recorded and not sent, in the order of the calls. A new operation goes to
            the last packet.
        step: the packet of the newest plan on the device, int32. Its address never changes, so that a captured launch
            can read it.
    """

    def __init__(self, registers: RegisterFile, run_data: DataMover | None = None, max_batch: int = 0) -> None:
        self.registers = registers
        self.ring = UploadRing(registers.backend)
        self.guard = registers.allocator.guard
        self.packets = 0  # number of packets with changes sent since the start
        self.journal: Journal | None = None
        registers.allocator.recorder = ref(self)
        self._run_data = run_data
        self._first: WeakMethod[Callable[[], None]] | None = None
        self.queue: list[Packet | Action] = []
        self._sending: Packet | Action | None = None  # entry that has left the queue and is not sent completely
        self._room = step_ints(max_batch)
        self.step = lasting.zeros(self._room, torch.int32, registers.backend.device)
        self.step_views = Views(self.step)
        self.fencing = False  # whether a planned forward is not launched yet
        self._used: Longs | None = None  # registers whose slots this forward uses
        self._fenced: set[int] | None = None  # `_used` and `_unwritten` as one set; made at the first change
        self._unwritten: set[int] = set()  # registers of new slots whose states this forward writes
        # position of the first waiting change: (index in the queue, index in that packet)
        self._waits: tuple[int, int] | None = None

    def before_packet(self, call: Callable[[], None]) -> None:
        """Sets a method that is called before each packet and action, and where `submit` or a plan sends neither.

        Args:
            call: a bound method. The command buffer keeps a weak reference to it.
        """
        self._first = WeakMethod(call)

    def prepare(self) -> None:
        """Calls the method that `before_packet` has set."""
        if self._first is not None and (call := self._first()):
            call()

    # The fence

    def fence(self, registers: Longs, unwritten: Longs | None = None) -> None:
        """Makes changes of these registers wait for `lift`, because a coming forward uses their slots.

        Call it only while nothing is recorded.

        Args:
            registers: numbers of the registers whose changes wait.
            unwritten: more registers, whose states the forward must still write. Actions that read them wait, too.
        """
        self.fencing, self._used, self._fenced = True, registers, None
        if unwritten is not None:
            self._unwritten = set(unwritten.tolist())

    def _fences(self) -> set[int]:
        """Returns the registers whose changes wait for the coming forward."""
        if self._fenced is None:
            self._fenced = self._unwritten.union(() if self._used is None else self._used.tolist())
        return self._fenced

    def lift(self) -> None:
        """Ends the wait, because the forward was launched or will never run. The next submit sends the changes."""
        self.fencing, self._used, self._fenced, self._waits = False, None, None, None
        self._unwritten.clear()

    @property
    def acts(self) -> bool:
        """Whether an action is queued, such as a readback that a caller waits for."""
        return any(isinstance(entry, Action) for entry in self.queue)

    @property
    def waiting(self) -> list[Packet | Action]:
        """The packets and actions that wait for a forward, in order."""
        if self._waits is None:
            return []
        at, operations = self._waits
        first, *rest = self.queue[at:]
        return [first.tail(operations) if isinstance(first, Packet) else first, *rest]

    @property
    def withheld(self) -> tuple[int, int]:
        """The number of slots that the waiting changes will free, and the number that they will claim."""
        released = claimed = 0
        for entry in self.waiting:
            if isinstance(entry, Packet):
                released += entry.size(RELEASES)
                claimed += entry.size(CLAIMS)
            else:
                released += entry.released
        return released, claimed

    def unsure(self) -> NDArray[np.bool_]:
        """Returns which registers perhaps do not have, on the device, the states that the host knows: bool `register`.

        These are the registers that the interrupted call changed, those of unsent changes, and those whose states a
        forward must still write.
        """
        unsure = np.zeros(self.registers.count, bool)
        unsure[list(self._unwritten)] = True
        for entry in [self._sending, *self.queue]:
            if isinstance(entry, Packet):
                unsure[[register for named in entry.named.values() for register in named if register > 0]] = True
            elif entry is not None:
                unsure[list(entry.fills)] = True
        for registers in self.guard.registers if self.guard.call else ():
            changed = np.asarray(registers, np.int64)
            unsure[changed[changed > 0]] = True
        return unsure

    def unsure_pages(self) -> set[int]:
        """Returns the KV pages that perhaps do not have their contents.

        These are the pages that the interrupted call claimed, and those that unsent actions fill.
        """
        unsure = set[int]().union(*self.guard.pages) if self.guard.call else set()
        for entry in [self._sending, *self.queue]:
            if isinstance(entry, Action):
                unsure.update(entry.pages)
        return unsure

    # Recording

    def named(self, registers: Sequence[int]) -> bool:
        """Returns whether an unsent operation changes one of these registers or reads its state.

        Also True if a coming forward must still write the state of one of them.
        """
        if self._unwritten and not self._unwritten.isdisjoint(registers):
            return True
        return any(isinstance(entry, Packet) and entry.names(registers) for entry in self.queue)

    def move(self, targets: list[int], sources: list[int]) -> None:
        """Moves slot and label from each source register to its target. Then the sources are empty.

        Args:
            targets: empty registers.
            sources: registers that hold slots, one for each target.

        Raises:
            RegisterInUse: a target holds a slot; nothing recorded.
            EmptyRegister: a source holds no slot; nothing recorded.
        """
        if not targets and not sources:
            return
        regs, held, label = targets + sources, self.registers.held_at, self.registers.label_at
        for register in targets:
            if held[register]:
                raise RegisterInUse("move", register)
        for register in sources:
            if not held[register]:
                raise EmptyRegister("move", register)
        self._record(MOVES, targets, sources, regs)
        for target, source in zip(targets, sources, strict=True):
            held[target], label[target] = True, label[source]
            held[source], label[source] = False, 0
        if self.journal is not None:
            self.journal.note("move", self._number, targets, sources)

    def release(self, registers: list[int]) -> int:
        """Empties registers and frees their slots. Skips empty registers.

        Args:
            registers: no register twice.

        Returns:
            Number of slots that become free.
        """
        held, label = self.registers.held_at, self.registers.label_at
        if not (regs := [register for register in registers if held[register]]):
            return 0
        self._record(RELEASES, regs, regs, regs)
        if self.journal is not None:
            self.journal.note("release", self._number, regs)
        for register in regs:
            held[register], label[register] = False, 0
        self.registers.allocator.free += len(regs)
        return len(regs)

    def claim(self, registers: list[int], lengths: list[int] | None = None, zeroed: list[int] | None = None) -> None:
        """Fills empty registers with the lowest free slots, in the order given.

        Args:
            registers: no register twice.
            lengths: for each register, the tokens that its state will stand for; None: the labels become 0.
            zeroed: the registers whose states are zeroed; None for none.

        Raises:
            OutOfSlots: more registers are given than slots are free; nothing recorded.
            RegisterInUse: a register holds a slot; nothing recorded.

        Syncs: only if the claim needs slots that were released by id, and the device has not confirmed their release.
        """
        allocator, held, label = self.registers.allocator, self.registers.held_at, self.registers.label_at
        for register in registers:
            if held[register]:
                raise RegisterInUse("claim", register)
        n = len(registers)
        if allocator.unconfirmed:
            allocator.confirm(n)
        if n > allocator.free:
            raise OutOfSlots(n, allocator.free)
        if not n:
            return
        self._record(CLAIMS, registers, registers, registers)
        for register in registers:
            held[register], label[register] = True, 0
        allocator.free -= n
        allocator.claimed += n
        if self.journal is not None:
            self.journal.note("claim", self._number, registers)
        if lengths is not None:
            self._label(registers, lengths)
        if zeroed:
            self._record(DATA, zeroed, [ZERO_SOURCE] * len(zeroed), zeroed)

    def write(self, cells: Sequence[int], values: Sequence[int]) -> None:
        """Sets cells of columns in the register file. If a cell is written twice, the last value stays."""
        if cells:
            self._last().add(WRITES, cells, values, ())

    def label(self, registers: list[int], lengths: list[int]) -> None:
        """Sets the lengths of states that were loaded into registers.

        Args:
            registers: no register twice.
            lengths: lengths in tokens, one for each register.

        Raises:
            EmptyRegister: a register holds no slot; nothing recorded.
        """
        self._require_held("label", registers)
        if registers:
            self._label(registers, lengths)

    def _label(self, registers: list[int], lengths: list[int]) -> None:
        """Records writes of labels.

        Each write names its register, so that a later change of the register cannot run too early.
        """
        cells, label = self.registers.address("labels", registers), self.registers.label_at
        self._record(WRITES, cells, lengths, registers)
        self.registers.longest = max(self.registers.longest, *lengths)
        for register, length in zip(registers, lengths, strict=True):
            label[register] = length

    def copy(self, targets: list[int], sources: list[int]) -> None:
        """Copies states and their labels between registers.

        Args:
            targets: registers that hold slots, no register twice.
            sources: registers that hold slots, one for each target.

        Raises:
            EmptyRegister: a register holds no slot; nothing recorded.
        """
        self._require_held("copy", sources)
        self._require_held("copy", targets)
        if targets:
            self._record(DATA, targets, sources, targets, sources)
            label = self.registers.label_at
            for target, source in zip(targets, sources, strict=True):
                label[target] = label[source]

    def start_rows(self, rows: Sequence[int], of: Sequence[int] = ()) -> None:
        """Fills the memory of rows with its initial values, or copies it from other rows.

        If a coming forward uses the row for its last request, the release of the row's registers waits for that
        forward. This change comes after that release, so it waits, too.

        Args:
            rows: the rows, no row twice.
            of: for each row, the row to copy, which no coming forward uses; empty to fill all with initial values.
        """
        targets, sources = ([ROW_CODE - row for row in named] for named in (rows, of))
        self._record(DATA, targets, sources or [ZERO_SOURCE] * len(targets), targets, sources)

    def note_changes(self, what: str, before: NDArray[np.bool_]) -> None:
        """Writes to the journal, if there is one, which registers a launch has filled or emptied.

        Args:
            what: name of the launch.
            before: whether each register held a slot before the launch, `register`.
        """
        if self.journal is not None:
            # The packet of this plan has a number only if it has operations.
            carried = isinstance(self._sending, Packet) and bool(self._sending.operations)
            changed: list[int] = np.flatnonzero(before != self.registers.held).tolist()
            self.journal.note(what, self._number - 1 + carried, changed)

    @property
    def _number(self) -> int:
        """Number that the last packet in the queue will get, if no earlier packet is split."""
        return self.packets + max(1, sum(isinstance(entry, Packet) for entry in self.queue))

    def _last(self) -> Packet:
        """Returns the last packet in the queue, to which operations are added. Makes one if there is none."""
        if self.queue and isinstance(last := self.queue[-1], Packet):
            return last
        self.queue.append(packet := Packet())
        return packet

    def _record(
        self, section: int, first: list[int], second: list[int], regs: list[int], sources: Sequence[int] = ()
    ) -> None:
        """Records a change of registers. Starts another packet if the order of phases requires it.

        Also notes the first change that must wait for a forward.

        Args:
            section: section of the packet that the entries go to.
            first: first column of the entries.
            second: second column of the entries.
            regs: the registers that change.
            sources: registers that a copy reads.
        """
        if self.guard.call:
            self.guard.registers.append(regs)
        packet = self.queue[-1] if self.queue else None
        if not isinstance(packet, Packet):
            self.queue.append(packet := Packet())
        elif (last := packet.last(regs, sources)) >= (DATA if section == WRITES else section):
            if section == MOVES and last < CLAIMS:
                first = [-register for register in first]  # the packet runs these moves behind its releases
            else:
                self.queue.append(packet := Packet())
        if self.fencing and self._waits is None and not self._fences().isdisjoint([*regs, *sources]):
            self._waits = len(self.queue) - 1, len(packet.operations)
        packet.add(section, first, second, regs)

    # Sending

    def submit(self) -> None:
        """Sends the recorded changes that come before the first waiting change.

        Each packet takes one upload and at most two launches.

        Syncs: no.
        """
        if not self.queue:
            self.prepare()
        if self._waits is None:
            self._send_up_to(0)
            return
        at, operations = self._waits
        if operations:
            first = self.queue[at]
            assert isinstance(first, Packet)  # an action cannot wait in part
            self.queue[at : at + 1] = first.split(operations)
            at += 1
        rest = len(self.queue) - at
        self._waits = None
        try:
            self._send_up_to(rest)
        finally:
            self._waits = len(self.queue) - rest, 0

    def upload_step(self, batch: Sequence[Longs], limit: int, marks: Sequence[Longs] = (), defer: int = 0) -> None:
        """Sends all recorded changes. The last packet goes to `step`, with a batch, for `launch_changes`.

        Call it only while no change waits for a forward.

        Args:
            batch: the rows and the tokens of the next plan, axis `n`.
            limit: largest number of claims of this plan.
            marks: entries of the batch, offsets and registers of this plan's marks, axis `mark`: at most `STEP_MARKS`,
                ascending by entry, then by offset.
            defer: if a tail has fewer tokens than this, those of the step included, none of them is added to the state.

        Syncs: no.
        """
        last = self._last()
        if len(self.queue) > 1:
            self._send_up_to(1)
        if self._first is not None:
            self.prepare()
        ints = last.encode(batch, limit, marks, self.ring.room, defer).size
        if ints > self._room:  # too many changes for `step`: they take an upload of their own
            self._send_prepared(last)
            ints = (last := Packet()).encode(batch, limit, marks, self.ring.room, defer).size
        self._sending = last
        self.queue.clear()
        self.ring.push(ints, self.step_views)

    def launch_changes(self, replayed: bool = False) -> None:
        """Carries out the changes in `step`, if there are any.

        Args:
            replayed: whether a captured graph of the caller launches them.
        """
        packet = self._sending
        if isinstance(packet, Packet) and packet.operations:
            self.packets += 1
            self._carry_out(self.step, packet, replayed)
        self._sending = None

    def capture_changes(self) -> None:
        """Launches the kernels that carry out the changes in `step`, so that a graph can capture them."""
        self.registers.ownership(self.step)
        if self._run_data:
            self._run_data(self.registers.table.slots, self.step, copied=0, zeroed=0)

    def then(self, action: Action, reads: Iterable[int] = (), behind: bool = False) -> None:
        """Runs an action after all changes recorded so far.

        If no change waits for a forward, it submits and runs the action at once. Otherwise the action waits, too.

        Args:
            action: the work to run.
            reads: registers whose states the action reads. It waits if a coming forward must still write one of them.
            behind: whether it also waits if that forward uses one of them, because it writes their states again.
        """
        if self._waits is None:
            of_forward = self._fences() if behind else self._unwritten
            if not of_forward.isdisjoint(reads):
                self._waits = len(self.queue), 0
        if self._waits is None:
            self.submit()
            action.run()
        else:
            self.queue.append(action)

    def _send_up_to(self, left: int) -> None:
        """Sends from the front of the queue, until `left` entries remain."""
        while len(self.queue) > left:
            entry = self._sending = self.queue[0]
            del self.queue[0]
            self.prepare()
            if isinstance(entry, Packet):
                self._send_prepared(entry)
            else:
                entry.run()
            self._sending = None

    def _send_prepared(self, packet: Packet) -> None:
        sent = self.ring.push(packet.encode(room=self.ring.room).size)
        if packet.operations:
            self.packets += 1
            self._carry_out(sent, packet)

    def _carry_out(self, sent: Tensor, packet: Packet, replayed: bool = False) -> None:
        if not replayed:
            self.registers.ownership(sent)
        copied, zeroed = packet.copied, packet.zeroed
        if self._run_data and (copied or zeroed or packet.rows):
            self._run_data(self.registers.table.slots, sent, copied=copied, zeroed=zeroed, replayed=replayed)

    def discard(self) -> None:
        """Forgets the recorded changes. Call it only in a reset, which also frees all slots on the device."""
        self.queue, self._sending = [], None
        self.lift()

    def _require_held(self, operation: str, registers: list[int]) -> None:
        for register in registers:
            if not self.registers.held_at[register]:
                raise EmptyRegister(operation, register)
