"""Plans steps, and settles, accepts or cancels them.

This module only calls mirror, registers and planes; they have the rules.

plan  [copies]  forward  [copies]  settle | accept

Copies are made for in-place kernels, and for planes that a step writes only in part. They come before the forward for
Redirect and for rows that read a snapshot directly, and after the forward for the ping-pong strategies.

A step is open from its plan until one of these calls closes it: the next plan, `submit(step)`, or its own settle,
accept or cancel. While a step is open, the slots that it uses do not change owners.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memstate.checks import INT32_MAX, counts, flags
from memstate.engine.world import Verbs, World
from memstate.errors import Asleep, InvalidArgument
from memstate.kernels.rules import Flags, Folded
from memstate.kernels.tables import REGISTERS_PER_ROW, StepRecord
from memstate.requests.handles import Row, Rows
from memstate.requests.marks import Mark
from memstate.requests.steps import Batch, Step
from memstate.requests.tracking.few import Few, Folds, fits
from memstate.slots.commands import STEP_MARKS
from memstate.slots.registers import Longs
from memstate.slots.upload import Views

PER_ROW = REGISTERS_PER_ROW
ROW = np.arange(PER_ROW)


class Late(NamedTuple):
    """A step that was planned while its predecessor was not accepted: the host does not know what the device decided.

    Attributes:
        step: the planned step.
        label: tokens of the state that each row reads, `row`.
        pending: number of tokens in the tail of each row that are certain, `row`.
        source: for each row, the register that it read instead of its live one before the plan, 0 for none, `row`.
        limit: largest number of claims of the plan.
        free: number of slots that were free at the plan.
        kept: number of slots that are held back for the claims of the plan.
        defer: if the tail and the step of a row have fewer tokens than this, none is added to the state.
    """

    step: Step
    label: Longs
    pending: Longs
    source: NDArray[np.int32]
    limit: int
    free: int
    kept: int
    defer: int


NO_LIMIT = 2**31 - 1


class Stepping(Verbs):
    """Plans, settles, accepts and cancels steps.

    This part changes the log of steps, the registers of rows, and marks. If due snapshots lack slots, it evicts cached
    states.

    Args:
        world: the tables of the manager.

    Attributes:
        open: the step whose forward is perhaps not launched yet, or None.
        replaying: number of entries of the batch whose graph the caller replays now, or None.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._planning, self._settling = world.guard.changing("plan"), world.guard.changing("settle")
        self._accepting = world.guard.changing("accept")
        self._rules, self._tail = world.mirror.rules, world.mirror.rules.tail
        self._accepted = Views(world.log.tails.accepted) if world.log.tails is not None else None
        self._copied, self._canary = world.copied, world.canary
        self._few = Few(world.mirror)
        self._plain = self._tail > 0 and not world.copied and world.canary is None
        self._moves = bool(world.copied) and (world.direct_hits or world.mirror.tracking.reads_old_slot)
        self.open: Step | None = None
        self.replaying: int | None = None
        self._launched = False  # whether the present replay has called `launch`
        self._captured: set[int] = set()  # batch sizes that `launch` was called with
        self._last: Batch | None = (
            None  # batch of the last lookup; the next three attributes are the lookup's arguments
        )
        self._last_rows: Sequence[Row | None] = ()
        self._last_tokens: object = None
        self._last_drafts: object = None
        self._confirmed: Step | None = None  # the newest step whose plan has confirmed the lengths of all of its rows
        self._promised: list[int] = []  # rows that have published a state or KV which the open step computes
        self._uncopied: tuple[Step, int] | None = None  # (step, number of snapshots) to copy after the forward
        self._late: Late | None = None  # the newest step, while the step before it is not accepted
        self._told: tuple[Step, Longs] | None = None  # in debug mode, (step, accepted numbers of its sampler)

    def reset(self) -> None:
        """Forgets every step."""
        self.open, self._uncopied, self._promised, self._last, self.replaying = None, None, [], None, None
        self._confirmed = self._late = self._told = None
        self._log.forget()
        if self._canary is not None:
            self._canary.forget()

    def launched(self, step: Step) -> None:
        """Notes that the forward of the newest step has been launched."""
        self._close(step)

    def require_newest(self, step: Step) -> None:
        """Raises an error unless this is the newest step.

        Raises:
            StaleHandle: the step was settled before.
            InvalidArgument: the step is not the newest.
        """
        self._log.require(step)
        self._log.require_next(step, newest=True)

    @property
    def promised(self) -> bool:
        """Whether rows have published a state or KV that the open step must still compute."""
        return bool(self._promised)

    def lengths_before(self) -> dict[int, int]:
        """Returns, by row of the open step, the largest length whose state exists even without that step."""
        if self.open is None:
            return {}
        same, before = self._same_request(self.open), self.open.before if self.open.there is None else self.open.there
        return dict(zip(self.open.numbers[same].tolist(), before[same].tolist(), strict=True))

    def promise(self, rows: Sequence[int], lengths: Sequence[int], before: Mapping[int, int]) -> None:
        """Notes the rows that have published a state or KV which the open step must still compute.

        Such a row has published a larger length than it had before the open step. The step cannot be cancelled any
        more.

        Args:
            rows: the row numbers.
            lengths: for each row, the length that was published.
            before: result of `lengths_before`, from before rows ended.
        """
        pairs = zip(rows, lengths, strict=True)
        self._promised += [row for row, length in pairs if length > before.get(row, INT32_MAX)]

    def _close(self, step: Step | None, send: bool = False) -> None:
        """Closes the open step: its forward was launched or will never run.

        In debug mode, the call first checks what the forward has done. Then it launches the copies of the step's
        snapshots. From then on, waiting changes can be sent.

        Args:
            step: the step to close; nothing happens if it is not the open step.
            send: whether to submit at once if an action is queued. A caller perhaps waits for the result of the action,
                and no further plan comes.

        Raises:
            ForwardFault: the forward did something wrong; nothing changed.
        """
        if self._canary is not None and (fault := self._canary.fault(step, self._relied)):
            raise self._guard.orderly(fault)
        if step is None or step is not self.open:
            return
        self.open, self._promised = None, []
        self._commands.lift()
        if self._uncopied is not None:
            self._copy_snapshots(*self._uncopied)
        if send and self._commands.queue and self._commands.acts:
            self._commands.submit()

    def batch(self, rows: Sequence[Row | None], tokens: int | Sequence[int], drafts: int | Sequence[int] = 0) -> Batch:
        """Looks up the rows of a batch. Returns the batch of the last call if rows and tokens are the same.

        Args:
            rows: the row of each entry; None and finished rows are padding.
            tokens: tokens of each entry.
            drafts: for each entry, how many of its tokens may be rejected.

        Raises:
            StaleHandle: a request has ended.
            InvalidArgument: an entry is not a row, or the tokens do not fit the rows.
        """
        table, last, alike = self._table, self._last, type(tokens) is int and type(drafts) is int
        if (
            last is not None
            and last.version == table.version
            and alike
            and tokens == self._last_tokens
            and drafts == self._last_drafts
            and (rows is self._last_rows or (type(rows) is type(self._last_rows) is list and rows == self._last_rows))
        ):
            return last
        batch = Batch.of(table, rows, tokens, last if alike else None, drafts)
        if type(rows) in (Rows, list) and alike:
            self._last, self._last_tokens, self._last_drafts = batch, tokens, drafts
            self._last_rows = rows[:] if type(rows) is list else rows
        return batch

    def shortfall(self, batch: Batch, defer: int) -> int:
        """See `StateManager.shortfall`."""
        length = self._mirror.lengths(batch.rows)
        if not self._tail:
            return self._shortfall(batch, length, length + batch.tokens)
        self._require_drafts(batch)
        read = length - self._file.pending[batch.rows]
        if self._log.unsettled and (unsure := self._unsure(batch.rows)) is not None:
            return self._shortfall(batch, read, length + unsure + batch.tokens, most=True)
        return self._shortfall(batch, *self._mirror.fold(batch, read, defer).due(read))

    def _shortfall(self, batch: Batch, length: Longs, after: Longs, most: bool = False) -> int:
        allocator = self._file.allocator
        wanted = self._mirror.claims(batch.rows, length, after, most)
        return max(0, wanted + allocator.reserve - allocator.free) if wanted else 0

    def plan(
        self, rows: Sequence[Row | None], tokens: int | Sequence[int], limit: int,
        replay: Callable[[], object] | None = None, drafts: int | Sequence[int] = 0, defer: int = 0,
    ) -> Step:  # fmt: skip
        """Plans a step; see `StateManager.plan`.

        Args:
            rows: the row of each entry; None and finished rows are padding.
            tokens: tokens of each entry.
            limit: largest number of slots that the step can claim for snapshots.
            replay: function that replays the graph with `launch` and the forward. None: the plan launches by itself.
            drafts: for each entry, how many of its tokens may be rejected.
            defer: if the tail and the step of a row have fewer tokens than this, none is added to the state.
        """
        log, commands, table = self._log, self._commands, self._table
        if len(log.unsettled) > log.depth:
            log.require_room()
        batch = self.batch(rows, tokens, drafts)
        if (size := len(batch.numbers)) > log.max_batch:
            raise InvalidArgument(f"a batch of {size}, the limit is max_batch={log.max_batch}")
        if self._plain and replay is None and (planned := self._plan_few(batch, limit, defer)) is not None:
            return planned
        running, reads = batch.rows, self._holdings.readers  # a row with a source has the length of the source
        length = self._mirror.lengths(running) if reads or self._tail else self._file.labels[batch.live]
        unsure = self._unsure(running) if self._tail and log.unsettled else None
        after = length + batch.tokens if unsure is None else length + unsure + batch.tokens
        self._require_plannable(batch, after)
        due_at, label, folded, late = (length, after), after, None, None
        if self._tail:
            self._require_drafts(batch)
            read = length - self._file.pending[running]
            folded = self._mirror.fold(batch, read, defer)
            due_at, label = folded.due(read), folded.after
            if unsure is not None:
                due_at = read, after  # `after` counts all drafts as accepted
            after = length + batch.certain
            self._read_accepted()
        with self._planning:
            if self.open is not None or self._canary is not None:
                self._close(self.open)
            before, reached = length, after
            if unsure is not None:  # a row with unaccepted drafts has no mark
                reached = np.where(unsure > 0, length, after)
            if type(batch.real) is not slice:
                before, reached = batch.spread(before), batch.spread(reached)
            stored: tuple[Longs, ...] = ()
            marks: list[Mark] = []
            if self._marks.awaited:
                of_tails: tuple[Longs, ...] = ()
                if folded is not None:  # if tokens stay in the tail, no slot has the state at the end of the step
                    of_tails = batch.tokens_of, np.subtract(reached, batch.spread(np.minimum(folded.newest, 1)))
                marks = self._marks.due(batch.numbers, before, reached, *of_tails)
            if marks:
                marks = self._make_room(marks, limit)
                stored, limit = self._marks.keep(marks), limit - len(marks)
                if folded is not None:  # `keep` can have changed sources, on which the fold depends
                    folded = self._mirror.fold(batch, read, defer)
                    due_at = folded.due(read) if unsure is None else due_at
            # `keep` can have added readers
            sources = list(filter(None, self._file.source[running].tolist())) if self._holdings.readers else []
            allocator, due = self._file.allocator, unsure is not None or self._mirror.reaches(*due_at)
            if due and self._cache.settings.evict and allocator.free - allocator.reserve < len(running):
                self._room.free_slots(allocator.free + min(limit, self._shortfall(batch, *due_at, unsure is not None)))

            if due and allocator.unconfirmed:  # now, because the count must not include this step's packet
                allocator.confirm(allocator.reserve + len(running))
            if commands.queue or not log.repeats(batch.numbers, batch.sent, limit, defer):
                commands.upload_step((batch.numbers, batch.sent), limit, stored, defer)
                log.sent = batch.numbers, batch.sent, limit, defer
            elif self._cache.below is not None:
                commands.prepare()
            taken = 0
            if unsure is not None:
                claims = self._mirror.claims(running, *due_at, most=True)
                kept = max(0, min(claims, limit, allocator.free - allocator.reserve))
                pending, source = self._file.pending[running], self._file.source[running]
                free = allocator.free
                late = Late(None, read, pending, source, limit, free, kept, defer)  # type: ignore[arg-type]
                allocator.free, allocator.held_back = allocator.free - kept, kept
                self._note_certain(batch, unsure == 0, folded)
            else:
                held = self._file.held.copy() if commands.journal is not None else None
                taken = self._mirror.plan(batch, *due_at, limit, due, len(sources) > 0, label)
                if folded is not None:
                    self._mirror.folded(batch, folded)
                if held is not None:
                    commands.note_changes("plan", held)
            record = log.record(size)
            if replay is None:
                commands.launch_changes()
                self._file.plan(commands.step, record, log.marks, self._rules, log.tails)
            else:
                self._replay(replay, size)
                commands.launch_changes(replayed=True)
            earlier, self._confirmed = log.unsettled[-1] if log.unsettled else None, None
            of_states = batch.spread(read) if folded is not None else None
            step = self.open = log.add(record, batch, before, reached, len(stored[0]) if stored else 0, of_states)
            if folded is not None:
                step.there = batch.spread(np.maximum(read - (folded.store == 0), 0))
            if late is not None:
                step.after = batch.spread(after)
                self._late, self._file.undecided = late._replace(step=step), frozenset(running.tolist())
            if replay is None:
                named = self._named(batch, sources, *due_at, taken) if sources or taken else batch.live
                if late is not None:
                    named = np.concatenate([named, *(batch.live + lane for lane in range(1, PER_ROW))])
                commands.fence(named, stored[2] if stored else None)
            if earlier is None:
                table.confirmed[running] = after
                self._confirmed = step
            elif earlier.batch is not batch:
                known = log.times(table)[running] == 1
                table.confirmed[running[known]] = after[known]
            if sources:
                self._holdings.reads_done(sources)
            if self._copied:
                self._copy_around(step, len(sources), taken, replay is not None, late is not None)
            if self._cache.below is not None:
                self._cache.below.planned(step.numbers, step.before, step.after)
            if replay is not None:  # the replay has launched the forward
                self._close(step, send=True)
            if self._canary is not None:
                self._canary.planned(step, bool(sources or taken or step.marked or late), replay is not None)
            return step

    def _plan_few(self, batch: Batch, limit: int, defer: int) -> Step | None:
        """Plans a step of a few rows as `plan` does. None: it is no step that `Few` knows, and nothing changed."""
        log, commands, file = self._log, self._commands, self._file
        earlier = log.unsettled[-1] if log.unsettled else None
        columns = self._few.columns(batch)
        if columns is None or (earlier is not None and earlier.batch is not batch):
            return None
        if self._holdings.readers or self._marks.awaited or file.allocator.unconfirmed:
            return None
        late = earlier is not None and batch.drafts is not None
        label, pending = file.labels[batch.live], file.pending[batch.rows]
        folds = self._few.fold(columns, label, pending, defer, late)
        if folds is None or file.longest + batch.most + self._tail > INT32_MAX:
            return None
        before = label + pending
        if self._pages.allocator.pages:
            self._pages.require_room(batch.rows, before + batch.tokens + (batch.tokens - batch.certain) * late)
        with self._planning:
            self._close(self.open)
            if commands.queue or not log.repeats(batch.numbers, batch.sent, limit, defer):
                commands.upload_step((batch.numbers, batch.sent), limit, (), defer)
                log.sent = batch.numbers, batch.sent, limit, defer
            elif self._cache.below is not None:
                commands.prepare()
            if not late:
                self._few.note(folds, batch)
            record = log.record(len(batch.numbers))
            commands.launch_changes()
            file.plan(commands.step, record, log.marks, self._rules, log.tails)
            step = self.open = log.add(record, batch, before, before + batch.certain, label=label)
            step.there, self._confirmed = label, None
            if earlier is None:
                self._table.confirmed[batch.rows] = step.after
                self._confirmed = step
            if late:
                file.longest += self._tail
                self._late = Late(step, label, pending, file.source[batch.rows], limit, file.allocator.free, 0, defer)
                file.undecided = frozenset(batch.rows.tolist())
            commands.fence((batch.live[:, None] + ROW).ravel() if late else batch.live)
            if self._cache.below is not None:
                self._cache.below.planned(step.numbers, step.before, step.after)
            return step

    def _make_room(self, marks: list[Mark], limit: int) -> list[Mark]:
        """Evicts cached states for marks, and returns the marks that get a slot and a holder.

        Args:
            marks: marks of a step.
            limit: largest number of slots for marks.
        """
        allocator = self._file.allocator
        limit = min(limit, STEP_MARKS)
        wanted = min(len(marks), limit)
        allocator.confirm(allocator.reserve + wanted)
        if self._cache.settings.evict:
            self._room.for_marks(wanted, allocator.reserve)
        return self._marks.choose(marks, min(self._holdings.free, allocator.free - allocator.reserve, limit))

    def keep_ends(self, rows: Sequence[int], known: Sequence[int], turns: Collection[int]) -> None:
        """Keeps the live states of rows that stand at a mark, so that they can be published before the next step.

        Args:
            rows: numbers of the rows.
            known: confirmed length of each row.
            turns: rows that are turns of sessions, which are left out: their live states go to their sessions.
        """
        if marks := self._marks.ends(rows, known, turns):
            self._marks.keep(self._make_room(marks, NO_LIMIT))

    def _replay(self, replay: Callable[[], object], batch: int) -> None:
        """Lets the caller launch a step, and raises an error if the caller did not.

        Args:
            replay: function that replays the graph of the step.
            batch: entries of the batch.
        """
        try:
            self.replaying, self._launched = batch, False
            replay()
        finally:
            self.replaying = None
        if not self._launched and batch not in self._captured:
            raise InvalidArgument(
                f"the replay of a step with batch={batch} did not launch it: no graph was captured with "
                f"launch({batch}), and the replay did not call it. For a graph of the forward alone, plan without "
                "`replay`, then replay the graph"
            )

    def launch(self, batch: int) -> StepRecord:
        """Launches everything that comes before the forward of a step; see `StateManager.launch`.

        Args:
            batch: entries of the batch.
        """
        self._require_launch(batch)
        self._launched = True
        self._captured.add(batch)
        record = self._log.record(batch)
        self._commands.capture_changes()
        self._file.plan(self._commands.step, record, self._log.marks, self._rules, self._log.tails)
        if self._moves:
            self._planes.copy(record.write, record.read, planes=self._copied, due=0)
        if self._canary is not None:
            self._canary.fill(record)
        return record

    def _require_launch(self, batch: int) -> None:
        if self._planes.asleep:
            raise Asleep()
        if batch > self._log.max_batch:
            raise InvalidArgument(f"launch of a batch of {batch}: the limit is max_batch={self._log.max_batch}")
        if self.replaying is None:
            self._guard.require_whole()
            if not self._file.allocator.stream.capturing:
                raise InvalidArgument(
                    "launch() outside of a graph capture would run the last step again: call it while you capture a "
                    "CUDA graph, or in the replay of a plan"
                )
        elif self.replaying != batch:
            raise InvalidArgument(
                f"launch({batch}) in the replay of a step with batch={self.replaying}: launch the same, or replay the "
                "graph of that batch"
            )
        elif self._launched:
            raise InvalidArgument("launch() twice in the replay of a step: the step would run twice, so call it once")

    def _require_plannable(self, batch: Batch, after: Longs) -> None:
        rows = batch.rows
        if not batch.distinct:
            row = next(row for row, times in Counter(rows.tolist()).items() if times > 1)
            raise InvalidArgument(
                f"a row is named twice in the batch: row {row}, entries {np.flatnonzero(batch.numbers == row).tolist()}"
            )
        if batch.fewest < 1 and not self._tail:
            at = int(np.argmin(batch.tokens))
            raise InvalidArgument(
                f"tokens={batch.tokens[at]} of row {rows[at]}: a row in the batch needs at least 1, padding is None"
            )
        if self._file.longest + batch.most > INT32_MAX:  # `longest` is an upper bound: each plan adds to it
            self._file.longest = int(self._file.labels.max())
            if rows.size and after.max() > INT32_MAX:
                raise InvalidArgument(
                    f"lengths {after.tolist()} after this step: a label holds {INT32_MAX} tokens at most"
                )
        if self._pages.allocator.pages:
            self._pages.require_room(rows, after)

    def _copy_around(self, step: Step, direct: int, taken: int, replayed: bool, late: bool) -> None:
        """Copies states of the planes in `copied` before the forward, and notes the copies to make after the forward.

        The copies read the vectors on the device. So they copy the right states even if the host knows no number.

        Args:
            step: the planned step.
            direct: number of entries that read the slot of a snapshot directly.
            taken: number of snapshots that this step takes.
            replayed: whether a captured graph has made the copies before the forward.
            late: whether the host does not know the number of snapshots yet; then `_decide` counts them later.
        """
        before = self._mirror.tracking.reads_old_slot
        moved = direct + taken * before
        if replayed:
            self._planes.count(self._copied, copied=moved)
        elif moved or (late and before):
            self._planes.copy(step.write, step.read, planes=self._copied, due=moved)
        if (taken or (late and self._mirror.lanes)) and not before:
            self._uncopied = (step, taken)

    def _copy_snapshots(self, of: Step, due: int) -> None:
        """Copies the snapshots of a step after its forward, for the planes in `copied`."""
        self._uncopied = None
        self._planes.copy(of.snapshot, of.write, planes=self._copied, due=due)

    def _named(self, batch: Batch, sources: list[int], before: Longs, after: Longs, taken: int) -> Longs:
        """Returns the registers whose slots a step reads, writes or takes as snapshots, as they are after the plan.

        Args:
            batch: the rows of the step, looked up.
            sources: registers that rows read instead of their live ones.
            before: for each row, its length before the step.
            after: for each row, its length after the step.
            taken: number of snapshots that this step takes.
        """
        named: list[Longs] = [batch.live, np.array(sources, np.int64)]
        if taken:
            label = before if self._mirror.tracking.reads_old_slot else after
            lanes = batch.live + np.arange(1, 1 + self._mirror.lanes)[:, None]
            named.append(lanes[self._file.held[lanes] & (self._file.labels[lanes] == label)])
        return np.concatenate(named)

    def settle(self, step: Step, finished: Sequence[bool] | NDArray[np.bool_] | None) -> None:
        """See `StateManager.settle`."""
        first = self._log.unsettled[0] if self._log.unsettled else None
        if first is None or step is not first:
            self._log.require(step)
        over = None if finished is None else flags("finished", finished, len(step.numbers))
        if step.batch.drafts is not None:
            raise InvalidArgument(f"step {step.serial} has drafts: accept(step, accepted) settles it")
        if step is not first:
            self._log.require_next(step)
        with self._settling:
            self._close(step, send=True)
            del self._log.unsettled[0]
            if step is self._confirmed and over is None and not self._mirror.releases:
                return  # the plan has confirmed all lengths
            table, batch = self._table, step.batch
            entries, rows = batch.real, batch.rows
            if batch.version != table.version:
                same = self._same_request(step)
                same &= ~table.finished[step.numbers]  # leave out rows that finished in the previous step
                entries = np.flatnonzero(same)
                rows = step.numbers[entries]
            reads = self._holdings.readers  # a row with a source has the length of the source
            known = self._mirror.lengths(rows) if reads or self._tail else self._file.labels[rows * PER_ROW]
            if over is not None and (ended := over[entries]).any():
                known = np.where(ended, step.after[entries], known)
                table.finish(rows[ended])
            table.confirmed[rows] = known
            if self._mirror.releases:
                self._release_lanes(rows, known)

    def accept(
        self, step: Step, accepted: Sequence[int], finished: Sequence[bool] | NDArray[np.bool_] | None, written: bool
    ) -> None:
        """See `StateManager.accept`."""
        if self._plain and finished is None and self._accept_few(step, accepted, written):
            return
        self._log.require(step)
        over = None if finished is None else flags("finished", finished, len(step.numbers))
        given, certain = counts("accepted", accepted, len(step.numbers)), step.after - step.before
        real, same = step.numbers > 0, self._same_request(step) & ~self._table.finished[step.numbers]
        if (wrong := np.flatnonzero((given > step.tokens_of) & real | (given < certain) & same)).size:
            at = int(wrong[0])
            raise InvalidArgument(
                f"accepted[{at}]={given[at]}: expected {certain[at] * same[at]} to {step.tokens_of[at]}: those that "
                "are no drafts, up to all tokens of the entry"
            )
        self._log.require_next(step)
        newest = self._log.is_last(step)
        if not newest and not written and (given != certain)[same].any():
            raise InvalidArgument(
                f"step {step.serial}: the next step was planned, so the device has counted what `step.accepted` said: "
                "write it there before that plan, and say written=True"
            )
        if newest and written:
            self._read_accepted()
        if self._told is not None and self._told[0] is step and (written or not newest):
            told = self._told[1]
            if (given != told)[same].any():
                raise InvalidArgument(
                    f"accepted {given.tolist()} of step {step.serial}, and `step.accepted` has {told.tolist()} on the "
                    "device: say written=True and give the same numbers, also for rows that end; `end(lengths=)` "
                    "leaves tokens behind an end out"
                )
        entries = np.flatnonzero(same)
        self._take(step, entries, given * real, (given - certain)[entries], newest and not written, over)

    def _accept_few(self, step: Step, accepted: Sequence[int], written: bool) -> bool:
        """Accepts a step of a few rows as `accept` does. False: it is no step that `Few` knows, and nothing changed."""
        log, late = self._log, self._late
        if not log.unsettled or step is not log.unsettled[0] or type(accepted) is not list:
            return False
        batch, columns = step.batch, self._few.columns(step.batch)
        if columns is None or batch.version != self._table.version:
            return False
        if (late is not None and (late.step.batch is not batch or late.kept)) or not fits(columns, accepted):
            return False
        newest, given = log.is_last(step), np.array(accepted)
        more = given - batch.certain
        if not newest and not written and more.any():
            return False
        folds = [] if late is None else self._few.fold(columns, late.label, late.pending + more, late.defer)
        if folds is not None:
            self._take(step, slice(None), given, more, newest and not written, None, folds)
        return folds is not None

    def _take(
        self, step: Step, entries: Longs | slice, given: Longs, more: Longs, send: bool, over: Flags | None,
        folds: Folds | None = None,
    ) -> None:  # fmt: skip
        """Takes over the accepted numbers of a step.

        Args:
            step: the oldest unsettled step.
            entries: entries of the batch whose requests still run.
            given: number of real tokens, `batch`.
            more: number of accepted drafts of each of these entries.
            send: whether the device does not have the accepted numbers.
            over: for each entry of the batch, whether its row has finished; None: none has.
            folds: what the late step does with the tails of its rows, if `Few` knows that.
        """
        file, rows = self._file, step.numbers[entries]
        with self._accepting:
            self._close(step, send=True)
            self._log.unsettled.remove(step)
            self._told = None
            if send:
                self._commands.ring.send(given.astype(np.int32), self._accepted)
            step.after = step.before + given
            late, self._late, file.undecided = self._late, None, frozenset()
            if late is None:
                file.pending[rows] += more
            elif folds is None:
                self._decide(late, rows, more)
            else:
                self._few.note(folds, step.batch)
                late.step.before, late.step.after = late.step.before + more, late.step.after + more
            known = file.labels[PER_ROW * rows] + file.pending[rows]
            if self._holdings.readers:
                known = self._mirror.lengths(rows)
            if over is not None and over.any():
                known = np.where(over[entries], step.after[entries], known)
                self._table.finish(rows[over[entries]])
            self._table.confirmed[rows] = known
            if self._mirror.releases:
                self._release_lanes(rows, known)

    def _read_accepted(self) -> None:
        """Reads, in debug mode, the accepted numbers that the sampler has written, before the next plan counts them.

        Raises:
            InvalidArgument: a number is too small or too large for its entry.

        Syncs: yes.
        """
        step = self._log.unsettled[-1] if self._log.unsettled else None
        if self._canary is None or step is None or not step.drafted or not self._log.is_last(step):
            return
        self._planes.backend.counts.syncs += 1
        told, least = step.accepted.cpu().numpy().astype(np.int64), step.after - step.before
        same = self._same_request(step) & ~self._table.finished[step.numbers]
        if ((told < least) | (told > step.tokens_of))[same].any():
            raise InvalidArgument(
                f"`step.accepted` of step {step.serial} has {told.tolist()} on the device: expected {least.tolist()} "
                f"to {step.tokens_of.tolist()}: write it before the next plan"
            )
        self._told = step, told

    def _unsure(self, rows: Longs) -> Longs | None:
        """Returns for each row how many of its drafts in the newest step may be accepted; None if no row has drafts."""
        step = self._log.unsettled[-1]
        if step.batch.drafts is None:
            return None
        if rows is step.batch.rows and step.batch.version == self._table.version:
            return step.batch.drafts  # nobody has ended
        drafts = np.zeros(self._table.rows + 1, np.int64)
        drafts[step.batch.rows] = step.batch.drafts
        same = self._same_request(step)
        drafts[step.numbers[~same]] = 0
        return drafts[rows] if drafts[rows].any() else None

    def _note_certain(self, batch: Batch, certain: NDArray[np.bool_], folded: Folded | None) -> None:
        """Notes the lengths of the `certain` rows of a step in `Late`: the rows without unaccepted drafts."""
        assert folded is not None
        rows, file = batch.rows[certain], self._file
        file.longest += self._tail
        file.source[batch.rows] = 0
        file.labels[batch.live[certain]] = folded.after[certain]
        file.pending[rows] = (folded.pending + np.where(folded.newest > 0, batch.certain, 0))[certain]

    def _decide(self, late: Late, rows: Longs, more: Longs) -> None:
        """Repeats the plan of a late step on the host, now that the accepted tokens of the step before are known.

        Args:
            late: the late step.
            rows: rows of the step before.
            more: for each of these rows, the number of accepted drafts.
        """
        step, allocator, file = late.step, self._file.allocator, self._file
        batch, held = step.batch, file.held.copy() if self._commands.journal is not None else None
        file.pending[batch.rows] = late.pending
        file.pending[rows] += more
        certain, step.before = step.after - step.before, batch.spread(late.label + file.pending[batch.rows])
        exact = allocator.free if late.kept and not allocator.held_back else None  # the count read since the plan
        allocator.held_back = 0
        allocator.free += late.kept
        taken = self._mirror.plan_late(batch, late.label, late.source, late.limit, late.free, late.defer)
        if self._copied:
            self._planes.count(self._copied, copied=taken)
        if exact is not None:
            allocator.free = exact
        if held is not None:
            self._commands.note_changes("plan", held)
        step.after = step.before + certain

    def require_told(self, rows: Sequence[int]) -> None:
        """Raises an error unless the host knows what the newest plan of each row has decided.

        Raises:
            InvalidArgument: a row is in a late step: the step before must be accepted first.
        """
        if not self._file.undecided.isdisjoint(rows):
            first = self._log.unsettled[0].serial
            raise InvalidArgument(
                f"rows {sorted(self._file.undecided.intersection(rows))} were planned again before step {first} was "
                f"accepted, so their states are not known yet: call accept(step {first}, ...) first"
            )

    def _require_drafts(self, batch: Batch) -> None:
        """Refuses more than `tail` tokens of a row with drafts."""
        if batch.drafts is not None and (long := (batch.drafts > 0) & (batch.tokens > self._tail)).any():
            raise InvalidArgument(
                f"rows {batch.rows[long].tolist()} have {batch.tokens[long].tolist()} tokens with drafts: a step keeps "
                f"at most {self._tail} of a row, Forward(tail={self._tail})"
            )

    def _release_lanes(self, rows: Longs, known: NDArray[np.integer]) -> None:
        """Records the release of lanes whose rows have a newer snapshot.

        The slot of the open step's snapshot is never released: that snapshot is the newest of its row.
        """
        if (lanes := self._mirror.superseded(rows, known)).size:
            self._commands.release(lanes.tolist())

    def _same_request(self, step: Step) -> NDArray[np.bool_]:
        """Returns for each entry of a step whether its row still belongs to the same request: bool `batch`."""
        if step.batch.version == self._table.version:  # nobody has ended
            return step.numbers > 0
        same: NDArray[np.bool_] = self._table.generation[step.numbers] == step.batch.generation
        same &= self._table.used[step.numbers]  # row 0, which is padding, is never used
        return same

    def _relied(self, step: Step) -> NDArray[np.bool_]:
        """Returns for each entry of the open step whether its row goes on or has published what the step computes."""
        return self._same_request(step) | np.isin(step.numbers, self._promised)

    def current(self, step: Step) -> Longs:
        """Returns the row of each entry of a step; 0 for padding and for rows whose request has ended.

        Raises:
            StaleHandle: the step was settled before.
            InvalidArgument: the argument is not a step.
        """
        self._log.require(step)
        return np.where(self._same_request(step), step.numbers, 0)

    def require_cancellable(self, step: Step) -> None:
        """Raises an error unless this is the newest step and its forward was not launched.

        Raises:
            StaleHandle: the step was settled before.
            InvalidArgument: the step is not the newest, its forward was launched, or a state of it was published.
        """
        self._log.require(step)
        self.require_told(step.numbers.tolist())
        if self._promised and step is self.open:
            raise InvalidArgument(
                f"step {step.serial}: what it computes for rows {sorted(set(self._promised))} was handed out since its "
                "plan: run its forward and settle it; where it cannot run, drop those snapshots or parked requests, "
                "clear the prefix cache, abort the rows, then settle it"
            )
        if step is not self.open and step is self._log.unsettled[-1]:
            raise InvalidArgument(f"step {step.serial}: its forward was launched: settle it")
        self._log.require_next(step, newest=True)

    def cancel(self, step: Step) -> tuple[list[int], list[int]]:
        """Cancels a step for which `require_cancellable` has passed.

        The confirmed length of a row becomes its length before the step, if it was larger.

        Returns:
            The entries whose requests have not ended, and their rows.
        """
        self._log.unsettled.remove(step)
        self._uncopied = None
        if self._canary is not None:
            self._canary.forget()
        self._close(step, send=True)
        entries = np.flatnonzero(self._same_request(step)).tolist()
        rows = step.numbers[entries]
        before = step.before if step.there is None else step.there
        self._table.confirmed[rows] = np.minimum(self._table.confirmed[rows], before[entries])
        return entries, rows.tolist()
