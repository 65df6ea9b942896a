"""New rows and rows that end: admit, fork, arrivals, pages, release, as they are meant and as they are not."""

from collections.abc import Callable
from typing import Any

import memstate as ms
from tests.stateful.history import EMPTY, fold
from tests.stateful.machine import REFUSED, Faults, foreign
from tests.stateful.planning import Handles
from tests.stateful.rows import Row
from tests.stateful.settings import Digits
from tests.stateful.settling import Settling


class Admitting(Settling):
    """What a scheduler does with rows."""

    def admit(self, d: Digits) -> None:
        model, requests = self.model, []
        for _ in range(d.pick(1, 2, 1, 3, 0)):
            resume: Any = d.pick(None, None, *self.snaps) if self.snaps else None
            length = d.pick(0, 0, d(5), d(9), 3 * d(9))
            want = d.pick(0, (resume.length if resume else 0) + self.settings.page_size * d(9))
            wrong = d(50)
            if wrong == 1:
                resume = d.pick(foreign().snapshot, *self.dropped, "snapshot")
            elif wrong == 2:
                length = d.pick(-1, 2**31, True, 1000)
            elif wrong == 3:
                want = d.pick(-1, self.settings.page_size + 1, 1.5)
            requests.append(ms.Request(f"request {self.calls}.{len(requests)}", length, resume, want))
        faults, numbers, shared, fresh = self._admit_faults(requests)
        given: Any = requests
        if d(50) == 1:
            given, faults = d.pick(requests[0] if requests else 3, [*requests, "request"]), {ms.InvalidArgument}
        rows = self.attempt(faults, lambda: self.mem.admit(given), numbers)
        if rows is REFUSED:
            return
        origins = [self.snaps[request.resume] if request.resume else None for request in requests]
        tenants = model.start([request.id for request in requests], origins, [one.length if one else 0 for one in
                              origins], [request.want for request in requests], shared, fresh)  # fmt: skip
        self.note_rows(rows, tenants)
        assert rows.any_alive == bool(requests)

    def _admit_faults(
        self, requests: list[ms.Request]
    ) -> tuple[Faults, dict[type, tuple[int, int]], list[tuple[int, ...]], list[int]]:
        model, faults, shared, fresh = self.model, set[type[ms.MemstateError]](), [], []
        for request in requests:
            pages: tuple[int, ...] = ()
            if request.resume is not None:
                if request.resume in self.snaps:
                    pages = request.resume.pages
                else:
                    foul = isinstance(request.resume, ms.Snapshot)
                    faults.add(ms.StaleHandle if foul else ms.InvalidArgument)
            numbers = (request.length, request.want)
            if (
                any(type(n) is not int or not 0 <= n < 2**31 for n in numbers)
                or request.want % model.settings.page_size
            ):
                faults.add(ms.InvalidArgument)
                continue
            if self.settings.pages and model.too_wide(request.length):
                faults.add(ms.InvalidArgument)
            shared.append(pages)
            fresh.append(max(0, model.pages_for(request.length) - len(pages)))
        slots = len(requests) * (1 + self.settings.lanes_at_admission)
        need = (len(requests), sum(fresh), slots)
        return faults | self._scarce(*need), self._numbers(*need), shared, fresh

    def _numbers(self, rows: int, pages: int, slots: int) -> dict[type, tuple[int, int]]:
        model = self.model
        return {ms.OutOfRows: (rows, len(model.free_rows)), ms.OutOfPages: (pages, model.free_pages),
                ms.OutOfSlots: (slots, model.free_count)}  # fmt: skip

    def _scarce(self, rows: int, pages: int, slots: int) -> Faults:
        numbers = self._numbers(rows, pages, slots)
        return {error for error, (requested, free) in numbers.items() if requested > free}

    def fork(self, d: Digits) -> None:
        model, s = self.model, self.settings
        handles: Handles = list(self.handles)
        settled = [row for row in handles if not self.handles[row].unsettled]
        row = d.pick(*(settled or handles or foreign().rows[:1]), *handles)
        if d(40) == 1:
            row = self.bad_row(d)
        names: Any = [f"fork {self.calls}.{i}" for i in range(d(4))]
        faults, tenant = self.row_faults([row]), self.handles.get(row)
        numbers: dict[type, tuple[int, int]] = {}
        if tenant and (tenant.unsettled or tenant.finished):
            faults.add(ms.InvalidArgument)
        if tenant and names:
            length = model.length(tenant)
            partial = model.pages_for(length) - model.pages_for(model.floor(length))
            moved = s.direct and not tenant.source
            need = (len(names), partial * len(names), len(names) * (1 + s.lanes_at_admission) + moved)
            faults |= self._scarce(*need)
            numbers = self._numbers(*need)
            if moved and not model.free_holders:
                faults.add(ms.InvalidArgument)
        if d(40) == 1:
            names = d.pick("ab", 3)
            faults.add(ms.InvalidArgument)
        fork = self.attempt(faults, lambda: self.mem.fork(row, names), numbers)
        if fork is REFUSED:
            return
        assert tenant
        tenants, copies = model.fork(tenant, names, int(self.mem.registers.source[row.index]))
        self.note_rows(fork.rows, tenants)
        self._same("page copies", [tuple(map(int, pair)) for pair in fork.page_copies], copies)

    def arrived(self, d: Digits) -> None:
        """A state from elsewhere, written to the slots that the device names."""
        model = self.model
        fresh = [row for row, tenant in self.handles.items() if not self._begun(tenant)]
        rows: Handles = self.draw_rows(d) if d(6) == 1 else fresh[: 1 + d(3)]
        lengths = [1 + d(9) for _ in rows]
        if d(30) == 1 and lengths:
            lengths[0] = 0
        if not self.row_faults(rows):
            slots = self.attempt(set(), lambda: self.mem.read_slots(rows))
            if slots is REFUSED:
                return
            model.submit()
            if self.settings.pages and d(9) != 8 and not self.extend(rows, lengths):
                return
        faults = self.row_faults(rows)
        for row, length in zip(rows, lengths, strict=True):
            tenant = self.handles.get(row)
            if tenant and (self._begun(tenant) or length < 1 or length > model.room(tenant)):
                faults.add(ms.InvalidArgument)
        states = [fold(EMPTY, self.tokens(length)) for length in lengths]
        if not faults:
            for row, slot, state in zip(rows, slots.wait().tolist(), states, strict=True):
                self._same("the slot of an arrival", slot, model.slot[self.handles[row].live])
                self.memory.put(slot, state)
                for contents in model.content.values():
                    contents[slot] = state
        if self.attempt(faults, lambda: self.mem.arrived(rows, lengths)) is not REFUSED:
            model.arrive([self.handles[row] for row in rows], states)

    def _begun(self, tenant: Row) -> bool:
        return bool(self.model.known[tenant.live] or tenant.source or tenant.unsettled or tenant.finished)

    def lengthen(self, d: Digits) -> None:
        """Pages for more tokens."""
        rows = self.draw_rows(d)
        lengths: Any = d.pick([d(30) for _ in rows], d(30), [-1 for _ in rows], [1, 2, 3, *[4 for _ in rows]])
        self.extend(rows, lengths)

    def leave(self, d: Digits) -> None:
        """Release, abort or retract; rows that are finished or have no room left first."""
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
        how = d.pick("release", "abort", "retract", "publish", "keys", "key")
        faults = self.row_faults(rows)
        keys: Any = [d(1 + model.length(self.handles[row])) for row in rows if row in self.handles]
        given = {"retract": True, "publish": True, "keys": keys, "key": d(12)}.get(how, False)
        if how == "keys":
            if d(20) == 1:
                given = d.pick([*keys, 1, 1], [-1 for _ in rows], "key")
            if isinstance(given, str) or len(given) != len(rows) or any(key < 0 for key in given):
                faults.add(ms.InvalidArgument)
        call: dict[str, Callable[[], Any]] = {
            "abort": lambda: self.mem.abort(rows),
            "retract": lambda: self.mem.retract(rows),
        }
        snaps = self.attempt(faults, call.get(how, lambda: self.mem.release(rows, given)))
        if snaps is REFUSED:
            return
        snaps = snaps or [None] * len(rows)
        tenants = [self.handles[row] for row in rows]
        bounds = [tenant.confirmed for tenant in tenants]
        if how in ("keys", "key"):
            bounds = [min(b, key) for b, key in zip(bounds, given if how == "keys" else [given] * 9, strict=False)]
        used = [snap.register for snap in snaps if snap]
        self.note_snaps(snaps, model.end(tenants, None if given is False else used, bounds))
        self.forget_rows(rows)
