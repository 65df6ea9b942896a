"""StateManager: what a decode loop sees. Orchestrates; decides nothing that a strategy, an allocator or the device
decides.

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
from memstate.engine import report
from memstate.engine.admission import Admission, Fork
from memstate.engine.ending import Ending
from memstate.engine.pool import StatePool
from memstate.engine.settings import (
    Forward,
    Pages,
    require_switch,
    validate_layout,
    validate_sizes,
    validate_tracking,
)
from memstate.engine.stepping import Stepping
from memstate.errors import Asleep, ConfigurationError, InvalidArgument, MemstateError
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
from memstate.slots import audit
from memstate.slots.allocator import SlotAllocator
from memstate.slots.commands import Action, CommandBuffer
from memstate.slots.inspect import Inspection
from memstate.slots.journal import Change, Journal
from memstate.slots.readback import Readback
from memstate.slots.registers import Longs, RegisterFile
from memstate.state.layout import StateLayout
from memstate.state.planes import Planes
from memstate.state.regions import BufferInfo
from memstate.stats import Stats
from memstate.tiers import Fetch, TierManager, Tiers
from memstate.tiers.load import Loader, NoLoader
from memstate.tokens import BYTES, Tokens, encode

NO_LIMIT = 2**31 - 1
TWO_STEPS = ": a depth of 0 or 1; with more unsettled steps a dead one could overwrite a live snapshot"
PER_ROW = REGISTERS_PER_ROW


class StateManager:
    """The states of all requests: their slots, their snapshots and the page ids of their KV.

    Args:
        layout: what one state is made of.
        slots: states that fit.
        max_requests: requests that can run at a time; each has a row of the request table.
        tracking: the strategy that takes snapshots. Default: `Redirect()`.
        pages: KV pages of requests. None: the caller manages KV, and a page has one token.
        prefix: settings of a prefix cache, for requests with tokens. What is cached gives way to requests.
        tiers: settings of host memory and storage below the prefix cache. They want one `poll` an iteration.
        forward: what the forward's kernels can do.
        overlap: the next step is planned before the last one is settled.
        max_batch: entries of the largest batch. Default: max_requests and preallocated.
        preallocated: more rows, for requests whose state is still arriving.
        snapshots: snapshots that can be kept at a time. Default: slots, and with a prefix cache rows too.
        reserve: slots that snapshots at boundaries leave free for admissions.
        tensors: the planes, where the engine has allocated them. See `Planes.from_tensors`.
        device: where the states live.
        backend: what carries out the kernels: "auto", "reference", "interpreter" or "cuda".
        journal: how many of the last changes of owners `changes` remembers.
        debug: check the calling thread and overlapping copies.

    Attributes:
        planes: the bytes of all slots, by plane, with gather and scatter.
        page_table: KV pages of each row.
        pool: slots by id, for callers that hold them outside of any request.
        prefix: the prefix cache, or None.
        tiers: host memory and storage, or None.
        backend: carries out launches and counts them. The kernels of a forward take another one, or are counted too.

    Raises:
        ConfigurationError: for settings that contradict each other.
        InvalidArgument: for arguments that cannot be meant.
        LayoutMismatch: for tensors that do not fit the layout.

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
        except (ValueError, TypeError, RuntimeError) as error:  # torch's own word on a device it does not know
            raise ConfigurationError(str(error)) from error
        self._allocator = SlotAllocator(slots, self.backend, reserve)
        if tensors is None:
            self.planes = Planes(layout, slots, self.backend)
        else:
            self.planes = Planes.from_tensors(layout, tensors, self.backend, slots)
        self.pool = StatePool(self._allocator, self.planes, debug=debug)
        self._table = RequestTable(max_requests + preallocated)
        spare = self._table.rows if prefix else 0  # else one given up and taken again in a step would cost a submit
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
        self.tiers: TierManager | None = None
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
    def changes(self) -> list[Change]:
        """The last changes of owners, oldest first: as many as `journal` said, none without it."""
        journal = self._commands.journal
        return list(journal.changes) if journal else []

    @property
    def page_table(self) -> Tensor:
        """KV pages of each row: int32 `row page`; 0 = none."""
        return self._registers.page_table

    @property
    def free_slots(self) -> int:
        """Slots that requests can be given now; those whose release waits for a forward are not there for
        `pool.claim` yet.
        """
        return self._allocator.free

    @property
    def free_pages(self) -> int:
        """KV pages that can be claimed now."""
        return self._pages.allocator.free

    def length(self, row: Row) -> int:
        """Tokens folded into the row's state by the steps planned so far. Raises: StaleHandle."""
        return int(self._mirror.lengths(np.array([self._table.index(row)]))[0])

    def confirmed(self, row: Row) -> int:
        """Tokens up to which the row is known to be real. Raises: StaleHandle."""
        return int(self._table.confirmed[self._table.index(row)])

    def next_boundary(self, row: Row) -> int:
        """The next length at which a snapshot is due; a prefill chunk must not go beyond it. Raises: StaleHandle."""
        index, length = self._table.index(row), self.length(row)
        following = (length // self.tracking.every + 1) * self.tracking.every
        snapshot_at = self._boundaries.after(index, length)
        return snapshot_at if length < snapshot_at < following else following

    def slots_held(self, row: Row) -> int:
        """Slots that the row's registers hold. Raises: StaleHandle."""
        first = PER_ROW * self._table.index(row)
        return int(self._registers.held[first : first + PER_ROW].sum())

    def admit(self, requests: Sequence[Request]) -> Rows:
        """Gives every request a row, its slots and its pages, or gives none anything. Fresh states are zeroed with the
        next submit. Syncs: no.

        Raises: OutOfSlots, OutOfRows, OutOfPages (back-pressure), StaleHandle, InvalidArgument; nothing changed then.
        """
        self._enter()
        return self._admission.admit(requests)

    def fork(self, row: Row, ids: Sequence[Hashable]) -> Fork:
        """Makes more requests go on from a running row's state, as for several samples of one prompt.

        With direct_hits (Redirect) nothing is copied: all of them, and the row itself, read one slot in their next step
        and write their own. Otherwise the state is copied with the next submit. KV pages are shared as far as they are
        full; the result says which page contents the caller copies. What all of them read is no snapshot of anyone: a
        row given up before its next step answers with an older one.
        Syncs: no. Raises: OutOfSlots, OutOfRows, OutOfPages (back-pressure), StaleHandle, InvalidArgument (also while a
        step of the row is unsettled, or where a page is to be copied while changes wait for a forward); nothing changed
        then.
        """
        self._enter()
        return self._admission.fork(row, ids)

    def arrived(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Says that states computed elsewhere have been written to the live slots of fresh rows (see `read_slots`) and
        what lengths in tokens they stand for. Under Redirect one that arrives at a boundary becomes a snapshot, as if
        it had been computed here; elsewhere the next boundary is the first.
        Syncs: no. Raises: StaleHandle, InvalidArgument; nothing changed then.
        """
        self._enter()
        self._admission.arrived(rows, lengths)

    def read_slots(self, handles: Sequence[Row | Snapshot]) -> Readback:
        """Asks the device which slots hold these rows' states and snapshots, for RDMA or debugging: one upload, one
        launch, one copy back, ready a step later.

        Where a change recorded before waits for a forward, the question waits with it, so that no id is known before
        its slot may be used. Syncs: no; `Readback.wait` does. Raises: StaleHandle, InvalidArgument.
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
        """Slots that snapshots due in the next plan of these rows (or, at most, in the accept of a window) would lack:
        drop as many snapshots first to have all of them. Syncs: no. Raises: StaleHandle, InvalidArgument.
        """
        self._enter()
        return self._stepping.shortfall(self._stepping.batch(rows, tokens), window)

    def extend(self, rows: Sequence[Row], lengths: Sequence[int]) -> None:
        """Takes KV pages so that row i can hold lengths[i] tokens, for all rows or for none. Syncs: no.

        Raises: OutOfPages (back-pressure), StaleHandle, InvalidArgument; nothing changed then.
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
        """Decides which slots the next step reads, writes and snapshots: one launch, after a submit of what was
        recorded.

        rows: the batch; None and finished rows are padding. tokens: of each row in this step: 1 in decode, the chunk in
        prefill, the drafted tokens of a window.
        limit: optional claims (for snapshots) that this step may make.
        Launch the forward before the next plan. Any other call may come before the forward: what would change the owner
        of a slot that this step names is recorded, and sent behind the forward by the next plan or `submit(step)`.
        window: a speculative step. Its forward reads `step.read` and stores no state in a slot, but the states after
        each of its tokens in windows of the caller's, which `accept` chooses from.
        Syncs: no. Raises: StaleHandle, InvalidArgument (also when an older step must be settled first); nothing changed
        then.
        """
        self._enter()
        if window and not self.forward.speculation:
            raise InvalidArgument("plan(window=True) needs a manager with forward=ms.Forward(speculation=True)")
        step = self._stepping.plan(rows, tokens, _limit(limit), window, self._cache)
        if self.tiers is not None:
            self.tiers.host.planned(step.numbers, step.before, step.after)
        return step

    def settle(self, step: Step, finished: Sequence[bool] | NDArray[np.bool_] | None = None) -> None:
        """Says that the results of a step are known, and which of its entries they ended; finished rows are padding
        from now on.

        finished: one per entry of the batch; None = nobody. Steps are settled in the order they were planned; at most
        one launch, none where no slot can become free. Syncs: no. Raises: StaleHandle for a step settled before,
        InvalidArgument.
        """
        self._enter()
        self._stepping.settle(step, finished)

    def accept(
        self, step: Step, accepted: Sequence[int], windows: Mapping[str, Tensor],
        finished: Sequence[bool] | NDArray[np.bool_] | None = None, *, limit: int = NO_LIMIT,
    ) -> None:  # fmt: skip
        """Says how many tokens of each window are real, keeps the states after them, and settles the step.

        accepted: per entry, 0 = none: that row stays where it was. windows: for every plane, `layer batch step ...`,
        the states after each token; or for a plane of conv inputs `layer batch tap-1+step channel`, every input once.
        Where a window crosses a boundary, the state there becomes a snapshot, if the strategy finds a slot for it.
        finished: as for `settle`; a row that ends within its window is accepted up to its end.
        One upload, one launch, one more for each plane, one where lanes can go. Syncs: no. Raises: StaleHandle,
        InvalidArgument; nothing changed then.
        """
        self._enter()
        self._stepping.accept(step, accepted, windows, finished, _limit(limit))

    def cancel(
        self, step: Step, *, publish: bool = False, tokens: Sequence[Tokens | None] | None = None
    ) -> list[Snapshot | None]:
        """Gives up a planned step whose forward never ran: its rows are aborted as they were before it, also those that
        the step before it had ended: release them first, or ask to publish.

        tokens: as for `release`, one per entry of the batch. Returns the snapshots, entry by entry, if asked to
        publish. Syncs: no. Raises: StaleHandle, InvalidArgument (also where something that the step computes has been
        handed out since its plan, or `submit(step)` said that its forward was launched), ConfigurationError; nothing
        changed then.
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
        """Ends requests: their newest real snapshots are published if asked, everything else is given back. Syncs: no.

        publish: False, True, or the key length of each row (tokens whose KV may be shared), which bounds the snapshot's
        length. tokens: all that is known of each request, prompt and answer; with them KV and snapshot go to the prefix
        cache, and a turn of a session to the session (without them it is aborted). Returns one snapshot a row, None
        where there is none; what the cache has is the cache's to drop. Raises: StaleHandle, InvalidArgument,
        ConfigurationError; nothing changed then.
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
        """Ends requests at once, whatever is in flight, and publishes nothing; a session goes back to where the turn
        began, as far as a register still has that state. Syncs: no. Raises: StaleHandle, InvalidArgument.
        """
        self._end(rows, False, None, "aborted")

    def retract(self, rows: Sequence[Row], *, tokens: Sequence[Tokens] | None = None) -> list[Snapshot | None]:
        """Ends requests that will come back, and keeps the newest real snapshot of each. tokens: as for `release`.
        Syncs: no. Raises: StaleHandle, InvalidArgument, ConfigurationError.
        """
        return self._end(rows, True, tokens, "retracted")

    def publish(
        self, rows: Sequence[Row], *, tokens: Sequence[Tokens] | None = None, strict: bool = False
    ) -> list[Snapshot | None]:
        """Moves the newest real snapshot out of each running row's lanes; the row goes on with another slot. Syncs: no.

        tokens: all that is known of each request, prompt and answer; with them KV and snapshot go to the prefix cache.
        Returns one snapshot a row, None where there is none or no holder is free; strict: raise InvalidArgument then,
        and publish nothing. A snapshot keeps its slot until it is dropped, however many requests resumed from it.
        Raises: StaleHandle, InvalidArgument, ConfigurationError; nothing changed then.
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
        """Tokens of each row that the cache or a session is about to rely on; None where handles say it."""
        if keys is None:
            return None
        lengths = [min(n, len(key) // BYTES) for n, key in zip(known.tolist(), keys, strict=True)]
        turns = self._sessions.by_row
        return [n if row in turns else self._pages.floor(n) for row, n in zip(rows.tolist(), lengths, strict=True)]

    def drop(self, snapshots: Sequence[Snapshot | None]) -> None:
        """Gives up snapshots: their slots and pages are free again, at once or when the first step of a row that
        resumes from one is planned.

        Syncs: no. Raises: StaleHandle, InvalidArgument (also for what the prefix cache has); nothing changed then.
        """
        self._enter()
        given = [snap for snap in sequence("snapshots", snapshots, "[snapshot]") if snap is not None]
        self._cache.require_foreign(given)
        self._snapshots.drop(given)

    def match(self, tokens: Tokens, salt: Hashable = None, session: Session | None = None) -> Match:
        """What the prefix cache has for a prompt, and why it is not more: lengths by state and by KV, and what host
        memory would add. Changes nothing.

        session: whose next turn it is; what it keeps counts too. A request computes its last token in any case.
        Syncs: no. Raises: InvalidArgument, StaleHandle, ConfigurationError without a prefix cache.
        """
        self._enter()
        found, kept = self._match(encode(tokens), require_salt(salt), session)
        return found.instead(kept) if kept >= found.length and kept else found

    def _match(self, key: bytes, salt: Hashable, session: Session | None) -> tuple[Match, int]:
        """What cache and host memory have, and what a session keeps."""
        if self.prefix is None:
            raise ConfigurationError("there is no prefix cache: build the manager with prefix=ms.Prefix()")
        most = max(0, len(key) // BYTES - 1)
        found = self.prefix.match(key, salt, most)
        kept = self._sessions.find(self._sessions.get(session), key, salt).length if session is not None else 0
        if self.tiers is not None and (hit := self.tiers.find(key, salt, found, max(kept, found.length), most)):
            found = replace(found, host_length=hit.length)
        return found, kept

    def prefetch(self, tokens: Tokens, salt: Hashable = None, session: Session | None = None) -> Fetch:
        """Begins to bring what storage has for a prompt to host memory, where the next `match` and `admit` find it.
        Ask for it when a request arrives, `poll` every iteration, and admit the request once `fetch.done`, or once
        `mem.tiers.ready(fetch)` says that it has waited long enough.

        salt, session: as the request's. Syncs: no. Raises: InvalidArgument, StaleHandle, ConfigurationError without a
        storage.
        """
        self._enter()
        if self.tiers is None:
            raise ConfigurationError("there is no storage to fetch from: build the manager with tiers=ms.Tiers(...)")
        key = encode(tokens)
        found, kept = self._match(key, require_salt(salt), session)
        own = found.host_length if self.tiers.settings.group is None else 0  # of which other ranks know nothing
        return self.tiers.prefetch(key, salt, found, max(kept, found.length, own))

    def poll(self) -> None:
        """Moves on what goes in the background between device, host memory and storage: once an iteration of the loop,
        also while no request runs. Syncs: no; with several ranks it waits for those that are late. Raises:
        AgreementLost.
        """
        self._enter()
        if self.tiers is not None:
            self.tiers.poll()

    def close(self) -> None:
        """Brings what is cached to storage, where there is one, closes it, and ends the threads of the tiers; only they
        need it, and requests go on without them. Syncs: yes. Raises: Asleep; InvalidArgument while something waits for
        the newest step's forward; nothing changed then.
        """
        if self.tiers is not None:
            self.tiers.close()

    def open_session(self, name: Hashable) -> Session:
        """A conversation whose states and pages stay between its turns: `Request(session=...)`. Syncs: no."""
        self._enter()
        return self._sessions.open(name)

    def close_session(self, session: Session) -> None:
        """Gives back what a session holds. Syncs: no. Raises: StaleHandle, InvalidArgument (a turn of it runs)."""
        self._enter()
        if lease := self._sessions.close(session):
            self._cache.release(lease)

    def scrub_null(self) -> None:
        """Zeroes slot 0, where kernels that are not memstate's may have left rubbish. Syncs: no."""
        self._enter()
        self.planes.scrub_null()

    def submit(self, step: Step | None = None) -> None:
        """Sends what is recorded now instead of with the next plan: for each packet one upload, at most two launches.

        step: the newest one, whose forward has been launched: all is sent, behind the snapshot copies of an in-place
        engine. Without it, the first change of a slot that the newest step names waits for the forward, and what was
        recorded after it. Syncs: no. Raises: StaleHandle, InvalidArgument; nothing changed then.
        """
        self._enter()
        if step is not None:
            self._stepping.launched(step)
        self._commands.submit()

    def sleep(self, keep: bool = True) -> None:
        """Releases the memory of the states, and keeps who owns what. Until `wake` lengths, counts and `stats` answer;
        everything else raises Asleep.

        keep: keep the bytes in host memory; otherwise no request and no snapshot may hold a slot.
        Syncs: yes. Raises: InvalidArgument, Asleep (nothing changed).
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
        """Takes the memory back, with the bytes that were kept, at addresses that may have moved: CUDA graphs that hold
        addresses of planes are captured anew. Syncs: yes. Raises: InvalidArgument unless asleep; Asleep, LayoutMismatch
        where an engine's memory is not back as it was.
        """
        self._require_thread()
        self.planes.wake()

    def buffer_infos(self) -> list[BufferInfo]:
        """Base address, slot stride and length of every plane and layer, in bytes, to register for RDMA. Syncs: no."""
        return self.planes.buffer_infos()

    def reset(self) -> None:
        """Everything free, every register, column and page zero, every handle stale; the bytes stay. Host memory is
        empty, storage stays. No forward of a step planned before may be launched from here on. Syncs: no, but for
        tiers.
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

    def stats(self) -> Stats:
        """Figures from the host's mirror.

        Syncs: no.
        """
        return report.stats(self)

    def audit(self) -> audit.AuditReport:
        """Looks for leaked and doubly owned slots, by name, also while requests run.

        It submits what does not wait for a forward; what waits counts as carried out.

        Syncs: yes.
        """
        inspection, names = self._look()
        return audit.audit(inspection, names)

    def inspect(self) -> Inspection:
        """Reads who owns which slot now, and all that the host knows, as plain data for audits, drawings and files.

        It submits what does not wait for a forward; what waits counts as carried out.

        Syncs: yes.
        """
        return self._look()[0]

    def _look(self) -> tuple[Inspection, dict[int, tuple[str, str]]]:
        self._enter()
        self._commands.submit()
        names = self.owners()
        return report.inspection(self, names), names

    def owners(self) -> dict[int, tuple[str, str]]:
        """Says who has the registers that hold a slot: register -> (kind, name).

        Syncs: no.
        """
        return {register: self.owner(register) for register in np.flatnonzero(self._registers.held).tolist()}

    def owner(self, register: int) -> tuple[str, str]:
        """Says who has a register, as (kind, name): a row by its request, a session by its id.

        Syncs: no.
        """
        return report.owner(self, register)

    def check(self) -> None:
        """Submits what does not wait for a forward, and raises the first fault that the device counted. Syncs: yes.
        Raises: DeviceFault, DoubleRelease.
        """
        self._enter()
        self._commands.submit()
        self.pool.check()

    def _enter(self) -> None:
        self._require_thread()
        if self.planes.asleep:
            raise Asleep()

    def _require_thread(self) -> None:
        if self._thread is not None and self._thread != threading.get_ident():
            raise MemstateError(f"a manager is driven by one thread ({self._thread}), this is {threading.get_ident()}")


def _limit(limit: int) -> int:
    """As an argument that kernels take: a plain integer that fits 32 bits."""
    if not isinstance(limit, int | np.integer) or isinstance(limit, bool):
        raise InvalidArgument(f"limit={limit!r}: expected a whole number of claims")
    return max(0, min(int(limit), NO_LIMIT))
