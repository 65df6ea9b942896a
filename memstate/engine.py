"""StateManager: what a decode loop sees. Orchestrates; decides nothing that a strategy, an allocator or the device
decides.

admit -> plan -> (your forward) -> settle -> ... -> release | abort | retract
              `-> cancel                      `-> publish -> (your index) -> admit(resume=...) | drop
"""

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate import audit, snapshot
from memstate.allocator import SlotAllocator
from memstate.arguments import counts, is_count
from memstate.commands import CommandBuffer
from memstate.errors import ConfigurationError, InvalidArgument, MemstateError, OutOfRows, OutOfSlots
from memstate.holders import Snapshot
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import REGISTERS_PER_ROW, Entry
from memstate.layout import StateLayout
from memstate.page_table import PageTable
from memstate.pool import StatePool
from memstate.publisher import Publisher
from memstate.registers import Longs, RegisterFile
from memstate.requests import Request, RequestTable, Row, Rows
from memstate.settings import validate_sizes, validate_tracking
from memstate.stats import Stats
from memstate.steps import Step, StepLog
from memstate.storage import Storage
from memstate.tracking import Redirect, Tracking
from memstate.tracking.mirror import Mirror

NO_LIMIT = 2**31 - 1
PER_ROW = REGISTERS_PER_ROW


