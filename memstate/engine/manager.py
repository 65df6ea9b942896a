"""Offers the calls of a decode loop as one object, `StateManager`: a file of calls. The rules are in its parts.

admit -> plan -> (your forward) -> settle | accept -> ... -> end
              `-> cancel                      `-> publish -> (your index) -> admit([Request(resume=...)]) | drop
                                                        `-> prefix cache -> admit([Request(tokens=...)])
                                                             `-> host memory, storage -> prefetch -> poll ..
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from memstate.checks import NotCopied, is_count, is_whole, sequence, shown, whole
from memstate.engine.conversations import SessionCalls
from memstate.engine.device import DeviceCalls
from memstate.engine.door import Door
from memstate.engine.ending import Keep
from memstate.engine.forking import Fork
from memstate.engine.recount import Recount
from memstate.engine.recovery import Recovered, Recovery
from memstate.engine.report import Reports
from memstate.engine.settings import Forward, Pages
from memstate.engine.verbs import Parts
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels.tables import StepRecord
from memstate.prefix import Match, Prefix
from memstate.prefix.session_settings import SessionLimits
from memstate.requests.handles import Request, Row, RowInfo, Rows, Session, Snapshot
from memstate.requests.steps import Step
from memstate.requests.tracking import Tracking
from memstate.sheet import Sheet, Shown
from memstate.slots.audit import AuditReport
from memstate.slots.inspect import Inspection
from memstate.slots.journal import Journal
from memstate.state.layout import StateLayout
from memstate.stats import Stats
from memstate.tiers import Fetch, Tiers
from memstate.tokens import Tokens

NO_LIMIT = 2**31 - 1


class StateManager(NotCopied, Shown):
    """Manages the states of all requests: their slots, their snapshots and the page ids of their KV.

    On CUDA, all calls come on one stream, outside of graph captures; see `device.use_stream`.

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
        journal: how many changes of owners `journal` keeps; 0: none.
        debug: whether to check the calling thread, overlapping copies and in each call the owners of all states, to
            look for leaks in `close`, and to find forwards that forget a store or change a slot that they may only
            read. Slots that a forward must store in are filled before it, and the call that closes the step raises
            ForwardFault if it did not. This call waits for the device then.

    Attributes:
        planes: the bytes of all slots, by plane, with gather and scatter.
        layout: the argument `layout`. The arguments `forward`, `overlap`, `pages` and `tracking` are attributes, too.
        pool: hands out slots by id, for callers that use slots outside of requests.
        prefix: the prefix cache, or None.
        tiers: host memory and storage, or None.
        sessions: opens and closes conversations.
        device: tensors at fixed addresses, slot ids, memory that sleeps, the stream.
        journal: the last changes of owners, or None.
        backend: runs memstate's launches and counts them. Use another `Backend` for the kernels of your forward. If you
            use this one, it counts the launches of the forward, too.

    Raises:
        ConfigurationError: settings contradict each other, a value is not valid, or the memory of the device or the
            host is too small. Sizes are checked before anything is allocated. Or ranks of a group have other settings.
        InvalidArgument: `reserve` is out of range, or a tensor of `tensors` requires grad.
        LayoutMismatch: tensors do not fit the layout.

    Example:
        >>> import torch, memstate as ms
        >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
        >>> mem = ms.StateManager(layout, slots=8, max_requests=2)
        >>> rows = mem.admit([ms.Request("a")])
        >>> step = mem.plan(rows, [3])  # then the forward, which reads step.read and writes step.write
        >>> mem.settle(step)
        >>> mem.info(rows[0]).length
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
    ) -> None:
        if not is_count(journal):
            raise ConfigurationError(f"journal={journal!r}: expected a number of changes")
        self._parts = parts = Parts(
            layout, slots=slots, max_requests=max_requests, tracking=tracking, pages=pages, prefix=prefix, tiers=tiers,
            sessions=sessions, forward=forward, overlap=overlap, max_batch=max_batch, preallocated=preallocated,
            snapshots=snapshots, reserve=reserve, tensors=tensors, device=device,
            backend=backend, debug=debug,
        )  # fmt: skip
        self.layout, self.tracking, self.forward = parts.layout, parts.tracking, parts.forward
        self.pages: Pages = parts.page_settings
        self.overlap = parts.overlap
        self.planes, self.pool, self.backend = parts.planes, parts.pool, parts.backend
        self.prefix, self.tiers = parts.prefix, parts.tiers
        recount = Recount(parts)
        self._door = Door(
            parts.guard, parts.stepping, parts.stream, parts.planes, recount.require_owners if debug else None
        )
        self._reports, self._recovery = Reports(parts, recount), Recovery(parts, recount)
        self.device, self.sessions = DeviceCalls(parts, self._door), SessionCalls(parts, self._door)
        self.journal: Journal | None = Journal(journal, parts.registers, self._reports.owner) if journal else None
        parts.commands.journal = self.journal
        self._enter, self._guard, self._table = self._door.enter, parts.guard, parts.table
        self._admission, self._stepping, self._ending = parts.admission, parts.stepping, parts.ending
        self._holdings, self._dropping, self._debug = parts.holdings, parts.guard.changing("drop"), debug
        self._cache, self._learning = parts.cache, parts.guard.changing("settle")

    def __setattr__(self, name: str, value: Any) -> None:
        self._require_free(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._require_free(name)
        super().__delattr__(name)

    def _require_free(self, name: str) -> None:
        """Refuses to change an attribute that is there. A method can be wrapped.

        Raises:
            AttributeError: the attribute is there.
        """
        method = getattr(type(self), name, None)
        if isinstance(method, property) or (method is None and name in self.__dict__):
            raise AttributeError(
                f"mem.{name} cannot be reassigned: all parts of the manager use what it has; change what is in it, or "
                "build another StateManager"
            )

    def __repr__(self) -> str:
        requests = self._table.rows - self._table.free
        slots = f"{self.free_slots} of {self._parts.allocator.capacity} slots free"
        return f"StateManager({slots}, {requests} requests, {self.tracking})"

    @property
    def rows(self) -> Rows:
        """Handles of all requests, finished ones too, in the order of their rows.

        A caller that an exception has kept from the result of `admit` or `fork` finds the new rows here.
        """
        return self._table.everyone

    @property
    def free_slots(self) -> int:
        """Number of free slots.

        Admissions can get more if the prefix cache has states to evict. The number includes slots whose release waits
        for a forward. `pool.claim` cannot use these slots yet.
        """
        return self._parts.allocator.free

    @property
    def free_pages(self) -> int:
        """Number of free KV pages. Admissions can get more if the prefix cache has pages to evict."""
        return self._parts.pages.allocator.free

    def info(self, row: Row) -> RowInfo:
        """Returns what the host knows of a row: its lengths, its next boundary, and its slots.

        Args:
            row: the request.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: not a row of this manager.

        Syncs: no.
        """
        self._door.require_whole()
        return self._reports.info(self._table.index(row))

    def chunk(self, row: Row, most: int) -> int:
        """Returns how many tokens of its prompt the row's next chunk should read, so that no wanted state is lost.

        A chunk ends where the prompt ends, or else at the last whole page within `most`: the next chunk then begins on
        a page, and so does its grid. Without a grid, or with one of the packed batch, which rows in front shift, a
        chunk ends at the next mark, if that comes first. Other chunks are allowed. Their states are kept at shorter
        lengths, or not at all (`Stats.missed`).

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
        self._door.require_whole()
        return self._reports.chunk(self._table.index(row), whole("tokens of a chunk", most))

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
        if self._parts.sessions.opened:
            self._admission.expire("admit")
        return self._admission.admit(requests)

    def fork(self, row: Row, ids: Sequence[Hashable]) -> Fork:
        """Starts more requests from a running row's state, for example several samples of one prompt.

        With `direct_hits`, the default of Redirect without in-place kernels, the new rows and the row itself read the
        same slot in their next step, and each row writes its own slot. Only planes that a step writes in part are
        copied, by the next plan. Without `direct_hits` the next `plan` or `submit` copies the state.

        The rows share the KV pages that are full. The result names the pages whose contents the caller must copy.

        A new row may go on with other tokens than those of the prompt. So only the tokens that it shares are known:
        `publish` and `end` with `keep="cache"` need `tokens=` for more.

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
        return self._parts.forking.fork(row, ids)

    def reorder(self, rows: Sequence[Row], entries: Sequence[int]) -> Fork:
        """Makes row i of the result what `rows[entries[i]]` was: for beams, all rows in one call.

        A row that is named once goes on. One that is named several times goes on and is forked, as by `fork`, under
        its own id. One that is not named ends, as by `end`, and its slots, pages and row count for the forks. All
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
        return self._parts.forking.reorder(rows, entries)

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
        self._admission.extend(rows, lengths)

    def snapshot_at(self, row: Row, lengths: Sequence[int] | NDArray[np.integer]) -> None:
        """Asks a request that reads its prompt to keep states at more lengths, as `Request(snapshot_at=)` does.

        So a request that arrives later can start where the two prompts part, as soon as the row has read that far.

        Args:
            row: the request.
            lengths: lengths in tokens. Those that the row has been planned to reach are ignored.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: they are no sequence of whole numbers from 0 on.

        Syncs: no.
        """
        self._enter()
        self._admission.snapshot_at(row, lengths)

    def shortfall(
        self, rows: Sequence[Row | None], tokens: int | Sequence[int] = 1, *, drafts: int | Sequence[int] = 0,
        defer: int = 0,
    ) -> int:  # fmt: skip
        """Returns how many slots are missing for the snapshots that are due in the next plan of these rows.

        If you drop that many snapshots first, the plan can take every snapshot that is due. For rows of which an
        earlier step is not accepted yet, it is an upper bound.

        Args:
            rows: the batch; None and finished rows are padding.
            tokens: tokens of each row in the step.
            drafts: as for `plan`.
            defer: as for `plan`.

        Raises:
            StaleHandle: a request has ended.
            InvalidArgument: the tokens, `drafts` or `defer` do not fit the rows.

        Syncs: no.
        """
        self._enter()
        if type(drafts) is not int or drafts or type(defer) is not int or defer:
            self._require_tails(defer)
        return self._stepping.shortfall(self._stepping.batch(rows, tokens, drafts), int(defer))

    def plan(
        self,
        rows: Sequence[Row | None],
        tokens: int | Sequence[int] = 1,
        *,
        limit: int = NO_LIMIT,
        replay: Callable[[], object] | None = None,
        drafts: int | Sequence[int] = 0,
        defer: int = 0,
    ) -> Step:
        """Decides which slots the next step reads, writes and snapshots.

        It sends the recorded changes, then takes one launch. With in-place kernels, or planes that a step writes only
        in part, it can take one more, for copies. Launch the forward before the next plan:
        memstate takes the next plan as the sign that this forward has been launched.

        Between the plan and its forward, do not call `plan` again and do not settle this step. Nearly all other calls
        are allowed; a few raise InvalidArgument while changes wait for the forward. If a slot that this step uses
        changes its owner, this change waits for the forward. The next `plan` or `submit(step)` sends it.

        Args:
            rows: the batch; None and finished rows are padding.
            tokens: tokens of each row in this step, drafts included: 1 in decode, the chunk in prefill. 0 for a row
                that reads none: what is pending in its tail is added to its state, up to the next boundary.
            limit: largest number of slots that this step can claim for snapshots.
            replay: replays a CUDA graph that begins with `launch` and contains the forward. Then this call takes no
                launch of its own, and the step is not open after it.
            drafts: of the tokens of each entry, how many of the last may be rejected, with `Forward(tail=)`. `accept`
                says how many were not.
            defer: store the state of a row only once so many tokens have come since it was stored last, at most 2 *
                tail, or at a boundary. Fewer bytes move, and more is computed: see docs/speculation.md.

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
        if replay is not None and not callable(replay):
            raise InvalidArgument(f"replay={replay!r}: expected a function, such as graph.replay")
        limit = limit if limit is NO_LIMIT else _limit(limit)
        if type(drafts) is not int or drafts or type(defer) is not int or defer:
            self._require_tails(defer)
        return self._stepping.plan(rows, tokens, limit, replay, drafts, int(defer))

    def _require_tails(self, defer: int) -> None:
        """Requires rows with tails, where a step has drafts or is deferred."""
        tail = self.forward.tail
        if not tail:
            raise InvalidArgument(
                "drafts= and defer= need rows with tails: build the manager with forward=ms.Forward(tail=4)"
            )
        if not is_whole(defer) or not 0 <= defer <= 2 * tail:
            raise InvalidArgument(
                f"defer={shown(defer)}: expected a whole number of tokens from 0 to {2 * tail}, 2 * tail"
            )

    def launch(self, batch: int) -> StepRecord:
        """Launches all that comes before the forward of a step, for a CUDA graph that is replayed step by step.

        Call it at the beginning of the capture, then run the forward on the vectors that it returns. Each
        `plan(rows, replay=graph.replay)` with a batch of this size then takes at most one upload, and the graph. Before
        you capture, call `warm_up` and run the forward once. A function that calls `launch` and the forward can also
        be the `replay` itself; then each launch is made one by one.

        Args:
            batch: entries of the batch.

        Returns:
            The vectors that all steps of this batch size have, each int32 `batch`.

        Raises:
            InvalidArgument: no graph is captured, and no plan replays; the batch is too large, or it is not the batch
                of the plan that replays.
            Asleep: the states are not in memory.

        Syncs: no.
        """
        self._door.require_thread()
        return self._stepping.launch(whole("batch", batch, least=0))

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
            InvalidArgument: the step has drafts or an older one is unsettled, or `finished` does not fit the batch.
            ForwardFault: with `debug=True`, its forward did something wrong; nothing changed.

        Syncs: in debug mode only.
        """
        self._enter()
        self._stepping.settle(step, finished)
        if self._cache.heard:
            self._learn()

    def accept(
        self, step: Step, accepted: Sequence[int], finished: Sequence[bool] | NDArray[np.bool_] | None = None, *,
        written: bool = False,
    ) -> None:  # fmt: skip
        """Says how many tokens of each entry are real, those that are no drafts included, and settles the step.

        It takes one small upload and no launch, or nothing if the sampler has `written` them to `step.accepted`. The
        next step of the row adds them to its state.

        Args:
            step: the oldest unsettled step.
            accepted: number of real tokens of each entry.
            finished: as for `settle`. If a row ends within its accepted tokens, accept only those up to its end; with
                `written`, what is written, and `end(lengths=)` leaves out the tokens behind the end.
            written: `step.accepted` has these numbers on the device already. Once the next step is planned, it has that
                step's: `accepted` is what the host has read before.

        Raises:
            StaleHandle: the step was settled before; nothing changed.
            InvalidArgument: the manager has no tails, an older step is unsettled, or `accepted` or `finished` do not
                fit the step. Nothing changed.
            ForwardFault: with `debug=True`, its forward did something wrong; nothing changed.

        Syncs: in debug mode only.
        """
        self._enter()
        if not self.forward.tail:
            raise InvalidArgument("accept needs steps with drafts: build the manager with forward=ms.Forward(tail=4)")
        if not isinstance(written, bool):
            raise InvalidArgument(f"written={written!r}: expected True or False")
        self._stepping.accept(step, accepted, finished, written)
        if self._cache.heard:
            self._learn()

    def _learn(self) -> None:
        """Lets the policies of the prefix cache learn of new requests, while a forward runs."""
        with self._learning:
            self._cache.learn()

    def cancel(
        self, step: Step, keep: Keep | None = None, *, tokens: Sequence[Tokens | None] | None = None
    ) -> list[Snapshot | None]:
        """Cancels a planned step whose forward never ran, and ends its rows.

        The rows end with the lengths that they had before the step. The plan has given up their live states, so `keep`
        finds what earlier steps have left: snapshots at boundaries and at marks. Rows that finished in the previous
        step end, too. To keep the states of the finished rows only, `end` these rows before `cancel`.

        Args:
            step: the newest step.
            keep: as for `end`. If the step stores no state, the state of the row counts, too.
            tokens: one sequence for each entry of the batch, None as for `end`. States of more tokens are not kept.

        Returns:
            One snapshot for each entry of the batch; None where nothing was published.

        Raises:
            StaleHandle: the step was settled before; nothing changed.
            InvalidArgument: the step is not the newest; its forward was launched, by a replay or after `submit(step)`;
                a state of this step was published; or `keep` and `tokens` do not fit. Nothing changed.
            ConfigurationError: `keep="cache"` without a prefix cache or a session; nothing changed.

        Syncs: no.
        """
        self._enter()
        return self._ending.cancel(step, keep, tokens)

    def end(
        self, rows: Sequence[Row], keep: Keep | None = None, *, tokens: Sequence[Tokens | None] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> list[Snapshot | None]:  # fmt: skip
        """Ends requests, also while a step is in flight. Keeps the longest confirmed state of each where `keep` says.

        The final state of a row counts if the row still holds it, and if its length is a multiple of the page size.
        Everything that is not kept becomes free.

        Args:
            rows: the requests.
            keep: where the states go. None: nowhere; the session of a turn keeps the state with which the turn began,
                or an older one, as far as a slot still holds it. "handle": to the result, for
                `Request(resume=...)` and `drop`. "cache": KV and state to the prefix cache, and the states of a turn to
                its session; `drop` refuses what the cache owns.
            tokens: all tokens of each request so far, prompt and answer. Of the object that it was admitted with, only
                those behind its prompt are read again. None, or None for a request: its prompt; a request that has
                decoded needs its tokens. With `keep="cache"` only.
            lengths: for each row, the largest length that its state can have, or one number for all. None: no limit.

        Returns:
            One snapshot for each row, or None.

        Raises:
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: a row is named twice, `keep`, `tokens` and `lengths` do not fit each other, tokens differ
                from the prompt of their row, or a turn is to become a handle; nothing changed.
            ConfigurationError: `keep="cache"` without a prefix cache or a session; nothing changed.

        Syncs: no.
        """
        self._enter()
        return self._ending.end(rows, keep, tokens, lengths)

    def publish(
        self,
        rows: Sequence[Row],
        keep: Keep = "handle",
        *,
        tokens: Sequence[Tokens | None] | None = None,
        strict: bool = False,
    ) -> list[Snapshot | None]:
        """Publishes the newest confirmed snapshot of each row. The rows continue to run.

        The snapshot moves with its slot from the row to a register of its own. It keeps the slot until it is dropped;
        any number of requests can resume from it.

        Args:
            rows: the requests.
            keep: where the snapshots go: "handle" or "cache", as for `end`.
            tokens: all tokens of each request so far, prompt and answer. Of the object that it was admitted with, only
                those behind its prompt are read again. None, or None for a request: its prompt; a request that has
                decoded needs its tokens. With `keep="cache"` only.
            strict: if a row has no snapshot, or no register is free for it, raise an error and publish nothing.

        Returns:
            One snapshot for each row; None if the row has no snapshot, or if no register is free for the snapshot.

        Raises:
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: `keep` and `tokens` do not fit each other, tokens differ from the prompt of their row, or
                with `strict` a snapshot is missing; nothing changed.
            ConfigurationError: `keep="cache"` without a prefix cache or a session; nothing changed.

        Syncs: no.
        """
        self._enter()
        return self._ending.publish(rows, keep, tokens, strict)

    def drop(self, snapshots: Sequence[Snapshot | None]) -> None:
        """Ends the handles of snapshots, and frees their slots and pages.

        Slots and pages become free at once. If the first step of a row must still read the snapshot, they become free
        when that step is planned.

        Args:
            snapshots: results of `publish`, `end` or `cancel`; None is skipped.

        Raises:
            StaleHandle: a snapshot was dropped before; nothing changed.
            InvalidArgument: a snapshot is named twice, or the prefix cache owns it; nothing changed.

        Syncs: no.
        """
        self._enter()
        if type(snapshots) is not list:
            snapshots = sequence("snapshots", snapshots, "[snapshot]")
        states, registers = self._holdings.droppable(snapshots)
        with self._dropping:
            self._holdings.end(states, registers)

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
        return self._admission.match(tokens, salt, session)

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
        return self._admission.prefetch(tokens, salt, session)

    def poll(self) -> None:
        """Advances the transfers between device, host memory and storage, and empties the sessions that have expired.

        Call it once in each iteration of the loop, even if no request runs.

        Raises:
            AgreementLost: a rank does not answer, or its prefetches differ.

        Syncs: no; with several ranks it waits for late ranks.
        """
        self._enter()
        self._admission.expire("poll")
        if self.tiers is not None:
            self.tiers.poll()

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        return self._reports.sheet(repr(self))

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
            self._parts.commands.submit()

    def stats(self) -> Stats:
        """Returns figures that the host knows. Works while the states sleep, too.

        Syncs: no.
        """
        return self._reports.stats()

    def audit(self) -> AuditReport:
        """Looks for leaked and doubly owned slots, and names their owners. Works while requests run.

        It also counts rows, KV pages, pins, leases, snapshot registers, sessions and host records at those who hold
        them, and compares the lengths of states and the page table with the device's. It first sends the recorded
        changes that do not wait for a forward. The other changes count as done.

        Syncs: yes.
        """
        self._enter()
        return self._reports.audit()

    def inspect(self) -> Inspection:
        """Returns the owner of every slot, and what the host knows of requests and caches, as plain data.

        It holds what `audit` finds, too. Use it for drawings and files. It first sends the recorded
        changes that do not wait for a forward. The other changes count as done.

        Syncs: yes.
        """
        self._enter()
        return self._reports.inspect()

    def recover(self, held: Tensor | Sequence[int] = (), *, keep: bool = True) -> Recovered:
        """Puts the manager right after an interrupted call, and keeps what was published.

        If an exception that memstate did not raise on purpose leaves a call, such as MemoryError, KeyboardInterrupt or
        an error of your policy, the call was completed, or it changed nothing, or it was interrupted while it changed
        something. In the last case every later call that changes something raises `Broken`, except `close` and
        `recover`.

        `recover` reads the device's registers. It keeps published snapshots, idle sessions and the states and KV of
        the prefix cache, as far as they are certain: what the interrupted call touched, and changes that were not sent
        to the device, are lost. All requests end, and their handles and steps are stale. Sessions with a running turn
        become empty. Host memory becomes empty; storage stays. Admit the requests again: they start from what is
        cached.

        After it, do not launch the forward of a step that was planned before it. End transfers that write to slots of
        requests first. You can call `recover` at any time, and again if it was interrupted itself.

        Args:
            held: slots that you hold by id, from `pool.claim`. All other slots without an owner become free.
            keep: False: nothing is certain. Every slot, row and page becomes free, every handle stale, and the prefix
                cache and all sessions empty; the tables on the device become zero.

        Returns:
            What was ended and what was kept.

        Raises:
            Asleep: the states sleep; nothing changed.
            InvalidArgument: a slot of `held` is out of range, named twice, free or owned, or given with
                `keep=False`; or another call makes this one, such as from a policy. Nothing changed.

        Syncs: yes.
        """
        self._door.require_outside("recover")
        self._door.require_caller()
        self._door.require_awake()
        return self._recovery.recover(held, keep)

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
            InvalidArgument: a change waits for the newest step's forward, or another call makes this one, such as from
                a policy; nothing changed.
            MemstateError: with `debug=True`, another thread called; nothing changed.
            LeakFound: with `debug=True`, slots are leaked, have two owners, or are owned and free. The tiers are
                closed.

        Syncs: yes.
        """
        self._door.require_outside("close")
        broken = bool(self._guard.call)
        if debug := self._debug:
            self._door.require_thread()
            if not broken:
                self._enter()
        if self.tiers is not None:
            self.tiers.close()
        if debug and not broken:
            self.audit().raise_if_leaking()


def _limit(limit: int) -> int:
    """Returns a limit as kernels take it: a plain integer that fits 32 bits."""
    if not isinstance(limit, int | np.integer) or isinstance(limit, bool):
        raise InvalidArgument(f"limit={limit!r}: expected a whole number of claims")
    return max(0, min(int(limit), NO_LIMIT))
