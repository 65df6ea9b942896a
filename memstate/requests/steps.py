"""Keeps the steps that are planned and not settled yet. This file knows no slot id.

The vectors of all steps lie at the same address: each plan overwrites those of the step before, behind the forward of
that step. The host keeps what a settle needs. The drawing shows how long vectors and host keep each step:

vectors   plan(0)  forward(0)  plan(1)  forward(1)  plan(2) ..
host      step 0 ............................ settle(0)
                               step 1 ................ settle(1)
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from memstate import lasting
from memstate.checks import counts
from memstate.errors import InvalidArgument, StaleHandle
from memstate.kernels.rules import DRAFTS, FOLD
from memstate.kernels.tables import REGISTERS_PER_ROW, Cursor, StepMarks, StepRecord, TailRecord
from memstate.requests.handles import Row
from memstate.requests.table import RequestTable
from memstate.slots.registers import Ints, Longs


class Batch(NamedTuple):
    """The rows of one step, looked up and checked.

    Attributes:
        numbers: for each entry of the batch, the number of its row; 0 for padding.
        tokens_of: for each entry of the batch, its tokens; 0 for padding.
        real: the entries that are not padding.
        rows: numbers of the rows of the real entries.
        tokens: tokens of the real entries.
        live: live registers of the real entries.
        generation: for each entry of the batch, the generation of its row, int32.
        distinct: whether no row comes twice.
        fewest: smallest number of tokens of a real entry.
        most: largest number of tokens of a real entry.
        version: version of the request table when the batch was looked up.
        drafts: for each real entry, how many of its tokens may be rejected; None: the batch has no drafts.
        certain: tokens of the real entries that are no drafts.
        sent: for each entry of the batch, the number by which the packet of a plan encodes its tokens and drafts.
    """

    numbers: Longs
    tokens_of: Longs
    real: slice | Longs
    rows: Longs
    tokens: Longs
    live: Longs
    generation: Ints
    distinct: bool
    fewest: int
    most: int
    version: int
    drafts: Longs | None
    certain: Longs
    sent: Longs

    @classmethod
    def of(
        cls, table: RequestTable, rows: Sequence[Row | None], tokens: int | Sequence[int], last: "Batch | None" = None,
        drafts: int | Sequence[int] = 0,
    ) -> "Batch":  # fmt: skip
        """Looks up the rows of a batch.

        Args:
            table: the request table.
            rows: the row of each entry; None and finished rows are padding.
            tokens: for each entry its tokens, or one number for all.
            last: the batch that was looked up before this one, or None. Its vector of tokens is used again if it fits.
            drafts: for each entry, how many of its tokens may be rejected, or one number for all.

        Raises:
            StaleHandle: a request has ended.
            InvalidArgument: an entry is not a row, or the tokens do not fit the rows.
        """
        numbers, distinct, padded = table.batch(rows)
        size = len(numbers)
        if last is not None and last.most == last.fewest == tokens and len(last.tokens_of) == size == len(last.rows):
            tokens_of = last.tokens_of
        else:
            tokens_of = counts("tokens", tokens, size)
        if table.over and (over := table.finished[numbers]).any():
            numbers, padded = np.where(over, 0, numbers), True
            distinct = len(set(running := numbers[numbers > 0].tolist())) == len(running)
        real: slice | Longs = slice(None)
        if padded:
            real, tokens_of = np.flatnonzero(numbers), tokens_of * (numbers > 0)
        numbers.flags.writeable = tokens_of.flags.writeable = False  # callers and later steps share these arrays
        running, of_rows = (numbers[real], tokens_of[real]) if padded else (numbers, tokens_of)
        fewest, most = (tokens, tokens) if type(tokens) is int and running.size else (1, 0)
        if type(tokens) is not int and running.size:
            fewest, most = int(of_rows.min()), int(of_rows.max())
        live, generation = running * REGISTERS_PER_ROW, table.generation[numbers]
        drafted, certain, sent = None, of_rows, tokens_of
        if not fewest:  # in a packet 0 means padding, so an entry of 0 tokens has another number
            sent = np.where((numbers > 0) & (tokens_of == 0), FOLD, tokens_of)
        if type(drafts) is not int or drafts:
            of_all = counts("drafts", drafts, size) * (numbers > 0)
            if (of_all > tokens_of).any():
                raise InvalidArgument(
                    f"drafts {of_all.tolist()} of {tokens_of.tolist()} tokens: expected no more than the tokens"
                )
            if of_all.any():
                drafted, sent = of_all[real], np.where(of_all > 0, -(DRAFTS * of_all + tokens_of), sent)
                certain = of_rows - drafted
        return cls(
            numbers, tokens_of, real, running, of_rows, live, generation, distinct, fewest, most, table.version,
            drafted, certain, sent,
        )  # fmt: skip

    def spread(self, values: Longs) -> Longs:
        """Returns one value for each entry of the batch, given those of the real entries; padding has 0."""
        if isinstance(self.real, slice):
            return values
        entries = np.zeros_like(self.numbers)
        entries[self.real] = values
        return entries


@dataclass(eq=False, slots=True, weakref_slot=True)
class Step:
    """One planned step: which slot each entry of the batch reads, writes and snapshots. Padding has only slots 0.

    The device vectors `rows`, `tokens`, `read`, `write` and `snapshot` of all steps with the same batch size are the
    same tensors. So one CUDA graph serves all of them, and the vectors are valid until the next plan.

    Attributes:
        serial: number of the step.
        record: the vectors on the device.
        before: length of each row before the step, int64 `batch`.
        after: length of each row after the step, int64 `batch`. Drafts count after `accept` of the step.
        marks: the marks of this step, on the device: for each mark its entry of the batch, its offset in tokens of the
            step, and the slot for the state there. The forward stores these states; memstate's own decode steps take
            `marks` as an argument.
        marked: number of marks, known on the host; 0 for most steps. A row with one token has none.
        label: tokens of each entry's state before the step, int64 `batch`. The length of a row with a tail is larger.
        tails: what the plan decided about tails, on the device; None where rows have no tails.
        there: for each entry, the largest length whose state exists even if the forward of the step never runs, int64
            `batch`. It is less than `label` if the step only stores the state again that it reads.

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
    batch: Batch = field(repr=False)
    before: Longs
    after: Longs
    marks: StepMarks = field(repr=False)
    marked: int = 0
    label: Longs | None = None
    tails: TailRecord | None = field(default=None, repr=False)
    there: Longs | None = field(default=None, repr=False)

    @property
    def cursor(self) -> Cursor:
        """How far the tails of the rows are folded, for decode steps with `tail=`. Needs tails: `Forward(tail=)`."""
        tails = self._tails()
        return Cursor(self.record.rows, tails.label, tails.pending, tails.store)

    @property
    def lengths(self) -> Tensor:
        """Length of each row before the step, on the device: int32 `batch`. Raises: InvalidArgument without tails."""
        return self._tails().length

    @property
    def accepted(self) -> Tensor:
        """Number of real tokens of each entry: int32 `batch`. A sampler may write it. Raises: InvalidArgument.

        All steps of this batch size share the vector: the next plan overwrites it with the numbers of the next step.
        With overlap, copy it after the sampler and before the next plan, for `accept`.
        """
        return self._tails().accepted

    def _tails(self) -> TailRecord:
        if self.tails is None:
            raise InvalidArgument(f"step {self.serial}: its rows have no tail; build the manager with Forward(tail=)")
        return self.tails

    @property
    def drafted(self) -> bool:
        """Whether the step has drafts, so that `accept` settles it."""
        return self.batch.drafts is not None

    @property
    def numbers(self) -> Longs:
        """Row of each entry, 0 for padding, on the host: int64 `batch`."""
        return self.batch.numbers

    @property
    def tokens_of(self) -> Longs:
        """Tokens of each entry in this step, on the host: int64 `batch`."""
        return self.batch.tokens_of

    @property
    def rows(self) -> Tensor:
        """Row of each entry, on the device: int32 `batch`."""
        return self.record.rows

    @property
    def tokens(self) -> Tensor:
        """Tokens of each entry in this step, on the device: int32 `batch`."""
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
    """Returns the entries of a column: a multiple of 64, so that every column starts at a multiple of 256 bytes."""
    return -(-max_batch // 64) * 64


def record_bytes(max_batch: int, marks: int = 0, tails: bool = False) -> int:
    """Returns the bytes of the step records on the device.

    Args:
        max_batch: entries of the largest batch.
        marks: marks that one step can have.
        tails: whether rows have tails.
    """
    columns = len(StepRecord._fields) + (len(TailRecord._fields) - 1) * tails
    return 4 * (_width(max_batch) * columns + _width(max(marks, 1)) * len(StepMarks._fields))


def _same(one: Longs, other: Longs) -> bool:
    return one is other or (len(one) == len(other) and bool((one == other).all()))


class StepLog:
    """Keeps the unsettled steps of a manager, oldest first.

    Args:
        max_batch: entries of the largest batch.
        depth: steps that may be unsettled when the next is planned: 1 with overlap, 0 without.
        device: where the records are.
        marks: marks that one step can have.
        tails: whether rows have tails.

    Attributes:
        unsettled: the unsettled steps, oldest first.
        sent: (rows, tokens, limit of claims, `defer`) of the batch on the device; None if the host does not know this.
        marks: the marks of the newest plan on the device, always at the same address.
        tails: the tails of the newest plan on the device, always at the same address; None where rows have no tails.
    """

    def __init__(self, max_batch: int, depth: int, device: torch.device, marks: int = 0, tails: bool = False) -> None:
        self.max_batch, self.depth = max_batch, depth
        width = _width(max_batch)
        columns = lasting.zeros((len(StepRecord._fields), width), torch.int32, device)
        self._columns = StepRecord(*columns)
        self._records: dict[int, StepRecord] = {}  # batch size -> slices of columns, kept because slicing takes time
        count, *places = lasting.zeros((len(StepMarks._fields), _width(max(marks, 1))), torch.int32, device)
        self.marks = StepMarks(count[:1], *places)
        self.tails: TailRecord | None = None
        self._tails: dict[int, TailRecord] = {}  # batch size -> slices of `tails`
        if tails:
            more = list(lasting.zeros((len(TailRecord._fields) - 1, width), torch.int32, device))
            self.tails = TailRecord(self._columns.rows, *more)._replace(batch=more[-1][:1])
        self.sent: tuple[Longs, Longs, int, int] | None = None
        self._serial = 0
        self.unsettled: list[Step] = []

    def require_room(self) -> None:
        """Raises an error unless the next step may be planned.

        Raises:
            InvalidArgument: an older step must be settled first.
        """
        if len(self.unsettled) > self.depth:
            raise InvalidArgument(
                f"{len(self.unsettled)} steps are unsettled, the limit before a plan is {self.depth}: "
                f"{'accept' if self.unsettled[0].drafted else 'settle'} step {self.unsettled[0].serial} first"
            )

    def times(self, table: RequestTable) -> Longs:
        """Returns the number of unsettled steps that each row's request is in: int64 `row`."""
        times = np.zeros(table.rows + 1, np.int64)
        for step in self.unsettled:
            same = (table.generation[step.numbers] == step.batch.generation) & table.used[step.numbers]
            times[step.numbers[same]] += 1
        return times

    def record(self, batch: int) -> StepRecord:
        """Returns the device vectors of all steps of this batch size."""
        if (record := self._records.get(batch)) is None:
            record = self._records[batch] = StepRecord(*(column[:batch] for column in self._columns))
        return record

    def repeats(self, rows: Longs, tokens: Longs, limit: int, defer: int) -> bool:
        """Returns whether the device has this batch already, with the same limit and `defer`."""
        if self.sent is None:
            return False
        last_rows, last_tokens, *numbers = self.sent
        return [limit, defer] == numbers and _same(rows, last_rows) and _same(tokens, last_tokens)

    def add(
        self, record: StepRecord, batch: Batch, before: Longs, after: Longs, marked: int = 0,
        label: Longs | None = None,
    ) -> Step:  # fmt: skip
        """Adds a planned step to the unsettled ones, and returns it."""
        step = Step(self._serial, record, batch, before, after, self.marks, marked, label)
        if self.tails is not None:
            if (tails := self._tails.get(size := len(batch.numbers))) is None:
                tails = self._tails[size] = TailRecord(*(column[:size] for column in self.tails))
            step.tails = tails
        self._serial += 1
        self.unsettled.append(step)
        return step

    def is_last(self, step: Step) -> bool:
        """Returns whether this is the newest step: then the vectors on the device are still those of this step."""
        return step.serial == self._serial - 1

    def require(self, step: Step) -> None:
        """Raises an error unless the argument is an unsettled step.

        Raises:
            StaleHandle: the step was settled before.
            InvalidArgument: the argument is not a step.
        """
        if not isinstance(step, Step):
            raise InvalidArgument(f"{step!r} is no step: use what plan() returned")
        if step not in self.unsettled:
            why = "it was settled, accepted or cancelled, ended by recover(), or belongs to another manager"
            raise StaleHandle(f"step {step.serial}", step.serial, self._serial, why)

    def require_next(self, step: Step, newest: bool = False) -> None:
        """Raises an error unless this is the oldest unsettled step, or with `newest` the newest. Call `require` first.

        Raises:
            InvalidArgument: the argument is another step.
        """
        expected = self.unsettled[-1 if newest else 0]
        if step is not expected:
            raise InvalidArgument(
                f"step {step.serial}: step {expected.serial} comes first ({'newest' if newest else 'oldest'} unsettled)"
            )

    def forget(self) -> None:
        """Forgets every step; the next plan uploads its batch again."""
        self.sent = None
        self.unsettled = []
