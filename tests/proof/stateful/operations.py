"""Carries out the operations of a manager. The digits of one number choose valid and invalid arguments."""

from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

import memstate as ms
from memstate.kernels.tables import StepRecord
from memstate.slots.readback import Readback
from tests.proof.stateful.cache import Start, Talk
from tests.proof.stateful.ledger import EMPTY, Kept, Later, Row, Text
from tests.proof.stateful.machine import (
    NO_TOKENS,
    REFUSED,
    SALTS,
    STEMS,
    Faults,
    Flight,
    Handles,
    Machine,
    foreign,
    key_of,
    placed,
    spelled,
)
from tests.proof.stateful.memory import RUBBISH
from tests.proof.stateful.model import Entry, Planned
from tests.proof.stateful.parked import Away
from tests.proof.stateful.settings import Digits
from tests.support.fetches import Fetched

NO_LIMIT = 2**31 - 1
# operations that may come between a plan and its forward; a repeated name is drawn more often
GAP = (
    "admit", "admit", "admit", "leave", "leave", "leave", "publish", "publish", "drop", "drop", "fork", "reorder",
    "cancel", "claim", "recover",
    "settle", "settle", "arrived", "submit", "submit", "lengthen", "read_slots", "read_slots", "shortfall", "ask",
    "audit", "snapshot", "check", "scrub_null", "sleep", "wake", "reset", "poll", "prefetch", "match", "talk", "hush",
    "twin", "name_marks", "wait", "forget_states", "forget_pages", "forget_all", "ready", "unfetch", "work", "thin",
    "flush", "empty_host", "push_down", "park", "park",
)  # fmt: skip
WITH_KEYS = GAP + ("forget",) * 4
AROUND_TAILS = GAP + ("leave", "cancel") * 4
FAULTS = ("gone", "vanished", "half", "garbage", "foreign", "denied", "raises", "", "")
# operation -> weight with which it is drawn
OPERATIONS = {
    "plan": 32, "first": 5, "fold": 4, "settle": 16, "admit": 12, "leave": 9, "publish": 8, "drop": 7, "fork": 4,
    "reorder": 3, "cancel": 2, "arrived": 3, "submit": 3, "lengthen": 2, "read_slots": 2, "shortfall": 3, "ask": 3,
    "accept": 1, "audit": 1, "snapshot": 1, "check": 1, "claim": 2, "scrub_null": 1, "sleep": 1, "wake": 1,
    "reset": 1, "recover": 2,
    "poll": 2, "prefetch": 1, "wait": 2,
    "serve": 16, "match": 3, "talk": 3, "hush": 1, "twin": 2, "name_marks": 2, "age": 4,
    "forget_states": 1, "forget_pages": 1, "forget_all": 1, "park": 2, "drop_parked": 1,
}  # fmt: skip

# weights of programs with tiers
BELOW = {
    "serve": 60, "poll": 16, "work": 16, "prefetch": 12, "ready": 8, "unfetch": 3, "tick": 3, "spoil": 8, "stock": 8,
    "thin": 4, "flush": 2, "empty_host": 2, "forget_states": 4, "plan": 20, "park": 8, "drop_parked": 1,
}  # fmt: skip

# weights of programs with keys
KEYED = {"serve": 60, "forget": 10, "match": 6, "fork": 30, "forget_states": 4}


