"""New rows and rows that end: admit, fork, arrivals, pages, release, as they are meant and as they are not."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

import memstate as ms
from tests.proof.stateful.history import EMPTY, fold
from tests.proof.stateful.ledger import Later
from tests.proof.stateful.machine import REFUSED, Faults, foreign
from tests.proof.stateful.planning import Handles
from tests.proof.stateful.prompting import Prompting
from tests.proof.stateful.rows import Row
from tests.proof.stateful.settings import Digits
from tests.proof.stateful.talking import Start


class Admitting(Prompting):
    """What a scheduler does with rows."""

    def admit(self, d: Digits) -> None:
        self.let_expire()
        names = [f"request {self.calls}.{i}" for i in range(d.pick(1, 2, 1, 3, 0))]
        self.admit_all(d, [self.draw_request(d, name) for name in names])

    def admit_all(self, d: Digits, drawn: Sequence[tuple[ms.Request, Start, Faults]]) -> Handles:
        """Admits requests together; returns the new rows, none where that is refused."""
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
        if not (faults or self.asleep) and (higher := self._from_host(starts)):
            starts, more = higher, set()
        elif more:
            starts, more, numbers = self._from_elsewhere(starts)
        rows = self.attempt(faults | more, lambda: self.mem.admit(given), numbers)
        if rows is REFUSED:
            return []
        tenants = model.admit(starts)
        for tenant in tenants:
            tenant.taste = d(3)
        self.note_rows(rows, tenants)
        assert rows.any_alive == bool(requests)
        return list(rows)

    def _from_host(self, starts: Sequence[Start]) -> list[Start] | None:
        """The same with what host memory has, where there is room for all of that."""
        model = self.model
        found = [model.from_host(start) or start for start in starts]
        states = {start.hit.state.key for start in found if start.hit}
        if not states or self._scarce(len(found), *model.weigh(found))[0]:
            return None
        return found if len(states) <= model.holders_left else None

    def _from_elsewhere(self, starts: Sequence[Start]) -> tuple[Sequence[Start], Faults, dict[type, tuple[int, ...]]]:
        """The same where sessions make way for their own turns: first those whose states the turns do not need."""
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
        """What runs out, and the numbers that the errors have to carry. need, room: pages and slots."""
        model = self.model
        numbers = {ms.OutOfRows: (rows, len(model.free_rows)), ms.OutOfPages: (need[0], model.free_pages),
                   ms.OutOfSlots: (need[1], model.free_count, evictable)}  # fmt: skip
        short = rows > len(model.free_rows), need[0] > room[0], need[1] > room[1]
        return {error for error, is_short in zip(numbers, short, strict=True) if is_short}, numbers

    def fork(self, d: Digits) -> None:
        model, s = self.model, self.settings
        handles: Handles = list(self.handles)
        settled = [row for row in handles if not self.handles[row].unsettled]
        row = d.pick(*(settled or handles or foreign().rows[:1]), *handles)
        if d(40) == 1:
            row = self.bad_row(d)
        names: Any = [f"fork {self.calls}.{i}" for i in range(d(4))]
        faults, tenant = self.row_faults([row]), self.handles.get(row)
        numbers: dict[type, tuple[int, ...]] = {}
        if tenant and (tenant.unsettled or tenant.finished):
            faults.add(ms.InvalidArgument)
        if tenant and names:
            length = model.length(tenant)
            partial = model.pages_for(length) - model.pages_for(model.floor(length))
            moved = s.direct and not tenant.source
            need = partial * len(names), len(names) * (1 + s.lanes_at_admission) + moved
            more, numbers = self._scarce(len(names), need, *model.weigh([])[1:])
            faults |= more
            if partial and model.waits:
                faults.add(ms.InvalidArgument)
            if moved and not model.free_holders and not model.ready_to_go:
                faults.add(ms.InvalidArgument)
        if d(40) == 1:
            names = d.pick("ab", 3)
            faults.add(ms.InvalidArgument)
        fork = self.attempt(faults, lambda: self.mem.fork(row, names), numbers)
        if fork is REFUSED:
            return
        assert tenant
        tenants, copies = model.fork(tenant, names, int(self.registers.source[row.index]))
        self.note_rows(fork.rows, tenants)
        if self.lower and self.lower.kv:
            self.lower.kv.copy(copies)
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
            slots = self.attempt(set(), lambda: self.mem.device.read_slots(rows))
            if slots is REFUSED:
                return
            model.then(Later(lambda: None))
            if self.memory.device.type == "cuda":  # the copy is over whenever somebody looks, as the model has it
                torch.cuda.synchronize()
            assert slots.ready == (model.waits is None)
            if not slots.ready:  # nothing can come to a slot that is not known
                return
            if self.settings.pages and d(9) != 8 and not self.extend(rows, lengths):
                return
        faults = self.row_faults(rows)
        for row, length in zip(rows, lengths, strict=True):
            tenant = self.handles.get(row)
            if tenant and (self._begun(tenant) or length < 1 or length > model.room(tenant)):
                faults.add(ms.InvalidArgument)
        texts = [
            tuple(self.feed(self.handles.get(row, Row(0, 0, "")), 0, n)) for row, n in zip(rows, lengths, strict=True)
        ]
        states = [fold(EMPTY, text) for text in texts]
        if not faults:
            for row, slot, state in zip(rows, slots.wait().tolist(), states, strict=True):
                self._same("the slot of an arrival", slot, model.slot[self.handles[row].live])
                self.memory.put(slot, state)
                for contents in model.content.values():
                    contents[slot] = state
        if self.attempt(faults, lambda: self.mem.device.arrived(rows, lengths)) is not REFUSED:
            model.arrive(tenants := [self.handles[row] for row in rows], states, texts)
            for tenant in tenants:
                model.arrived_at(tenant)
            if self.lower and self.lower.kv:
                self.lower.kv.arrive(tenants)

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
        ways = "release", "abort", "retract", "publish", "keys", "key", "told", "told", "retract told", "told keys"
        self.end_rows(d, rows, d.pick(*ways))

    def end_rows(self, d: Digits, rows: Handles, how: str) -> None:
        """told: with the tokens of the rows; keys: as far as these go."""
        model = self.model
        faults = self.row_faults(rows)
        keys: Any = [d(1 + model.length(self.handles[row])) for row in rows if row in self.handles]
        given = {"retract": True, "publish": True, "keys": keys, "told keys": keys, "key": d(12)}.get(how, False)
        if how in ("keys", "told keys"):
            if d(20) == 1:
                given = d.pick([*keys, 1, 1], [-1 for _ in rows], "key")
            if isinstance(given, str) or len(given) != len(rows) or any(key < 0 for key in given):
                faults.add(ms.InvalidArgument)
        tokens = texts = None
        if "told" in how:
            tokens, texts, wrong = self.tell(d, rows)
            faults |= wrong
            if not faults:
                ends = zip(
                    texts, [self.handles[row].confirmed for row in rows], given or [1 << 30] * len(rows), strict=True
                )
                if any(len(text) < min(confirmed, most) for text, confirmed, most in ends):
                    faults.add(ms.InvalidArgument)
        elif how not in ("release", "abort") and any(row in self.handles and self.handles[row].talk for row in rows):
            faults.add(ms.InvalidArgument)
        keep: Any = "cache" if tokens is not None else None if given is False else "handle"
        lengths = None if isinstance(given, bool) else given
        keep: Any = "cache" if tokens is not None else None if given is False else "handle"
        lengths = None if isinstance(given, bool) else given
        call: dict[str, Callable[[], Any]] = {
            "abort": lambda: self.mem.end(rows),
            "retract": lambda: self.mem.end(rows, keep="handle"),
            "retract told": lambda: self.mem.end(rows, keep="cache", tokens=tokens),
        }
        snaps = self.attempt(faults, call.get(how, lambda: self.mem.end(rows, keep, lengths=lengths, tokens=tokens)))
        if snaps is REFUSED:
            return
        snaps = snaps or [None] * len(rows)
        tenants = [self.handles[row] for row in rows]
        bounds = [tenant.confirmed for tenant in tenants]
        if how in ("keys", "key", "told keys"):
            bounds = [min(b, key) for b, key in zip(bounds, [given] * 9 if how == "key" else given, strict=False)]
        used = None if how in ("release", "abort") else [snap.register for snap in snaps if snap]
        if texts is not None:
            model.promise(tenants, model.told(tenants, bounds, texts))
        elif used is not None:
            model.promise(tenants, [snap.length if snap else 0 for snap in snaps])
        self.note_snaps(snaps, model.end(tenants, used, bounds, texts))
        self.forget_rows(rows)
