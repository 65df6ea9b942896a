"""Questions: slots, shortfall, lengths, audits and pictures. Each answer is told from the model beforehand."""

from collections import Counter

import memstate as ms
from tests.proof.stateful.admitting import Admitting
from tests.proof.stateful.ledger import Later
from tests.proof.stateful.machine import REFUSED, foreign
from tests.proof.stateful.planning import Handles
from tests.proof.stateful.rows import Kept, Row
from tests.proof.stateful.settings import Digits


class Asking(Admitting):
    """What a caller may want to know."""

    def read_slots(self, d: Digits) -> None:
        handles: Handles = [*self.draw_rows(d), *[snap for snap in self.snaps if d(2)]]
        handles = sorted(handles, key=lambda _: d(4))
        wrong = d(25)
        rows = [handle for handle in handles if not isinstance(handle, ms.Snapshot)]
        faults = self.row_faults(sorted(set(rows), key=rows.index))  # here a row may be named twice
        if wrong == 1:
            handles.append(d.pick(foreign().snapshot, *self.dropped))
            faults.add(ms.StaleHandle)
        found = self.attempt(faults, lambda: self.mem.device.read_slots(handles))
        if found is REFUSED:
            return
        registers = []
        for handle in handles:
            owner: Row | Kept = self.snaps[handle] if handle in self.snaps else self.handles[handle]
            registers.append(owner.register if isinstance(owner, Kept) else owner.source or owner.live)
        told: list[list[int]] = []
        self.model.then(Later(lambda: told.append([self.model.slot[register] for register in registers])))
        self.asked.append((found, told))

    def shortfall(self, d: Digits) -> None:
        """Exact for the next plan; for a window between what can happen and what boundaries inside could ask for."""
        model, window = self.model, d(3) == 1
        rows = self.draw_rows(d)
        faults = self.row_faults(sorted(set(rows), key=rows.index))
        if len(set(rows)) < len(rows) and not faults:
            return
        counts = [1 + d(6) for _ in rows]
        most = least = 0
        for row, n in zip(rows, counts, strict=True):
            tenant = self.handles.get(row)
            if tenant and not tenant.finished:
                needs, may = model.needs(tenant, n, window)
                least, most = least + needs, most + may
        seen = self.attempt(faults, lambda: self.mem.shortfall(rows, counts, window=window))
        if seen is not REFUSED:
            low, high = model.shortfall(least), model.shortfall(most)
            assert low <= seen <= high, f"shortfall {seen}, expected {low} to {high}"

    def ask(self, d: Digits) -> None:
        """What the host knows; it answers asleep as well."""
        mem, model = self.mem, self.model
        for row, tenant in self.handles.items():
            seen = (mem.info(row).length, mem.info(row).confirmed, mem.info(row).next_boundary, mem.info(row).slots)
            held = sum(tenant.live + k in model.held for k in range(3)) + len(tenant.marks)
            told = (model.length(tenant), tenant.confirmed, model.next_boundary(tenant), held)
            self._same(f"length, confirmed, next boundary, slots of row {row.index}", seen, told)
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
            report.raise_if_leaking()
            self._same("free", report.free, self.model.free_count)
            self._same("owners", dict(report.owned_by_kind), dict(Counter(map(self._kind, self.model.held))))

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
        self._same("free in the picture", list(picture.free), [slot > 0 and slot not in by_slot for slot in slots])
        self._same("slots in the picture", list(picture.slots), [held.get(r, 0) for r in
                   range(model.register_count)])  # fmt: skip
        self._same("kinds", picture.kinds, {register: self._kind(register) for register in held})
        self._same("names", picture.names, {register: self.owner(register)[1] for register in held})
