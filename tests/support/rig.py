"""Every operation of a manager, done on the manager and on the model of its rules, and answered alike."""

from collections.abc import Sequence

import pytest

import memstate as ms
from tests.support.ledger import History, Register
from tests.support.pair import Flight, Pair, Tenant

NO_LIMIT = 2**31 - 1


class Rig(Pair):
    """A manager beside its model."""

    def admit(self, requests: Sequence[ms.Request]) -> list[Tenant]:
        """Admits all or none; back-pressure is predicted with its numbers."""
        free, per_request = self.row_count - len(self.tenants), 1 + self.rules.admission
        fresh = [max(0, self._page_need(r.length) - len(r.resume.pages if r.resume else ())) for r in requests]
        refusal: type[ms.MemstateError] | None = None
        if len(requests) > free:
            refusal, numbers = ms.OutOfRows, (len(requests), free)
        elif sum(fresh) > self.free_pages:
            refusal, numbers = ms.OutOfPages, (sum(fresh), self.free_pages)
        elif per_request * len(requests) > self.model.free_count:
            refusal, numbers = ms.OutOfSlots, (per_request * len(requests), self.model.free_count)
        if refusal:
            with pytest.raises(refusal) as caught:
                self.mem.admit(requests)
            assert (caught.value.requested, caught.value.free) == numbers  # type: ignore[attr-defined]
            if refusal is ms.OutOfSlots:
                assert caught.value.evictable == sum(not self.model.pins[node] for node in self.model.kept)  # type: ignore[attr-defined]
            return []
        rows = self.mem.admit(requests)
        admitted = [
            (handle.index, request.snapshot_at, ("node", request.resume.register) if request.resume else None)
            for handle, request in zip(rows, requests, strict=True)
        ]
        tenants = []
        for handle, row, request, n in zip(rows, self.model.admit(admitted), requests, fresh, strict=True):
            shared = list(request.resume.pages) if request.resume else []
            self.users.update(shared)
            tenants.append(
                Tenant(
                    handle,
                    row,
                    list(self.snaps[request.resume]) if request.resume else [],
                    [*shared, *self._claim_pages(n)],
                )
            )
        self.tenants += tenants
        return tenants

    # Pages: lowest first, shared with snapshots, free with their last holder.

    def _page_need(self, length: int) -> int:
        return -(-length // self.model.page) if self.page_count else 0

    def _claim_pages(self, n: int) -> list[int]:
        free = [page for page in range(1, self.page_count + 1) if not self.users[page]][:n]
        self.users.update(free)
        return free

    def extend(self, tenants: Sequence[Tenant], lengths: Sequence[int]) -> bool:
        """Pages for these lengths, for all or for none."""
        handles = [tenant.handle for tenant in tenants]
        needed = [max(0, self._page_need(length) - len(t.pages)) for t, length in zip(tenants, lengths, strict=True)]
        if sum(needed) > self.free_pages:
            with pytest.raises(ms.OutOfPages):
                self.mem.extend(handles, lengths)
            return False
        self.mem.extend(handles, lengths)
        for tenant, n in zip(tenants, needed, strict=True):
            tenant.pages += self._claim_pages(n)
        self.model.buffer.columns |= any(needed)
        return True

    def plan(self, batch: Sequence[tuple[Tenant | None, History]], limit: int = NO_LIMIT, run: bool = True) -> Flight:
        """Plans a step that feeds each tenant its tokens, and runs its forward unless it is to be cancelled."""
        packets = self.model.packets
        entries = self.model.plan([(t.row if t else None, len(fed)) for t, fed in batch], limit)
        handles = [t.handle if t else None for t, _ in batch]
        with self.counted() as spent:
            step = self.mem.plan(handles, [len(fed) for _, fed in batch], limit=limit)
        assert spent["plan"] == 1 and spent["ownership"] <= packets and spent["run_data"] <= packets
        assert spent["uploads"] <= max(1, packets) and sum(spent.values()) <= 1 + 3 * max(1, packets)
        real = [fed if entry.row else () for entry, (_, fed) in zip(entries, batch, strict=True)]
        for name, column in (
            ("read", step.read),
            ("write", step.write),
            ("snapshot", step.snapshot),
            ("after", step.record.after),
        ):
            assert column.tolist() == [getattr(entry, name) for entry in entries], name
        assert step.rows.tolist() == [entry.row.number if entry.row else 0 for entry in entries]
        assert step.after.tolist() == step.record.after.tolist() and step.before.tolist() == [
            entry.before for entry in entries
        ]
        generations = [
            tenant.handle.generation if entry.row and tenant else 0
            for entry, (tenant, _) in zip(entries, batch, strict=True)
        ]
        assert step.record.generation.tolist() == generations
        self._unpin()
        self.unrun = entries
        self.look()  # nothing has written yet: zeros and copies must be done, and poison be where nobody looks
        for (tenant, _), fed in zip(batch, real, strict=True):
            if tenant:
                tenant.fed += fed
        if run:
            self.planes.forward(step, real)
            self.model.forward(entries, real)
            self.mem.submit(step)
            self.model.submit()
            self.unrun = []
        flight = Flight(step, entries, [tenant for tenant, _ in batch])
        self.flights.append(flight)
        return flight

    def settle(self, finished: Sequence[bool] | None = None) -> Flight:
        """Settles the oldest step."""
        flight = self.flights.popleft()
        launched = self.model.settle(flight.entries, finished or [False] * len(flight.entries))
        with self.counted() as spent:
            self.mem.settle(flight.step, finished)
        for tenant, entry, over in zip(flight.tenants, flight.entries, finished or (), strict=bool(finished)):
            if tenant and entry.row and over:
                tenant.end = min(tenant.end, entry.after)
        assert spent["settle"] == launched and spent["uploads"] <= 2 and not spent["plan"] and not spent["syncs"]
        return flight

    def end(self, tenants: Sequence[Tenant], publish: bool | Sequence[int] = False) -> list[ms.Snapshot | None]:
        """Releases; publish: False, True or the key length of each."""
        snaps = self.mem.release([tenant.handle for tenant in tenants], publish)
        rows = [tenant.row for tenant in tenants]
        bounds = None if publish is False else [row.confirmed for row in rows]
        if bounds is not None and publish is not True:
            bounds = [min(bound, key) for bound, key in zip(bounds, publish, strict=True)]  # type: ignore[arg-type]
        self.model.end(rows, bounds, _nodes(snaps))
        self._ended(tenants, snaps)
        return snaps

    def publish(self, tenants: Sequence[Tenant]) -> list[ms.Snapshot | None]:
        snaps = self.mem.publish([tenant.handle for tenant in tenants])
        self.model.publish([t.row for t in tenants], [t.row.confirmed for t in tenants], _nodes(snaps))
        self._keep(tenants, snaps)
        return snaps

    def cancel(self, publish: bool = False) -> list[ms.Snapshot | None]:
        """Cancels the newest step; its rows end."""
        flight = self.flights.pop()
        snaps = self.mem.cancel(flight.step, publish=publish)
        ended = {
            t: snap
            for t, snap in zip(flight.tenants, snaps, strict=True)
            if t in self.tenants and t.row in [e.row for e in flight.entries]
        }
        self.model.cancel(flight.entries, _nodes(snaps), publish)
        self.unrun = []
        self._ended([t for t in ended if t], list(ended.values()))
        return snaps

    def drop(self, snaps: Sequence[ms.Snapshot]) -> None:
        self.mem.drop(snaps)
        nodes: list[Register] = [("node", snap.register) for snap in snaps]
        self.model.drop(nodes)
        self.pins += [snap for snap, node in zip(snaps, nodes, strict=True) if node in self.model.nodes]
        for snap in snaps:
            self.users.subtract(snap.pages if snap not in self.pins else ())
            if snap not in self.pins:
                del self.snaps[snap]

    def reset(self) -> None:
        self.mem.reset()
        self.model.reset()
        self.last_generation |= {tenant.handle.index: tenant.handle.generation for tenant in self.tenants}
        self.model.buffer.columns = True
        self.unrun, self.degraded_before = [], self.model.degraded
        self.tenants, self.pins = [], []
        for kept in (self.flights, self.snaps, self.users):
            kept.clear()

    def _ended(self, tenants: Sequence[Tenant], snaps: Sequence[ms.Snapshot | None]) -> None:
        self._keep(tenants, snaps)
        for tenant in tenants:
            self.last_generation[tenant.handle.index] = tenant.handle.generation
            self.tenants.remove(tenant)
            self.users.subtract(tenant.pages)
        self._unpin()

    def _unpin(self) -> None:
        for snap in [snap for snap in self.pins if ("node", snap.register) not in self.model.nodes]:
            self.pins.remove(snap)
            self.users.subtract(snap.pages)
            del self.snaps[snap]

    def _keep(self, tenants: Sequence[Tenant], snaps: Sequence[ms.Snapshot | None]) -> None:
        for tenant, snap in zip(tenants, snaps, strict=True):
            if snap:
                assert snap.length == self.model.known["node", snap.register] and snap.length <= tenant.end
                assert list(snap.pages) == (tenant.pages[: snap.length // self.model.page] if self.page_count else [])
                self.users.update(snap.pages)
                self.snaps[snap] = tuple(tenant.fed[: snap.length])


def _nodes(snaps: Sequence[ms.Snapshot | None]) -> list[Register | None]:
    return [("node", snap.register) if snap else None for snap in snaps]
