"""Every operation of a manager: those on snapshots and on the manager as a whole, and all others by name."""

from contextlib import nullcontext
from typing import Any

import memstate as ms
from tests.proof.stateful.history import EMPTY
from tests.proof.stateful.machine import REFUSED, Faults, foreign
from tests.proof.stateful.settings import Digits
from tests.proof.stateful.talking import Start
from tests.proof.stateful.tiering import Tiering


class Operations(Tiering):
    """`run` carries out one of `OPERATIONS`."""

    naps = 0

    def run(self, name: str, number: int) -> None:
        """Carries out an operation on both sides and compares everything."""
        d = Digits(number)
        if self.asleep:
            self.naps += 1
            if self.naps > 2:
                self.wake(d)
        getattr(self, name)(d)
        self.look()

    # Snapshots

    def publish(self, d: Digits) -> None:
        model, rows, strict = self.model, self.draw_rows(d), d(4) == 1
        faults = self.row_faults(rows)
        tenants = [self.handles[row] for row in rows if row in self.handles]
        bounds = [tenant.confirmed for tenant in tenants]
        if d(3) and (self.settings.prefix or d(8) == 1):
            self.publish_told(d, rows)
            return
        if strict and not model.strictly_publishable(tenants, bounds):
            faults.add(ms.InvalidArgument)
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
            snaps.append(None)  # as publish() returns it where there is nothing
        elif wrong == 4 and self.cached:
            snaps.append(snap := d.pick(*self.cached))
            faults |= {ms.StaleHandle} if snap in self.stale() else {ms.InvalidArgument}
        if self.attempt(faults, lambda: self.mem.drop(snaps)) is not REFUSED:
            real = [snap for snap in snaps if snap is not None]
            self.model.drop([self.snaps.pop(snap) for snap in real])
            self.dropped.extend(real)

    # Everything else

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

    def scrub_null(self, d: Digits) -> None:
        if self.attempt(set(), self.mem.device.scrub_null) is not REFUSED:
            for states in self.model.content.values():
                states[0] = EMPTY

    def sleep(self, d: Digits) -> None:
        """Not for fenced memory, which is part of a larger block that would go with it."""
        if self.settings.memory == "fenced":
            return
        keep = d(3) != 1
        faults: Faults = {ms.InvalidArgument} if not keep and (self.model.held or self.model.waits) else set()
        if self.attempt(faults, lambda: self.mem.device.sleep(keep)) is REFUSED:
            return
        self.model.submit()
        if self.model.below:
            self.model.below.settle()
        self.asleep, self.naps, self.kept_bytes = True, 0, keep
        if self.memory.given:
            self.memory.scribble()

    def wake(self, d: Digits) -> None:
        if not self.asleep:
            self.attempt({ms.InvalidArgument}, self.mem.device.wake)
            return
        self.mem.device.wake()
        self.asleep = False
        self.memory.attach(self.mem)
        if not self.kept_bytes:
            self.memory.lose()
            for states in self.model.content.values():
                states[0] = EMPTY
        self.look()  # before anything else happens to what was kept

    def reset(self, d: Digits) -> None:
        if d(3) and not self.asleep:
            return  # rare, or nothing grows
        with self.lower.waiting() if self.lower else nullcontext():
            if self.attempt(set(), lambda: self.mem.recover(keep=False)) is REFUSED:
                return
        self.asked.clear()
        self.model.discard()
        if self.model.below:
            self.model.below.clear()
        self.model.reset()
        self.gone.extend(self.handles)
        self.dropped.extend([*self.snaps, *self.cached])
        self.settled.extend(flight.step for flight in self.flights)
        self.closed.extend(self.talks)
        for kept in (self.handles, self.snaps, self.flights, self.cached, self.talks):
            kept.clear()

    def window(self, d: Digits) -> None:
        """A speculative step; where the manager has none, that is an error."""
        self.plan(d, window=self.settings.speculation or d(30) == 1)

    def close(self) -> None:
        """Everything ends, and everything is free."""
        nothing = Digits(0)
        if self.asleep:
            self.wake(nothing)
        while self.flights:
            self.settle(nothing)
        self.mem.end(rows := list(self.handles))
        self.model.end([self.handles[row] for row in rows], None, [])
        self.forget_rows(rows)
        self.mem.drop(list(self.snaps))
        self.model.drop(list(self.snaps.values()))
        self.snaps.clear()
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
        if self.settings.debug:  # then close looks for leaks, as an audit does
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

    def _everything_can_be_had(self) -> None:
        """No request runs: no other waits because of idle sessions, whatever they keep, nor because of the cache."""
        s, nothing = self.settings, Digits(0)
        self.let_expire()
        n = min(s.row_count, s.slots // (1 + s.lanes_at_admission))
        long = min(s.pages, s.pages_per_row) * s.page_size
        sizes = [long] + [0] * (n - 1)
        drawn = [(ms.Request(f"last {i}", size), Start(f"last {i}", size), Faults()) for i, size in enumerate(sizes)]
        rows = self.admit_all(nothing, drawn)
        assert len(rows) == n, "idle sessions refuse a request for ever"
        self.look()
        self.mem.end(rows)
        self.model.end([self.handles[row] for row in rows], None, [])
        self.forget_rows(rows)


# How often each is drawn.
OPERATIONS = {
    "plan": 30, "settle": 16, "window": 8, "admit": 12, "leave": 9, "publish": 8, "drop": 7, "fork": 4, "cancel": 2,
    "arrived": 3, "submit": 3, "lengthen": 2, "read_slots": 2, "shortfall": 3, "ask": 3, "accept": 1, "audit": 1,
    "snapshot": 1, "check": 1, "scrub_null": 1, "sleep": 1, "wake": 1, "reset": 1,
    "poll": 2, "prefetch": 1,
    "serve": 16, "match": 3, "talk": 3, "hush": 1, "age": 4, "forget_states": 1, "forget_pages": 1, "forget_all": 1,
}  # fmt: skip
# With tiers.
BELOW = {
    "serve": 60, "poll": 16, "work": 16, "prefetch": 12, "ready": 8, "unfetch": 3, "tick": 3, "spoil": 8, "stock": 8,
    "thin": 4, "flush": 2, "empty_host": 2, "forget_states": 4, "plan": 20, "window": 4,
}  # fmt: skip
