"""Offers the calls of a decode loop as one object, `StateManager`. Other modules have the rules.

admit -> plan -> (your forward) -> settle | accept -> ... -> end
              `-> cancel                      `-> publish -> (your index) -> admit([Request(resume=...)]) | drop
                                                        `-> prefix cache -> admit([Request(tokens=...)])
                                                             `-> host memory, storage -> prefetch -> poll ..
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from math import inf
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
from memstate.errors import ConfigurationError, InvalidArgument, StaleHandle
from memstate.kernels.tables import StepRecord
from memstate.prefix import Match, Prefix
from memstate.prefix.session_settings import SessionLimits
from memstate.requests.handles import Parked, Request, Row, RowInfo, Rows, Session, Snapshot
from memstate.requests.steps import Step
from memstate.requests.tracking import Tracking
from memstate.sheet import Sheet, Shown
from memstate.slots.audit import AuditReport
from memstate.slots.inspect import Inspection
from memstate.slots.journal import Journal
from memstate.state.layout import StateLayout
from memstate.stats import Stats
from memstate.tiers import Fetch, Tiers
from memstate.tokens import Keys, Tokens

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
        sessions: limits on what idle sessions keep. Default: `SessionLimits()`.
        forward: what the kernels of your forward can do.
        overlap: whether the next step can be planned before the previous step is settled.
        max_batch: entries of the largest batch. Default: max_requests + preallocated.
        preallocated: additional rows, for requests that wait for a state computed elsewhere.
        snapshots: largest number of published snapshots. Default: slots; with a prefix cache slots + rows.
        reserve: number of slots that snapshots at boundaries leave free for admissions.
        tensors: plane name -> tensors that the engine has allocated; None: allocate. See `Planes.from_tensors`.
        device: device of the states.
        backend: what runs the kernels: "auto", "reference", "interpreter" or "cuda".
        journal: how many changes of owners `journal` keeps; 0: none.
        debug: whether to check the calling thread, overlapping copies and, in each call, the owners of all states; to
            look for leaks in `close`; and to find forwards that forget a store or change a slot that they may only
            read. Before a forward, the slots that it must store in are filled with a pattern. The call that closes the
            step waits for the device, and raises ForwardFault if the forward has not stored there.

    Attributes:
        planes: the bytes of all slots, by plane, with gather and scatter.
        layout: the argument `layout`. The arguments `forward`, `overlap`, `pages` and `tracking` are attributes, too.
        pool: slots by id, for callers that use slots outside of requests.
        prefix: the prefix cache, or None.
        tiers: host memory and storage, or None.
        sessions: the calls that open and close sessions.
        device: tensors at fixed addresses, slot ids, `sleep` and `wake`, the stream.
        journal: the last changes of owners, or None.
        backend: runs and counts the launches of memstate. Use another `Backend` for the kernels of your forward: this
            one would count their launches, too.

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
        self._names, self._forgetting = parts.cache.names, parts.guard.changing("forget")

    def __setattr__(self, name: str, value: Any) -> None:
        self._require_free(name)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        self._require_free(name)
        super().__delattr__(name)

    def _require_free(self, name: str) -> None:
        """Refuses to change an attribute that is set already. A method can be replaced, so that callers can wrap it.

        Raises:
            AttributeError: the attribute is set already.
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

        If an exception took the result of `admit` or `fork` from the caller, the new rows are here.
        """
        return self._table.everyone

    @property
    def free_slots(self) -> int:
        """Number of free slots.

        Admissions can get more slots if the prefix cache has states to evict. The number includes slots whose release
        waits for a forward, which `pool.claim` cannot use yet.
        """
        return self._parts.allocator.free

    @property
    def free_pages(self) -> int:
        """Number of free KV pages. Admissions can get more pages if the prefix cache has pages to evict."""
        return self._parts.pages.allocator.free

    def info(self, row: Row) -> RowInfo:
        """Returns what the host knows of a row: its lengths, its next boundary, and its slots.

        Args:
            row: the request.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: the argument is not a row of this manager.

        Syncs: no.
        """
        self._door.require_whole()
        return self._reports.info(self._table.index(row))

    def chunk(self, row: Row, most: int) -> int:
        """Returns how many tokens of its prompt the row's next chunk should read, so that no wanted state is lost.

        A chunk ends where the prompt ends, or else at the last whole page within `most`. So the next chunk, and the
        grid inside it, begin at the start of a page. If the forward has no grid, or a packed grid, a chunk also ends at
        the next mark. You can plan other chunks: their states are kept at shorter lengths, or not at all
        (`Stats.missed`).

        Args:
            row: the request.
            most: largest number of tokens of the chunk.

        Returns:
            A number from 1 to `most`. It is `most` if the row has read its prompt, or was admitted without one.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: `row` is not a row of this manager, or `most` is not a whole number from 1 on.

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

        Syncs: no, unless the call needs slots that `pool.release` freed by id.
        """
        self._enter()
        if self._parts.sessions.expiry < inf:
            self._admission.expire("admit")
        return self._admission.admit(requests)

    def fork(self, row: Row, ids: Sequence[Hashable]) -> Fork:
        """Starts more requests from a running row's state, for example several samples of one prompt.

        With `direct_hits`, the default of Redirect without in-place kernels, the new rows and the row itself read the
        same slot in their next step, and each row writes its own slot. Only planes that a step writes in part are
        copied, by the next plan. Without `direct_hits` the next `plan` or `submit` copies the state.

        The rows share the KV pages that are full. The result names the pages whose contents the caller must copy.

        A new row can go on with other tokens than those of the prompt. So memstate knows only the tokens that the rows
        share: to keep longer states, `publish` and `end` with `keep="cache"` need `tokens=`.

        With `direct_hits` the shared state is not a snapshot of any row. If a row ends before its next step, it
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
        """Forks and ends rows, so that row i of the result continues `rows[entries[i]]`: one call for all beams.

        A row that is named once goes on. A row that is named several times goes on and is forked, as by `fork`, under
        its own id. A row that is not named ends, as by `end`, and the forks can use its slots, pages and row. All of
        these changes are in one packet.

        Args:
            rows: the running requests.
            entries: for each row of the result, an index into `rows`. There can be more or fewer entries than rows.

        Returns:
            The rows, and the page copies to make.

        Raises:
            OutOfSlots: back-pressure, too few slots are free; nothing changed.
            OutOfRows: back-pressure, the request table is full; nothing changed.
            OutOfPages: back-pressure, too few KV pages are free; nothing changed.
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: a row comes twice in `rows`, or an entry is no index of `rows`; a row that is not named is
                the turn of a session; or a row cannot be forked: see `fork`. Nothing changed.

        Syncs: no, unless it needs slots that `pool.release` freed by id.
        """
        self._enter()
        return self._parts.forking.reorder(rows, entries)

    def extend(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Gives rows the KV pages that they need for longer lengths. If pages are short, no row gets a page.

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
        """Adds lengths at which a running request keeps states of its prompt, as `Request(snapshot_at=)` does.

        A later request whose prompt parts from this one at such a length can then start there, once the row has read
        that far.

        Args:
            row: the request.
            lengths: lengths in tokens. Lengths that a planned step of the row reaches already are ignored.

        Raises:
            StaleHandle: the request has ended.
            InvalidArgument: `lengths` is no sequence of whole numbers from 0 on.

        Syncs: no.
        """
        self._enter()
        self._admission.snapshot_at(row, lengths)

    def shortfall(
        self, rows: Sequence[Row | None], tokens: int | Sequence[int] = 1, *, drafts: int | Sequence[int] = 0,
        defer: int = 0,
    ) -> int:  # fmt: skip
        """Returns how many slots are missing for the snapshots that are due in the next plan of these rows.

        If you drop that many snapshots first, the plan can take every snapshot that is due. The number is an upper
        bound if an earlier step of the rows is not accepted yet.

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

        The call sends the recorded changes, then takes one launch. With in-place kernels, or planes that a step writes
        only in part, it can take one more launch, for copies. Launch the forward before the next plan: memstate takes
        the next plan as the sign that this forward has been launched.

        Between the plan and its forward, do not call `plan` again and do not settle this step. Nearly all other calls
        are allowed; a few raise InvalidArgument while changes wait for the forward. If a slot that this step uses
        changes its owner, this change waits for the forward. The next `plan` or `submit(step)` sends it.

        Args:
            rows: the batch; None and finished rows are padding.
            tokens: number of tokens of each row in this step, drafts included: 1 in decode, the chunk in prefill. For a
                row with 0 tokens, the step adds the pending tokens of the tail to the state, up to the next boundary.
            limit: largest number of slots that this step can claim for snapshots.
            replay: replays a CUDA graph that begins with `launch` and contains the forward. Then this call takes no
                launch of its own, and the step is not open after it.
            drafts: for each entry, how many of its last tokens may be rejected; needs `Forward(tail=)`. Afterwards
                `accept` says how many tokens are real.
            defer: number of tokens, at most 2 * tail. The state of a row is stored only at boundaries, and when this
                many tokens have come since it was stored last. Fewer bytes move, and more is computed: see
                docs/speculation.md.

        Returns:
            The step, with three vectors of slots on the device: int32, axis `batch`.

        Raises:
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: an older step must be settled first; the batch is too large; a row is named twice; or a
                row has too few pages. Nothing changed.
            ForwardFault: with `debug=True`, the forward of the step before did something wrong; nothing changed.

        Syncs: no, unless the call needs slots that `pool.release` freed by id, or in debug mode.
        """
        self._enter()
        if replay is not None and not callable(replay):
            raise InvalidArgument(f"replay={replay!r}: expected a function, such as graph.replay")
        limit = limit if limit is NO_LIMIT else _limit(limit)
        if type(drafts) is not int or drafts or type(defer) is not int or defer:
            self._require_tails(defer)
        return self._stepping.plan(rows, tokens, limit, replay, drafts, int(defer))

    def _require_tails(self, defer: int) -> None:
        """Refuses `drafts` and `defer` in a manager without `Forward(tail=)`, and a `defer` that is not valid."""
        if not (tail := self.forward.tail):
            raise InvalidArgument(
                "drafts= and defer= need rows with tails: build the manager with forward=ms.Forward(tail=4)"
            )
        if not is_whole(defer) or not 0 <= defer <= 2 * tail:
            raise InvalidArgument(
                f"defer={shown(defer)}: expected a whole number of tokens from 0 to {2 * tail}, 2 * tail"
            )

    def launch(self, batch: int) -> StepRecord:
        """Launches everything that comes before the forward of a step, for a CUDA graph that is replayed in each step.

        Call it at the beginning of the capture, then run the forward on the vectors that it returns. Each
        `plan(rows, replay=graph.replay)` with a batch of this size then takes at most one upload, and the graph. Before
        you capture, call `warm_up` and run the forward once. Without a graph, `replay` can be a function that calls
        `launch` and the forward.

        Args:
            batch: entries of the batch.

        Returns:
            The vectors of all steps of this batch size, each int32 `batch`.

        Raises:
            InvalidArgument: the call comes neither in a graph capture nor in the replay of a plan; or the batch is too
                large, or not the batch of the plan that replays.
            Asleep: the states are not in memory.

        Syncs: no.
        """
        self._door.require_thread()
        return self._stepping.launch(whole("batch", batch, least=0))

    def settle(self, step: Step, finished: Sequence[bool] | NDArray[np.bool_] | None = None) -> None:
        """Tells the manager that the results of a step are known, and which rows of the step have ended.

        Rows that have ended are padding from now on. Settle steps in the order of their plans. If a lane can be
        released, the call records its release, and the next packet sends it.

        If this step is still open, `settle` closes it: the call launches the copies of snapshots that in-place kernels,
        or planes written only in part, need. If a readback or a transfer waits, it also sends the waiting changes.

        Args:
            step: the oldest unsettled step.
            finished: True or False for each entry of the batch. None: no row has finished.

        Raises:
            StaleHandle: the step was settled before.
            InvalidArgument: the step has drafts or an older one is unsettled, or `finished` does not fit the batch.
            ForwardFault: with `debug=True`, the forward of the step did something wrong; nothing changed.

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
        """Settles a step with drafts, with the number of real tokens of each entry.

        The call takes one small upload and no launch. If the sampler has `written` the numbers to `step.accepted`, it
        takes no upload. The next step of a row adds the real tokens to the state of the row.

        Args:
            step: the oldest unsettled step.
            accepted: number of real tokens of each entry, tokens that are no drafts included.
            finished: as for `settle`. If a row ends within its accepted tokens, accept only the tokens up to the end.
                With `written`, give the number that was written; `end(lengths=)` then leaves out the tokens behind the
                end.
            written: whether `step.accepted` has these numbers on the device already. Read them before the next plan,
                which overwrites the vector.

        Raises:
            StaleHandle: the step was settled before; nothing changed.
            InvalidArgument: the manager has no tails, an older step is unsettled, or `accepted` or `finished` do not
                fit the step. Nothing changed.
            ForwardFault: with `debug=True`, the forward of the step did something wrong; nothing changed.

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
        """Tells the policies of the prefix cache which requests were admitted, while a forward runs."""
        with self._learning:
            self._cache.learn()

    def cancel(
        self, step: Step, keep: Keep | None = None, *, tokens: Sequence[Tokens | None] | None = None,
        keys: Sequence[Keys | None] | None = None,
    ) -> list[Snapshot | None]:  # fmt: skip
        """Cancels a planned step whose forward never ran, and ends its rows.

        The rows end with the lengths that they had before the step. Their live states are lost, because the plan has
        passed them to the forward. So `keep` finds only what earlier steps have left: snapshots at boundaries and at
        marks. Rows that finished in the previous step end, too. To keep the states of the finished rows only, `end`
        these rows before `cancel`.

        Args:
            step: the newest step.
            keep: as for `end`. If the step stores no state of a row, the live state of the row can be kept, too.
            tokens: for each entry of the batch, its tokens or None, as for `end`. Longer states are not kept.
            keys: for each entry of the batch, its keys or None, in place of `tokens`, as for `end`.

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
        return self._ending.cancel(step, keep, self._names.of(tokens, keys))

    def end(
        self, rows: Sequence[Row], keep: Keep | None = None, *, tokens: Sequence[Tokens | None] | None = None,
        lengths: Sequence[int] | None = None, keys: Sequence[Keys | None] | None = None,
    ) -> list[Snapshot | None]:  # fmt: skip
        """Ends requests, also while a step is in flight. With `keep`, keeps the longest confirmed state of each.

        The final state of a row can be kept if the row still holds it, and if its length is a multiple of the page
        size. Everything that is not kept becomes free.

        Args:
            rows: the requests.
            keep: where the states go. None: no state is kept, but the session of a turn keeps the state with which the
                turn began, or an older one, if a slot still holds it. "handle": the result has handles, for
                `Request(resume=...)` and `drop`. "cache": KV and state go to the prefix cache, and the states of a turn
                to its session. `drop` refuses states that the cache owns.
            tokens: for each request all of its tokens so far, prompt and answer; with `keep="cache"` only. None for one
                request, or for all, stands for the prompt; a request that has decoded needs its tokens. If you give the
                object that the request was admitted with, only the tokens behind the prompt are read.
            lengths: for each row, the largest length of a state to keep, or one number for all rows. None: no limit.
            keys: with `Prefix(keyed=True)`, in place of `tokens`: the keys of all blocks that each request has filled.
                None for one request, or for all, stands for the keys of the admission.

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
        named = tokens if keys is None and not self._names.keyed else self._names.of(tokens, keys)
        return self._ending.end(rows, keep, named, lengths)

    def publish(
        self,
        rows: Sequence[Row],
        keep: Keep = "handle",
        *,
        tokens: Sequence[Tokens | None] | None = None,
        strict: bool = False,
        keys: Sequence[Keys | None] | None = None,
    ) -> list[Snapshot | None]:
        """Publishes the newest confirmed snapshot of each row. The rows continue to run.

        The slot of the snapshot moves from the row to a holder, and stays there until the snapshot is dropped. Any
        number of requests can resume from the snapshot. With `Redirect`, the state of a boundary becomes a snapshot at
        the next plan; with the other strategies it is one when its step has settled. With `keep="cache"`, older
        snapshots that the row still has go to the cache as well.

        Args:
            rows: the requests.
            keep: where the snapshots go: "handle" or "cache", as for `end`.
            tokens: for each request all of its tokens so far, prompt and answer; with `keep="cache"` only. None for one
                request, or for all, stands for the prompt; a request that has decoded needs its tokens. If you give the
                object that the request was admitted with, only the tokens behind the prompt are read.
            strict: whether to raise an error and publish nothing if a row has no snapshot, or no holder is free for it.
            keys: with `Prefix(keyed=True)`, in place of `tokens`: the keys of the blocks that each row has filled, as
                for `end`. Only new keys are read. States behind the last key stay with the row for later.

        Returns:
            One snapshot for each row; None if the row has no snapshot, or if no holder is free for it.

        Raises:
            StaleHandle: a request has ended; nothing changed.
            InvalidArgument: `keep` and `tokens` do not fit each other, tokens differ from the prompt of their row, or
                with `strict` a snapshot is missing; nothing changed.
            ConfigurationError: `keep="cache"` without a prefix cache or a session; nothing changed.

        Syncs: no.
        """
        self._enter()
        return self._ending.publish(rows, keep, self._names.of(tokens, keys), strict)

    def park(
        self, handles: Sequence[Row | Session], tokens: Sequence[Tokens | None] | None = None, *,
        user: Sequence[bytes] | None = None,
    ) -> list[Parked]:  # fmt: skip
        """Moves running requests and idle sessions to host memory, and ends them. `Request(resume=)` goes on from them.

        A request goes on at the length at which it was parked, with the same bytes: its state at any length, the tokens
        in its tail, and its KV with the last page. All are parked, or none. States at marks and older snapshots of the
        row are dropped. KV pages for which staging has no room stay on the device, and `poll` copies them
        later. A session closes: `Request(resume=, session=)` makes what it kept the next turn of a new session.

        If a step is planned and its forward is not launched, what the forward computes is parked, too. Such a step can
        no longer be cancelled.

        Args:
            handles: rows, and sessions without a running turn.
            tokens: for each row all of its tokens so far, as far as you know them; None for one, or for all, stands for
                the prompt. A whole page of known tokens that host memory has already is not copied. None for a session.
            user: for each handle, bytes of your own, such as the state of a sampler. `Parked.user` returns them.

        Returns:
            A handle for each. Its records stay until it goes on or is dropped.

        Raises:
            OutOfRecords: back-pressure: host memory or its staging has too little room; nothing changed.
            StaleHandle: a request has ended, or a session is closed; nothing changed.
            InvalidArgument: drafts of a row are not accepted, pending tokens are in a tail that you keep, a row is
                finished or a turn, its tokens are not those of its prompt, or a session keeps no state; nothing
                changed.
            ConfigurationError: there is no host memory, or `Tiers(int8=)` keeps no exact states; nothing changed.
            Asleep: the memory of states or KV pages is released; nothing changed.

        Example:
            >>> import torch, memstate as ms
            >>> layout = ms.StateLayout([ms.Plane("ssm", (4,), torch.float32)], layers=1)
            >>> tiers = ms.Tiers("toy", host_slots=8)
            >>> mem = ms.StateManager(
            ...     layout, slots=8, max_requests=2, pages=ms.Pages(size=16), prefix=ms.Prefix(), tiers=tiers
            ... )
            >>> row = mem.admit([ms.Request("a", tokens=range(20))])[0]
            >>> mem.settle(mem.plan([row], 20))
            >>> parked = mem.park([row])[0]
            >>> mem.free_slots
            8
            >>> row = mem.admit([ms.Request("a", resume=parked)])[0]
            >>> mem.info(row).length
            20

        Syncs: no.
        """
        self._enter()
        return self._ending.park(handles, tokens, user)

    def drop(self, snapshots: Sequence[Snapshot | Parked | None]) -> None:
        """Ends the handles of snapshots and of parked requests, and frees their slots, pages and records.

        Slots and pages become free at once, or, if the first step of a row must still read the snapshot, when that step
        is planned.

        Args:
            snapshots: results of `publish`, `end`, `cancel` or `park`; None is skipped.

        Raises:
            StaleHandle: a snapshot was dropped before, or a parked request went on; nothing changed.
            InvalidArgument: a snapshot is named twice, or the prefix cache owns it; nothing changed.

        Syncs: no.
        """
        self._enter()
        if type(snapshots) is not list:
            snapshots = sequence("snapshots or parked requests", snapshots, "[snapshot]")
        parked = [one for one in snapshots if isinstance(one, Parked)]
        states, registers = self._holdings.droppable([one for one in snapshots if not isinstance(one, Parked)])
        below = self.tiers.parked if self.tiers is not None else None
        if below is not None:
            below.require(parked)
        elif parked:
            raise StaleHandle("parked request", 0, 0)
        with self._dropping:
            self._holdings.end(states, registers)
            if below is not None:
                below.drop(parked)

    def forget(self, keys: Keys) -> None:
        """Says that your engine has given KV blocks away, with `Prefix(keyed=True)`: their states are evicted first.

        Answers are right without this call, because a request names only blocks whose KV is there. Call it where the
        engine takes a block with a key for other tokens. A state stays until its slot is needed. If its KV is computed
        again before, requests find it again. Once a request starts from it, or a row files it again, it counts as
        before. Longer states have keys of their own.

        Args:
            keys: the keys of the blocks. Keys without a state are skipped.

        Raises:
            InvalidArgument: something is no key, or the manager has no keyed cache; nothing changed.

        Syncs: no.
        """
        self._enter()
        encoded = self._names.encode(self._names.of(None, keys))
        with self._forgetting:
            self._cache.forget(encoded)

    def match(
        self, tokens: Tokens | None = None, salt: Hashable = None, session: Session | None = None, *,
        keys: Keys | None = None, length: int | None = None, reach: int | None = None,
    ) -> Match:  # fmt: skip
        """Returns how much of a prompt the prefix cache has, and why it does not have more. Changes nothing.

        The result says how many tokens a cached state covers, how many cached KV covers, and how many a state in host
        memory covers. The last token never counts, because a request always computes it.

        Args:
            tokens: the whole prompt.
            salt: the salt of the request.
            session: the session of the request. States that the session keeps count, too.
            keys: with `Prefix(keyed=True)`, in place of `tokens`: the keys of the request.
            length: with `keys`, the number of all tokens of the prompt.
            reach: as for `Request`.

        Raises:
            InvalidArgument: tokens, keys, reach or salt are not valid, or a turn of the session runs.
            StaleHandle: the session is closed.
            ConfigurationError: the manager has no prefix cache.

        Syncs: no.
        """
        self._enter()
        asked = Request(None, length, tokens=tokens, salt=salt, session=session, keys=keys, reach=reach)
        return self._admission.match(asked)

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
            ForwardFault: with `debug=True`, the forward of the step did something wrong; nothing changed.

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

        The audit also asks the owners of rows, KV pages, pins, leases, snapshot registers, sessions and host records
        what they hold, and compares the answers with the host's counts. It compares the lengths of states and the page
        table with those of the device. First it sends the recorded changes that do not wait for a forward; the other
        changes count as done.

        Syncs: yes.
        """
        self._enter()
        return self._reports.audit()

    def inspect(self) -> Inspection:
        """Returns the owner of every slot, and what the host knows of requests and caches, as plain data.

        The result includes what `audit` finds. Use it for drawings and files. First the call sends the recorded changes
        that do not wait for a forward; the other changes count as done.

        Syncs: yes.
        """
        self._enter()
        return self._reports.inspect()

    def recover(self, held: Tensor | Sequence[int] = (), *, keep: bool = True) -> Recovered:
        """Repairs the manager after an interrupted call, and keeps what was published.

        An exception that memstate did not raise on purpose, such as MemoryError, KeyboardInterrupt or an error of your
        policy, can end a call. If that happens while the call changes something, the call is *interrupted*: every later
        call that changes something raises `Broken`, except `close` and `recover`. Otherwise the call was completed, or
        it changed nothing.

        `recover` reads the device's registers. It keeps published snapshots, idle sessions and the states and KV of
        the prefix cache, except those that the interrupted call or an unsent change touched. All requests end, and
        their handles and steps are stale. Sessions with a running turn become empty. Host memory becomes empty, so
        parked requests are lost; storage stays. Admit the requests again: they start from what is cached.

        End transfers that write to slots of requests before you call `recover`. After it, do not launch the forward of
        a step that was planned before. You can call `recover` at any time, and again if it was interrupted itself.

        Args:
            held: slots that you hold by id, from `pool.claim`. All other slots without an owner become free.
            keep: whether to keep anything. If not, every slot, row and page becomes free, every handle stale, and the
                prefix cache and all sessions empty; the tables on the device become zero.

        Returns:
            The requests that ended, and the snapshots that were kept or lost.

        Raises:
            Asleep: the states sleep; nothing changed.
            InvalidArgument: a slot of `held` is out of range, named twice, free or owned, or given with
                `keep=False`; or `recover` is called inside another call, such as by a policy. Nothing changed.

        Syncs: yes.
        """
        self._door.require_outside("recover")
        self._door.require_caller()
        self._door.require_awake()
        return self._recovery.recover(held, keep)

    def close(self) -> None:
        """Writes the cached states to storage, closes the storage, and ends the threads of the tiers.

        If the manager has no tiers, `close` does nothing. After `close`, requests can continue, but without tiers:
        `prefetch` and `park` raise ConfigurationError, `poll` does nothing, and all other calls work. A second
        `close` does nothing.

        With `debug=True`, each `close` checks the calling thread, and audits the slots after everything is closed.
        Slots of running requests are no leaks. Slots from `pool.claim` are leaks, so release them first.

        If an earlier call was interrupted (see `recover`), `close` writes nothing and audits nothing.

        Raises:
            Asleep: states or KV pages sleep; nothing changed.
            InvalidArgument: a change waits for the newest step's forward, or `close` is called inside another call,
                such as by a policy; nothing changed.
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
    """Returns a limit of claims as a plain integer from 0 to the largest int32, as kernels take it."""
    if not isinstance(limit, int | np.integer) or isinstance(limit, bool):
        raise InvalidArgument(f"limit={limit!r}: expected a whole number of claims")
    return max(0, min(int(limit), NO_LIMIT))
