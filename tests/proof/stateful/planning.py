"""Batches of rows and the steps planned for them, as they are meant and as they are not."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

import memstate as ms
from memstate.kernels.tables import StepRecord
from tests.proof.stateful.machine import REFUSED, Faults, Flight, Machine, foreign
from tests.proof.stateful.memory import RUBBISH
from tests.proof.stateful.model import Planned
from tests.proof.stateful.rows import Row
from tests.proof.stateful.settings import Digits

NO_LIMIT = 2**31 - 1
# What may come between a plan and its forward.
GAP = (
    "admit", "admit", "admit", "leave", "leave", "leave", "publish", "publish", "drop", "drop", "fork", "cancel",
    "settle", "settle", "arrived", "submit", "submit", "lengthen", "read_slots", "read_slots", "shortfall", "ask",
    "audit", "snapshot", "check", "scrub_null", "sleep", "wake", "reset", "poll", "prefetch", "match", "talk", "hush",
    "forget_states", "forget_pages", "forget_all", "ready", "unfetch", "work", "thin", "flush", "empty_host",
    "push_down",
)  # fmt: skip
Handles = list[Any]


class Planning(Machine):
    """Handles, most of them good, and what a decode loop does with them first."""

    admit: Callable[[Digits], None]
    settle: Callable[[Digits], None]
    wake: Callable[[Digits], None]

    def bad_row(self, d: Digits) -> Any:
        """A handle of another manager, of a row given up, or none at all."""
        gone = [row for row in self.gone if row not in self.handles]
        return d.pick(*foreign().rows[:: len(foreign().rows) - 1], *gone, 3, "row")

    def draw_rows(self, d: Digits, most: int = 9) -> Handles:
        rows: Handles = sorted(self.handles, key=lambda row: self.handles[row].finished)
        how, rows = d(8), rows[:most]
        if how == 1:
            rows = [rows[d(len(rows))]] if rows else []
        elif how == 2:
            rows = [row for row in rows if d(2)]
        elif how == 3:
            rows.reverse()
        elif how == 4:
            rows = sorted(rows, key=lambda _: d(8))
        bad = d(40)
        if bad in (1, 2):
            rows.insert(d(len(rows) + 1), self.bad_row(d))
        elif bad == 3 and rows:
            rows.append(rows[0])
        return rows

    def row_faults(self, rows: Handles, padding: bool = False) -> Faults:
        faults: Faults = set()
        for row in rows:
            if isinstance(row, ms.Row):
                if row.index > self.model.row_count:
                    faults.add(ms.InvalidArgument)
                elif row not in self.handles:
                    faults.add(ms.StaleHandle)
            elif not (padding and row is None):
                faults.add(ms.InvalidArgument)
        named = [row for row in rows if row in self.handles and not (padding and self.handles[row].finished)]
        if len(set(named)) < len(named):
            faults.add(ms.InvalidArgument)
        return faults

    def extend(self, rows: Handles, lengths: Any) -> bool:
        """Pages for rows up to lengths, for all or for none."""
        model, faults = self.model, self.row_faults(rows)
        given = lengths if isinstance(lengths, list) else [lengths] * len(rows)
        requested = 0
        if len(given) != len(rows) or any(not 0 <= length <= NO_LIMIT for length in given):
            faults.add(ms.InvalidArgument)
        elif not faults:
            if any(model.too_wide(length) for length in given):
                faults.add(ms.InvalidArgument)
            tenants = [self.handles[row] for row in rows]
            requested = sum(max(0, model.pages_for(n) - len(t.pages)) for t, n in zip(tenants, given, strict=True))
            if requested > model.free_pages + model.pages_ready_to_go:
                faults.add(ms.OutOfPages)
        call = lambda: self.mem.extend(rows, lengths)  # noqa: E731
        if self.attempt(faults, call, {ms.OutOfPages: (requested, model.free_pages)}) is REFUSED:
            return False
        model.free_some_pages(requested)
        model.extend([self.handles[row] for row in rows], given)
        return True

    def plan(self, d: Digits, window: bool = False, run: bool = True) -> Flight | None:
        model = self.model
        if len(self.flights) > self.settings.overlap and d(8) != 7:
            self.settle(d)
        alive = [row for row, tenant in self.handles.items() if not tenant.finished]
        if (not alive and d(6) != 5) or (len(alive) < self.max_batch and d(2)):
            self.admit(d)
        handles = self.draw_rows(d, self.max_batch)
        while len(handles) < self.max_batch and d(4) == 1:
            handles.insert(d(len(handles) + 1), None)
        counts = []
        for handle in handles:
            row = self.handles.get(handle)
            most = d.pick(4, 4, 9, model.next_boundary(row) - model.length(row) if row and not window else 4)
            counts.append(1 + d(most))
            if row and not window and d(3) == 1:
                counts[-1] = self.mem.chunk(handle, counts[-1])
        if self.planned_last is not None and d(4) == 1:  # as a decode loop does, whether these are still there or not
            handles = self.planned_last
            counts = [1] * len(handles)
        self.planned_last = handles
        handles, counts, limit = self._spoil(d, handles, counts, window)
        return self.plan_batch(d, self.take_pages(d, handles, counts), counts, limit, window, run)

    def plan_batch(
        self, d: Digits, handles: Handles, counts: list[int], limit: Any = NO_LIMIT, window: bool = False,
        run: bool = True,
    ) -> Flight | None:  # fmt: skip
        """Plans these rows, whatever is wrong with that; the step's forward runs unless told otherwise.

        About half of the forwards run within the plan, as where a graph is replayed.
        """
        model = self.model
        given: Any = counts[0] if len(set(counts)) == 1 and len(counts) == len(handles) and d(2) else counts
        faults = self._plan_faults(handles, counts, limit, window)
        rows: list[Row | None] = []
        fed: list[list[int]] = []
        if not faults:
            rows = [self.handles[handle] if handle else None for handle in handles]
            fed = [
                self.feed(row, model.length(row), n) if row and not row.finished else []
                for row, n in zip(rows, counts, strict=True)
            ]
        starts = [model.length(row) if row and not row.finished else 0 for row in rows]
        windows: dict[str, Tensor] = {}
        replay: Any = None
        if run and handles and d(2):
            replay = lambda: windows.update(self._replay(d, window, starts, fed))  # noqa: E731
        elif d(60) == 1:
            self._misuse_replay(handles, given, window)
        packets = model.packets
        with self.counted() as spent:
            call = lambda: self.mem.plan(handles, given, limit=limit, window=window, replay=replay)  # noqa: E731
            step = self.attempt(faults, call)
        if step is REFUSED:
            return None
        planned = model.plan(list(zip(rows, fed, strict=True)), max(0, limit), window)
        packets = model.packets - packets
        owned = packets + (replay is not None and not planned.changes)  # a graph launches it for no change, too
        assert spent["plan"] == 1 and spent["ownership"] == owned, spent
        assert not spent["syncs"] or self.settings.debug, spent
        if spent.keys() <= {
            "plan",
            "ownership",
            "run_data",
            "uploads",
            "syncs",
        }:  # and nothing is copied, read back or packed
            assert spent["run_data"] <= owned and spent["uploads"] <= max(1, packets), spent
        flight = Flight(step, planned, fed, windows)
        self.note_step(flight)
        entries = planned.entries
        self._same("rows of the step", step.numbers.tolist(), [e.row.number if e.row else 0 for e in entries])
        self._same("tokens of the step", step.tokens_of.tolist(), list(map(len, fed)))
        self._same_marks(step, planned)
        self._same("before", step.before.tolist(), [entry.before for entry in entries])
        self._same("after", step.after.tolist(), [entry.after for entry in entries])
        assert step.window == window
        if replay is not None:
            assert self.mem._parts.stepping.open is None
            self._ran(flight)
            model.launched(planned, send=True)
            self.look()
            return flight
        self.look()  # before the forward: zeros and copies are done, and nothing else
        if run:
            self._gap(d)
            if flight not in self.flights:  # cancelled, or everything was reset
                return None
            flight.windows.update(self._run(d, step.record, window, starts, fed))
            self._ran(flight)
            if d(4) == 1:
                self.look()
                self.tell_launched()
        return flight

    def _replay(self, d: Digits, window: bool, starts: list[int], fed: list[list[int]]) -> dict[str, Tensor]:
        """What a captured graph does, launched one by one."""
        return self._run(d, self.mem.launch(len(fed), window=window), window, starts, fed)

    def _misuse_replay(self, handles: Handles, given: Any, window: bool) -> None:
        """Launches outside of a plan, and something that cannot be called."""
        if not self.asleep:
            self.attempt({ms.InvalidArgument}, lambda: self.mem.launch(1))
        call = lambda: self.mem.plan(handles, given, window=window, replay=1)  # type: ignore[arg-type] # noqa: E731
        self.attempt({ms.InvalidArgument}, call)

    def _gap(self, d: Digits) -> None:
        """Whatever a scheduler does between a plan and the forward."""
        flight, self.in_gap = self.flights[-1], True
        for _ in range(d.pick(0, 0, 0, 1, 2, 3, 5)):
            if flight in self.flights:
                getattr(self, d.pick(*GAP))(d)
                self.look()
        if self.asleep:
            self.wake(d)
        self.in_gap = False

    def tell_launched(self) -> None:
        """Says that the newest step's forward has been launched."""
        flight = self.flights[-1]
        if self.attempt(set(), lambda: self.mem.submit(flight.step)) is not REFUSED:
            self.model.launched(flight.planned)
            self.model.submit()

    def _spoil(self, d: Digits, handles: Handles, counts: list[int], window: bool) -> tuple[Handles, list[int], Any]:
        """Now and then something is wrong with a batch."""
        limit: Any = d.pick(NO_LIMIT, NO_LIMIT, NO_LIMIT, 0, 1, 2)
        wrong = d(40)
        if wrong == 1 and counts:
            counts = [*counts[:-1], counts[-1] + d.pick(self.settings.every, NO_LIMIT)]
        elif wrong == 2 and counts:
            counts = [0, *counts[1:]]
        elif wrong == 3:
            counts = [*counts, 1, 1]
        elif wrong == 4:
            handles, counts = [*handles, *[None] * self.max_batch], [*counts, *[1] * self.max_batch]
        elif wrong == 5:
            limit = d.pick(-1, True, 1.5, None)
        return handles, counts, limit

    def take_pages(self, d: Digits, handles: Handles, counts: list[int]) -> Handles:
        """The batch with the pages that it needs; most often, rows that get none stay out of it."""
        if not self.settings.pages or d(12) == 11:
            return handles
        model, short = self.model, {}
        for row, n in zip(handles, counts, strict=False):
            tenant = self.handles.get(row)
            if tenant and not tenant.finished and model.length(tenant) + n > model.room(tenant):
                short[row] = model.length(tenant) + n
        if not short or self.extend(list(short), list(short.values())):
            return handles
        refused = [row for row, length in short.items() if not self.extend([row], [length])]
        return [None if row in refused else row for row in handles]

    def _plan_faults(self, handles: Handles, counts: list[int], limit: Any, window: bool) -> Faults:
        model, faults = self.model, self.row_faults(handles, padding=True)
        if len(self.flights) > self.settings.overlap or len(handles) > self.max_batch or len(counts) != len(handles):
            faults.add(ms.InvalidArgument)
        if (window and not self.settings.speculation) or isinstance(limit, bool) or not isinstance(limit, int):
            faults.add(ms.InvalidArgument)
        for handle, n in zip(handles, counts, strict=False):
            row = self.handles.get(handle)
            if row and not row.finished:
                after = model.length(row) + n
                if n < 1 or n > NO_LIMIT or after > NO_LIMIT or after > model.room(row):
                    faults.add(ms.InvalidArgument)
            elif n > NO_LIMIT:
                faults.add(ms.InvalidArgument)
        return faults

    def _run(
        self, d: Digits, record: StepRecord, window: bool, starts: list[int], fed: list[list[int]]
    ) -> dict[str, Tensor]:
        """The forward on the bytes of slots: it leaves states there, or returns windows."""
        read = record.read.tolist()
        if window:
            width = max(map(len, fed), default=0) + d(2)
            return self.memory.windows(read, starts, fed, width, inputs=d(2) == 1)
        self.memory.forward(read, record.write.tolist(), record.snapshot.tolist(), starts, fed, self._marks())
        return {}

    def _marks(self) -> list[tuple[int, int, int]]:
        """Entry, offset and slot of the marks of the newest plan, as the device has them."""
        count, *columns = (column.tolist() for column in self.mem._parts.log.marks)
        return list(zip(*(column[: count[0]] for column in columns), strict=True))

    def _same_marks(self, step: ms.Step, planned: Planned) -> None:
        told = [(mark.entry, mark.offset, self.model.slot[kept.register]) for mark, kept in planned.marks]
        self._same("number of marks", step.marked, len(told))
        self._same("marks of the step", self._marks(), told)

    def _ran(self, flight: Flight) -> None:
        """What the forward has done, as the model has it."""
        planned = flight.planned
        if planned.window:
            return
        self.model.forward(planned)
        if self.lower:
            self.lower.forward([(entry.row, entry.before, len(entry.tokens)) for entry in planned.entries if entry.row])
        if self.settings.in_place and not self.settings.pad and not all(entry.row for entry in planned.entries):
            for states in self.model.content.values():
                states[0] = RUBBISH
