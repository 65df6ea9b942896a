"""Keeps the steps that are planned and not settled yet, on two records that alternate. It knows no slot id.

record 0   plan(0) ............ settle(0)   plan(2) ............ settle(2)
record 1             plan(1) ............ settle(1)   plan(3) ..
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate.errors import InvalidArgument, StaleHandle
from memstate.kernels.tables import Accepted, StepRecord
from memstate.sizes import Part, require_memory
from memstate.slots.registers import Ints, Longs


@dataclass(frozen=True, eq=False)
class Step:
    """One planned step: which slot each entry of the batch reads, writes and snapshots; 0 everywhere marks padding.

    The device vectors `rows`, `tokens`, `read`, `write` and `snapshot` are at addresses that alternate between two
    records. Capture a CUDA graph for each.

    Attributes:
        serial: number of the step.
        record: the vectors on the device.
        numbers: row of each entry on the host, int64 `batch`.
        tokens_of: tokens of each entry on the host, int64 `batch`.
        before: length of each entry before the step, int64 `batch`.
        after: length of each entry after it, int64 `batch`. In a window it equals `before` until tokens are accepted.
        generation: of each entry's row, int32 `batch`.
        window: whether the step is speculative, so that its tokens count once they are accepted.

    Example:
        >>> import torch, memstate as ms
        >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
        >>> mem = ms.StateManager(layout, slots=8, max_requests=2)
        >>> step = mem.plan([*mem.admit([ms.Request("a")]), None], 3)
        >>> step.read.tolist(), step.write.tolist(), step.after.tolist()
        ([1, 0], [1, 0], [3, 0])
    """

    serial: int
    record: StepRecord = field(repr=False)
    numbers: Longs
    tokens_of: Longs
    before: Longs
    after: Longs
    generation: Ints = field(repr=False)
    window: bool = False

    @property
    def parity(self) -> int:
        """Number of the record that this step uses, 0 or 1."""
        return self.serial % 2

    @property
    def rows(self) -> Tensor:
        """Row of each entry: int32 `batch`."""
        return self.record.rows

    @property
    def tokens(self) -> Tensor:
        """Tokens of each entry in this step: int32 `batch`."""
        return self.record.tokens

    @property
    def read(self) -> Tensor:
        """Slot that holds each entry's state before the step: int32 `batch`."""
        return self.record.read

    @property
    def write(self) -> Tensor:
        """Slot for each entry's state after the step: int32 `batch`."""
        return self.record.write

    @property
    def snapshot(self) -> Tensor:
        """Slot for a second copy of the state after the step, 0 = none: int32 `batch`."""
        return self.record.snapshot


def _width(max_batch: int) -> int:
    """Returns the entries of a column: on 256-byte boundaries, so that every slice of a batch starts aligned."""
    return -(-max_batch // 64) * 64


def record_bytes(max_batch: int, speculation: bool) -> int:
    """Returns the bytes of the step records on the device.

    Args:
        max_batch: entries of the largest batch.
        speculation: whether steps can be speculative.
    """
    return 4 * _width(max_batch) * (2 * len(StepRecord._fields) + (len(Accepted._fields) if speculation else 0))


class StepLog:
    """Keeps the unsettled steps of a manager, oldest first.

    Args:
        max_batch: entries of the largest batch.
        depth: steps that may be unsettled when the next is planned: 1 with overlap, 0 without.
        device: where the records are.
        speculation: whether steps can be speculative.

    Attributes:
        unsettled: the steps.

    Raises:
        InvalidArgument: the device has too little memory for the records; nothing was allocated.
    """

    def __init__(self, max_batch: int, depth: int, device: torch.device, speculation: bool = False) -> None:
        self.max_batch, self.depth = max_batch, depth
        records = Part("step records", record_bytes(max_batch, speculation), "max_batch")
        require_memory(f"max_batch={max_batch}", [records], device, InvalidArgument)
        width = _width(max_batch)
        store = torch.zeros(2, len(StepRecord._fields), width, dtype=torch.int32, device=device)
        self._columns = [StepRecord(*store[parity]) for parity in range(2)]
        self._records: list[dict[int, StepRecord]] = [{}, {}]  # by batch size: slicing tensors costs
        self._outcome = Accepted(*torch.zeros(2, width if speculation else 0, dtype=torch.int32, device=device))
        self._planned: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self._serial = 0
        self.unsettled: list[Step] = []

    def require_room(self) -> None:
        """Requires that the next step may be planned.

        Raises:
            InvalidArgument: an older step must be settled first.
        """
        if len(self.unsettled) > self.depth:
            raise InvalidArgument(
                f"{len(self.unsettled)} steps are unsettled, the limit before a plan is {self.depth}: "
                f"settle step {self.unsettled[0].serial} first"
            )

    def next_record(self, batch: int) -> StepRecord:
        """Returns the record that the next plan of `batch` entries writes."""
        parity = self._serial % 2
        if (found := self._records[parity].get(batch)) is None:
            found = self._records[parity][batch] = StepRecord(*(column[:batch] for column in self._columns[parity]))
        return found

    def outcome(self, batch: int) -> Accepted:
        """Returns where the accept of a batch writes its outcome. At most one speculative step is in flight."""
        return Accepted(*(column[:batch] for column in self._outcome))

    def repeated(self, rows: Longs, tokens: Longs) -> tuple[Tensor, Tensor] | None:
        """Returns the device copies of these rows and tokens, if the step before had the same batch."""
        if self._planned is None:
            return None
        last = self._planned
        if len(last[0]) != len(rows) or not ((last[0] == rows) & (last[1] == tokens)).all():
            return None
        before = self._records[(self._serial - 1) % 2][len(rows)]
        return before.rows, before.tokens

    def add(
        self, record: StepRecord, rows: Longs, tokens: Longs, before: Longs, after: Longs, generation: Ints,
        window: bool = False,
    ) -> Step:  # fmt: skip
        """Notes a planned step."""
        step = Step(self._serial, record, rows, tokens, before, after, generation, window)
        self._serial += 1
        self._planned = (rows, tokens)
        self.unsettled.append(step)
        return step

    def require(self, step: Step, newest: bool = False) -> None:
        """Requires an unsettled step.

        Raises:
            StaleHandle: the step was settled before.
            InvalidArgument: not a step, or not the newest where that is asked for.
        """
        if not isinstance(step, Step):
            raise InvalidArgument(f"{step!r} is no step: use what plan() returned")
        if step not in self.unsettled:
            raise StaleHandle(f"step {step.serial}", step.serial, self._serial)
        if newest and step is not self.unsettled[-1]:
            raise InvalidArgument(f"step {step.serial}: expected the newest, step {self.unsettled[-1].serial}")

    def require_next(self, step: Step, newest: bool = False) -> None:
        """Requires the oldest unsettled step, or the newest for a cancel.

        Raises:
            StaleHandle: the step was settled before.
            InvalidArgument: another step comes first.
        """
        self.require(step)
        expected = self.unsettled[-1 if newest else 0]
        if step is not expected:
            raise InvalidArgument(
                f"step {step.serial}: step {expected.serial} comes first ({'newest' if newest else 'oldest'} unsettled)"
            )

    def pop(self, step: Step, newest: bool = False) -> Step:
        """Removes an unsettled step that `require_next` has let pass."""
        self.unsettled.remove(step)
        if newest:  # its record is free again, the other one may still be waited for
            self._serial -= 1
            self._planned = None
        return step

    def forget(self) -> None:
        """Forgets every step; the next plan uploads its batch again."""
        self._planned = None
        self.unsettled = []