class Operations(Machine):
    """A machine that carries out operations by name."""

    naps = 0

    def run(self, name: str, number: int) -> None:
        """Carries out an operation on both sides, and compares them."""
        d = Digits(number)
        if self.asleep:
            self.naps += 1
            if self.naps > 2:
                self.wake(d)
        getattr(self, name)(d)
        self.look()
        self.look_at_launches()

    def look_at_launches(self) -> None:
        moving, launches = self.model.moving, self.mem.backend.counts.launches
        self._same("launches of data and of rows", (launches["run_data"], launches["run_rows"]),
                   (moving, moving * self.settings.tails))  # fmt: skip

    # Snapshots

    def _undecided(self, rows: Handles) -> Faults:
        """Returns the error of a call that names rows of the late step, because the host does not know their states."""
        undecided = self.model.undecided
        return {ms.InvalidArgument} if any(self.handles.get(row) in undecided for row in rows) else set()

    def publish(self, d: Digits) -> None:
        model, rows, strict = self.model, self.draw_rows(d), d(4) == 1
        faults = self.row_faults(rows)
        tenants = [self.handles[row] for row in rows if row in self.handles]
        bounds = [tenant.confirmed for tenant in tenants]
        faults |= self._undecided(rows)
        if d(3) and (self.settings.prefix or d(8) == 1):
            self.publish_told(d, rows)
            return
        if strict and not model.strictly_publishable(tenants, bounds):
            faults.add(ms.InvalidArgument)
        self.publish_rows(rows, faults, strict)

    def publish_rows(self, rows: Handles, faults: Faults, strict: bool = False) -> None:
        """Publishes rows as handles, on both sides."""
        model, tenants = self.model, [self.handles[row] for row in rows if row in self.handles]
        bounds = [tenant.confirmed for tenant in tenants]
        snaps = self.attempt(faults, lambda: self.mem.publish(rows, strict=strict))
        if snaps is not REFUSED:
            used = [snap.register for snap in snaps if snap]
            model.keep_ends(tenants, bounds)
            model.promise(tenants, [snap.length if snap else 0 for snap in snaps])
            self.note_snaps(snaps, model.publish(tenants, bounds, used, ended=False))

    def drop(self, d: Digits) -> None:
        snaps: list[Any] = [snap for snap in self.snaps if d(2)]
        faults: Faults = set()
        wrong = d(25)
        if wrong == 1:
            snaps.append(d.pick(foreign().snapshot, *self.dropped))
            faults.add(ms.StaleHandle)
        elif wrong == 2 and snaps:
            snaps.append(snaps[0])
            faults.add(ms.InvalidArgument)
        elif wrong == 3:
            snaps.append(d.pick((), 3, "snapshot"))
            faults.add(ms.InvalidArgument)
        elif wrong == 5:
            snaps.append(None)  # publish() returns None for a row without a snapshot
        elif wrong == 4 and self.cached:
            snaps.append(snap := d.pick(*self.cached))
            faults |= {ms.StaleHandle} if snap in self.stale() else {ms.InvalidArgument}
        self.drop_snaps(snaps, faults)

    def drop_snaps(self, snaps: Sequence[Any], faults: Faults) -> None:
        """Drops published handles on both sides."""
        if self.attempt(faults, lambda: self.mem.drop(snaps)) is not REFUSED:
            real = [snap for snap in snaps if snap is not None]
            self.model.drop([self.snaps.pop(snap) for snap in real])
            self.dropped.extend(real)

    # Submit, check, sleep, wake, reset, close

    def submit(self, d: Digits) -> None:
        if self.flights and not self.in_gap and d(2):
            self.tell_launched()
            return
        if d(20) == 1:
            step = d.pick(*self.settled, *[flight.step for flight in self.flights[:-1]], foreign().step)
            current = [flight.step for flight in self.flights]
            self.attempt({ms.InvalidArgument if step in current else ms.StaleHandle}, lambda: self.mem.submit(step))
            return
        if self.attempt(set(), self.mem.submit) is not REFUSED:
            self.model.submit()

    def check(self, d: Digits) -> None:
        if self.attempt(set(), self.mem.device.check) is not REFUSED:
            self.model.submit()
            self.model.count_slots()

    def claim(self, d: Digits) -> None:
        """Claims slots by id, or releases some."""
        if d(2) and self.model.by_id:
            self.release_ids([slot for slot in self.model.by_id if d(2)])
        else:
            self.claim_ids(d.pick(0, 1, 1, 2, 3))

    def claim_ids(self, n: int) -> list[int]:
        """Claims slots by id on both sides. Returns their ids; [] if the call is refused."""
        there = self.model.claimable
        faults: Faults = {ms.OutOfSlots} if n > there else set()
        ids = self.attempt(faults, lambda: self.mem.pool.claim(n), {ms.OutOfSlots: (n, there, 0)})
        if ids is REFUSED:
            return []
        slots = self.model.claim_by_id(n)
        self._same("slots by id", ids.tolist(), slots)
        return slots

    def release_ids(self, ids: Sequence[int]) -> None:
        """Releases slots by id on both sides, and lets the host count them, which an audit or a claim does later."""
        if self.asleep:
            return
        self.mem.pool.release(list(ids))
        self.model.release_by_id(list(ids))
        self.check(Digits(0))

    def scrub_null(self, d: Digits) -> None:
        if self.attempt(set(), self.mem.device.scrub_null) is not REFUSED:
            for states in self.model.content.values():
                states[0] = EMPTY

    def sleep(self, d: Digits) -> None:
        """Puts the states to sleep, unless their memory is inside a larger block, which would be freed with it."""
        if self.settings.memory == "fenced":
            return
        keep, model = d(3) != 1, self.model
        faults: Faults = {ms.InvalidArgument} if not keep and (model.held or model.by_id or model.waits) else set()
        if self.attempt(faults, lambda: self.mem.device.sleep(keep)) is REFUSED:
            return
        self.model.submit()
        if self.model.below:
            self.model.below.advance()
        self.asleep, self.naps, self.kept_bytes = True, 0, keep
        if self.memory.given:
            self.memory.scribble()

    def wake(self, d: Digits) -> None:
        if not self.asleep:
            self.attempt({ms.InvalidArgument}, self.mem.device.wake)
            return
        self.called(self.mem.device.wake)
        self.asleep = False
        self.memory.attach(self.mem)
        if not self.kept_bytes:
            self.memory.lose()
            self.model.tails[1:] = [None] * self.model.row_count
            self.model.rings = [()] * (1 + self.model.row_count)
            for states in self.model.content.values():
                states[0] = EMPTY
        self.look()  # now, because the next operation changes the kept states

    def reset(self, d: Digits) -> None:
        if d(3) and not self.asleep:
            return  # frequent resets would keep sessions and cache small
        with self.lower.waiting() if self.lower else nullcontext():
            if self.attempt(set(), lambda: self.mem.recover(keep=False)) is REFUSED:
                return
        self.model.discard()
        if self.model.below:
            self.model.below.clear()
        self.forget_parked()
        self.model.reset()
        self._forget_rows_and_steps()
        self.dropped.extend([*self.snaps, *self.cached])
        self.closed.extend(self.talks)
        for kept in (self.snaps, self.cached, self.talks):
            kept.clear()

    def forget_parked(self) -> None:
        self.over.extend(self.parked)
        self.parked.clear()

    def _forget_rows_and_steps(self) -> None:
        self.gone.extend(self.handles)
        self.settled.extend(flight.step for flight in self.flights)
        for kept in (self.asked, self.handles, self.flights):
            kept.clear()

    def recover(self, d: Digits) -> None:
        """Calls `recover` without an interrupted call. With tiers, the order of the writes after it is not modelled."""
        if d(3) or self.lower:
            return
        self.recover_all([slot for slot in self.model.by_id if d(3)])

    def recover_all(self, held: Sequence[int]) -> None:
        """Ends all requests on both sides, and keeps what is certain. held: slots that the caller keeps by id."""
        model, ended = self.model, [row.name for _, row in sorted(self.model.rows.items())]
        recovered = self.attempt(set(), lambda: self.mem.recover(list(held)))
        if recovered is REFUSED:
            return
        gone, talks = model.recover(held), dict(self.talks)
        self._same("requests that have ended", recovered.ended, ended)
        handles = {one: snap for snap, one in self.snaps.items()}
        self.talks = {session: talk for session, talk in talks.items() if talk in model.talks}
        self.closed.extend(session for session in talks if session not in self.talks)
        self._forget_rows_and_steps()
        lost = [handles[one] for one in gone]
        self.snaps = {snap: one for snap, one in self.snaps.items() if snap not in lost}
        self.dropped.extend(lost)
        self._same("lost snapshots", set(recovered.lost), set(lost))
        self._same("kept snapshots", set(recovered.snapshots), set(self.snaps))
        told = len(model.stated), model.in_talks
        self._same("states in cache and sessions", (recovered.cached, recovered.in_sessions), told)
        if (cache := self.mem.prefix) is not None:
            order = {node: at for at, node in enumerate(cache.state_policy.victims(), 1)}
            places = {place: (node.touched, order.get(node, 0)) for place, node in placed(cache)}
            model.rank_again(lambda one: places.get(self.place_of(one), (0, 0)))

    def close(self) -> None:
        """Ends everything, and asserts that all slots and pages are free."""
        nothing = Digits(0)
        if self.asleep:
            self.wake(nothing)
        self.release_ids([*self.model.by_id])
        self.end_all()
        self.look()
        self._everything_can_be_had()
        for session, talk in self.talks.items():
            self.mem.sessions.close(session)
            self.model.close_talk(talk)
        self.look()
        with self.lower.waiting() if self.lower else nullcontext():
            self.mem.close()
        if self.model.below:
            self.model.below.flush()
            self.model.below.clear()
        if self.settings.debug:  # in this case close() audits, and so submits
            self.model.submit()
        self.look()
        if self.mem.prefix is not None:
            self.mem.prefix.clear()
            self.model.clear_cache()
        self.look()
        self.check(nothing)
        self.look()
        assert self.mem.free_slots == self.settings.slots and self.mem.free_pages == self.settings.pages
        assert not self.model.kept and not self.model.slot

    def end_all(self) -> None:
        """Ends steps and rows, and drops all published snapshots."""
        while self.flights:
            self.settle(Digits(0))
        self.end_rows(Digits(0), list(self.handles), "release")
        if self.parked:
            self.drop_away(list(self.parked))
        self.mem.drop(list(self.snaps))
        self.model.drop(list(self.snaps.values()))
        self.snaps.clear()

    def _everything_can_be_had(self) -> None:
        """Asserts that idle sessions and the cache make room for as many requests as fit, if no request runs."""
        s, nothing = self.settings, Digits(0)
        self.let_expire()
        n = min(s.row_count, s.slots // (1 + s.lanes_at_admission))
        long = min(s.pages, s.pages_per_row) * s.page_size
        sizes = [long] + [0] * (n - 1)
        drawn = [(ms.Request(f"last {i}", size), Start(f"last {i}", size), Faults()) for i, size in enumerate(sizes)]
        rows = self.admit_all(nothing, drawn)
        assert len(rows) == n, "idle sessions refuse a request for ever"
        self.look()
        self.end_rows(nothing, rows, "release")

    # Plan

    def extend(self, rows: Handles, lengths: Any) -> bool:
        """Takes the pages that rows need up to these lengths, for all rows or for none. Returns whether for all."""
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

    def plan(self, d: Digits, run: bool = True) -> Flight | None:
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
            most = d.pick(4, 4, 9, model.next_boundary(row) - model.length(row) if row else 4)
            counts.append(1 + d(most))
            if row and d(3) == 1:
                counts[-1] = self.mem.chunk(handle, counts[-1])
            if self.settings.tail and d(4):
                counts[-1] = 1 + d(self.settings.tail) if d(6) < 5 else 0
        drafts = self.draw_drafts(d, counts)
        if self.planned_last is not None and d(4) == 1:  # a decode loop repeats its batch
            handles = self.planned_last
            n = 1 + d(self.settings.tail)
            counts = [n] * len(handles)
            drafts = counts if self.settings.tail and d(4) else []
        self.planned_last = handles
        handles, counts, limit = self._spoil(d, handles, counts)
        return self.plan_batch(d, self.take_pages(d, handles, counts), counts, limit, run, drafts=drafts)

    def first(self, d: Digits, run: bool = True) -> Flight | None:
        """Plans the first step of a request; all its tokens are drafts.

        If no tokens are pending, the step may store the state that it reads.
        """
        if not self.settings.tail or self.asleep:
            return self.plan(d, run)
        while self.flights:
            self.settle(Digits(0))
        self.let_expire()
        name = f"request {self.calls}.0"
        drawn = self.draw_request(d, name)
        if self.snaps and d(3):
            snap = d.pick(*self.snaps)
            start = Start(name, origin=self.snaps[snap], length=snap.length, shared=snap.pages)
            drawn = ms.Request(name, resume=snap), start, Faults()
        rows = self.admit_all(d, [drawn])
        counts = [1 + d(self.settings.tail) for _ in rows]
        return self.plan_batch(d, self.take_pages(d, rows, counts), counts, run=run, replays=False, drafts=counts)

    def fold(self, d: Digits) -> None:
        """Plans a step of 0 tokens for all running rows, which adds pending tokens to their states."""
        rows = [row for row, tenant in self.handles.items() if not tenant.finished][: self.max_batch]
        if self.settings.tail and len(self.flights) <= self.settings.overlap and rows:
            self.plan_batch(d, rows, [0] * len(rows))
        else:
            self.plan(d)

    def draw_drafts(self, d: Digits, counts: Sequence[int]) -> list[int]:
        """Draws the number of drafts among the tokens of each entry. Returns [] without drafts."""
        most = self.settings.tail
        chosen = [d.pick(n, n, d(n + 1), 0) if n <= most or d(40) == 1 else 0 for n in counts] if most else []
        return chosen if chosen and d(5) else []

    def plan_batch(
        self, d: Digits, handles: Handles, counts: list[int], limit: Any = NO_LIMIT, run: bool = True,
        replays: bool | None = None, drafts: Sequence[int] = (), accepted: Sequence[int] | None = None,
        defer: int | None = None,
    ) -> Flight | None:  # fmt: skip
        """Plans these rows on both sides, valid or not, and runs the forward unless `run` is False.

        replays: whether the forward runs inside the plan, as in a replayed graph; None: drawn. drafts: their number in
        each entry, or (). accepted: number of real tokens of each entry; None: drawn. defer: tokens that wait in the
        tail; None: drawn.
        """
        model = self.model
        given: Any = counts[0] if len(set(counts)) == 1 and len(counts) == len(handles) and d(2) else counts
        faults = self._plan_faults(handles, counts, limit, drafts)
        if self.flights and not (self.asleep or self.flights[-1].written) and self.flights[-1].planned.drafted:
            self.write(self.flights[-1])  # the plan counts these numbers on the device
        self.memory.copy_rings()
        rows: list[Row | None] = []
        fed: list[list[int]] = []
        if not faults:
            rows = [self.handles[handle] if handle else None for handle in handles]
            fed = [
                self.feed(row, len(model.text_of(row)), n) if row and not row.finished else []
                for row, n in zip(rows, counts, strict=True)
            ]
            rejected = [d(n + 1) if new else 0 for new, n in zip(fed, drafts or [0] * len(fed), strict=True)]
            accepted = accepted or [len(new) - n for new, n in zip(fed, rejected, strict=True)]
            fed = [new[:n] + self.tokens(len(new) - n) for new, n in zip(fed, accepted, strict=True)]
        texts = [model.text_of(row) if row and not row.finished else () for row in rows]
        tails = [row.tail if row else () for row in rows]
        replay: Any = None  # runs the launches of a captured graph, one by one
        if replays or (replays is None and run and handles and d(2)):
            replay = lambda: self._run(self.mem.launch(len(fed)), texts, fed, tails)  # noqa: E731
        elif d(60) == 1:
            self._misuse_replay(handles, given)
        packets, moving = model.packets, model.moving
        with self.counted() as spent:
            more = {"drafts": drafts[0] if len({*drafts}) == 1 and d(2) else list(drafts)} if drafts else {}
            if defer is None:
                defer = d(2 * self.settings.tail + 1) if self.settings.tail and d(3) == 1 else 0
            call = lambda: self.mem.plan(handles, given, limit=limit, replay=replay, defer=defer, **more)  # noqa: E731
            step = self.attempt(faults, call)
        if step is REFUSED:
            return None
        model.defer = defer
        planned = model.plan(list(zip(rows, fed, strict=True)), max(0, limit), drafts)
        model.defer = 0
        packets = model.packets - packets
        owned = packets + (replay is not None and not planned.changes)  # a graph always launches ownership
        model.moving += replay is not None and not planned.moves
        moving = model.moving - moving
        assert spent["plan"] == 1 and spent["ownership"] == owned, spent
        assert not spent["syncs"] or self.settings.debug, spent
        if spent.keys() <= {
            "plan",
            "ownership",
            "run_data",
            "run_rows",
            "uploads",
            "syncs",
        }:  # other launches copy, read back or pack states
            assert spent["run_data"] == moving and spent["uploads"] <= max(1, packets), spent
        flight = Flight(step, planned, fed, list(accepted or ()))
        self.note_step(flight)
        entries = planned.entries
        self._same("rows of the step", step.numbers.tolist(), [e.row.number if e.row else 0 for e in entries])
        self._same("tokens of the step", step.tokens_of.tolist(), list(map(len, fed)))
        self._same_marks(step, planned)
        self._same_lengths()
        assert step.drafted == planned.drafted
        if replay is not None:
            assert self.mem._parts.stepping.open is None
            self._ran(flight)
            model.launched(planned, send=True)
            self.look()
            return flight
        self.look()  # before the forward, only zeros and copies were done
        if run:
            self._gap(d)
            if flight not in self.flights:  # it was cancelled or reset
                return None
            self.forward(flight)
            if d(4) == 1:
                self.look()
                self.tell_launched()
        return flight

    def _misuse_replay(self, handles: Handles, given: Any) -> None:
        """Makes invalid calls: drafts without tails, a launch outside a plan, a replay that is not callable."""
        if not self.settings.tail:
            self.attempt({ms.InvalidArgument}, lambda: self.mem.plan(handles, given, drafts=1))
        if not self.asleep:
            self.attempt({ms.InvalidArgument}, lambda: self.mem.launch(1))
        call = lambda: self.mem.plan(handles, given, replay=1)  # type: ignore[arg-type] # noqa: E731
        self.attempt({ms.InvalidArgument}, call)

    def _gap(self, d: Digits) -> None:
        """Carries out a few operations between a plan and its forward."""
        flight, self.in_gap = self.flights[-1], True
        for _ in range(d.pick(0, 0, 0, 1, 2, 3, 5)):
            if flight in self.flights:
                names = WITH_KEYS if self.settings.keyed else AROUND_TAILS if self.settings.tail else GAP
                getattr(self, d.pick(*names))(d)
                self.look()
        if self.asleep:
            self.wake(d)
        self.in_gap = False

    def tell_launched(self) -> None:
        """Tells manager and model that the forward of the newest step has been launched."""
        flight = self.flights[-1]
        if self.attempt(set(), lambda: self.mem.submit(flight.step)) is not REFUSED:
            self.model.launched(flight.planned)
            self.model.submit()

    def _spoil(self, d: Digits, handles: Handles, counts: list[int]) -> tuple[Handles, list[int], Any]:
        """Makes a batch invalid now and then. Returns its rows, its counts of tokens, and the limit of the plan."""
        limit: Any = d.pick(NO_LIMIT, NO_LIMIT, NO_LIMIT, 0, 1, 2)
        wrong = d(40)
        if wrong == 1 and counts:
            counts = [*counts[:-1], counts[-1] + d.pick(self.settings.every, NO_LIMIT + 1)]
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
        """Takes the pages that a batch needs. Returns its rows, with padding in place of rows without enough pages."""
        if not self.settings.pages or d(12) == 11:
            return handles
        model, short = self.model, {}
        for row, n in zip(handles, counts, strict=False):
            tenant = self.handles.get(row)
            if tenant and not tenant.finished and (most := self._most(tenant) + n) > model.room(tenant):
                short[row] = most
        if not short or self.extend(list(short), list(short.values())):
            return handles
        refused = [row for row, length in short.items() if not self.extend([row], [length])]
        return [None if row in refused else row for row in handles]

    def _most(self, row: Row) -> int:
        """Returns the length that a row has if all its drafts are accepted."""
        return self.model.length(row) + self.model.unsure(row)

    def _plan_faults(
        self, handles: Handles, counts: list[int], limit: Any, drafts: Sequence[int] = ()
    ) -> Faults:  # fmt: skip
        model, faults = self.model, self.row_faults(handles, padding=True)
        if len(self.flights) > self.settings.overlap or len(handles) > self.max_batch or len(counts) != len(handles):
            faults.add(ms.InvalidArgument)
        if isinstance(limit, bool) or not isinstance(limit, int):
            faults.add(ms.InvalidArgument)
        if drafts and len(drafts) != len(handles):
            faults.add(ms.InvalidArgument)
        for handle, n, of in zip(handles, counts, drafts, strict=False):
            row = self.handles.get(handle)
            if row and not row.finished and (of > n or (of and n > self.settings.tail)):
                faults.add(ms.InvalidArgument)
        for handle, n in zip(handles, counts, strict=False):
            row = self.handles.get(handle)
            if row and not row.finished:
                after = self._most(row) + n
                if n < (not self.settings.tail) or n > NO_LIMIT or after > NO_LIMIT or after > model.room(row):
                    faults.add(ms.InvalidArgument)
            elif n > NO_LIMIT:
                faults.add(ms.InvalidArgument)
        return faults

    def _run(self, record: StepRecord, texts: list[Text], fed: list[list[int]], tails: list[Text]) -> None:
        """Runs a forward on the bytes of slots, tails and row memory."""
        read, cursor = record.read.tolist(), None
        if self.settings.tail:
            columns = [column[: len(fed)].tolist() for column in self.mem._parts.log.tails[1:4]]
            cursor = self.memory.fold(record.rows.tolist(), list(map(list, zip(*columns, strict=True))), texts, fed)
        self.memory.forward(read, record.write.tolist(), record.snapshot.tolist(), texts, fed, self._marks(), cursor)
        if self.settings.tails:
            self.memory.forward_rows(record.rows.tolist(), tails, fed)

    def _marks(self) -> list[tuple[int, int, int]]:
        """Returns (entry, offset, slot) of each mark of the newest plan, read from the device."""
        count, *columns = (column.tolist() for column in self.mem._parts.log.marks)
        return list(zip(*(column[: count[0]] for column in columns), strict=True))

    def _same_marks(self, step: ms.Step, planned: Planned) -> None:
        told = [(mark.entry, mark.offset, self.model.slot[kept.register]) for mark, kept in planned.marks]
        self._same("number of marks", step.marked, len(told))
        self._same("marks of the step", self._marks(), told)

    def forward(self, flight: Flight) -> None:
        """Runs the forward of a step after its plan."""
        entries, record = flight.planned.entries, flight.step.record
        texts = [entry.row.text[: entry.before] if entry.row else () for entry in entries]
        tails = [entry.memory for entry in entries]
        self._run(record, texts, flight.tokens, tails)
        self._ran(flight)

    def _ran(self, flight: Flight) -> None:
        """Tells the model that a forward has run."""
        planned = flight.planned
        self.model.forward(planned)
        if self.lower and self.lower.kv:
            self.lower.kv.forward([(e.row, e.before, e.tokens) for e in planned.entries if e.row])
        if self.settings.in_place and not self.settings.pad and not all(entry.row for entry in planned.entries):
            for states in self.model.content.values():
                states[0] = RUBBISH

    # Settle, accept, cancel

    def _wrong_step(self, d: Digits) -> ms.Step | None:
        steps = [foreign().step, *self.settled, *[flight.step for flight in self.flights[1:]]]
        return steps[d(len(steps))]

    def _step_faults(self, step: ms.Step) -> Faults:
        faults: Faults = set()
        if step.drafted:
            faults.add(ms.InvalidArgument)
        if step not in [flight.step for flight in self.flights]:
            faults.add(ms.StaleHandle)
        elif step is not self.flights[0].step:
            faults.add(ms.InvalidArgument)
        return faults

    def settle(self, d: Digits) -> None:
        """Settles the oldest step, or accepts it if it has drafts."""
        wrong = d(30)
        if self.in_gap and len(self.flights) < 2:  # the newest step has not run
            return
        if not self.flights and wrong > 1:
            self.plan(d)
            return
        if not self.flights or wrong == 1:
            step = self._wrong_step(d)
            assert step
            faults = self._step_faults(step)
            if faults:
                self.attempt(faults, lambda: self.mem.settle(step, [False] * len(step.numbers)))
            return
        flight = self.flights[0]
        accepts = flight.planned.drafted or (self.settings.tail > 0 and d(3) == 1)
        if accepts and wrong != 2:
            self.accept(d)
            return
        entries = flight.planned.entries
        over = [d(12) == 1 for _ in entries]
        given: Any = d.pick(over, np.array(over, bool), over if any(over) else None)
        faults = self._step_faults(flight.step)
        if wrong == 3:
            given = d.pick([*over, True], [1] * len(over), "x")
            if given:
                faults.add(ms.InvalidArgument)
        self.settle_step(flight, over, given, faults)

    def settle_step(self, flight: Flight, over: list[bool], given: Any, faults: Faults | None = None) -> None:
        """Settles a step on both sides. over: which entries have finished. given: what the call says of it."""
        faults, packets = self._step_faults(flight.step) if faults is None else faults, self.model.packets
        with self.counted() as spent:
            settled = self.attempt(faults, lambda: self.mem.settle(flight.step, given))
        if settled is not REFUSED:
            self.model.settle(flight.planned, over)
            assert spent["ownership"] == self.model.packets - packets and not spent["plan"], spent
            assert not spent["syncs"] or self.settings.debug, spent
            self.forget_step(flight)

    def write(self, flight: Flight) -> None:
        """Writes the numbers of real tokens to the device, as a sampler does."""
        flight.written = True
        flight.step.accepted.copy_(torch.tensor(flight.accepted, dtype=torch.int32, device="cpu"))
        self.model.wrote(flight.planned, flight.accepted)

    def accept(self, d: Digits) -> None:
        """Accepts the oldest step, with numbers that were drawn at its plan. The device may have them already."""
        if not (self.settings.tail and self.flights) or (self.in_gap and len(self.flights) < 2):
            step = d.pick(foreign().step, *self.settled)
            fault = ms.StaleHandle if self.settings.tail else ms.InvalidArgument
            self.attempt({fault}, lambda: self.mem.accept(step, [0] * len(step.numbers)))
            return
        flight, newest = self.flights[0], self.flights[0].planned is self.model.newest
        entries, faults = flight.planned.entries, set[type[ms.MemstateError]]()
        over, wrong, written = [d(12) == 1 for _ in entries], d(40), d(2) == 1
        accepted = self._told(d, flight, over, newest)
        if newest and written and not self.asleep and (not flight.written or accepted != flight.accepted or d(2)):
            flight.accepted = accepted
            self.write(flight)
        given = list(accepted)
        some = [at for at, entry in enumerate(entries) if entry.row]
        if wrong == 1 and some:
            given[some[-1]] = len(flight.tokens[some[-1]]) + 1
        elif wrong == 2 and some and self._goes_on(entries[some[0]]) and entries[some[0]].certain:
            given[some[0]] = entries[some[0]].certain - 1
        elif wrong == 3:
            given += [0, 0]
        written = flight.written and (written or not newest)
        if not newest and wrong == 4:
            written = False
            if any(self._goes_on(e) and n != e.certain for e, n in zip(entries, accepted, strict=True)):
                faults.add(ms.InvalidArgument)
        if given != accepted:
            faults.add(ms.InvalidArgument)
        self.accept_step(flight, accepted, given, over, written, faults)

    def accept_step(
        self, flight: Flight, accepted: list[int], given: Any, over: list[bool], written: bool,
        faults: Faults = frozenset(),  # type: ignore[assignment]
    ) -> None:  # fmt: skip
        """Accepts a step on both sides. accepted: real tokens of each entry. given: what the call says of them.

        written: whether the device has the numbers.
        """
        entries, newest = flight.planned.entries, flight.planned is self.model.newest
        call = lambda: self.mem.accept(flight.step, given, finished=over, written=written)  # noqa: E731
        packets = self.model.packets
        with self.counted() as spent:
            done = self.attempt(faults, call)
        if done is REFUSED:
            return
        self.model.accept(flight.planned, accepted, over, written)
        packets = self.model.packets - packets
        assert spent["ownership"] == packets and not spent["plan"], spent
        if spent.keys() <= {"ownership", "run_data", "run_rows", "uploads", "syncs"}:
            assert spent["uploads"] == packets + (newest and not written), spent
        self.forget_step(flight)
        self._same("before what was accepted", flight.step.before.tolist(), [entry.before for entry in entries])
        self._same("after what was accepted", flight.step.after.tolist(), [entry.after for entry in entries])
        self._same_lengths()

    def _told(self, d: Digits, flight: Flight, over: list[bool], newest: bool) -> list[int]:
        """Returns the numbers of accepted tokens to pass to `accept`.

        For a row that has ended it may be 0. For a row that ends now it may be smaller than drawn, unless the device
        has counted the tokens.
        """
        numbers = list(flight.accepted)
        for at, (entry, ends) in enumerate(zip(flight.planned.entries, over, strict=True)):
            if not self._goes_on(entry):
                numbers[at] = d.pick(numbers[at], 0)
            elif newest and ends:
                numbers[at] -= d(numbers[at] - entry.certain + 1)
        return numbers

    def _goes_on(self, entry: Entry) -> bool:
        """Says whether the request of an entry still has its row and has not ended."""
        row = self.model.tenant(entry)
        return row is not None and not row.finished

    def _same_lengths(self) -> None:
        """Compares lengths of unsettled steps, as far as the host knows them, and labels, which it always knows."""
        for flight in self.flights:
            step, entries = flight.step, flight.planned.entries
            self._same(
                "lengths of rows before the step",
                step.before.tolist(),
                [entry.before - entry.more for entry in entries],
            )
            self._same(
                "lengths of rows after the step", step.after.tolist(), [entry.after - entry.more for entry in entries]
            )
            if self.settings.tail:
                self._same(
                    "lengths of the states that the step reads",
                    step.label.tolist(),
                    [entry.tail.label for entry in entries],
                )

    def cancel(self, d: Digits) -> None:
        """Cancels the newest step: the last planned one, or one that it plans now, perhaps followed by a settle.

        A step that has run is cancelled only if none of its snapshots waits for a copy, because it may be published.
        """
        how = d(4)
        flight, ran = self.flights[-1] if self.flights and not self.model.due else None, True
        if self.in_gap:
            flight = self.flights[-1]
        elif how or not flight:
            flight, ran = self.first(d, run=False) if d(2) else self.plan(d, run=False), False
            if flight and how == 2 and len(self.flights) > 1:
                self.settle(d)
        if d(20) == 1 or not flight:
            step = d.pick(foreign().step, *self.settled, *[flight.step for flight in self.flights[:-1]])
            current = [flight.step for flight in self.flights]
            self.attempt({ms.InvalidArgument if step in current else ms.StaleHandle}, lambda: self.mem.cancel(step))
            if not flight:
                return
        publish = d(2) == 1
        if flight not in self.flights:
            return
        keep: Any = "handle" if publish else None
        tenants = [self.model.tenant(entry) for entry in flight.planned.entries]
        faults: Faults = set()
        tokens = texts = None
        if d(3) == 1:
            handles = {row: handle for handle, row in self.handles.items()}
            keep, (tokens, texts, faults) = "cache", self.tell(d, [handles.get(row) for row in tenants])  # type: ignore[arg-type]
        elif publish and any(row and row.talk for row in tenants):
            faults = {ms.InvalidArgument}
        if self.cancel_step(flight, keep, tokens, texts, faults):
            return
        if not (self.asleep or self._stays(flight)):  # a step without a forward must be cancelled
            self.cancel_step(flight, None)
        elif not ran:
            self.forward(flight)

    def _stays(self, flight: Flight) -> bool:
        """Says whether a step cannot be cancelled: its results were published, it is not open any more, or late."""
        model = self.model
        return model.promised or flight.planned is not model.open or model.late is not None

    def cancel_step(
        self, flight: Flight, keep: Any, tokens: Any = None, texts: list[Text] | None = None,
        faults: Faults = frozenset(),  # type: ignore[assignment]
    ) -> bool:  # fmt: skip
        """Cancels a step on both sides. Returns False if the call is refused. texts: what `tokens` mean."""
        model, faults = self.model, faults | ({ms.InvalidArgument} if self._stays(flight) else set())
        snaps = self.attempt(faults, lambda: self.mem.cancel(flight.step, keep, **self.naming(tokens)))
        if snaps is REFUSED:
            return False
        entries = [entry for entry in flight.planned.entries if model.tenant(entry)]
        if texts is not None:
            texts = [text for text, entry in zip(texts, flight.planned.entries, strict=True) if entry in entries]
        rows = model.cancelled(flight.planned)
        used = [snap.register for snap in snaps if snap] if keep == "handle" else None
        kept = iter(model.end(rows, used, [row.confirmed for row in rows], texts))
        self.note_snaps(snaps, [next(kept) if entry in entries else None for entry in flight.planned.entries])
        self.forget_rows([handle for handle, row in self.handles.items() if row in rows])
        self.forget_step(flight)
        return True

    # New rows and rows that end

    def admit(self, d: Digits) -> None:
        self.let_expire()
        names = [f"request {self.calls}.{i}" for i in range(d.pick(1, 2, 1, 3, 0))]
        self.admit_all(d, [self.draw_request(d, name) for name in names])

    def admit_all(self, d: Digits, drawn: Sequence[tuple[ms.Request, Start, Faults]]) -> Handles:
        """Admits requests in one call. Returns the new rows; [] if the call is refused."""
        model, requests, starts = self.model, [one[0] for one in drawn], [one[1] for one in drawn]
        faults: Faults = set().union(*[one[2] for one in drawn])
        turns = [request.session for request in requests if request.session]
        if len(set(turns)) < len(turns):
            faults.add(ms.InvalidArgument)
        more, numbers = (set(), None) if faults else self._scarce(len(starts), *model.weigh(starts))
        given: Any = requests
        if d(50) == 1:
            given, faults = (
                d.pick(requests[0] if requests else 3, [*requests, "request"]),
                faults | {ms.InvalidArgument},
            )
        parked = [start.parked for start in starts if start.parked]
        if len(set(map(id, parked))) < len(parked):
            faults.add(ms.InvalidArgument)
        if not (faults or self.asleep) and (higher := self._from_host(starts)):
            starts, more = higher, set()
        elif more:
            starts, more, numbers = self._from_elsewhere(starts)
        rows = self.attempt(faults | more, lambda: self.mem.admit(given), numbers)
        if rows is REFUSED:
            return []
        tenants = model.admit(starts)
        for handle in [handle for handle, away in self.parked.items() if away in parked]:
            del self.parked[handle]
            self.over.append(handle)
        for tenant, start in zip(tenants, starts, strict=True):
            tenant.taste = start.parked.taste if start.parked else d(3)
        self.note_rows(rows, tenants)
        return list(rows)

    def park(self, d: Digits) -> None:
        """Parks rows and sessions."""
        if self.lower:
            talks = [session for session, talk in self.talks.items() if talk.kept and not talk.row and d(3) == 1]
            rows = [row for row in self.draw_rows(d, d(3)) if row is not None]
            self.park_all(rows, talks, told=d(2) == 1)

    def park_all(self, rows: Handles, talks: Sequence[Any], told: bool = False) -> list[Any]:
        """Parks rows and sessions on both sides. told: whether it tells all tokens of the rows. Returns the handles."""
        model, faults = self.model, self.row_faults(rows) | self._undecided(rows)
        tenants, of_talks = (
            [self.handles[row] for row in rows if row in self.handles],
            [self.talks.get(t) for t in talks],
        )
        drafted = {entry.row for step in model.steps if step.drafted for entry in step.entries}
        kept_by_caller = not self.settings.tails and any(tenant.pending for tenant in tenants)
        if kept_by_caller or any(tenant.talk or tenant.finished or tenant in drafted for tenant in tenants):
            faults.add(ms.InvalidArgument)
        if None in of_talks:
            faults.add(ms.StaleHandle)
        if len(set(talks)) < len(talks) or any(talk and (talk.row or not talk.kept) for talk in of_talks):
            faults.add(ms.InvalidArgument)
        leaving, tokens, numbers = [], None, None
        if not faults:
            leaving = [self._away(tenant, told) for tenant in tenants] + [
                self._talk_away(talk) for talk in of_talks if talk
            ]
            if told:
                tokens = [list(one.known) if one.known else None for one in leaving[: len(rows)]] + [None] * len(talks)
            if short := model.below.parking.short(leaving):
                faults, numbers = {ms.OutOfRecords}, {ms.OutOfRecords: short}
        handles = self.attempt(faults, lambda: self.mem.park([*rows, *talks], tokens), numbers)
        if handles is REFUSED:
            return []
        model.promise(tenants, [len(one.text) for one in leaving[: len(tenants)]])
        model.below.parking.park(leaving)
        model.end(tenants, None, [tenant.confirmed for tenant in tenants])
        for talk in talks:
            model.close_talk(self.talks.pop(talk))
            self.closed.append(talk)
        self.forget_rows(rows)
        self.parked.update(zip(handles, leaving, strict=True))
        self._same("lengths", [one.length for one in handles], [len(one.text) for one in leaving])
        self._same("pending", [one.pending for one in handles], [one.pending for one in leaving])
        return list(handles)

    def _away(self, row: Row, told: bool) -> Away:
        model, rest = self.model, self.known(row)
        text, known = model.text_of(row), (rest if told else row.given)
        salt = row.lease.salt if row.lease else None
        pages = row.pages[: model.pages_for(len(text))]
        memory = row.tail if text else ()
        return Away(text, row.pending, known, rest, salt, row.source or row.live, row.number, pages, row.taste, memory)

    def _talk_away(self, talk: Talk) -> Away:
        one = talk.kept[0]
        pages = talk.pages[: self.model.pages_for(one.length)]
        return Away(one.text, 0, talk.text, talk.text, talk.salt, one.register, 0, pages)

    def drop_parked(self, d: Digits) -> None:
        if self.parked:
            self.drop_away([handle for handle in self.parked if d(2)])

    def drop_away(self, handles: Sequence[Any]) -> None:
        """Drops parked requests on both sides."""
        faults: Faults = set() if all(handle in self.parked for handle in handles) else {ms.StaleHandle}
        if self.attempt(faults, lambda: self.mem.drop(handles)) is not REFUSED:
            for handle in handles:
                self.model.below.parking.drop(self.parked.pop(handle))
                self.over.append(handle)

    def _from_host(self, starts: Sequence[Start]) -> list[Start] | None:
        """Returns starts that use the longer states in host memory; None if there are none, or no room for all."""
        model = self.model
        starts_below = [(not start.parked and model.from_host(start)) or start for start in starts]
        states = {start.hit.state.key for start in starts_below if start.hit}
        if not states or self._scarce(len(starts_below), *model.weigh(starts_below))[0]:
            return None
        return starts_below if len(states) <= model.holders_left else None

    def _from_elsewhere(self, starts: Sequence[Start]) -> tuple[Sequence[Start], Faults, dict[type, tuple[int, ...]]]:
        """If room is short, lets sessions make way for their own turns, first those whose states the turn cannot use.

        Returns the starts, the errors that can still come, and the numbers in these errors.
        """
        model = self.model
        turns = [start for start in starts if start.talk and start.talk.kept]
        more, numbers = self._scarce(len(starts), *model.weigh(starts))
        for needed in False, True:
            gone = [start.talk for start in turns if bool(start.moved) == needed]
            if more and gone:
                starts = [model.from_elsewhere(start) if start.talk in gone else start for start in starts]
                more, numbers = self._scarce(len(starts), *model.weigh(starts))
        return starts, more, numbers

    def _scarce(
        self, rows: int, need: tuple[int, int], room: tuple[int, int], evictable: int
    ) -> tuple[Faults, dict[type, tuple[int, ...]]]:
        """Returns the errors for what is short, and the numbers that they must carry. need, room: (pages, slots)."""
        model = self.model
        numbers = {ms.OutOfRows: (rows, len(model.free_rows)), ms.OutOfPages: (need[0], model.free_pages),
                   ms.OutOfSlots: (need[1], model.free_count, evictable)}  # fmt: skip
        short = rows > len(model.free_rows), need[0] > room[0], need[1] > room[1]
        return {error for error, is_short in zip(numbers, short, strict=True) if is_short}, numbers

    def fork(self, d: Digits) -> None:
        handles: Handles = list(self.handles)
        settled = [row for row in handles if not self.handles[row].unsettled]
        row = d.pick(*(settled or handles or foreign().rows[:1]), *handles)
        if d(40) == 1:
            row = self.bad_row(d)
        names: Any = [f"fork {self.calls}.{i}" for i in range(d(4))]
        wrong = d(40) == 1
        rows = self.fork_row(row, d.pick("ab", 3) if wrong else names, {ms.InvalidArgument} if wrong else set())
        for row in rows:
            if d(3) == 1:
                self.handles[row].prompt = None  # its tokens will differ from the prompt

    def fork_row(self, row: Any, names: Any, faults: Faults) -> Handles:
        """Forks a row on both sides. Returns the new rows; [] if the call is refused."""
        tenant = self.handles.get(row)
        groups = [(tenant, names)] if tenant and isinstance(names, list) and names else []
        faults = faults | self.row_faults([row])
        if tenant and (tenant.unsettled or tenant.finished):
            faults.add(ms.InvalidArgument)
        more, numbers = self._fork_faults(groups)
        fork = self.attempt(faults | more, lambda: self.mem.fork(row, names), numbers)
        if fork is REFUSED:
            return []
        self._forked(groups, [], fork.rows, fork.page_copies)
        return list(fork.rows)

    def _fork_faults(self, groups: Any, gone: Sequence[Row] = ()) -> tuple[Faults, dict[type, tuple[int, ...]]]:
        """Returns the errors of forks that are not allowed or lack something, and the numbers that they must carry."""
        model = self.model
        need, rows = model.needs_to_fork(groups, gone), sum(len(names) for _, names in groups) - len(gone)
        faults, numbers = self._scarce(max(0, rows), need, *model.weigh([])[1:])
        if model.waits and any(model.partial(row) for row, _ in groups):
            faults.add(ms.InvalidArgument)
        moved = sum(model.shares_live(row) for row, _ in groups)
        if moved > sum(map(len, model.free_holders)) + model.ready_to_go:
            faults.add(ms.InvalidArgument)
        return faults, numbers

    def _forked(self, groups: Any, gone: Sequence[Row], rows: Handles, page_copies: Any) -> None:
        """Forks rows in the model, and compares the new rows and the pages to copy."""
        left = [handle for handle, row in self.handles.items() if row in gone]
        tenants, copies = self.model.fork(groups, [int(self.registers.source[row.number]) for row, _ in groups], gone)
        if self.settings.tail and not self.settings.tails:
            of = [row.number for row, names in groups for _ in names]
            self.memory.ring_copies += [(new.number, row) for new, row in zip(tenants, of, strict=True)]
        self.forget_rows(left)
        self.note_rows(rows, tenants)
        if self.lower and self.lower.kv:
            self.lower.kv.copy(copies)
        self._same("page copies", [tuple(map(int, pair)) for pair in page_copies], copies)

    def reorder(self, d: Digits) -> None:
        """Lets rows go on from others, as a beam search does, valid or not."""
        rows = self.draw_rows(d)
        ready = [row for row in rows if row in self.handles and not self.handles[row].unsettled]
        rows = ready if d(6) else rows
        entries: Any = [d(len(rows) + (d(30) == 1)) for _ in range(d.pick(len(rows), len(rows) + 1, 1))]
        self.reorder_rows(rows, entries if rows else [])

    def reorder_rows(self, rows: Handles, entries: list[int]) -> Handles:
        """Reorders rows on both sides. Returns a row for each entry; [] if the call is refused."""
        faults, tenants = self.row_faults(rows), [self.handles.get(row) for row in rows]
        chosen: dict[Row, list[int]] = {}
        gone: list[Row] = []
        numbers: Any = None
        if any(entry >= len(rows) for entry in entries):
            faults.add(ms.InvalidArgument)
        if not faults:
            for at, entry in enumerate(entries):
                chosen.setdefault(tenants[entry], []).append(at)  # type: ignore[arg-type]
            gone = [row for row in tenants if row not in chosen]  # type: ignore[misc]
            if any(row.unsettled or row.finished for row in chosen) or any(row.unsettled or row.talk for row in gone):
                faults.add(ms.InvalidArgument)
        groups = [(row, [row.name] * (len(at) - 1)) for row, at in chosen.items() if len(at) > 1]
        if not faults:
            faults, numbers = self._fork_faults(groups, gone)
        fork = self.attempt(faults, lambda: self.mem.reorder(rows, entries), numbers)
        if fork is REFUSED:
            return []
        firsts = [at[0] for at in chosen.values()]
        self._same("rows that go on", [fork.rows[at] for at in firsts], [rows[entries[at]] for at in firsts])
        forks = [fork.rows[at] for row, _ in groups for at in chosen[row][1:]]
        self._forked(groups, gone, forks, fork.page_copies)
        return list(fork.rows)

    def arrived(self, d: Digits) -> None:
        """Lets states arrive from elsewhere: writes them to the slots of `read_slots`, then calls `arrived`."""
        fresh = [row for row, tenant in self.handles.items() if not self._begun(tenant)]
        rows: Handles = self.draw_rows(d) if d(6) == 1 else fresh[: 1 + d(3)]
        lengths = [1 + d(9) for _ in rows]
        if d(30) == 1 and lengths:
            lengths[0] = 0
        self.let_arrive(rows, lengths, extends=d(9) != 8)

    def let_arrive(self, rows: Handles, lengths: list[int], extends: bool = True) -> None:
        """Lets states of these lengths arrive on both sides. extends: whether the rows take pages for them first."""
        model, late = self.model, list[tuple[Row, Text]]()
        if not self.row_faults(rows):
            slots = self.attempt(set(), lambda: self.mem.device.read_slots(rows))
            if slots is REFUSED:
                return
            model.then(Later(lambda: [self._hold_text(*one) for one in late] and None))
            if self.memory.device.type == "cuda":  # in the model, copies have no duration
                torch.cuda.synchronize()
            assert slots.ready == (model.waits is None)
            if self.settings.pages and extends and not self.extend(rows, lengths):
                return
            there = {page for row in rows for page in self.handles[row].pages}
            if model.below and there & model.below.parking.leaving:
                return  # the page table has these pages only after they were copied, so nobody knows their ids yet
        faults = self.row_faults(rows)
        for row, length in zip(rows, lengths, strict=True):
            tenant = self.handles.get(row)
            if tenant and (self._begun(tenant) or length < 1 or length > model.room(tenant)):
                faults.add(ms.InvalidArgument)
        texts = [
            tuple(self.feed(self.handles.get(row, Row(0, 0, "")), 0, n)) for row, n in zip(rows, lengths, strict=True)
        ]
        tenants = [self.handles[row] for row in rows if row in self.handles]
        if not faults and slots.ready:
            told = [model.slot[tenant.live] for tenant in tenants]
            self._same("slots of an arrival", slots.wait().tolist(), told)
            for tenant, text in zip(tenants, texts, strict=True):
                self.memory.put(model.slot[tenant.live], text)
                self._hold_text(tenant, text)
        elif not faults:  # written as soon as their slots are known
            slots.begin = lambda ids: self._put_all(slots, ids, texts)
        if self.attempt(faults, lambda: self.mem.device.arrived(rows, lengths)) is not REFUSED:
            late += [] if slots.ready else zip(tenants, texts, strict=True)
            model.arrive(tenants, texts)
            for tenant in tenants:
                model.arrived_at(tenant)
            if self.lower and self.lower.kv:
                for tenant in tenants:
                    self.lower.kv.write(tenant, tenant.text, 0)

    def _put_all(self, slots: Readback, ids: torch.Tensor, texts: Sequence[Text]) -> None:
        """Tells the slots of rows, and writes the states of these texts to them."""
        Readback.begin(slots, ids)
        for slot, text in zip(ids.tolist(), texts, strict=True):
            self.memory.put(slot, text)

    def _hold_text(self, tenant: Row, text: Text) -> None:
        """Notes in the model that the live slot of a row has the state of a text."""
        for contents in self.model.content.values():
            contents[self.model.slot[tenant.live]] = text

    def _begun(self, tenant: Row) -> bool:
        return bool(self.model.length(tenant) or tenant.source or tenant.unsettled or tenant.finished)

    def name_marks(self, d: Digits) -> None:
        """Names lengths of rows that read their prompts, valid or not, at which states are kept."""
        rows = self.draw_rows(d, 1) or [self.bad_row(d)]
        tenant = self.handles.get(rows[0])
        most = self.longest if tenant else 9
        lengths: Any = [d(most) for _ in range(d(3))]
        if d(20) == 1:
            lengths = d.pick([-1], [True], 8, None)
        self.ask_for(rows[0], lengths)

    def ask_for(self, row: Any, lengths: Any) -> None:
        """Names marks of a row on both sides. Those that are not beyond its length are too late."""
        faults, tenant = self.row_faults([row]), self.handles.get(row)
        if not isinstance(lengths, list | tuple) or any(type(n) is not int or not 0 <= n < 2**31 for n in lengths):
            faults.add(ms.InvalidArgument)
        if self.attempt(faults, lambda: self.mem.snapshot_at(row, lengths)) is not REFUSED:
            wants = self.wants(lengths, tenant.longest)
            more = [(at, kind) for at, kind in wants if at > self.model.length(tenant)]
            if more and not tenant.coming:  # marks know no more than what the row tracks
                tenant.floor, tenant.until = 0, tenant.tracked
            tenant.coming = sorted({**dict(more), **dict(tenant.coming)}.items())

    def lengthen(self, d: Digits) -> None:
        """Takes pages for more tokens, or tries it with invalid lengths."""
        rows = self.draw_rows(d)
        lengths: Any = d.pick([d(30) for _ in rows], d(30), [-1 for _ in rows], [1, 2, 3, *[4 for _ in rows]])
        self.extend(rows, lengths)

    def leave(self, d: Digits) -> None:
        """Ends rows in one of several ways. Finished rows, and rows without room for more tokens, come first."""
        model = self.model
        wide = [
            row
            for row, tenant in self.handles.items()
            if self.settings.pages and model.too_wide(model.length(tenant) + 3)
        ]
        over: Handles = wide + [row for row, tenant in self.handles.items() if tenant.finished and row not in wide]
        rows = over if over and d(4) else self.draw_rows(d, 1) if d(3) == 1 else self.draw_rows(d, d(8))
        if not over and d(3):
            return
        ways = "release", "abort", "retract", "publish", "keys", "key", "told", "told", "retract told", "told keys"
        self.end_rows(d, rows, d.pick(*ways))

    def end_rows(self, d: Digits, rows: Handles, how: str) -> None:
        """Ends rows on both sides.

        how: how `end` is called. "told": with tokens of the rows; "keys": a length for each; "key": one length for all;
        "retract", "publish": handles are published; "release", "abort": nothing is published.
        """
        model = self.model
        keys: Any = [d(1 + model.length(self.handles[row])) for row in rows if row in self.handles]
        given = {"retract": True, "publish": True, "keys": keys, "told keys": keys, "key": d(12)}.get(how, False)
        if how in ("keys", "told keys") and d(20) == 1:
            given = d.pick([*keys, 1, 1], [-1 for _ in rows], "key")
        self.end_as(d, rows, how, given)

    def end_as(self, d: Digits, rows: Handles, how: str, given: Any) -> None:
        """Ends rows on both sides. given: lengths, one of all or one of each, or whether handles are published."""
        model, faults = self.model, self.row_faults(rows) | self._undecided(rows)
        each = not isinstance(given, int)
        if each and (isinstance(given, str) or len(given) != len(rows) or any(key < 0 for key in given)):
            faults.add(ms.InvalidArgument)
        tokens = texts = None
        if "told" in how:
            tokens, texts, wrong = self.tell(d, rows)
            faults |= wrong
            if not faults:
                most = given if each else [given if type(given) is int else 1 << 30] * len(rows)
                ends = zip(texts, [self.handles[row].confirmed for row in rows], most, strict=True)
                if any(len(text) < self.model.nameable(min(confirmed, most)) for text, confirmed, most in ends):
                    faults.add(ms.InvalidArgument)
        elif how not in ("release", "abort") and any(row in self.handles and self.handles[row].talk for row in rows):
            faults.add(ms.InvalidArgument)
        keep: Any = "cache" if tokens is not None else None if given is False else "handle"
        lengths = None if isinstance(given, bool) else given
        snaps = self.attempt(faults, lambda: self.mem.end(rows, keep, lengths=lengths, **self.naming(tokens)))
        if snaps is REFUSED:
            return
        tenants = [self.handles[row] for row in rows]
        bounds = [tenant.confirmed for tenant in tenants]
        if not isinstance(given, bool):
            bounds = [min(b, key) for b, key in zip(bounds, given if each else [given] * len(rows), strict=True)]
        used = None if how in ("release", "abort") else [snap.register for snap in snaps if snap]
        if texts is not None:
            model.promise(tenants, model.told(tenants, bounds, texts))
        elif used is not None:
            model.promise(tenants, [snap.length if snap else 0 for snap in snaps])
        self.note_snaps(snaps, model.end(tenants, used, bounds, texts))
        self.forget_rows(rows)

    # Questions: each answer is compared with the model's

    def read_slots(self, d: Digits) -> None:
        handles: Handles = [*self.draw_rows(d), *[snap for snap in self.snaps if d(2)]]
        handles = sorted(handles, key=lambda _: d(4))
        wrong = d(25)
        if wrong == 1:
            handles.append(d.pick(foreign().snapshot, *self.dropped))
        self.read_slots_of(handles, {ms.StaleHandle} if wrong == 1 else set())

    def read_slots_of(self, handles: Handles, faults: Faults) -> None:
        """Asks for slots of rows and snapshots on both sides. `look` compares them as soon as they are known."""
        rows = [handle for handle in handles if not isinstance(handle, ms.Snapshot)]
        faults = faults | self.row_faults(sorted(set(rows), key=rows.index))  # read_slots() accepts a row twice
        slots = self.attempt(faults, lambda: self.mem.device.read_slots(handles))
        if slots is REFUSED:
            return
        registers = []
        for handle in handles:
            owner: Row | Kept = self.snaps[handle] if handle in self.snaps else self.handles[handle]
            registers.append(owner.register if isinstance(owner, Kept) else owner.source or owner.live)
        told: list[list[int]] = []
        self.model.then(Later(lambda: told.append([self.model.slot[register] for register in registers])))
        self.asked.append((slots, told))

    def shortfall(self, d: Digits) -> None:
        """Compares the shortfall of the next plan. While a step with drafts is not accepted, it is an upper bound."""
        rows = self.draw_rows(d)
        faults = self.row_faults(sorted(set(rows), key=rows.index))
        if len(set(rows)) < len(rows) and not faults:
            return
        self.same_shortfall(rows, [1 + d(6) for _ in rows], faults)

    def same_shortfall(self, rows: Handles, counts: list[int], faults: Faults) -> None:
        """Compares the number of slots that the next plan of these rows lacks."""
        model = self.model
        tenants = [(self.handles[row], n) for row, n in zip(rows, counts, strict=True) if row in self.handles]
        running = [(tenant, n) for tenant, n in tenants if not tenant.finished]
        late = any(model.unsure(tenant) for tenant, _ in running)
        wanted = sum(model.needs(tenant, n, most=late) for tenant, n in running)
        seen = self.attempt(faults, lambda: self.mem.shortfall(rows, counts))
        if seen is not REFUSED and len(self.flights) <= self.settings.overlap:  # without this, no plan can follow
            self._same("shortfall", seen, model.shortfall(wanted))

    def ask(self, d: Digits) -> None:
        """Compares the answers of calls that need no device, also while the states sleep."""
        mem, model = self.mem, self.model
        for row, tenant in self.handles.items():
            info = mem.info(row)
            seen = info.length, info.confirmed, info.next_boundary, info.slots, info.pending
            held = sum(tenant.live + k in model.held for k in range(3)) + len(tenant.marks)
            told = model.length(tenant), tenant.confirmed, model.next_boundary(tenant), held, tenant.pending
            self._same(f"length, confirmed, next boundary, slots, pending of row {row.index}", seen, told)
            most = 1 + d(40)
            self._same(f"chunk of {most} of row {row.index}", mem.chunk(row, most), model.chunk(tenant, most))
        self._same("free slots and pages", (mem.free_slots, mem.free_pages), (model.free_count, model.free_pages))
        assert f"{model.free_count} of {model.capacity} slots free, {len(model.rows)} requests" in repr(mem).replace(
            "StateManager(", ""
        )
        if d(3) == 1 and not self.asleep:
            row = self.bad_row(d)
            self.attempt(self.row_faults([row]), lambda: mem.info(row))
            most = d.pick(1, 7, 0, -1, "4", 2.0)
            faults = self.row_faults([row]) | (set() if most in (1, 7) else {ms.InvalidArgument})
            self.attempt(faults, lambda: mem.chunk(row, most))
        for register in list(model.held)[:2]:
            self._same("owner", mem._reports.owner(register), self.owner(register))
        infos = self.attempt(set(), mem.device.buffer_infos)
        if infos is not REFUSED:
            for info in infos:
                layer = mem.planes[info.plane][info.layer]
                told = (layer.data_ptr(), layer.stride(0) * layer.element_size(), model.capacity)
                self._same(f"{info.plane} for RDMA", (info.address, info.slot_stride, info.slots), told)

    def audit(self, d: Digits) -> None:
        report = self.attempt(set(), self.mem.audit)
        if report is not REFUSED:
            self.model.submit()
            self._same("slots by id", report.leaked, sorted(self.model.by_id))  # an audit cannot know them
            assert report.clean or report.leaked, report
            held = self.model.slots_to_come()  # the device knows the claims of a late step
            self._same("free", report.free, self.model.capacity - len(held) - len(self.model.by_id))
            self._same("owners", dict(report.owned_by_kind), dict(Counter(map(self._kind, held))))

    def _kind(self, register: int) -> str:
        return self.owner(register)[0]

    def snapshot(self, d: Digits) -> None:
        picture = self.attempt(set(), self.mem.inspect)
        if picture is REFUSED:
            return
        model = self.model
        model.submit()
        held = model.slots_to_come()
        by_slot = {slot: register for register, slot in held.items()}
        slots = range(model.capacity + 1)
        self._same("owners in the picture", list(picture.owners), [int(slot in by_slot) for slot in slots])
        self._same("free in the picture", list(picture.free), [slot > 0 and slot not in {*by_slot, *model.by_id}
                   for slot in slots])  # fmt: skip
        self._same("slots in the picture", list(picture.slots), [held.get(r, 0) for r in
                   range(model.register_count)])  # fmt: skip
        self._same("kinds", picture.kinds, {register: self._kind(register) for register in held})
        self._same("names", picture.names, {register: self.owner(register)[1] for register in held})

    # The prefix cache and sessions: requests with tokens

    def serve(self, d: Digits) -> None:
        """Runs one prompt or turn for some steps, without other rows, so that it leaves states for later requests."""
        if self.asleep:
            return
        alive = [row for row, tenant in self.handles.items() if tenant.prompt and not tenant.finished]
        rows = [d.pick(*alive)] if alive and d(4) < 2 else []
        if not rows:
            if not self.model.free_rows:
                self.end_rows(d, list(self.handles)[: 1 + d(2)], "told" if self.settings.prefix else "abort")
            if self.lower:
                self.push_down(d)
                self.poll(d)  # a prefetch may come between the draw and the admission
            self.let_expire()
            turn = any(not talk.row for talk in self.talks.values()) and d(2) == 1
            drawn = self.draw_prompted(d, f"request {self.calls}.0", turn)
            if self.lower and not turn and not drawn[2] and drawn[1].prompt:
                self.fetch_first(d, drawn[1].prompt, drawn[1].salt)
            rows = self.admit_all(d, [drawn])
        for _ in range(1 + d(6) if rows else 0):
            if not self._advance(d, rows):
                break
            if d(3) == 1:
                self.publish_told(d, rows)
        rows = [row for row in rows if row in self.handles]
        if rows and d(2 + 2 * bool(self.handles[rows[0]].talk)):
            self.end_rows(d, rows, d.pick("told", "told", "told", "retract told", "abort"))
            if d(3):
                self.serve(d)

    def _advance(self, d: Digits, rows: Handles) -> bool:
        """Plans and runs a step of one row. Returns whether the row goes on."""
        while len(self.flights) > self.settings.overlap or (self.flights and d(3)):
            self.settle(Digits(0))
        tenant = self.handles[rows[0]]
        if tenant.finished:
            return False
        length = self.model.length(tenant)
        counts = [min(self.model.next_boundary(tenant) - length, 1 + d(8)) if d(3) else 1 + d(12)]
        handles = self.take_pages(Digits(0), rows, counts)
        if self.settings.tail and d(3):
            counts = [1 + d(self.settings.tail)]
        drafts = self.draw_drafts(d, counts)
        if handles != rows or self.plan_batch(d, handles, counts, drafts=drafts) is None:
            return False
        while self.flights and d(4):
            self.settle(Digits(0))
        if self.lower and d(3):
            self.work(d)
            self.poll(d)
        return rows[0] in self.handles and not tenant.finished

    def publish_told(self, d: Digits, rows: Handles) -> None:
        """Publishes rows to the cache. If there is no cache, only rows of sessions may pass tokens."""
        tokens, texts, faults = self.tell(d, rows)
        faults |= self.row_faults(rows) | self._undecided(rows)
        bare = not faults and tokens and tokens[-1] is None
        if bare and len(texts[-1]) < self.model.nameable(self.handles[rows[-1]].confirmed):
            faults.add(ms.InvalidArgument)  # the prompt is shorter than the row
        snaps = self.attempt(faults, lambda: self.mem.publish(rows, keep="cache", **self.naming(tokens)))
        if snaps is not REFUSED:
            tenants = [self.handles[row] for row in rows]
            bounds = [tenant.confirmed for tenant in tenants]
            self.model.keep_ends(tenants, bounds)
            self.model.promise(tenants, self.model.told(tenants, bounds, texts))
            kept = self.model.keep(tenants, [tenant.confirmed for tenant in tenants], texts, ended=False)
            self.note_snaps(snaps, kept)

    def match(self, d: Digits) -> None:
        """Compares a match with the search of the model. The next `look` checks that the call has changed nothing."""
        prompt, salt = self.draw_prompt(d), self.draw_salt(d)
        faults: Faults = set() if self.settings.prefix else {ms.ConfigurationError}
        named, reach = self.draw_extent(d, prompt)
        given = self.spell(d, named)
        if d(20) == 1:
            given = d.pick(*NO_TOKENS)
            if not isinstance(given, list) or given or self.settings.keyed:  # a prompt has a token
                faults.add(ms.InvalidArgument)
            prompt, named, reach = (), (), None
        asked = {"length": len(prompt)} if self.settings.keyed else {}
        call = lambda: self.mem.match(salt=salt, reach=reach, **asked, **self.naming(given))  # noqa: E731
        match = self.attempt(faults, call)
        if match is not REFUSED:
            self.same_match(match, prompt, salt, self.reached(named, reach))

    def match_of(self, prompt: Text, salt: Any = None) -> None:
        """Compares what the cache has for a prompt."""
        faults: Faults = set() if self.settings.prefix else {ms.ConfigurationError}
        match = self.attempt(faults, lambda: self.mem.match(list(prompt), salt=salt))
        if match is not REFUSED:
            self.same_match(match, prompt, salt, None)

    def same_match(self, match: Any, prompt: Text, salt: Any, reach: int | None) -> None:
        expected = self.model.find(prompt, salt, reach)
        state = expected.stated.state if expected.stated else None
        seen = (match.tokens, match.length, match.kv_length, match.evicted_length)
        self._same("match", seen, (expected.tokens, expected.length, expected.kv, expected.gone))
        hit = self.model.below.find(prompt, salt, expected, expected.length) if self.model.below else None
        self._same("match in host memory", match.host_length, hit.length if hit else 0)
        self._same("snapshot", match.snapshot and match.snapshot.register, state and state.register)
        no_sharing, evicted, no_snapshot = expected.lost()
        told = {"no_sharing": no_sharing, "evicted": evicted, "no_snapshot": no_snapshot}
        self._same("lost", dict(match.lost), told)
        assert sum(match.lost.values()) == len(prompt) - match.length
        why = [reason for reason in ("evicted", "no_snapshot", "no_sharing") if told[reason]]
        self._same("reason", match.reason, why[0] if why else "")

    def talk(self, d: Digits) -> None:
        """Opens a session with a new name, with invalid limits now and then."""
        if len(self.talks) < 3 and not self.settings.keyed:  # sessions know no keys
            name, faults = f"talk {self.calls}", set[type[ms.MemstateError]]()
            priority, ttl = d.pick(0, 0, 1, -1), d.pick(None, 3, 1, 0)
            if d(30) == 1:
                priority, ttl = d.pick((0.5, None), (0, -1), (0, "x"))
                faults = {ms.InvalidArgument}
            self.open_session(faults, name, priority, ttl)

    def open_session(self, faults: Faults, name: str, priority: Any, ttl: Any) -> ms.Session | None:
        """Opens a session on both sides. Returns None if the call is refused."""
        session = self.attempt(faults, lambda: self.mem.sessions.open(name, priority=priority, ttl=ttl))
        if session is REFUSED:
            return None
        self.talks[session] = self.model.open_talk(name, priority, ttl)
        return session

    def age(self, d: Digits) -> None:
        """Advances the clock. The next poll or admission notices which sessions have expired."""
        self.model.seconds += d.pick(1, 2, 4)

    def let_expire(self) -> None:
        """Empties expired sessions in the model, as an admission does before it looks for states."""
        if not self.asleep:
            self.model.expire()

    def hush(self, d: Digits) -> None:
        """Closes a session, or tries it with an invalid handle."""
        session = d.pick(*self.talks, *self.closed) if self.talks or self.closed else None
        if d(9) == 1:
            session = d.pick("session", None)
        self.close_session(session)

    def close_session(self, session: Any) -> None:
        """Closes a session on both sides."""
        faults = self._session_faults(session, busy=set())
        if self.attempt(faults, lambda: self.mem.sessions.close(session)) is not REFUSED:
            self.model.close_talk(self.talks.pop(session))
            self.closed.append(session)

    def _session_faults(self, session: Any, busy: Faults) -> Faults:
        """Returns the errors of a call with this session. busy: those while a turn of it runs."""
        if session in self.talks:
            return busy if self.talks[session].row else set()
        return {ms.StaleHandle if isinstance(session, ms.Session) else ms.InvalidArgument}

    def twin(self, d: Digits) -> None:
        """Forks a session, or tries it with an invalid handle."""
        if len(self.talks) < 4:
            self.twin_of(d.pick(*self.talks, *self.talks, *self.closed, "session"), f"twin {self.calls}")

    def twin_of(self, session: Any, name: str) -> ms.Session | None:
        """Forks a session on both sides. Returns the new one; None if the call is refused."""
        model, faults, talk = self.model, self._session_faults(session, {ms.InvalidArgument}), self.talks.get(session)
        if talk and not faults and (copied := model.fork_pages(talk)):
            model.starting = [talk]
            room = model.free_pages + model.pages_ready_to_go
            model.starting = []
            faults = {ms.InvalidArgument} if model.waits else {ms.OutOfPages} if copied > room else set()
        numbers = {ms.OutOfPages: (model.fork_pages(talk) if talk else 0, model.free_pages)}
        fork = self.attempt(faults, lambda: self.mem.sessions.fork(session, name), numbers)
        if fork is REFUSED:
            return None
        twin, copies = model.fork_talk(talk, name)
        self._same("page copies", [tuple(map(int, pair)) for pair in fork.page_copies], copies)
        if self.lower and self.lower.kv:
            self.lower.kv.copy(copies)
        self.talks[fork.session] = twin
        return fork.session

    def wait(self, d: Digits) -> None:
        """Sets the priority or ttl of a session, or lets it make way at once. Sometimes the handle is invalid."""
        session = d.pick(*self.talks, *self.talks, *self.closed) if self.talks or self.closed else None
        if d(2):
            of = (("priority", (0, 1, -1)), ("ttl", (None, 3, 1, 0)))
            self.set_session(session, {name: d.pick(*choices) for name, choices in of if d(2)})
        else:
            self.rest(session)

    def set_session(self, session: Any, given: dict[str, Any]) -> None:
        """Sets priority or ttl of a session on both sides."""
        faults, talk = self._session_faults(session, {ms.InvalidArgument}), self.talks.get(session)
        if self.attempt(faults, lambda: self.mem.sessions.set(session, **given)) is not REFUSED and talk:
            talk.priority, talk.ttl = given.get("priority", talk.priority), given.get("ttl", talk.ttl)

    def rest(self, session: Any) -> None:
        """Lets a session make way on both sides."""
        faults = self._session_faults(session, {ms.InvalidArgument})
        faults |= set() if self.settings.prefix or faults else {ms.ConfigurationError}
        if self.attempt(faults, lambda: self.mem.sessions.rest(session)) is not REFUSED:
            self.model.give_way(self.talks[session])

    def forget_states(self, d: Digits) -> None:
        """Calls `evict_states`, but not while the states sleep, because then no packet can be sent."""
        if self.mem.prefix is not None and not self.asleep:
            n = d(3)
            self._same("evicted states", self.mem.prefix.evict_states(n), self.model.evict_states(n))

    def forget(self, d: Digits) -> None:
        """Says that the KV of some blocks, or of none, is gone. Sometimes gives invalid keys."""
        texts = [one.tokens for one in self.model.stated if d(3) == 1] + [STEMS[0]] * (d(3) == 1)
        given, faults = [key_of(text) for text in texts], set[type[ms.MemstateError]]()
        if d(20) == 1:
            given = d.pick(*NO_TOKENS[1:])
            faults.add(ms.InvalidArgument)
        if self.attempt(faults, lambda: self.mem.forget(given)) is not REFUSED:
            self.model.forget(texts)

    def forget_pages(self, d: Digits) -> None:
        if self.mem.prefix is not None and not self.asleep:
            n = d(6)
            self._same("evicted pages", self.mem.prefix.evict_pages(n), self.model.evict_pages(n))

    def forget_all(self, d: Digits) -> None:
        if self.mem.prefix is not None and not self.asleep and d(3) == 1:
            self.mem.prefix.clear()
            self.model.clear_cache()

    # Tiers: prefetches, polls, threads, time and faults

    def poll(self, d: Digits) -> None:
        if self.attempt(set(), self.mem.poll) is not REFUSED:
            self.model.expire()
            if self.model.below:
                self.model.below.poll()

    def prefetch(self, d: Digits) -> None:
        idle = [session for session, talk in self.talks.items() if not talk.row]
        session: Any = d.pick(*idle) if idle and d(3) == 1 else None
        talk = self.talks.get(session)
        prompt, salt = self.draw_prompt(d, talk), self.draw_salt(d)
        self.prefetch_for(d, prompt, talk.salt if talk else salt, session)

    def prefetch_for(self, d: Digits, prompt: Text, salt: Hashable, session: Any = None) -> ms.tiers.Fetch | None:
        model, below, s = self.model, self.model.below, self.settings
        given, faults = spelled(d, prompt), set[type[ms.MemstateError]]()
        if not below or not s.storing:
            faults.add(ms.ConfigurationError)
        wrong = d(40)
        if wrong == 1 and below:
            given, prompt = d.pick(*NO_TOKENS[1:]), ()
            faults = {ms.InvalidArgument}
        elif wrong == 2 and below and self.closed:
            session, prompt = self.closed[0], ()
            faults = {ms.StaleHandle}
        covered, keys, match = 0, [], None
        if below and prompt and not self.asleep:
            match, talk = model.find(prompt, salt), self.talks.get(session)
            serving = model.serving(talk, prompt, salt) if talk else []
            covered = max(match.length, serving[0].length if serving else 0)
            hit = below.find(prompt, salt, match, covered)
            covered, keys = max(covered, hit.length if hit else 0), below.keys(prompt[:-1], salt)
        fetch = self.attempt(faults, lambda: self.mem.prefetch(given, salt, session))
        if fetch is REFUSED:
            return None
        self.fetches[fetch] = below.start(keys, covered, match.kv // s.page_size)
        return fetch

    def _open(self) -> list[ms.tiers.Fetch]:
        return [fetch for fetch, told in self.fetches.items() if not told.done]

    def ready(self, d: Digits) -> None:
        """Asks whether a prefetch is ready."""
        if fetches := list(self.fetches):
            self.ready_for(d.pick(*(self._open() or fetches), *fetches[-1:]))

    def ready_for(self, fetch: ms.tiers.Fetch) -> None:
        self._same("ready", self.mem.tiers.ready(fetch), self.model.below.ready(self.fetches[fetch]))
        self.look()

    def unfetch(self, d: Digits) -> None:
        """Cancels a prefetch."""
        if self.fetches:
            self.unfetch_of(d.pick(*(self._open() or self.fetches), *list(self.fetches)[-1:]))

    def unfetch_of(self, fetch: ms.tiers.Fetch) -> None:
        """Cancels a prefetch on both sides."""
        self.mem.tiers.cancel(fetch)
        self.model.below.cancel(self.fetches[fetch])

    def work(self, d: Digits) -> None:
        """Lets threads begin or end some jobs."""
        for _ in range(1 + d(4)):
            if not (self.lower and (jobs := self.lower.open_jobs)):
                return
            self.lower.work(d.pick(*jobs[:6]), finish=d(4) > 0)

    def tick(self, d: Digits) -> None:
        if self.lower:
            self.lower.advance(d.pick(0.5, 1.0, 0.25, 2.0, 0.0))

    def spoil(self, d: Digits) -> None:
        """Sets faults of storage: of one record, or of all calls."""
        below, lower = self.model.below, self.lower
        if lower and self.settings.storing:
            how = d(12)
            if how < 10:
                records = sorted(below.storage.records, key=str)
                wanted = [(kind, key) for fetch in below.fetches for key in fetch.keys for kind in ("state", "kv")]
                items = [(s.kind, item.key) for s in below.shelves for item in s.items[-2:] if not item.once]
                there = [one for one in wanted if one in below.storage.records] if d(2) else []
                if there or records or items:
                    lower.spoil(*d.pick(*(there or [*records, *items])), d.pick(*FAULTS))
            else:
                lower.break_all(how == 10 and d(2) == 1, how == 11 and d(2) == 1)

    def stock(self, d: Digits) -> None:
        """Puts more records into storage, as another process would."""
        if self.lower and self.settings.storing:
            salt, stem = d.pick(*SALTS), STEMS[d(3)]
            there = [item.key for item in self.lower.below.states.items if not item.once]
            if there and d(2):
                salt, stem = d.pick(*there)
            else:
                stem = stem[: d.pick(14, 8, 5)]
            text = (stem + tuple(d(3) for _ in range(d(8))))[: self.longest]
            ends = {1 + d(max(1, len(text) // self.settings.page_size)) for _ in range(1 + d(4))}
            ends = {end for end in ends if end * self.settings.page_size % self.settings.unit == 0}
            self.lower.stock(text, salt, ends, d.pick(-1, -1, -1, -1, d(12)))

    def thin(self, d: Digits) -> None:
        """Evicts records of one kind from host memory."""
        if below := self.model.below:
            at = d(len(below.shelves))
            self.thin_by(len(below.shelves) - 1 - at, d.pick(1, 2, 3, 99))

    def thin_by(self, at: int, n: int) -> None:
        """Evicts `n` records from host memory on both sides. at: 0 for states, 1 for KV pages."""
        self.lower.caches[at].evict(n)
        self.model.below.shelves[at].evict(n)

    def hurt(self, d: Digits, fetch: Fetched) -> None:
        """Sets a fault of a record that a prefetch wants."""
        there = [(kind, key) for key in fetch.keys for kind in ("state", "kv")
                 if (kind, key) in self.model.below.storage.records]  # fmt: skip
        if there:
            self.lower.spoil(*d.pick(*there[::-1]), d.pick(*FAULTS[:7]))

    def flush(self, d: Digits) -> None:
        if self.lower:
            with self.lower.waiting():
                flushed = self.attempt(self._waiting_faults(), self.mem.tiers.flush)
            if flushed is not REFUSED:
                self.model.below.flush()

    def empty_host(self, d: Digits) -> None:
        if self.lower and d(2):
            if self._waiting_faults():
                with pytest.raises(ms.InvalidArgument):
                    self.mem.tiers.clear()
                return
            with self.lower.waiting():
                self.mem.tiers.clear()
            self.model.below.clear()
            self.forget_parked()

    def _waiting_faults(self) -> Faults:
        """Returns the error of `flush` and `clear` while records wait for a forward."""
        return {ms.InvalidArgument} if self.model.waits else set()

    def push_down(self, d: Digits) -> None:
        """Evicts some states, KV pages or records, so that later requests need the tiers."""
        how = d(12)
        if how < 4:
            self.forget_states(d)
        elif how < 7:
            self.forget_pages(d)
        elif how < 9:
            for move in (self.flush, self.forget_all, self.empty_host)[: how % 3 + 1]:
                move(Digits(1))
                self.look()
        self.look()

    def fetch_first(self, d: Digits, prompt: Text, salt: Hashable) -> None:
        """Prefetches the prompt of a request before its admission, as a scheduler does while the request waits."""
        if not (self.settings.storing and d(4)):
            return
        if d(4) == 1:
            self.thin(Digits(3 * len(self.model.below.shelves)))  # evicts all KV records, if there are any
        fetch = self.prefetch_for(d, prompt, salt)
        for _ in range(1 + d(6)):
            if fetch is None or fetch.done:
                break
            self.work(d)
            if d(4) == 1:
                self.hurt(d, self.fetches[fetch])
            self.poll(d)
            self.look()
            if d(6) == 1:
                self.ready_for(fetch)
        if fetch and d(3):
            self.ready_for(fetch)
