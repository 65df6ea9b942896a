"""Offers the calls of `mem.device`: tensors at fixed addresses, slot ids, memory that sleeps, the stream."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from memstate.checks import sequence
from memstate.engine.door import Door
from memstate.engine.verbs import Parts
from memstate.errors import InvalidArgument
from memstate.kernels.tables import REGISTERS_PER_ROW, StepMarks, TailRecord
from memstate.requests.handles import Row, Snapshot
from memstate.requests.steps import Step
from memstate.slots.commands import Action
from memstate.slots.readback import Readback
from memstate.state.regions import BufferInfo


class DeviceCalls:
    """The calls of `mem.device`: for transfers, captured graphs and other kernels. A decode loop needs none of them.

    Args:
        parts: the parts of the manager.
        door: lets calls in.

    Attributes:
        page_table: KV page ids of each row: int32 tensor, axes `row page`; 0 = no page. Its address never changes.
        live_slots: the slot of each row's live state: int32 tensor, axis `row`. Its address never changes.
            `mem.device.live_slots[step.rows]` are the slots of a batch. An entry is 0 for row 0, which is padding, and
            for rows without a request. The next `submit` or `plan` carries out recorded changes here. Under Redirect
            the slot of a row changes at boundaries.
        lengths: tokens of each row's state after its newest plan: int32 tensor, axis `row`. Its address never changes.
            `mem.device.lengths[step.rows] - step.tokens` are the lengths before a step, also in a CUDA graph. With
            `Forward(tail=)` use `step.lengths` instead.
        marks: the marks of the newest plan, as in `step.marks`. Their addresses never change, so that a captured
            forward can read them.
        tails: what the newest plan decided about the tails of rows: int32 tensors, as long as the largest batch. Their
            addresses never change. None where rows have no tails.

    Example:
        >>> import torch, memstate as ms
        >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
        >>> mem = ms.StateManager(layout, slots=8, max_requests=2)
        >>> rows = mem.admit([ms.Request("a")])
        >>> mem.device.read_slots(rows).wait().tolist()
        [1]
        >>> mem.device.live_slots.tolist()
        [0, 1, 0]
    """

    def __init__(self, parts: Parts, door: Door) -> None:
        self._parts, self._door = parts, door
        table, live = parts.registers.table, slice(0, REGISTERS_PER_ROW * (parts.registers.rows + 1), REGISTERS_PER_ROW)
        self.page_table: Tensor = parts.registers.page_table
        self.live_slots: Tensor = table.slots[live]
        self.lengths: Tensor = table.labels[live]
        self.marks: StepMarks = parts.log.marks
        self.tails: TailRecord | None = parts.log.tails

    def __repr__(self) -> str:
        return f"DeviceCalls({self._parts.backend!r})"

    def read_slots(self, handles: Sequence[Row | Snapshot]) -> Readback:
        """Asks the device which slot holds the state of each given row or snapshot, for RDMA or debugging.

        The call first sends the recorded changes. Then it takes one upload, one launch and one copy to the host.
        `Readback.wait` waits for the copy.

        If changes wait for a forward, the copy starts after them, otherwise at once. So no id names a slot that this
        forward still uses for an earlier owner.

        Args:
            handles: rows and snapshots, in any order.

        Returns:
            A readback with one slot id for each handle. `Readback.wait` syncs.

        Raises:
            StaleHandle: a request has ended, or a snapshot was dropped.
            InvalidArgument: a handle is neither a row nor a snapshot.

        Syncs: no.
        """
        self._door.enter()
        parts = self._parts
        sequence("rows and snapshots", handles, "[row, snapshot]")
        rows = [0 if isinstance(handle, Snapshot) else parts.table.index(handle) for handle in handles]
        parts.holdings.require(handle for handle in handles if isinstance(handle, Snapshot))
        registers = [
            handle.register if isinstance(handle, Snapshot) else parts.registers.origin(row)
            for handle, row in zip(handles, rows, strict=True)
        ]
        answer = Readback(len(registers), parts.backend)

        def resolve() -> None:
            sent = parts.commands.ring.send(np.asarray(registers, np.int32))
            answer.begin(parts.registers.resolve(sent))

        with parts.guard.changing("read_slots"):
            parts.commands.then(Action(resolve))
            return answer

    def arrived(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Tells the manager that states computed elsewhere have been written to the slots of newly admitted rows.

        `read_slots` returns the slots to write. Under Redirect, such a state becomes a snapshot if its length is a
        boundary, like a state computed here. Under other strategies, the first snapshot comes at the next boundary.

        Args:
            rows: rows of length 0.
            lengths: length of each state in tokens, at least 1.

        Raises:
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: a row has a length already; a row is in a step or has finished; or a row has too few pages
                for its new length. Nothing changed.

        Syncs: no.
        """
        self._door.enter()
        self._parts.admission.arrived(rows, lengths)

    def scrub_null(self) -> None:
        """Fills slot 0 and row 0 with zeros, or with the `fill` of a plane.

        Call this before each forward if your kernels write to slot 0, but rely on these values when they read it later.
        The launch is on the current stream, and a CUDA graph can contain it.

        Syncs: no.
        """
        parts = self._parts
        self._door.require_thread()
        if parts.stepping.replaying is None or parts.guard.interrupted:
            parts.guard.require_whole()
        parts.planes.scrub_null()

    def keep_path(self, nodes: Tensor) -> None:
        """Moves the accepted nodes of draft trees to adjacent places in the tails of rows, in one launch.

        Call it once in a step with trees: after the sampler has written `step.accepted`, and before the next plan.
        After it, the tail of a row is like that of a step without a tree. The launch is on the current stream, and a
        CUDA graph can contain it.

        Args:
            nodes: the accepted nodes of each entry of the newest step, in ascending order, int32 or int64
                `batch depth` on the device. Of each entry, the first `step.accepted` nodes count. An entry without a
                tree has -1 everywhere.

        Raises:
            InvalidArgument: the nodes do not fit the step, or rows have no tails; in debug mode, the nodes of an
                entry do not ascend. Nothing moved.
            Asleep: the memory is released; nothing moved.

        Syncs: in debug mode only.
        """
        parts = self._parts
        self._door.require_thread()
        if parts.stepping.replaying is None or parts.guard.interrupted:
            parts.guard.require_whole()
        if self.tails is None:
            raise InvalidArgument(
                "keep_path: rows have no tails: give the manager Forward(tail=), and its layout rings"
            )
        if parts.log.unsettled and parts.stepping.replaying is None and isinstance(nodes, Tensor) and nodes.dim() == 2:
            self._require_path(parts.log.unsettled[-1], nodes)
        parts.planes.keep_path(self.tails, nodes)

    def _require_path(self, step: Step, nodes: Tensor) -> None:
        """Refuses nodes that do not fit the entries of a step. In debug mode, also refuses nodes that do not ascend.

        Syncs: in debug mode only.
        """
        if len(nodes) != len(step.numbers):
            raise InvalidArgument(
                f"keep_path: nodes of {len(nodes)} entries, step {step.serial} has {len(step.numbers)}"
            )
        if not self._parts.pool.debug or self.tails is None or nodes.device != self.tails.accepted.device:
            return
        accepted = self.tails.accepted[: len(nodes)].tolist()
        for entry, (most, path, tokens) in enumerate(zip(accepted, nodes.tolist(), step.tokens_of, strict=True)):
            known = [(number, node) for number, node in enumerate(path[:most]) if node >= 0]
            ascend = all(low < high for (_, low), (_, high) in pairwise(known))
            short = len(path) < most and any(node > number for number, node in known)
            if not ascend or short or not all(number <= node < tokens for number, node in known):
                raise InvalidArgument(
                    f"keep_path: nodes {path} of entry {entry}, which has {tokens} tokens, {most} of them accepted: "
                    "expected as many nodes, in ascending order"
                )

    def sleep(self, keep: bool = True) -> None:
        """Releases the memory of the states, and remembers who owns each slot.

        Until `wake`, only `stats`, `info` and numbers such as `free_slots` can be read. Other calls raise Asleep.

        Args:
            keep: whether to keep the bytes in host memory. False is allowed only if no slot is held.

        Raises:
            InvalidArgument: slots are held and `keep` is False, or memory cannot be released; nothing changed.
            Asleep: the states sleep already; nothing changed.

        Syncs: yes.
        """
        self._door.enter()
        if not isinstance(keep, bool):
            raise InvalidArgument(f"keep={keep!r}: expected True or False")
        parts = self._parts
        # a slot whose release waits for a forward counts as held
        held = parts.allocator.capacity - parts.allocator.free + parts.commands.withheld[0]
        if held and not keep:
            raise InvalidArgument(
                f"{held} slots are held: their states would be lost; use keep=True, or end them first, and settle the "
                "newest step, whose forward may still need them"
            )
        with parts.guard.changing("sleep"):
            parts.commands.submit()
            if parts.tiers is not None:
                parts.tiers.settle()
        parts.planes.sleep(keep=keep)

    def wake(self) -> None:
        """Restores the memory of the states, and the bytes that `sleep` kept.

        Planes can have new addresses. If a CUDA graph uses the old addresses, capture it again.

        Raises:
            InvalidArgument: the states do not sleep.
            Asleep: the engine has not restored its own tensors.
            LayoutMismatch: the engine has restored its tensors with a smaller alignment.

        Syncs: yes.
        """
        self._door.require_caller()
        self._parts.planes.wake()

    def buffer_infos(self) -> list[BufferInfo]:
        """Returns base address, slot stride and length of every plane and layer, in bytes, to register for RDMA.

        Syncs: no.
        """
        return self._parts.planes.buffer_infos()

    def use_stream(self, stream: "torch.cuda.Stream") -> None:
        """Moves the device work of the manager to another stream, after all its work so far.

        All calls come on one stream, except `info`, `chunk`, counts, `stats` and `scrub_null`. It is the stream that is
        current in the first call; later calls on another stream raise InvalidArgument. `use_stream` makes the new
        stream wait for the old one. It does not make the new stream current: make the next calls under
        `torch.cuda.stream(stream)`.

        Only the forward may run on another stream, ordered by events of the caller.

        Args:
            stream: a stream of the manager's device.

        Raises:
            InvalidArgument: the argument is not a stream of this device, or the current stream captures a CUDA graph;
                nothing changed.

        Syncs: no.
        """
        self._door.require_thread()
        self._parts.stream.use(stream)

    def check(self) -> None:
        """Raises an error for the first fault that the device counted.

        The call first sends the recorded changes that do not wait for a forward.

        Raises:
            DoubleRelease: a slot was released that was free already.
            DeviceFault: the device counted another invalid operation.

        Syncs: yes.
        """
        self._door.enter()
        self._parts.pool.check()