class StateManager:
    """Owns the states of all requests: their slots, their snapshots and the page ids of their KV.

    layout: what one state is made of. slots: states that fit. max_requests: rows; preallocated: more rows, for requests
    whose state is still arriving. max_batch: entries of the largest batch (default: rows). tracking: the snapshot
    strategy. device, backend: where the states live and what carries out the kernels ("auto", "reference",
    "interpreter", "cuda"). holders: snapshots that can be kept (default: as many as slots). pages, page_size,
    pages_per_row: KV page ids, tokens a page, width of the page table. overlap: the next plan comes before the last
    settle. reserve: slots that snapshots at boundaries leave free for admissions. direct_hits: the first step reads a
    resumed snapshot instead of a copy of it (default: with Redirect). debug: check threads and overlapping copies.
    Raises: ConfigurationError, InvalidArgument.
    """

    def __init__(
        self,
        layout: StateLayout,
        *,
        slots: int,
        max_requests: int,
        tracking: Tracking | None = None,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        max_batch: int | None = None,
        preallocated: int = 0,
        holders: int | None = None,
        pages: int = 0,
        page_size: int = 1,
        pages_per_row: int = 0,
        overlap: bool = True,
        reserve: int = 0,
        direct_hits: bool | None = None,
        debug: bool = False,
    ) -> None:
        self.tracking = tracking if tracking is not None else Redirect()
        self.layout, self.overlap = layout, overlap
        self.direct_hits = isinstance(self.tracking, Redirect) if direct_hits is None else direct_hits
        validate_sizes(max_requests, preallocated, max_batch, holders, pages, page_size, pages_per_row, overlap)
        validate_tracking(self.tracking, layout, slots, page_size, bool(overlap), self.direct_hits)
        try:
            self.backend = Backend(backend, device)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
        self.allocator = SlotAllocator(slots, self.backend, reserve)
        self.storage = Storage(layout, slots, self.backend)
        self.pool = StatePool(self.allocator, self.storage, debug=debug)
        self.table = RequestTable(max_requests + preallocated)
        self.registers = RegisterFile(
            self.allocator, self.table.rows, slots if holders is None else holders, pages_per_row
        )
        self.commands = CommandBuffer(self.registers, self.pool.run_data)
        self.pages = PageTable(pages, page_size, self.commands)
        self.mirror = Mirror(self.registers, self.tracking, overlap)
        self.publisher = Publisher(self.commands, self.pages, self.mirror)
        self.holders = self.publisher.holders
        self.log = StepLog(max_batch or self.table.rows, int(overlap), self.backend.device)
        self._thread = threading.get_ident() if debug else None

    def __repr__(self) -> str:
        requests = self.table.rows - self.table.free
        slots = f"{self.free_slots} of {self.allocator.capacity} slots free"
        return f"StateManager({slots}, {requests} requests, {self.tracking})"

    @property
    def planes(self) -> Mapping[str, Tensor]:
        """Plane name -> tensor `layer slot ...`."""
        return self.storage.planes

    @property
    def page_table(self) -> Tensor:
        """KV pages of each row: int32 `row page`; 0 = none."""
        return self.registers.page_table

    @property
    def free_slots(self) -> int:
        """Slots that can be claimed now."""
        return self.allocator.free

    @property
    def free_pages(self) -> int:
        """KV pages that can be claimed now."""
        return self.pages.allocator.free

    def length(self, row: Row) -> int:
        """Tokens folded into the row's state by the steps planned so far. Raises: StaleHandle."""
        index = self.table.index(row)
        return int(self.registers.labels[self.registers.source[index] or PER_ROW * index])

    def confirmed(self, row: Row) -> int:
        """Tokens up to which the row is known to be real. Raises: StaleHandle."""
        return int(self.table.confirmed[self.table.index(row)])

    def next_boundary(self, row: Row) -> int:
        """The next length at which a snapshot is due; a prefill chunk must not go beyond it. Raises: StaleHandle."""
        index, length = self.table.index(row), self.length(row)
        following = (length // self.tracking.every + 1) * self.tracking.every
        want = int(self.registers.want[index])
        return want if length < want < following else following

    def slots_held(self, row: Row) -> int:
        """Slots that the row's registers hold. Raises: StaleHandle."""
        first = PER_ROW * self.table.index(row)
        return int(self.registers.held[first : first + PER_ROW].sum())

    def admit(self, requests: Sequence[Request]) -> Rows:
        """Gives every request a row, its slots and its pages, or gives none anything. Fresh states are zeroed with the
        next submit. Syncs: no.

        Raises: OutOfSlots, OutOfRows, OutOfPages (back-pressure), StaleHandle, InvalidArgument; nothing changed then.
        """
        self._enter()
        if not isinstance(requests, Sequence):
            raise InvalidArgument(f"{requests!r} is no sequence of requests, such as admit([request])")
        fresh_pages = [self._pages_needed(request) for request in requests]
        self.holders.require(request.resume for request in requests if request.resume is not None)
        per_request = 1 + self.tracking.lanes_at_admission(self.overlap)
        if len(requests) > self.table.free:
            raise OutOfRows(len(requests), self.table.free, self.table.rows)
        self.pages.require_free(sum(fresh_pages))
        self.allocator.confirm(per_request * len(requests))
        if per_request * len(requests) > self.allocator.free:
            raise OutOfSlots(
                per_request * len(requests), self.allocator.free, self.holders.evictable, self.allocator.capacity
            )
        rows = self.table.take([request.id for request in requests])
        first = rows * PER_ROW
        self.commands.claim((first[:, None] + np.arange(per_request)).reshape(-1))
        self.pages.start(rows, [request.resume.pages if request.resume else () for request in requests], fresh_pages)
        self._start(rows, requests)
        return Rows.of((self.table.handle(row) for row in rows.tolist()), self.table)

    def _pages_needed(self, request: Request) -> int:
        if not isinstance(request, Request):
            raise InvalidArgument(f"{request!r} is no Request: admit([Request(id, ...), ...])")
        if not (is_count(request.length) and is_count(request.want)) or request.want % self.pages.page_size:
            raise InvalidArgument(
                f"request {request.id!r}: length={request.length!r} and want={request.want!r} must be whole numbers "
                f"from 0 on, want a multiple of page_size={self.pages.page_size}"
            )
        held = len(request.resume.pages) if isinstance(request.resume, Snapshot) else 0
        return max(0, self.pages.count(request.length) - held)

    def _start(self, rows: Longs, requests: Sequence[Request]) -> None:
        """Fills the columns of new rows, and their states: zeros, a copy, or a note to read the snapshot once."""
        file = self.registers
        resume = [request.resume for request in requests]
        source = np.array([snap.register if snap else 0 for snap in resume], np.int64)
        length = np.array([snap.length if snap else 0 for snap in resume], np.int64)
        live, hit = rows * PER_ROW, source > 0
        file.want[rows] = [request.want for request in requests]
        file.tracked[rows] = length
        file.source[rows] = source if self.direct_hits else 0
        self.table.confirmed[rows] = length
        for column, values in (
            ("generation", self.table.generation[rows]),
            ("want", file.want[rows]),
            ("tracked", length),
            ("source", file.source[rows]),
        ):
            self.commands.write(file.address(column, rows), values)
        self.commands.zero(live[~hit])
        if self.direct_hits:
            for row, register in zip(rows[hit].tolist(), source[hit].tolist(), strict=True):
                self.publisher.pin(row, register)
        elif hit.any():
            self.commands.copy(live[hit], source[hit])

    def shortfall(self, rows: Sequence[Row | None], tokens: int | Sequence[int] = 1) -> int:
        """Slots that snapshots due in the next plan of these rows would lack: drop as many snapshots first to have all
        of them. Syncs: no. Raises: StaleHandle, InvalidArgument.
        """
        self._enter()
        numbers, tokens_of = self._batch(rows, tokens)
        real = np.flatnonzero(numbers)
        wanted = self.mirror.claims(numbers[real], tokens_of[real])
        return max(0, wanted + self.allocator.reserve - self.allocator.free) if wanted else 0

    def extend(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Takes KV pages so that row i can hold lengths[i] tokens, for all rows or for none. Syncs: no.

        Raises: OutOfPages (back-pressure), StaleHandle, InvalidArgument; nothing changed then.
        """
        self._enter()
        numbers = self.table.indices(rows)
        self.pages.extend(numbers, counts("lengths", lengths, len(numbers)).tolist())

    def plan(self, rows: Sequence[Row | None], tokens: int | Sequence[int] = 1, *, limit: int = NO_LIMIT) -> Step:
        """Decides which slots the next step reads, writes and snapshots: one launch, after a submit of what was
        recorded.

        rows: the batch; None and finished rows are padding. tokens: of each row in this step: 1 in decode, the chunk in
        prefill.
        limit: optional claims (for snapshots) that this step may make. Launch the forward right after: other calls may
        record changes of owners meanwhile, and the next plan or submit sends them behind it.
        Syncs: no. Raises: StaleHandle, InvalidArgument (also when an older step must be settled first); nothing changed
        then.
        """
        self._enter()
        self.log.require_room()
        if len(rows) > self.log.max_batch:
            raise InvalidArgument(f"a batch of {len(rows)}, the limit is max_batch={self.log.max_batch}")
        numbers, tokens_of = self._batch(rows, tokens)
        real = np.flatnonzero(numbers)
        self._require_plannable(numbers[real], tokens_of[real])

        before, after = np.zeros_like(numbers), np.zeros_like(numbers)
        batch = None if self.commands.pending else self.log.repeated(numbers, tokens_of)
        sent = batch or self.commands.submit((numbers.astype(np.int32), tokens_of.astype(np.int32)))
        assert sent is not None  # submit returns a batch where it was given one
        before[real], after[real] = self.mirror.plan(numbers[real], tokens_of[real], limit)
        record = self.log.next_record(len(rows))
        self.registers.plan(
            *sent, record, strategy=self.tracking.strategy, lanes=self.mirror.lanes, every=self.tracking.every,
            in_place=self.tracking.in_place, limit=limit,
        )  # fmt: skip
        settled = numbers[real][self.table.unsettled[numbers[real]] == 0]
        self.table.unsettled[numbers[real]] += 1
        self.table.confirmed[settled] = self.registers.labels[settled * PER_ROW]
        self.publisher.unpin(numbers)
        return self.log.add(record, numbers, tokens_of, before, after, self.table.generation[numbers])

    def _batch(self, rows: Sequence[Row | None], tokens: int | Sequence[int]) -> tuple[Longs, Longs]:
        """Row numbers and tokens of a batch, 0 for padding."""
        if not isinstance(rows, Sequence):
            raise InvalidArgument(f"{rows!r} is no batch: expected a sequence of rows, such as plan([row])")
        numbers = np.array([0 if row is None else self.table.index(row) for row in rows], np.int64)
        numbers[self.table.finished[numbers]] = 0
        return numbers, counts("tokens", tokens, len(numbers)) * (numbers > 0)

    def _require_plannable(self, rows: Longs, tokens: Longs) -> None:
        if np.unique(rows).size != rows.size:
            raise InvalidArgument(f"a row is named twice in the batch {rows.tolist()}")
        if (tokens < 1).any():
            raise InvalidArgument(f"tokens {tokens.tolist()}: a row in the batch needs at least 1, padding is None")
        self.pages.require_room(rows, self.mirror.require_within_boundary(rows, tokens))

    def settle(self, step: Step, finished: Sequence[bool] | NDArray[np.bool_] | None = None) -> None:
        """Says that the results of a step are known, and which of its entries they ended; finished rows are padding
        from now on.

        finished: one per entry of the batch; None = nobody. Steps are settled in the order they were planned; at most
        one launch, none where no slot can become free. Syncs: no. Raises: StaleHandle for a step settled before,
        InvalidArgument.
        """
        self._enter()
        over = np.zeros(len(step.numbers), bool) if finished is None else np.asarray(finished, bool).reshape(-1)
        if over.size != len(step.numbers):
            raise InvalidArgument(f"finished has {over.size} entries, the step {len(step.numbers)}")
        self.log.take(step)
        same = self._same_request(step)
        dead = same & self.table.finished[step.numbers]  # ended by the step before: what is real was settled with that
        same &= ~dead
        rows, ended = step.numbers[same], over[same]
        known = np.where(ended, step.after[same], self.registers.labels[rows * PER_ROW])
        self.table.unsettled[step.numbers[same | dead]] -= 1
        self.table.confirmed[rows] = known
        self.table.finished[rows] |= ended
        if self.tracking.releases_at_settle and self.mirror.superseding(rows):
            self.commands.submit()  # what was recorded before comes first
            self.mirror.settle(rows, known)
            flags = np.where(dead, Entry.DEAD, np.where(over & same, Entry.ENDED, Entry.ALIVE)).astype(np.int32)
            self.registers.settle(step.record, self.commands.ring.send(flags) if flags.any() else None)

    def _same_request(self, step: Step) -> NDArray[np.bool_]:
        """Which entries of a step still belong to the request they were planned for."""
        now = self.table.generation[step.numbers]
        same: NDArray[np.bool_] = (step.numbers > 0) & (now == step.generation) & self.table.used[step.numbers]
        return same

    def cancel(self, step: Step, *, publish: bool = False) -> list[Snapshot | None]:
        """Gives up a planned step whose forward never ran: its rows are aborted as they were before it.

        Returns their snapshots, entry by entry, if asked to publish. Syncs: no. Raises: StaleHandle, InvalidArgument.
        """
        self._enter()
        self.log.take(step, newest=True)
        entries = np.flatnonzero(self._same_request(step)).tolist()
        rows = step.numbers[entries]
        self.table.confirmed[rows] = np.minimum(self.table.confirmed[rows], step.before[entries])
        snapshots: list[Snapshot | None] = [None] * len(step.numbers)
        for entry, snap in zip(entries, self._end(rows, self.table.confirmed[rows] if publish else None), strict=True):
            snapshots[entry] = snap
        return snapshots

    def release(self, rows: Sequence[Row], publish: bool | Sequence[int] = False) -> list[Snapshot | None]:
        """Ends requests: their newest real snapshots are published if asked, everything else is given back. Syncs: no.

        publish: False, True, or the key length of each row (tokens whose KV may be shared), which bounds the snapshot's
        length. Returns one snapshot a row, None where there is none. Raises: StaleHandle, InvalidArgument; nothing
        changed then.
        """
        self._enter()
        numbers = self.table.indices(rows)
        if publish is False:
            return self._end(numbers, None)
        known = self.table.confirmed[numbers]
        if publish is not True:
            known = np.minimum(known, counts("publish", publish, len(numbers)))
        return self._end(numbers, known)

    def abort(self, rows: Sequence[Row]) -> None:
        """Ends requests at once, whatever is in flight, and publishes nothing. Syncs: no. Raises: StaleHandle,
        InvalidArgument.
        """
        self.release(rows)

    def retract(self, rows: Sequence[Row]) -> list[Snapshot | None]:
        """Ends requests that will come back, and keeps the newest real snapshot of each. Syncs: no. Raises:
        StaleHandle, InvalidArgument.
        """
        return self.release(rows, publish=True)

    def publish(self, rows: Sequence[Row], *, strict: bool = False) -> list[Snapshot | None]:
        """Moves the newest real snapshot out of each running row's lanes; the row goes on with another slot. Syncs: no.

        Returns one snapshot a row, None where there is none or no holder is free; strict: raise InvalidArgument then,
        and publish nothing. A snapshot keeps its slot until it is dropped, however many requests resumed from it.
        Raises: StaleHandle, InvalidArgument; nothing changed then.
        """
        self._enter()
        numbers = self.table.indices(rows)
        known = self.table.confirmed[numbers]
        if strict:
            self.publisher.require_answers(numbers, known)
        return self.publisher.publish(numbers, known, ended=False)

    def drop(self, snapshots: Sequence[Snapshot]) -> None:
        """Gives up snapshots: their slots and pages are free again, at once or when the first step of a row that
        resumes from one is planned.

        Syncs: no. Raises: StaleHandle, InvalidArgument; nothing changed then.
        """
        self._enter()
        self.publisher.drop(snapshots)

    def _end(self, rows: Longs, known: Longs | None) -> list[Snapshot | None]:
        snapshots: list[Snapshot | None] = [None] * len(rows)
        if known is not None:
            snapshots = self.publisher.publish(rows, known, ended=True)
        self.commands.release((rows[:, None] * PER_ROW + np.arange(PER_ROW)).reshape(-1))
        file = self.registers
        self.publisher.unpin(rows)
        self.pages.end(rows)
        self.table.give_back(rows)
        file.tracked[rows] = file.want[rows] = file.source[rows] = 0
        for column in ("tracked", "want", "source"):
            self.commands.write(file.address(column, rows), [0] * len(rows))
        self.commands.write(file.address("generation", rows), self.table.generation[rows])
        return snapshots

    def scrub_null(self) -> None:
        """Zeroes slot 0, where kernels that are not memstate's may have left rubbish. Syncs: no."""
        self._enter()
        self.storage.scrub_null()

    def submit(self) -> None:
        """Sends what is recorded now instead of with the next plan: one upload, at most two launches. Syncs: no."""
        self._enter()
        self.commands.submit()

    def reset(self) -> None:
        """Everything free, every register, column and page zero, every handle stale; the bytes stay. Syncs: no."""
        self._enter()
        self.commands.discard()
        self.allocator.reset()
        self.registers.reset()
        self.table.reset()
        self.commands.write(self.registers.address("generation", np.arange(self.table.rows + 1)), self.table.generation)
        self.publisher.reset()
        self.pages.reset()
        self.log.forget()

    def stats(self) -> Stats:
        """Figures from the host's mirror. Syncs: no."""
        held, rows_end = self.registers.held, self.registers.first_holder
        live = int(held[:rows_end:PER_ROW].sum())
        asked, traffic = self.backend.counts, self.storage.traffic
        return Stats(
            capacity=self.allocator.capacity,
            free=self.allocator.free,
            held_by_live=live,
            held_by_lanes=int(held[:rows_end].sum()) - live,
            held_by_snapshots=int(held[rows_end:].sum()),
            rows=self.table.rows,
            rows_used=self.table.rows - self.table.free,
            pages=self.pages.allocator.pages,
            pages_free=self.pages.allocator.free,
            snapshots=self.mirror.snapshots,
            degraded=self.mirror.degraded,
            published=self.publisher.published,
            dropped=self.publisher.dropped,
            refused=self.publisher.refused,
            copied_bytes=traffic.copied,
            zeroed_bytes=traffic.zeroed,
            submits=self.commands.submits,
            uploads=asked.uploads,
            upload_bytes=asked.upload_bytes,
            upload_waits=self.commands.ring.waits,
            launches=asked.total_launches,
            syncs=asked.syncs,
        )

    def audit(self) -> audit.AuditReport:
        """Looks for leaked and doubly owned slots, by name, also while requests run. Syncs: yes, after submitting what
        is recorded.
        """
        self._enter()
        self.commands.submit()
        names = {register: self._owner(register) for register in np.flatnonzero(self.registers.held).tolist()}
        return audit.audit(snapshot.take(self.registers, names), names)

    def _owner(self, register: int) -> tuple[str, str]:
        if register >= self.registers.first_holder:
            return "snapshot", self.holders.name(register)
        row, part = divmod(register, PER_ROW)
        what = ("live", "lane 0", "lane 1")[part]
        return what.split()[0], f"row {row} (request {self.table.ids[row]!r}) {what}"

    def check(self) -> None:
        """Submits what is recorded and raises the first fault that the device counted. Syncs: yes. Raises: DeviceFault,
        DoubleRelease.
        """
        self._enter()
        self.commands.submit()
        self.pool.check()

    def _enter(self) -> None:
        if self._thread is not None and self._thread != threading.get_ident():
            raise MemstateError(f"a manager is driven by one thread ({self._thread}), this is {threading.get_ident()}")
