"""Offers the calls of a decode loop as one object, `StateManager`.

It joins the parts of `memstate.engine` and has no rules of its own. The rules are in the strategies, the allocators and
the kernels.

admit -> plan -> (your forward) -> settle | accept -> ... -> release | abort | retract
              `-> cancel                      `-> publish -> (your index) -> admit([Request(resume=...)]) | drop
                                                        `-> prefix cache -> admit([Request(tokens=...)])
                                                             `-> host memory, storage -> prefetch -> poll ..
"""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate.checks import is_count, numbers_of, require_salt, require_switch, sequence, whole
from memstate.engine.ages import Ages
from memstate.engine.canary import Canary
from memstate.engine.chaos import Chaos, faults_of
from memstate.engine.ending import Ending
from memstate.engine.forking import Fork, Forking
from memstate.engine.pool import StatePool
from memstate.engine.recovery import Recovery
from memstate.engine.settings import Forward, Pages, validate_layout, validate_sizes, validate_tracking
from memstate.engine.sizing import require_fit
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.kernels.tables import REGISTERS_PER_ROW, Marks, StepRecord
from memstate.prefix import Match, Prefix, PrefixCache
from memstate.prefix.conversation import SessionInfo
from memstate.prefix.room import Room
from memstate.prefix.session_settings import SessionLimits, is_duration
from memstate.prefix.sessions import Sessions
from memstate.requests.handles import Request, Row, Rows, Session, Snapshot
from memstate.requests.holdings import Holdings
from memstate.requests.marks import Marks as PromptMarks
from memstate.requests.page_table import PageTable
from memstate.requests.steps import Step, StepLog
from memstate.requests.table import RequestTable
from memstate.requests.tracking import Redirect, Tracking
from memstate.requests.tracking.mirror import Mirror
from memstate.slots.allocator import SlotAllocator
from memstate.slots.commands import Action, CommandBuffer
from memstate.slots.journal import Journal
from memstate.slots.readback import Readback
from memstate.slots.registers import RegisterFile
from memstate.state.layout import StateLayout
from memstate.state.planes import Planes
from memstate.state.regions import BufferInfo
from memstate.tiers import Fetch, Tiers
from memstate.tiers.load import Loader
from memstate.tokens import BYTES, Prompt, Tokens, encode

NO_LIMIT = 2**31 - 1
TWO_STEPS = ": a depth of 0 or 1; with more unsettled steps a dead one could overwrite a live snapshot"
PER_ROW = REGISTERS_PER_ROW
ENDED = {"release": "released", "abort": "aborted", "retract": "retracted"}


