"""Offers the calls of a decode loop as one object, `StateManager`.

It joins the parts of `memstate.engine` and keeps no rule of its own. Strategies, allocators and the device decide.

admit -> plan -> (your forward) -> settle | accept -> ... -> release | abort | retract
              `-> cancel                      `-> publish -> (your index) -> admit(resume=...) | drop
                                                        `-> prefix cache -> admit(tokens=...)
                                                             `-> host memory, storage -> prefetch -> poll ..
"""

import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate.checks import counts, is_count, require_salt, sequence
from memstate.engine.admission import Admission, Fork
from memstate.engine.ending import Ending
from memstate.engine.pool import StatePool
from memstate.engine.report import Reports
from memstate.engine.settings import (
    Forward,
    Pages,
    require_switch,
    validate_layout,
    validate_sizes,
    validate_tracking,
)
from memstate.engine.stepping import Stepping
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import REGISTERS_PER_ROW
from memstate.prefix import Match, Prefix, PrefixCache
from memstate.prefix.none import NoCache
from memstate.prefix.sessions import Sessions
from memstate.requests.boundaries import Boundaries
from memstate.requests.handles import Request, Row, Rows, Session, Snapshot
from memstate.requests.page_table import PageTable
from memstate.requests.snapshots import Snapshots
from memstate.requests.steps import Step, StepLog
from memstate.requests.table import RequestTable
from memstate.requests.tracking import Redirect, Tracking
from memstate.requests.tracking.mirror import Mirror
from memstate.slots.allocator import SlotAllocator
from memstate.slots.commands import Action, CommandBuffer
from memstate.slots.journal import Journal
from memstate.slots.readback import Readback
from memstate.slots.registers import Longs, RegisterFile
from memstate.state.layout import StateLayout
from memstate.state.planes import Planes
from memstate.state.regions import BufferInfo
from memstate.tiers import Fetch, TierManager, Tiers
from memstate.tiers.load import Loader, NoLoader
from memstate.tokens import BYTES, Tokens, encode

NO_LIMIT = 2**31 - 1
TWO_STEPS = ": a depth of 0 or 1; with more unsettled steps a dead one could overwrite a live snapshot"
PER_ROW = REGISTERS_PER_ROW


class StateManager(Reports):
    """Manages the states of all requests: their slots, their snapshots and the page ids of their KV.

    Args:
        layout: what one state is made of.
        slots: number of states that fit.
        max_requests: requests that can run at a time; each has a row of the request table.
        tracking: the strategy that takes snapshots. Default: `Redirect()`.
        pages: KV pages of requests. None: the caller manages KV, and a page has one token.
        prefix: settings of a prefix cache, for requests with tokens. Cached states and pages are evicted for requests.
        tiers: settings of host memory and storage below the prefix cache. Call `poll` once an iteration with them.
        forward: what the forward's kernels can do.
        overlap: plan the next step before the last one is settled.
        max_batch: entries of the largest batch. Default: max_requests + preallocated.
        preallocated: more rows, for requests whose state is still arriving.
        snapshots: snapshots that can be kept at a time. Default: slots; with a prefix cache slots + rows.
        reserve: slots that snapshots at boundaries leave free for admissions.
        tensors: plane name -> tensors that the engine has allocated. See `Planes.from_tensors`.
        device: where the states live.
        backend: what runs the kernels: "auto", "reference", "interpreter" or "cuda".
        journal: number of the last changes of owners that `changes` keeps.
        debug: check the calling thread and overlapping copies.

    Attributes:
        planes: the bytes of all slots, by plane, with gather and scatter.
        layout: the argument of this name, as are `forward`, `overlap` and `tracking`.
        pool: slots by id, for callers that hold them outside of any request.
        prefix: the prefix cache, or None.
        tiers: host memory and storage, or None.
        backend: runs the launches and counts them. Give the kernels of a forward another one, or they are counted too.

    Raises:
        ConfigurationError: settings contradict each other.
        InvalidArgument: an argument has no meaning here.
        LayoutMismatch: tensors do not fit the layout.

    Example:
        >>> import torch, memstate as ms
        >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
        >>> mem = ms.StateManager(layout, slots=8, max_requests=2)
        >>> rows = mem.admit([ms.Request("a")])
        >>> step = mem.plan(rows, [3])  # then the forward, which reads step.read and writes step.write
        >>> mem.settle(step)
        >>> mem.length(rows[0])
        3
    """

    def __init__(
        self,
        layout: StateLayout,
        *,
        slots: int,
        max_requests: int,
        tracking: Tracking | None = None,
        pages: Pages | None = None,
        prefix: Prefix | None = None,
        tiers: Tiers | None = None,
        forward: Forward | None = None,
        overlap: bool = True,
        max_batch: int | None = None,
        preallocated: int = 0,
        snapshots: int | None = None,
        reserve: int = 0,
        tensors: Mapping[str, Tensor | Sequence[Tensor]] | None = None,
        device: torch.device | str = "cpu",
        backend: str = "auto",
        journal: int = 0,
        debug: bool = False,
    ) -> None:
        for name, given, kind in (
            ("pages", pages, Pages),
            ("forward", forward, Forward),
            ("prefix", prefix, Prefix),
            ("tiers", tiers, Tiers),
        ):
            if not isinstance(given, kind | None):
                raise ConfigurationError(f"{name}={given!r}: expected ms.{kind.__name__}(...) or None")
        if prefix is not None and pages is None:
            raise ConfigurationError("a prefix cache needs the size of a page: pages=ms.Pages(size=16)")
        if tiers is not None and prefix is None:
            raise ConfigurationError("tiers without a prefix cache: build the manager with prefix=ms.Prefix()")
        if not is_count(journal):
            raise ConfigurationError(f"journal={journal!r}: expected a number of changes")
        validate_layout(layout)
        require_switch("overlap", overlap, TWO_STEPS)
        require_switch("debug", debug)
        validate_sizes(slots, max_requests, preallocated, max_batch, snapshots)
        pages, forward = pages or Pages(size=1), forward or Forward()
        self.tracking = tracking if tracking is not None else Redirect()
        validate_tracking(self.tracking, slots, pages.size, overlap, forward.speculation)
        self.layout, self.overlap, in_place = layout, overlap, forward.in_place
        if forward.direct_hits is None:
            forward = replace(forward, direct_hits=isinstance(self.tracking, Redirect) and not in_place)
        self.forward = forward
        try:
            self.backend = Backend(backend, device)
        except (ValueError, TypeError, RuntimeError) as error:  # torch names the device that it does not know
            raise ConfigurationError(str(error)) from error
        self._allocator = SlotAllocator(slots, self.backend, reserve)
        if tensors is None:
            self.planes = Planes(layout, slots, self.backend)
        else:
            self.planes = Planes.from_tensors(layout, tensors, self.backend, slots)
        self.pool = StatePool(self._allocator, self.planes, debug=debug)
        self._table = RequestTable(max_requests + preallocated)
        spare = self._table.rows if prefix else 0  # without them, a holder reused within a step would cost a submit
        self._registers = RegisterFile(
            self._allocator, self._table.rows, slots + spare if snapshots is None else snapshots, pages.per_row
        )
        self._commands = CommandBuffer(self._registers, self.pool.run_data)
        self._pages = PageTable(pages.count, pages.size, self._commands)
        self._mirror = Mirror(self._registers, self.tracking, overlap)
        self._snapshots = Snapshots(self._commands, self._pages, self._mirror)
        parts = self._commands, self._pages, self._snapshots
        self._cache = PrefixCache(prefix, *parts) if prefix is not None else NoCache(*parts)
        self.prefix = self._cache if self._cache.enabled else None
        copied = tuple(plane.name for plane in layout.planes if in_place or not plane.rewritten_each_step)
        self.tiers = None
        loader = NoLoader()
        if tiers is not None:
            if copied:  # the plan reads whole states itself, before any layer
                tiers = replace(tiers, layerwise=False)
            self.tiers = TierManager(tiers, self.planes, self._cache, self._commands, self._pages)
            loader = Loader(self.tiers, self._cache, self._pages)
        self._sessions = Sessions(self._commands, self._pages, self._snapshots, self._mirror.lanes)
        self._boundaries = Boundaries(self._commands, self.tracking.reads_old_slot)
        self._log = StepLog(max_batch or self._table.rows, int(overlap), self.backend.device, forward.speculation)
        self._stepping = Stepping(
            self._commands,
            self._table,
            self._pages,
            self._mirror,
            self._snapshots,
            self._boundaries,
            self._log,
            self.planes,
            copied,
        )
        self._admission = Admission(
            self._commands, self._table, self._pages, self._snapshots, self._cache, self._sessions, self._boundaries,
            self.tracking.lanes_at_admission(overlap), bool(forward.direct_hits), self._mirror.lanes > 0, loader,
        )  # fmt: skip
        self._ending = Ending(
            self._commands, self._table, self._pages, self._snapshots, self._cache, self._sessions, self._boundaries
        )
        self._commands.journal = Journal(journal, self._registers, self.owner) if journal else None
        self._thread = threading.get_ident() if debug else None

    def __repr__(self) -> str:
        requests = self._table.rows - self._table.free
        slots = f"{self.free_slots} of {self._allocator.capacity} slots free"
        return f"StateManager({slots}, {requests} requests, {self.tracking})"

    @property
    def page_size(self) -> int:
        """Tokens of a KV page."""
        return self._pages.page_size

    @property
    def page_table(self) -> Tensor:
        """KV pages of each row: int32 `row page` on the device; 0 = none."""
        return self._registers.page_table

    @property
    def free_slots(self) -> int:
        """Slots that requests can be given now.

        The number includes slots whose release waits for a forward. `pool.claim` cannot have these yet.
        """
        return self._allocator.free

    @property
    def free_pages(self) -> int:
        """KV pages that can be claimed now."""
        return self._pages.allocator.free

    def length(self, row: Row) -> int:
        """Returns the tokens folded into the row's state by the steps planned so far.

        Args:
            row: the request.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: not a row of this manager.

        Syncs: no.
        """
        return int(self._mirror.lengths(np.array([self._table.index(row)]))[0])

    def confirmed(self, row: Row) -> int:
        """Returns the length in tokens up to which the row is known to be real.

        Args:
            row: the request.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: not a row of this manager.

        Syncs: no.
        """
        return int(self._table.confirmed[self._table.index(row)])

    def next_boundary(self, row: Row) -> int:
        """Returns the next length in tokens at which a snapshot is due.

        A prefill chunk must not go beyond it.

        Args:
            row: the request.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: not a row of this manager.

        Syncs: no.
        """
        index, length = self._table.index(row), self.length(row)
        following = (length // self.tracking.every + 1) * self.tracking.every
        snapshot_at = self._boundaries.after(index, length)
        return snapshot_at if length < snapshot_at < following else following

    def slots_held(self, row: Row) -> int:
        """Returns how many slots the row's registers hold.

        Args:
            row: the request.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: not a row of this manager.

        Syncs: no.
        """
        first = PER_ROW * self._table.index(row)
        return int(self._registers.held[first : first + PER_ROW].sum())

    def admit(self, requests: Sequence[Request]) -> Rows:
        """Gives every request a row, slots and pages; or raises and gives no request anything.

        Fresh states are zeroed with the next submit.

        Args:
            requests: the requests to start.

        Returns:
            One row a request, in the same order.

        Raises:
            OutOfSlots: back-pressure, too few slots are free; nothing changed.
            OutOfRows: back-pressure, the request table is full; nothing changed.
            OutOfPages: back-pressure, too few KV pages are free; nothing changed.
            StaleHandle: a snapshot was dropped, or a session closed; nothing changed.
            InvalidArgument: a request contradicts itself, or a turn of its session runs; nothing changed.

        Syncs: no.
        """
        self._enter()
        return self._admission.admit(requests)

    def fork(self, row: Row, ids: Sequence[Hashable]) -> Fork:
        """Starts more requests from a running row's state, for example several samples of one prompt.

        With `direct_hits` (Redirect) nothing is copied. The new rows and the row itself read one slot in their next
        step, and each writes its own. Otherwise the state is copied with the next submit.

        The rows share the KV pages that are full. The result names the pages whose contents the caller must copy.

        The shared state is not a snapshot of any row. A row that ends before its next step publishes an older snapshot.

        Args:
            row: the running request.
            ids: names of the new requests.

        Returns:
            The new rows, and the page copies to make.

        Raises:
            OutOfSlots: back-pressure, too few slots are free; nothing changed.
            OutOfRows: back-pressure, the request table is full; nothing changed.
            OutOfPages: back-pressure, too few KV pages are free; nothing changed.
            StaleHandle: the request has ended; nothing changed.
            InvalidArgument: the row has finished or has an unsettled step, no register for a snapshot is free, or a
                page needs a copy while changes wait for a forward; nothing changed.

        Syncs: no.
        """
        self._enter()
        return self._admission.fork(row, ids)

    def arrived(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Tells the manager that states computed elsewhere are in the live slots of fresh rows.

        Use `read_slots` to learn which slots to write. Under Redirect, a state that arrives at a boundary becomes a
        snapshot, as if it had been computed here. Under other strategies the next boundary is the first.

        Args:
            rows: rows that have folded no token yet.
            lengths: tokens that each state stands for, at least 1.

        Raises:
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: a row has folded tokens, is in a step or has finished, or its pages are too few for its
                length; nothing changed.

        Syncs: no.
        """
        self._enter()
        self._admission.arrived(rows, lengths)

    def read_slots(self, handles: Sequence[Row | Snapshot]) -> Readback:
        """Asks the device which slots hold these rows' states and snapshots, for RDMA or debugging.

        It takes one upload, one launch and one copy back. The ids are ready a step later.

        If a change recorded before waits for a forward, the question waits with it. So no id is known before its slot
        may be used.

        Args:
            handles: rows and snapshots, in any order.

        Returns:
            A readback of one slot id a handle. `Readback.wait` syncs.

        Raises:
            StaleHandle: a request has ended, or a snapshot was dropped.
            InvalidArgument: a handle is neither a row nor a snapshot.

        Syncs: no.
        """
        self._enter()
        sequence("rows and snapshots", handles, "[row, snapshot]")
        rows = [0 if isinstance(handle, Snapshot) else self._table.index(handle) for handle in handles]
        self._snapshots.require(handle for handle in handles if isinstance(handle, Snapshot))
        origins = self._registers.origins(np.array(rows, np.int64)).tolist()
        registers = [
            handle.register if isinstance(handle, Snapshot) else origin
            for handle, origin in zip(handles, origins, strict=True)
        ]
        found = Readback(len(registers), self.backend)

        def resolve() -> None:
            sent = self._commands.ring.send(np.asarray(registers, np.int32))
            found.begin(self._registers.resolve(sent))

        self._commands.then(Action(resolve))
        return found

    def shortfall(self, rows: Sequence[Row | None], tokens: int | Sequence[int] = 1, *, window: bool = False) -> int:
        """Returns how many slots the snapshots due in the next plan of these rows would lack.

        Drop that many snapshots first to take all of them.

        Args:
            rows: the batch; None and finished rows are padding.
            tokens: tokens of each row in the step.
            window: count for the accept of a window instead; the result is then an upper bound.

        Raises:
            StaleHandle: a request has ended.
            InvalidArgument: the tokens do not fit the rows.

        Syncs: no.
        """
        self._enter()
        return self._stepping.shortfall(self._stepping.batch(rows, tokens), window)

    def extend(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Takes KV pages for longer rows, for all of them or for none.

        Args:
            rows: the rows.
            lengths: tokens that each row must have pages for.

        Raises:
            OutOfPages: back-pressure, too few KV pages are free; nothing changed.
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: a row is named twice, or a length needs more than `per_row` pages; nothing changed.

        Syncs: no.
        """
        self._enter()
        numbers = self._table.indices(rows)
        tokens = counts("lengths", lengths, len(numbers)).tolist()
        self._cache.make_room(self._pages.missing(numbers, tokens))
        self._pages.extend(numbers, tokens)

    def plan(
        self,
        rows: Sequence[Row | None],
        tokens: int | Sequence[int] = 1,
        *,
        limit: int = NO_LIMIT,
        window: bool = False,
    ) -> Step:
        """Decides which slots the next step reads, writes and snapshots.

        It submits what was recorded, then takes one launch. Launch the forward before the next plan.

        Any other call may come between the plan and its forward. A change of the owner of a slot that this step names
        is recorded, and sent behind the forward by the next plan or by `submit(step)`.

        The forward of a window reads `step.read` and stores no state in a slot. It writes the states after each of its
        tokens to windows that the caller owns, and `accept` chooses from these.

        Args:
            rows: the batch; None and finished rows are padding.
            tokens: tokens of each row in this step: 1 in decode, the chunk in prefill, the drafted tokens of a window.
            limit: number of optional claims (for snapshots) that this step may make.
            window: plan a speculative step.

        Returns:
            The step, with its slots on the device: int32 `batch` each.

        Raises:
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: an older step must be settled first, the batch is too large, a row is named twice, a row
                crosses a boundary, or its pages are too few; nothing changed.

        Syncs: no.
        """
        self._enter()
        if window and not self.forward.speculation:
            raise InvalidArgument("plan(window=True) needs a manager with forward=ms.Forward(speculation=True)")
        step = self._stepping.plan(rows, tokens, _limit(limit), window, self._cache)
        if self.tiers is not None:
            self.tiers.host.planned(step.numbers, step.before, step.after)
        return step

    def settle(self, step: Step, finished: Sequence[bool] | NDArray[np.bool_] | None = None) -> None:
        """Tells the manager that a step's results are known, and which of its rows they finished.

        Finished rows are padding from now on. Settle steps in the order in which they were planned. It takes one launch
        where a slot can become free, otherwise none.

        Args:
            step: the oldest unsettled step.
            finished: one switch an entry of the batch. None: no row has finished.

        Raises:
            StaleHandle: the step was settled before.
            InvalidArgument: the step is speculative or an older one is unsettled, or `finished` does not fit the batch.

        Syncs: no.
        """
        self._enter()
        self._stepping.settle(step, finished)

    def accept(
        self, step: Step, accepted: Sequence[int], windows: Mapping[str, Tensor],
        finished: Sequence[bool] | NDArray[np.bool_] | None = None, *, limit: int = NO_LIMIT,
    ) -> None:  # fmt: skip
        """Keeps the states after the accepted tokens of each window, and settles the step.

        If a window crosses a boundary, the state there becomes a snapshot, as long as the strategy finds a slot for it.

        It takes one upload, one launch, one more launch for each plane, and one where lanes can be released.

        Args:
            step: the oldest unsettled step, planned with `window=True`.
            accepted: number of real tokens of each entry; 0: the row stays where it was.
            windows: plane name -> the states after each token, `layer batch step ...`. For a plane of conv inputs also
                `layer batch tap-1+step channel`, every input once.
            finished: as for `settle`. Count the tokens of a row that ends within its window up to its end.
            limit: number of optional claims (for snapshots) that this call may make.

        Raises:
            StaleHandle: the step was settled before; nothing changed.
            InvalidArgument: the step is not speculative or an older one is unsettled, or `accepted`, `windows` or
                `finished` do not fit it; nothing changed.

        Syncs: no.
        """
        self._enter()
        self._stepping.accept(step, accepted, windows, finished, _limit(limit))

    def cancel(
        self, step: Step, *, publish: bool = False, tokens: Sequence[Tokens | None] | None = None
    ) -> list[Snapshot | None]:
        """Gives up a planned step whose forward never ran, and aborts its rows.

        The rows end as they were before the step. Rows that the step before it had finished are aborted as well. To
        keep their states, release them first, or ask to publish.

        Args:
            step: the newest step.
            publish: publish the newest real snapshot of each row.
            tokens: as for `release`, one sequence an entry of the batch.

        Returns:
            One snapshot an entry, if asked to publish; None where there is none.

        Raises:
            StaleHandle: the step was settled before; nothing changed.
            InvalidArgument: the step is not the newest, a result of it was handed out since its plan, `submit(step)`
                said that its forward was launched, or the tokens do not fit; nothing changed.
            ConfigurationError: tokens without a prefix cache or a session; nothing changed.

        Syncs: no.
        """
        self._enter()
        current = self._stepping.current(step)
        keys = self._ending.keys(tokens, current)
        keep = publish or keys is not None
        if keep and keys is None:
            self._ending.require_sessions_told(current)
        entries, rows = self._stepping.cancel(step)
        known = self._table.confirmed[rows] if keep else None
        given = [keys[entry] for entry in entries] if keys is not None else None
        ended = self._ending.end(rows, known, given, "cancelled with its step")
        snapshots: list[Snapshot | None] = [None] * len(step.numbers)
        for entry, snap in zip(entries, ended, strict=True):
            snapshots[entry] = snap
        return snapshots

    def release(
        self, rows: Sequence[Row], publish: bool | Sequence[int] = False, *, tokens: Sequence[Tokens] | None = None
    ) -> list[Snapshot | None]:
        """Ends requests: publishes their newest real snapshots if asked, and frees everything else.

        With tokens, KV and snapshot go to the prefix cache, and a turn's states go to its session. A turn that ends
        with neither tokens nor `publish` is aborted. The cache owns the snapshots that it takes; `drop` refuses them.

        Args:
            rows: the requests.
            publish: False, True, or the key length of each row: tokens whose KV may be shared. It bounds the snapshot's
                length.
            tokens: everything known of each request, prompt and answer.

        Returns:
            One snapshot a row; None where there is none.

        Raises:
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: a row is named twice, tokens do not continue their prompt, or a turn is published without
                tokens; nothing changed.
            ConfigurationError: tokens without a prefix cache or a session; nothing changed.

        Syncs: no.
        """
        return self._end(rows, publish, tokens, "released")

    def _end(
        self, rows: Sequence[Row], publish: bool | Sequence[int], tokens: Sequence[Tokens] | None, how: str
    ) -> list[Snapshot | None]:
        self._enter()
        numbers = self._table.indices(rows)
        keys = self._ending.keys(tokens, numbers)
        if publish is False and keys is None:
            return self._ending.end(numbers, None, None, how)
        known = self._table.confirmed[numbers]
        if not isinstance(publish, bool):
            known = np.minimum(known, counts("publish", publish, len(numbers)))
        if keys is None:
            self._ending.require_sessions_told(numbers)
        before, told = self._stepping.lengths_before(numbers), self._told(numbers, known, keys)
        snapshots = self._ending.end(numbers, known, keys, how)
        self._stepping.promise(numbers, told or [snap.length if snap else 0 for snap in snapshots], before)
        return snapshots

    def abort(self, rows: Sequence[Row]) -> None:
        """Ends requests at once, also while a step is in flight, and publishes nothing.

        A session goes back to where the turn began, as far as a register still has that state.

        Args:
            rows: the requests.

        Raises:
            StaleHandle: a request has ended.
            InvalidArgument: a row is named twice, or is no row of this manager.

        Syncs: no.
        """
        self._end(rows, False, None, "aborted")

    def retract(self, rows: Sequence[Row], *, tokens: Sequence[Tokens] | None = None) -> list[Snapshot | None]:
        """Ends requests that will come back, and keeps the newest real snapshot of each.

        Args:
            rows: the requests.
            tokens: as for `release`.

        Returns:
            One snapshot a row, for `Request(resume=...)`; None where there is none.

        Raises:
            StaleHandle: a request has ended.
            InvalidArgument: as for `release`.
            ConfigurationError: tokens without a prefix cache or a session.

        Syncs: no.
        """
        return self._end(rows, True, tokens, "retracted")

    def publish(
        self, rows: Sequence[Row], *, tokens: Sequence[Tokens] | None = None, strict: bool = False
    ) -> list[Snapshot | None]:
        """Publishes the newest real snapshot of each running row; the row continues with another slot.

        The snapshot moves from the row's lanes to a register of its own. It keeps its slot until it is dropped, however
        many requests resumed from it. With tokens, KV and snapshot go to the prefix cache.

        Args:
            rows: the requests.
            tokens: everything known of each request, prompt and answer.
            strict: raise where a row has no snapshot or no register is free for it, and publish nothing.

        Returns:
            One snapshot a row; None where there is none, or no register is free for it.

        Raises:
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: `strict`, and a snapshot is missing; or tokens do not continue their prompt; nothing
                changed.
            ConfigurationError: tokens without a prefix cache or a session; nothing changed.

        Syncs: no.
        """
        self._enter()
        numbers = self._table.indices(rows)
        keys = self._ending.keys(tokens, numbers)
        known = self._table.confirmed[numbers]
        if strict:
            bounds = known if keys is None else np.minimum(known, [len(key) // BYTES for key in keys])
            self._snapshots.require_answers(numbers, bounds)
        before, told = self._stepping.lengths_before(numbers), self._told(numbers, known, keys)
        snapshots = self._ending.publish(numbers, known, keys)
        self._stepping.promise(numbers, told or [snap.length if snap else 0 for snap in snapshots], before)
        return snapshots

    def _told(self, rows: Longs, known: NDArray[np.integer], keys: Sequence[bytes] | None) -> list[int] | None:
        """Returns the tokens of each row that the cache or a session is about to rely on; None where handles say it."""
        if keys is None:
            return None
        lengths = [min(n, len(key) // BYTES) for n, key in zip(known.tolist(), keys, strict=True)]
        turns = self._sessions.by_row
        return [n if row in turns else self._pages.floor(n) for row, n in zip(rows.tolist(), lengths, strict=True)]

    def drop(self, snapshots: Sequence[Snapshot | None]) -> None:
        """Gives up snapshots, so that their slots and pages become free.

        They are free at once. If a row is about to resume from one, they are free when its first step is planned.

        Args:
            snapshots: what `publish` and `release` returned; None is skipped.

        Raises:
            StaleHandle: a snapshot was dropped before; nothing changed.
            InvalidArgument: a snapshot is named twice, or the prefix cache owns it; nothing changed.

        Syncs: no.
        """
        self._enter()
        given = [snap for snap in sequence("snapshots", snapshots, "[snapshot]") if snap is not None]
        self._cache.require_foreign(given)
        self._snapshots.drop(given)

    def match(self, tokens: Tokens, salt: Hashable = None, session: Session | None = None) -> Match:
        """Says how much of a prompt the prefix cache has, and why not more. Changes nothing.

        The result has the lengths by state and by KV, and what host memory would add. A request computes its last token
        in any case.

        Args:
            tokens: the whole prompt.
            salt: as the request's.
            session: the session whose next turn it is; what the session keeps counts too.

        Raises:
            InvalidArgument: tokens or salt are not valid, or a turn of the session runs.
            StaleHandle: the session is closed.
            ConfigurationError: the manager has no prefix cache.

        Syncs: no.
        """
        self._enter()
        found, kept = self._match(encode(tokens), require_salt(salt), session)
        return found.instead(kept) if kept >= found.length and kept else found

    def _match(self, key: bytes, salt: Hashable, session: Session | None) -> tuple[Match, int]:
        """Returns what cache and host memory have, and the length that a session keeps."""
        if self.prefix is None:
            raise ConfigurationError("there is no prefix cache: build the manager with prefix=ms.Prefix()")
        most = max(0, len(key) // BYTES - 1)
        found = self.prefix.match(key, salt, most)
        kept = self._sessions.find(self._sessions.get(session), key, salt).length if session is not None else 0
        if self.tiers is not None and (hit := self.tiers.find(key, salt, found, max(kept, found.length), most)):
            found = replace(found, host_length=hit.length)
        return found, kept

    def prefetch(self, tokens: Tokens, salt: Hashable = None, session: Session | None = None) -> Fetch:
        """Starts to bring what storage has for a prompt to host memory, where `match` and `admit` find it.

        Call it when a request arrives, and `poll` every iteration. Admit the request once `fetch.done`, or once
        `mem.tiers.ready(fetch)` says that it has waited long enough.

        Args:
            tokens: the whole prompt.
            salt: as the request's.
            session: as the request's.

        Returns:
            The fetch, for `Request(fetch=...)`.

        Raises:
            InvalidArgument: tokens or salt are not valid, or a turn of the session runs.
            StaleHandle: the session is closed.
            ConfigurationError: the manager has no storage, or it is closed.

        Syncs: no.
        """
        self._enter()
        if self.tiers is None:
            raise ConfigurationError("there is no storage to fetch from: build the manager with tiers=ms.Tiers(...)")
        key = encode(tokens)
        found, kept = self._match(key, require_salt(salt), session)
        own = found.host_length if self.tiers.settings.group is None else 0  # of which other ranks know nothing
        return self.tiers.prefetch(key, salt, found, max(kept, found.length, own))

    def poll(self) -> None:
        """Advances the transfers between device, host memory and storage.

        Call it once an iteration of the loop, also while no request runs.

        Raises:
            AgreementLost: a rank does not answer, or runs other prefetches.

        Syncs: no; with several ranks it waits for those that are late.
        """
        self._enter()
        if self.tiers is not None:
            self.tiers.poll()

    def close(self) -> None:
        """Writes what is cached to storage, closes the storage, and ends the threads of the tiers.

        Only tiers need it. Requests continue without them.

        Raises:
            Asleep: states or KV pages sleep; nothing changed.
            InvalidArgument: something waits for the newest step's forward; nothing changed.

        Syncs: yes.
        """
        if self.tiers is not None:
            self.tiers.close()

    def open_session(self, name: Hashable) -> Session:
        """Opens a conversation whose states and pages stay between its turns.

        Args:
            name: a name, shown by audits.

        Returns:
            The session, for `Request(session=...)`.

        Raises:
            InvalidArgument: the name is not hashable.

        Syncs: no.
        """
        self._enter()
        return self._sessions.open(name)

    def close_session(self, session: Session) -> None:
        """Closes a session and frees what it holds.

        Args:
            session: what `open_session` returned.

        Raises:
            StaleHandle: the session was closed before.
            InvalidArgument: a turn of the session runs.

        Syncs: no.
        """
        self._enter()
        if lease := self._sessions.close(session):
            self._cache.release(lease)

    def scrub_null(self) -> None:
        """Zeroes slot 0, after kernels outside memstate may have written to it.

        Syncs: no.
        """
        self._enter()
        self.planes.scrub_null()

    def submit(self, step: Step | None = None) -> None:
        """Sends what is recorded now, instead of with the next plan.

        Each packet takes one upload and at most two launches.

        Without `step`, the first change of a slot that the newest step names waits for the forward. Everything recorded
        after it waits too. With `step`, everything is sent, behind the snapshot copies of an in-place engine.

        Args:
            step: the newest step, once its forward has been launched.

        Raises:
            StaleHandle: the step was settled before; nothing changed.
            InvalidArgument: the step is not the newest; nothing changed.

        Syncs: no.
        """
        self._enter()
        if step is not None:
            self._stepping.launched(step)
        self._commands.submit()

    def sleep(self, keep: bool = True) -> None:
        """Releases the memory of the states, and remembers who owns each slot.

        Until `wake`, only lengths, counts and `stats` work. All other calls raise Asleep.

        Args:
            keep: keep the bytes in host memory. Without it, no request and no snapshot may hold a slot.

        Raises:
            InvalidArgument: slots are held and `keep` is False, or memory cannot be released; nothing changed.
            Asleep: the states sleep already; nothing changed.

        Syncs: yes.
        """
        self._enter()
        held = (
            self._allocator.capacity - self._allocator.free + self._commands.withheld[0]
        )  # until a forward is launched
        if held and not keep:
            raise InvalidArgument(
                f"{held} slots are held: their states would be lost; use keep=True, or end them first, and settle the "
                "newest step, whose forward may still need them"
            )
        self._commands.submit()
        if self.tiers is not None:
            self.tiers.settle()
        self.planes.sleep(keep=keep)

    def wake(self) -> None:
        """Takes the memory back, with the bytes that were kept.

        Addresses may have moved. Capture CUDA graphs that hold addresses of planes anew.

        Raises:
            InvalidArgument: the states do not sleep.
            Asleep: an engine's memory is not back.
            LayoutMismatch: an engine's memory is not back as it was.

        Syncs: yes.
        """
        self._require_thread()
        self.planes.wake()

    def buffer_infos(self) -> list[BufferInfo]:
        """Returns base address, slot stride and length of every plane and layer, in bytes, to register for RDMA.

        Syncs: no.
        """
        return self.planes.buffer_infos()

    def reset(self) -> None:
        """Frees every slot, row and page, and makes every handle stale.

        Registers, columns and the page table become zero. The bytes of states and what storage has stay; host memory is
        emptied. From here on, do not launch the forward of a step planned before.

        Syncs: no; with tiers yes.
        """
        self._enter()
        self._commands.discard()
        if self.tiers is not None:
            self.tiers.clear()
        self._allocator.reset()
        self._registers.reset()
        self._table.reset()
        self._commands.write(
            self._registers.address("generation", np.arange(self._table.rows + 1)), self._table.generation
        )
        self._snapshots.reset()
        self._boundaries.reset()
        self._sessions.reset()
        self._cache.reset()
        self._pages.reset()
        self._stepping.reset()

    def check(self) -> None:
        """Submits what does not wait for a forward, and raises the first fault that the device counted.

        Raises:
            DeviceFault: the device counted an operation that cannot be right.
            DoubleRelease: a slot was released that was free already.

        Syncs: yes.
        """
        self._enter()
        self._commands.submit()
        self.pool.check()


def _limit(limit: int) -> int:
    """Returns a limit as kernels take it: a plain integer that fits 32 bits."""
    if not isinstance(limit, int | np.integer) or isinstance(limit, bool):
        raise InvalidArgument(f"limit={limit!r}: expected a whole number of claims")
    return max(0, min(int(limit), NO_LIMIT))