class StateManager(Recovery):
    """Manages the states of all requests: their slots, their snapshots and the page ids of their KV.

    On CUDA, all calls come on one stream, outside of graph captures; see `use_stream`.

    Args:
        layout: what one state is made of.
        slots: number of states that the memory holds.
        max_requests: requests that can run at a time; each has a row of the request table.
        tracking: the strategy that takes snapshots. Default: `Redirect()`.
        pages: KV pages of requests. None: the caller manages KV, and a page has one token.
        prefix: settings of a prefix cache, for requests with tokens. Admissions can evict cached states and pages.
        tiers: settings of host memory and storage below the prefix cache. With tiers, call `poll` in each iteration.
        sessions: limits of what idle sessions keep. Default: `SessionLimits()`.
        forward: what the kernels of your forward can do.
        overlap: whether the next step can be planned before the previous step is settled.
        max_batch: entries of the largest batch. Default: max_requests + preallocated.
        preallocated: additional rows, for requests that wait for a state computed elsewhere.
        snapshots: largest number of published snapshots. Default: slots; with a prefix cache slots + rows.
        reserve: slots that snapshots at boundaries leave free for admissions.
        tensors: plane name -> tensors that the engine has allocated; None: allocate. See `Planes.from_tensors`.
        device: device of the states.
        backend: what runs the kernels: "auto", "reference", "interpreter" or "cuda".
        journal: how many changes of owners `changes` keeps; 0: none.
        debug: whether to check the calling thread, overlapping copies and in each call the owners of all states, to
            look for leaks in `close`, and to find forwards that forget a store or change a slot that they may only
            read. Slots that a forward must store in are filled before it, and the call that closes the step raises
            ForwardFault if it did not. This call waits for the device then.
        chaos: faults to inject on purpose, to test an engine: refused claims and admissions, a store that fails or is
            slow, delayed polls. None: none, or those of the environment variable MEMSTATE_CHAOS, such as
            "seed=1,claims=0.1". `ms.Chaos()` injects none.

    Attributes:
        planes: the bytes of all slots, by plane, with gather and scatter.
        layout: the argument `layout`. The arguments `forward`, `overlap` and `tracking` are attributes, too.
        pool: hands out slots by id, for callers that use slots outside of requests.
        prefix: the prefix cache, or None.
        tiers: host memory and storage, or None.
        backend: runs memstate's launches and counts them. Use another `Backend` for the kernels of your forward. If you
            use this one, it counts the launches of the forward, too.

    Raises:
        ConfigurationError: settings contradict each other, a value is not valid, or the memory of the device or the
            host is too small. Sizes are checked before anything is allocated.
        InvalidArgument: `reserve` is out of range, or a tensor of `tensors` requires grad.
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
        sessions: SessionLimits | None = None,
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
        chaos: Chaos | None = None,
    ) -> None:
        for name, given, kind in (
            ("pages", pages, Pages),
            ("forward", forward, Forward),
            ("prefix", prefix, Prefix),
            ("tiers", tiers, Tiers),
            ("sessions", sessions, SessionLimits),
        ):
            if not isinstance(given, kind | None):
                raise ConfigurationError(f"{name}={given!r}: expected ms.{kind.__name__}(...) or None")
        if prefix is not None and pages is None:
            raise ConfigurationError("a prefix cache needs the size of a page: pages=ms.Pages(size=16)")
        if tiers is not None and prefix is None:
            raise ConfigurationError("tiers without a prefix cache: build the manager with prefix=ms.Prefix()")
        if not is_count(journal):
            raise ConfigurationError(f"journal={journal!r}: expected a number of changes")
        self._faults = faults_of(chaos)
        validate_layout(layout)
        require_switch("overlap", overlap, TWO_STEPS)
        require_switch("debug", debug)
        validate_sizes(slots, max_requests, preallocated, max_batch, snapshots)
        pages, forward = pages or Pages(size=1), forward or Forward()
        self.tracking = tracking if tracking is not None else Redirect()
        validate_tracking(self.tracking, slots, pages.size, overlap, forward.speculation)
        self.layout, self.overlap, in_place = layout, overlap, forward.in_place
        partly = [plane.name for plane in layout.planes if not plane.rewritten_each_step]
        if forward.grid is not None and partly:
            raise ConfigurationError(
                f"grid={forward.grid} with planes {partly} that a step writes only in part: the forward has no whole "
                "state inside a chunk; leave grid out"
            )
        if forward.direct_hits is None:
            forward = replace(forward, direct_hits=isinstance(self.tracking, Redirect) and not in_place)
        self.forward = forward
        try:
            self.backend = Backend(backend, device)
        except (ValueError, TypeError, RuntimeError) as error:  # torch raises these for an unknown device, and names it
            raise ConfigurationError(str(error)) from error
        # A prefix cache gets one more holder for each row. With fewer, a holder could be emptied and filled again
        # before the next plan, and that takes another packet.
        rows = int(max_requests) + int(preallocated)
        holders = slots + (rows if prefix else 0) if snapshots is None else snapshots
        require_fit(
            layout if tensors is None else None, slots=slots, max_requests=max_requests, preallocated=preallocated,
            snapshots=holders, pages=pages, max_batch=max_batch or rows, speculation=forward.speculation,
            device=self.backend.device,
        )  # fmt: skip
        self._allocator = SlotAllocator(slots, self.backend, reserve)
        self._guard = self._allocator.guard
        self._ends, self._dropping = {call: self._guard.changing(call) for call in ENDED}, self._guard.changing("drop")
        if tensors is None:
            self.planes = Planes(layout, slots, self.backend)
        else:
            self.planes = Planes.from_tensors(layout, tensors, self.backend, slots)
        self._memory, self._stream = self.planes.memory, self._allocator.stream
        self.pool = StatePool(self._allocator, self.planes, debug=debug)
        limits = sessions or SessionLimits()
        self._table = RequestTable(rows, limits.clock)
        self._registers = RegisterFile(self._allocator, rows, holders, pages.per_row)
        self._commands = CommandBuffer(self._registers, self.pool.run_data, max_batch or rows, checked=debug)
        self._pages = PageTable(pages.count, pages.size, self._commands)
        self._mirror = Mirror(self._registers, self.tracking, overlap, forward.pad)
        self._holdings = Holdings(self._commands, self._pages.allocator)
        parts = self._commands, self._pages, self._holdings
        self._cache = PrefixCache(prefix, *parts)
        self.prefix = self._cache if self._cache.enabled else None
        copied = tuple(plane.name for plane in layout.planes if in_place or not plane.rewritten_each_step)
        below = None
        if tiers is not None:
            below = self._faults.tiers(tiers, self.planes, self._cache, self._commands, self._pages)
        self.tiers = below
        loader = Loader(below, self._cache, self._pages) if below is not None else None
        self._ages = Ages(self._table, self._mirror)
        self._sessions = Sessions(*parts, self._mirror.lanes, limits)
        self._room = Room(self._cache, self._sessions, self._allocator, self._pages, self._holdings)
        self._marks = PromptMarks(
            self._commands, self._holdings, pages.size, forward.grid or 0, forward.packed, bool(forward.direct_hits)
        )
        self._log = StepLog(max_batch or rows, int(overlap), self.backend.device, forward.speculation, holders)
        canary = None
        if debug:
            canary = Canary(
                self.planes, self._log, copied,
                moves=bool(forward.direct_hits) or self.tracking.reads_old_slot,
                snapshots=self._mirror.lanes > 0 and not self.tracking.reads_old_slot,
                marks=forward.grid is not None,
                guards=True,
            )  # fmt: skip
        self._stepping = self._faults.stepping(
            self._commands, self._table, self._pages, self._mirror, self._holdings, self._marks, self._log,
            self.planes, copied, bool(forward.direct_hits), canary,
        )  # fmt: skip
        self._admission = self._faults.admission(
            self._commands, self._table, self._pages, self._holdings, self._cache, self._sessions, self._marks,
            self._mirror, self._log, bool(forward.direct_hits), loader, self._room,
        )  # fmt: skip
        self._ending = Ending(
            self._commands, self._table, self._pages, self._mirror, self._holdings, self._cache, self._sessions,
            self._marks, self._room,
        )  # fmt: skip
        self._forking = Forking(
            self._admission, self._ending, self._commands, self._table, self._pages, self._holdings, self._cache,
            self._sessions, self._marks, self._log, bool(forward.direct_hits), self._room,
        )  # fmt: skip
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
        """KV page ids of each row: int32 tensor on the device, axes `row page`; 0 = no page."""
        return self._registers.page_table

    @property
    def rows(self) -> Rows:
        """Handles of all requests, finished ones too, in the order of their rows.

        A caller that an exception has kept from the result of `admit` or `fork` finds the new rows here.
        """
        return self._table.handles(np.flatnonzero(self._table.used).tolist())

    @property
    def live_slots(self) -> Tensor:
        """The slot of each row's live state: an int32 view on the device, axis `row`, always at one address.

        `mem.live_slots[numbers]` are the slots of a batch, where `numbers` are those of `step.rows` on the device. It
        is 0 for row 0, which is padding, and for rows without a request. Changes that were recorded show after the next
        `submit` or `plan`. Under Redirect the slot of a row changes at boundaries.
        """
        return self._registers.table.slots[: REGISTERS_PER_ROW * (self._registers.rows + 1) : REGISTERS_PER_ROW]

    @property
    def marks(self) -> Marks:
        """The marks of the newest plan on the device, at one address, so that a captured forward can read them.

        They are those of `step.marks`: the states inside of the step that are kept.
        """
        return self._log.marks

    @property
    def free_slots(self) -> int:
        """Number of free slots.

        Admissions can get more if the prefix cache has states to evict. The number includes slots whose release waits
        for a forward. `pool.claim` cannot use these slots yet.
        """
        return self._allocator.free

    @property
    def free_pages(self) -> int:
        """Number of free KV pages. Admissions can get more if the prefix cache has pages to evict."""
        return self._pages.allocator.free

    def length(self, row: Row) -> int:
        """Returns the length of the row's state in tokens.

        All planned steps count. A speculative step counts after its `accept`.

        Args:
            row: the request.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: not a row of this manager.

        Syncs: no.
        """
        return int(self._registers.label_at[self._registers.origin(self._index(row))])

    def confirmed(self, row: Row) -> int:
        """Returns the confirmed length of the row in tokens.

        The row is certain to reach this length, unless a step is cancelled. A planned step counts as soon as all
        earlier steps of the row are settled. A speculative step counts after its `accept`.

        Args:
            row: the request.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: not a row of this manager.

        Syncs: no.
        """
        return int(self._table.confirmed_at[self._index(row)])

    def next_boundary(self, row: Row) -> int:
        """Returns the next length in tokens at which a chunk should end, so that a state can be kept there.

        This is the next multiple of `every` beyond the prompt, or the next mark that the forward cannot hand out from
        inside a chunk. A chunk can go beyond; the state there is then not kept. For the chunks of a prompt, `chunk` is
        simpler.

        Args:
            row: the request.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: not a row of this manager.

        Syncs: no.
        """
        index, length = self._index(row), self.length(row)
        beyond = max(length, self._registers.tracked_at[index])
        following = (beyond // self.tracking.every + 1) * self.tracking.every
        mark = self._marks.next(index, length)
        return min(mark, following) if mark else following

    def chunk(self, row: Row, most: int) -> int:
        """Returns how many tokens of its prompt the row's next chunk should read, so that no wanted state is lost.

        A chunk ends where the prompt ends, at a mark that the forward can hand out only there, or else at the last
        whole page within `most`: the next chunk then begins on a page, and so does its grid. Other chunks are allowed.
        Their states are kept at shorter lengths, or not at all (`Stats.missed`).

        Args:
            row: the request.
            most: tokens that the step has room for.

        Returns:
            A number from 1 to `most`. It is `most` if the row has read its prompt, or was admitted without one.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: not a row of this manager, or `most` is not a whole number from 1 on.

        Syncs: no.
        """
        index, length, most = self._index(row), self.length(row), whole("tokens of a chunk", most)
        prompt = self._registers.tracked_at[index]
        if length >= prompt:
            return most
        return self._marks.chunk(index, length, min(length + most, prompt), prompt) - length

    def slots_held(self, row: Row) -> int:
        """Returns how many slots the row holds, the states at its marks included.

        Args:
            row: the request.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: not a row of this manager.

        Syncs: no.
        """
        index = self._index(row)
        held = self._registers.held[PER_ROW * index : PER_ROW * (index + 1)]
        return int(held.sum()) + len(self._marks.kept.get(index, ()))

    def _index(self, row: Row) -> int:
        self._require_no_replay()
        self._guard.require_whole()
        return self._table.index(row)

    def admit(self, requests: Sequence[Request]) -> Rows:
        """Gives every request a row, slots and pages, or raises an error and changes nothing.

        If a request starts without a state, the next `plan` or `submit` zeroes its slot.

        Args:
            requests: the requests to start.

        Returns:
            One row for each request, in the same order.

        Raises:
            OutOfSlots: back-pressure, too few slots are free; nothing changed.
            OutOfRows: back-pressure, the request table is full; nothing changed.
            OutOfPages: back-pressure, too few KV pages are free; nothing changed.
            StaleHandle: a snapshot was dropped, or a session closed; nothing changed.
            InvalidArgument: a request contradicts itself, or a turn of its session runs; nothing changed.

        Syncs: no, unless it needs slots that `pool.release` freed by id.
        """
        self._enter()
        if self._sessions.opened:
            self._expire_sessions("admit")
        return self._admission.admit(requests)

    def fork(self, row: Row, ids: Sequence[Hashable]) -> Fork:
        """Starts more requests from a running row's state, for example several samples of one prompt.

        With `direct_hits`, the default of Redirect without in-place kernels, the new rows and the row itself read the
        same slot in their next step, and each row writes its own slot. Only planes that a step writes in part are
        copied, by the next plan. Without `direct_hits` the next `plan` or `submit` copies the state.

        The rows share the KV pages that are full. The result names the pages whose contents the caller must copy.

        With `direct_hits` the shared state is not a snapshot of any row. If a row then ends before its next step, it
        publishes an older snapshot, or none.

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
            InvalidArgument: the row has finished or has an unsettled step; no register for a snapshot is free; or the
                row has a partly filled page while changes wait for a forward. Nothing changed.

        Syncs: no, unless it needs slots that `pool.release` freed by id.
        """
        self._enter()
        return self._forking.fork(row, ids)

    def reorder(self, rows: Sequence[Row], entries: Sequence[int]) -> Fork:
        """Makes row i of the result what `rows[entries[i]]` was: for beams, all rows in one call.

        A row that is named once goes on. One that is named several times goes on and is forked, as by `fork`, under
        its own id. One that is not named ends, as by `release`, and its slots, pages and row count for the forks. All
        of this is in one packet.

        Args:
            rows: the running requests.
            entries: an entry of `rows` for each row of the result. There can be more or fewer than rows.

        Returns:
            The rows, and the page copies to make.

        Raises:
            OutOfSlots: back-pressure, too few slots are free; nothing changed.
            OutOfRows: back-pressure, the request table is full; nothing changed.
            OutOfPages: back-pressure, too few KV pages are free; nothing changed.
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: a row is named twice in `rows`, or an entry is no row; a row that is not named is the turn
                of a session; or a row cannot be forked: see `fork`. Nothing changed.

        Syncs: no, unless it needs slots that `pool.release` freed by id.
        """
        self._enter()
        return self._forking.reorder(rows, entries)

    def arrived(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Tells the manager that states computed elsewhere have been written to the slots of newly admitted rows.

        Use `read_slots` to learn which slots to write. Under Redirect, such a state becomes a snapshot if its length is
        a boundary, like a state computed here. Under other strategies it becomes no snapshot. The first snapshot comes
        at the next boundary.

        Args:
            rows: rows of length 0.
            lengths: length of each state in tokens, at least 1.

        Raises:
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: a row has a length already; a row is in a step or has finished; or a row has too few pages
                for its new length. Nothing changed.

        Syncs: no.
        """
        self._enter()
        self._admission.arrived(rows, lengths)

    def read_slots(self, handles: Sequence[Row | Snapshot]) -> Readback:
        """Asks the device which slot holds the state of each given row or snapshot, for RDMA or debugging.

        It first sends the recorded changes. Then it takes one upload, one launch and one copy to the host.
        `Readback.wait` waits for the copy.

        The copy starts at once, or, if changes wait for a forward, after them. So the ids never name a slot that this
        forward still uses for its former owner.

        Args:
            handles: rows and snapshots, in any order.

        Returns:
            A readback with one slot id for each handle. `Readback.wait` syncs.

        Raises:
            StaleHandle: a request has ended, or a snapshot was dropped.
            InvalidArgument: a handle is neither a row nor a snapshot.

        Syncs: no.
        """
        self._enter()
        sequence("rows and snapshots", handles, "[row, snapshot]")
        rows = [0 if isinstance(handle, Snapshot) else self._table.index(handle) for handle in handles]
        self._holdings.require(handle for handle in handles if isinstance(handle, Snapshot))
        registers = [
            handle.register if isinstance(handle, Snapshot) else self._registers.origin(row)
            for handle, row in zip(handles, rows, strict=True)
        ]
        found = Readback(len(registers), self.backend)

        def resolve() -> None:
            sent = self._commands.ring.send(np.asarray(registers, np.int32))
            found.begin(self._registers.resolve(sent))

        with self._guard.changing("read_slots"):
            self._commands.then(Action(resolve))
            return found

    def shortfall(self, rows: Sequence[Row | None], tokens: int | Sequence[int] = 1, *, window: bool = False) -> int:
        """Returns how many slots are missing for the snapshots that are due in the next plan of these rows.

        If you drop that many snapshots first, the plan can take every snapshot that is due.

        Args:
            rows: the batch; None and finished rows are padding.
            tokens: tokens of each row in the step.
            window: count for the next `accept` instead of the next plan. The result is then an upper bound.

        Raises:
            StaleHandle: a request has ended.
            InvalidArgument: the tokens do not fit the rows.

        Syncs: no.
        """
        self._enter()
        return self._stepping.shortfall(self._stepping.batch(rows, tokens), window)

    def extend(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Gives rows the KV pages that they need for longer lengths. If pages are short, no row gets any.

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
        tokens = numbers_of("lengths", lengths, len(numbers))
        missing = self._pages.missing(numbers, tokens)
        needed = self.free_pages + missing
        with self._guard.changing("extend"):
            if missing and self._room.can_free_pages(missing):
                self._room.free_pages(needed)
            if (lack := self._pages.short_of(needed)) is not None:
                self._admission.refuse("extend", lack)
                raise self._guard.orderly(lack)
            self._pages.extend(numbers, tokens)

    def plan(
        self,
        rows: Sequence[Row | None],
        tokens: int | Sequence[int] = 1,
        *,
        limit: int = NO_LIMIT,
        window: bool = False,
        replay: Callable[[], object] | None = None,
    ) -> Step:
        """Decides which slots the next step reads, writes and snapshots.

        It sends the recorded changes, then takes one launch. With in-place kernels, or planes that a step writes only
        in part, it can take one more, for copies. Launch the forward before the next plan.

        Between the plan and its forward, do not call `plan` again and do not settle this step. Nearly all other calls
        are allowed; a few raise InvalidArgument while changes wait for the forward. If a slot that this step uses
        changes its owner, this change waits for the forward. The next `plan` or `submit(step)` sends it.

        The forward of a speculative step reads `step.read` and stores no state in a slot. It writes the state after
        each token to tensors that the caller owns, the *windows*. `accept` then copies one state of each row, the state
        after the last accepted token, to the row's slot.

        Args:
            rows: the batch; None and finished rows are padding.
            tokens: tokens of each row in this step: 1 in decode, the chunk in prefill, the drafted tokens of a window.
            limit: largest number of slots that this step can claim for snapshots.
            window: plan a speculative step.
            replay: replays a CUDA graph that begins with `launch` and contains the forward. Then this call takes no
                launch of its own, and the step is not open after it.

        Returns:
            The step, with three vectors of slots on the device: int32, axis `batch`.

        Raises:
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: an older step must be settled first; the batch is too large; a row is named twice; or a
                row has too few pages. Nothing changed.
            ForwardFault: with `debug=True`, the forward of the step before did something wrong; nothing changed.

        Syncs: no, unless it needs slots that `pool.release` freed by id, or in debug mode.
        """
        self._enter()
        if window:
            self._require_speculation("plan", window)
        if replay is not None and not callable(replay):
            raise InvalidArgument(f"replay={replay!r}: expected a function, such as graph.replay")
        limit = limit if limit is NO_LIMIT else _limit(limit)
        return self._stepping.plan(rows, tokens, limit, bool(window), self._room, replay)

    def launch(self, batch: int, *, window: bool = False) -> StepRecord:
        """Launches all that comes before the forward of a step, for a CUDA graph that is replayed step by step.

        Call it at the beginning of the capture, then run the forward on the vectors that it returns. Each
        `plan(rows, replay=graph.replay)` with a batch of this size then takes at most one upload, and the graph. Before
        you capture, call `warm_up` and run the forward once. A function that calls `launch` and the forward can also
        be the `replay` itself; then each launch is made one by one.

        Args:
            batch: entries of the batch.
            window: whether the steps are speculative.

        Returns:
            The vectors that all steps of this batch size have, each int32 `batch`.

        Raises:
            InvalidArgument: no graph is captured, and no plan replays; the batch is too large, or it is not the batch
                of the plan that replays; or `window` without speculation.
            Asleep: the states are not in memory.

        Syncs: no.
        """
        self._require_thread()
        self._require_speculation("launch", window)
        return self._stepping.launch(whole("batch", batch, least=0), bool(window))

    def _require_speculation(self, call: str, window: bool) -> None:
        if window and not self.forward.speculation:
            raise InvalidArgument(f"{call}(window=True) needs a manager with forward=ms.Forward(speculation=True)")

    def settle(self, step: Step, finished: Sequence[bool] | NDArray[np.bool_] | None = None) -> None:
        """Tells the manager that the results of a step are known, and which rows of the step have ended.

        Rows that have ended are padding from now on. Settle steps in the order of their plans. If a lane can
        be released, the call records that; the next packet carries it.

        If this step is still open, `settle` closes it: it launches the copies of snapshots that in-place kernels, or
        planes written only in part, need. If a readback or a transfer waits, it also sends the waiting changes.

        Args:
            step: the oldest unsettled step.
            finished: True or False for each entry of the batch. None: no row has finished.

        Raises:
            StaleHandle: the step was settled before.
            InvalidArgument: the step is speculative or an older one is unsettled, or `finished` does not fit the batch.
            ForwardFault: with `debug=True`, its forward did something wrong; nothing changed.

        Syncs: in debug mode only.
        """
        self._enter()
        self._stepping.settle(step, finished)

    def accept(
        self, step: Step, accepted: Sequence[int], windows: Mapping[str, Tensor],
        finished: Sequence[bool] | NDArray[np.bool_] | None = None, *, limit: int = NO_LIMIT,
    ) -> None:  # fmt: skip
        """Keeps, for each row, the state after its last accepted token, and settles the step.

        If the accepted tokens cross boundaries, the state at the last of them becomes a snapshot, if a slot is free.
        Under Redirect a boundary at the end of the accepted tokens waits for the next step.

        It first sends the recorded changes. Then it takes one upload and these launches: one for the lengths, and one
        for each plane. A plane with a tensor for each layer takes one for each layer.

        Args:
            step: the oldest unsettled step, planned with `window=True`.
            accepted: number of accepted tokens of each entry; 0: the row keeps its length.
            windows: plane name -> the state after each token, (layer, batch, token, ...). For a plane of conv inputs
                you can give the inputs instead, (layer, batch, taps - 1 + tokens, channel). These are the taps - 1
                inputs before the step, then one input for each token.
            finished: as for `settle`. If a row ends within its window, accept only the tokens up to its end.
            limit: largest number of slots that this call can claim for snapshots.

        Raises:
            StaleHandle: the step was settled before; nothing changed.
            InvalidArgument: the step is not speculative or an older one is unsettled; `accepted`, `windows` or
                `finished` do not fit it; or a window requires grad. Nothing changed.
            ForwardFault: with `debug=True`, its forward changed a slot; nothing changed.

        Syncs: no, unless it needs slots that `pool.release` freed by id, or in debug mode.
        """
        self._enter()
        self._stepping.accept(step, accepted, windows, finished, _limit(limit))

    def cancel(
        self, step: Step, *, publish: bool = False, tokens: Sequence[Tokens | None] | None = None
    ) -> list[Snapshot | None]:
        """Cancels a planned step whose forward never ran, and ends its rows.

        The rows end with the lengths that they had before the step. Rows that finished in the previous step end, too.
        To keep the states of the finished rows only, release these rows with `publish=True` before `cancel`. To keep
        the states of all rows, set `publish`.

        Args:
            step: the newest step.
            publish: publish the newest confirmed snapshot of each row. If the step is speculative, the state of the row
                counts, too, as in `release`.
            tokens: as for `release`, one sequence for each entry of the batch. With tokens, all rows are published.

        Returns:
            One snapshot for each entry of the batch; None where nothing was published.

        Raises:
            StaleHandle: the step was settled before; nothing changed.
            InvalidArgument: the step is not the newest; its forward was launched, by a replay or after `submit(step)`;
                a state of this step was published; or the tokens do not fit. Nothing changed.
            ConfigurationError: tokens without a prefix cache or a session; nothing changed.

        Syncs: no.
        """
        self._enter()
        current = self._stepping.current(step).tolist()
        keys = self._ending.keys(tokens, current)
        keep = publish or keys is not None
        if keep and keys is None:
            self._ending.require_sessions_told(current)
        self._stepping.require_cancellable(step)
        with self._guard.changing("cancel"):
            entries, rows = self._stepping.cancel(step)
            known = [self._table.confirmed_at[row] for row in rows] if keep else None
            given = [keys[entry] for entry in entries] if keys is not None else None
            ended = self._ending.end(rows, known, given, "cancelled with its step")
            snapshots: list[Snapshot | None] = [None] * len(step.numbers)
            for entry, snap in zip(entries, ended, strict=True):
                snapshots[entry] = snap
            return snapshots

    def release(
        self, rows: Sequence[Row], publish: bool | Sequence[int] = False, *, tokens: Sequence[Tokens] | None = None
    ) -> list[Snapshot | None]:
        """Ends requests. With `publish`, publishes the longest confirmed state of each. Frees everything else.

        The final state of a row counts if the row still holds it, and if its length is a multiple of the page size.

        With tokens, KV and snapshot go to the prefix cache, and the states of a session's turn go to the session. A
        turn without tokens and without `publish` is aborted. The cache owns the snapshots that it takes; `drop` refuses
        them.

        Args:
            rows: the requests.
            publish: False, True, or for each row the largest length that its snapshot can have.
            tokens: all tokens of each request so far, prompt and answer.

        Returns:
            One snapshot for each row, or None.

        Raises:
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: a row is named twice, tokens differ from the prompt of their row, or a turn is published
                without tokens; nothing changed.
            ConfigurationError: tokens without a prefix cache or a session; nothing changed.

        Syncs: no.
        """
        return self._end(rows, publish, tokens, "release")

    def _end(
        self, rows: Sequence[Row], publish: bool | Sequence[int], tokens: Sequence[Tokens] | None, call: str
    ) -> list[Snapshot | None]:
        self._enter()
        numbers = self._table.indices(rows)
        keys = None if tokens is None else self._ending.keys(tokens, numbers)
        if publish is False and keys is None:
            with self._ends[call]:
                return self._ending.end(numbers, None, None, ENDED[call])
        known = list(map(self._table.confirmed_at.__getitem__, numbers))
        if not isinstance(publish, bool):
            known = list(map(min, known, numbers_of("publish", publish, len(numbers))))
        if keys is not None:
            self._ending.require_all(numbers, known, keys)
        elif self._sessions.by_row:
            self._ending.require_sessions_told(numbers)
        before = self._stepping.lengths_before() if self._stepping.open is not None else None
        told = self._told(numbers, known, keys) if before else None
        with self._ends[call]:
            snapshots = self._ending.end(numbers, known, keys, ENDED[call])
            if before:
                self._stepping.promise(numbers, told or [snap.length if snap else 0 for snap in snapshots], before)
            return snapshots

    def abort(self, rows: Sequence[Row]) -> None:
        """Ends requests at once, also while a step is in flight, and publishes nothing.

        The session of a turn goes back to the state with which the turn began. If no slot holds that state any more, it
        goes back to an older state.

        Args:
            rows: the requests.

        Raises:
            StaleHandle: a request has ended.
            InvalidArgument: a row is named twice, or is not a row of this manager.

        Syncs: no.
        """
        self._end(rows, False, None, "abort")

    def retract(self, rows: Sequence[Row], *, tokens: Sequence[Tokens] | None = None) -> list[Snapshot | None]:
        """Ends requests that will resume later, and publishes the longest confirmed state of each, as `release` does.

        Args:
            rows: the requests.
            tokens: as for `release`.

        Returns:
            One snapshot for each row, for `Request(resume=...)`, or None.

        Raises:
            StaleHandle: a request has ended.
            InvalidArgument: as for `release`.
            ConfigurationError: tokens without a prefix cache or a session.

        Syncs: no.
        """
        return self._end(rows, True, tokens, "retract")

    def publish(
        self, rows: Sequence[Row], *, tokens: Sequence[Tokens] | None = None, strict: bool = False
    ) -> list[Snapshot | None]:
        """Publishes the newest confirmed snapshot of each row. The rows continue to run.

        The snapshot moves with its slot from the row to a register of its own. It keeps the slot until it is dropped;
        any number of requests can resume from it. With tokens, KV and snapshot go to the prefix cache.

        Args:
            rows: the requests.
            tokens: all tokens of each request so far, prompt and answer.
            strict: if a row has no snapshot, or no register is free for it, raise an error and publish nothing.

        Returns:
            One snapshot for each row; None if the row has no snapshot, or if no register is free for the snapshot.

        Raises:
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: tokens differ from the prompt of their row, or with `strict` a snapshot is missing; nothing
                changed.
            ConfigurationError: tokens without a prefix cache or a session; nothing changed.

        Syncs: no.
        """
        self._enter()
        numbers = self._table.indices(rows)
        keys = self._ending.keys(tokens, numbers)
        known = [self._table.confirmed_at[row] for row in numbers]
        if strict:
            bounds = known if keys is None else list(map(min, known, (len(key) // BYTES for key in keys)))
            self._ending.require_answers(numbers, bounds)
        before = self._stepping.lengths_before()
        told = self._told(numbers, known, keys) if before else None
        with self._guard.changing("publish"):
            self._stepping.keep_ends(numbers, known, self._room, self._sessions.by_row)
            snapshots = self._ending.publish(numbers, known, keys)
            if before:
                self._stepping.promise(numbers, told or [snap.length if snap else 0 for snap in snapshots], before)
            return snapshots

    def _told(self, rows: Sequence[int], known: Sequence[int], keys: Sequence[bytes] | None) -> list[int] | None:
        """Returns the length of each row that the cache or a session will use; None if handles are published."""
        if keys is None:
            return None
        lengths = [min(n, len(key) // BYTES) for n, key in zip(known, keys, strict=True)]
        turns = self._sessions.by_row
        return [n if row in turns else self._pages.floor(n) for row, n in zip(rows, lengths, strict=True)]

    def drop(self, snapshots: Sequence[Snapshot | None]) -> None:
        """Ends the handles of snapshots, and frees their slots and pages.

        Slots and pages become free at once. If the first step of a row must still read the snapshot, they become free
        when that step is planned.

        Args:
            snapshots: results of `publish`, `release`, `retract` or `cancel`; None is skipped.

        Raises:
            StaleHandle: a snapshot was dropped before; nothing changed.
            InvalidArgument: a snapshot is named twice, or the prefix cache owns it; nothing changed.

        Syncs: no.
        """
        self._enter()
        if type(snapshots) is not list:
            snapshots = sequence("snapshots", snapshots, "[snapshot]")
        given, registers = self._holdings.droppable(snapshots)
        with self._dropping:
            self._holdings.end(given, registers)

    def match(self, tokens: Tokens, salt: Hashable = None, session: Session | None = None) -> Match:
        """Returns how much of a prompt the prefix cache has, and why it has no more. Changes nothing.

        The result says how many tokens a cached state covers, how many cached KV covers, and how many a state in host
        memory covers. The last token never counts, because a request always computes it.

        Args:
            tokens: the whole prompt.
            salt: the salt of the request.
            session: the session of the request. The states that the session keeps count, too.

        Raises:
            InvalidArgument: tokens or salt are not valid, or a turn of the session runs.
            StaleHandle: the session is closed.
            ConfigurationError: the manager has no prefix cache.

        Syncs: no.
        """
        self._enter()
        found, kept = self._match(Prompt(encode(tokens), require_salt(salt)), session)
        return found.instead(kept) if kept >= found.length and kept else found

    def _match(self, prompt: Prompt, session: Session | None) -> tuple[Match, int]:
        """Returns what cache and host memory have, and the length that a session keeps."""
        if self.prefix is None:
            raise ConfigurationError("there is no prefix cache: build the manager with prefix=ms.Prefix()")
        found = self.prefix.match(prompt)
        kept = self._sessions.find(self._sessions.get(session), prompt).length if session is not None else 0
        if self.tiers is not None and (hit := self.tiers.find(prompt, found, max(kept, found.length))):
            found = replace(found, host_length=hit.length)
        return found, kept

    def prefetch(self, tokens: Tokens, salt: Hashable = None, session: Session | None = None) -> Fetch:
        """Starts to read the states of a prompt from storage to host memory, where `match` and `admit` find them.

        Call it when a request arrives, and call `poll` in each iteration. Admit the request when `fetch.done` is true,
        or when `mem.tiers.ready(fetch)` is true: then the fetch is done or has had enough time.

        Args:
            tokens: the whole prompt.
            salt: the salt of the request.
            session: the session of the request.

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
        prompt = Prompt(encode(tokens), require_salt(salt))
        found, kept = self._match(prompt, session)
        # with several ranks, do not count this host memory: the other ranks do not know its contents
        own = found.host_length if self.tiers.settings.group is None else 0
        return self.tiers.prefetch(prompt, found, max(kept, found.length, own))

    def poll(self) -> None:
        """Advances the transfers between device, host memory and storage, and empties the sessions that have expired.

        Call it once in each iteration of the loop, even if no request runs.

        Raises:
            AgreementLost: a rank does not answer, or its prefetches differ.

        Syncs: no; with several ranks it waits for late ranks.
        """
        self._enter()
        self._expire_sessions("poll")
        if self.tiers is not None:
            self.tiers.poll()

    def close(self) -> None:
        """Writes the cached states to storage, closes the storage, and ends the threads of the tiers.

        If the manager has no tiers, `close` does nothing. After `close`, requests can continue, but without tiers:
        `prefetch` raises ConfigurationError, `poll` does nothing, and all other calls work. A second `close` does
        nothing.

        With `debug=True`, `close` checks the calling thread. After everything is closed, it audits the slots, each time
        that it is called. Slots that running requests hold are no leaks; slots from `pool.claim` are, so release them
        first.

        If an earlier call was interrupted (see `recover`), `close` writes nothing and audits nothing.

        Raises:
            Asleep: states or KV pages sleep; nothing changed.
            InvalidArgument: a change waits for the newest step's forward; nothing changed.
            MemstateError: with `debug=True`, another thread called; nothing changed.
            LeakFound: with `debug=True`, slots are leaked, have two owners, or are owned and free. The tiers are
                closed.

        Syncs: yes.
        """
        broken = bool(self._guard.call)
        if debug := self._thread is not None:
            self._require_thread()
            if not broken:
                self._enter()
        if self.tiers is not None:
            self.tiers.close()
        if debug and not broken:
            self.audit().raise_if_leaking()

    def open_session(self, name: Hashable, *, priority: int = 0, ttl: float | None = None) -> Session:
        """Opens a conversation whose states and pages stay between its turns while there is room.

        Where a request, a snapshot or a load needs the room, idle sessions make way: see `SessionLimits`. A session
        that made way stays open. Its next turn starts from what the prefix cache or the tiers have of its tokens.

        Args:
            name: the name that audits show. Two open sessions can have the same name; each keeps its own states.
            priority: sessions of a lower priority make way first.
            ttl: seconds of `SessionLimits.clock` that the idle session keeps its states. After that the next `admit` or
                `poll` releases them. None: no limit.

        Returns:
            The session, for `Request(session=...)`.

        Raises:
            InvalidArgument: the name is not hashable, or a number is not valid.

        Syncs: no.
        """
        self._enter()
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise InvalidArgument(f"priority={priority!r}: expected a whole number")
        if ttl is not None and not is_duration(ttl):
            raise InvalidArgument(f"ttl={ttl!r}: expected seconds from 0 on, or None")
        return self._sessions.open(name, priority, ttl)

    def close_session(self, session: Session) -> None:
        """Closes a session and frees what it holds.

        While a turn of the session runs, the handle becomes stale at once, and the session closes when the turn ends.
        The states of that turn go to the prefix cache, as those of any other request.

        Args:
            session: what `open_session` returned.

        Raises:
            StaleHandle: the session was closed before.

        Syncs: no.
        """
        self._enter()
        self._sessions.require(session)
        with self._guard.changing("close_session"):
            self._cache.release(self._sessions.close(session))

    def sessions(self) -> list[SessionInfo]:
        """Returns the open sessions, in the order in which they were opened.

        Syncs: no.
        """
        return self._sessions.infos()

    def _expire_sessions(self, call: str) -> None:
        """Empties the idle sessions whose time to live is over."""
        if self._sessions.any_expired:
            with self._guard.changing(call):
                self._room.expire()

    def scrub_null(self) -> None:
        """Zeroes slot 0.

        Call this before each forward if your kernels write to slot 0, read slot 0 later, and need zeros there. It runs
        on the current stream, and a CUDA graph can hold it.

        Syncs: no.
        """
        self._require_thread()
        if self._stepping.replaying is None or self._guard.interrupted:
            self._guard.require_whole()
        self.planes.scrub_null()

    def submit(self, step: Step | None = None) -> None:
        """Sends the recorded changes now, instead of with the next plan.

        The changes are sent in packets, mostly one. Each packet takes one upload and at most two launches.

        Without `step`, and while the newest step is open, the first change of a slot that this step uses waits for the
        forward. So does every later change. With `step`, all changes are sent. With in-place kernels, or planes written
        only in part, the copies of snapshots come first.

        Args:
            step: the newest step, once its forward has been launched.

        Raises:
            StaleHandle: the step was settled before; nothing changed.
            InvalidArgument: the step is not the newest; nothing changed.
            ForwardFault: with `debug=True`, its forward did something wrong; nothing changed.

        Syncs: in debug mode only.
        """
        self._enter()
        if step is not None:
            self._stepping.require_newest(step)
        with self._guard.changing("submit"):
            if step is not None:
                self._stepping.launched(step)
            self._commands.submit()

    def sleep(self, keep: bool = True) -> None:
        """Releases the memory of the states, and remembers who owns each slot.

        Until `wake`, only lengths, counts and `stats` work. Other calls raise Asleep.

        Args:
            keep: keep the bytes in host memory. False is allowed only if no slot is held.

        Raises:
            InvalidArgument: slots are held and `keep` is False, or memory cannot be released; nothing changed.
            Asleep: the states sleep already; nothing changed.

        Syncs: yes.
        """
        self._enter()
        # a slot whose release waits for a forward counts as held
        held = self._allocator.capacity - self._allocator.free + self._commands.withheld[0]
        if held and not keep:
            raise InvalidArgument(
                f"{held} slots are held: their states would be lost; use keep=True, or end them first, and settle the "
                "newest step, whose forward may still need them"
            )
        with self._guard.changing("sleep"):
            self._commands.submit()
            if self.tiers is not None:
                self.tiers.settle()
        self.planes.sleep(keep=keep)

    def wake(self) -> None:
        """Restores the memory of the states, and the bytes that `sleep` kept.

        Planes can have new addresses. If a CUDA graph uses the old addresses, capture it again.

        Raises:
            InvalidArgument: the states do not sleep.
            Asleep: the engine has not restored its own tensors.
            LayoutMismatch: the engine has restored its tensors with a smaller alignment.

        Syncs: yes.
        """
        self._require_caller()
        self.planes.wake()

    def buffer_infos(self) -> list[BufferInfo]:
        """Returns base address, slot stride and length of every plane and layer, in bytes, to register for RDMA.

        Syncs: no.
        """
        return self.planes.buffer_infos()


def _limit(limit: int) -> int:
    """Returns a limit as kernels take it: a plain integer that fits 32 bits."""
    if not isinstance(limit, int | np.integer) or isinstance(limit, bool):
        raise InvalidArgument(f"limit={limit!r}: expected a whole number of claims")
    return max(0, min(int(limit), NO_LIMIT))
