"""Random schedules: the manager and the model of its rules agree after every operation, and so do all bytes.

    python -m tests.engine.test_tracking_model --operations 100000 --seed 1 [--strategy lazy] [--overlap 0]
        [--backend cuda]

runs long, with a fresh configuration every thousand operations, and prints the seed of each. MEMSTATE_SEED is the first
seed under pytest.
"""

import argparse
import os
import random
from collections import deque
from collections.abc import Callable

import pytest

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.support.model import Rules
from tests.support.pair import Tenant
from tests.support.rig import NO_LIMIT, Rig
from tests.support.sampling import PROOF
from tests.support.scan import scan

STRATEGIES = ("none", "ping-pong", "lazy", "redirect")
SEED = int(os.environ.get("MEMSTATE_SEED", "1"))
LONGEST = 40  # tokens of a request
WIDTHS = (1, 1, 1, 2, 3, 8)  # tokens of a chunk


class Schedule:
    """One configuration and the operations that its seed chooses."""

    def __init__(self, seed: int, strategy: str, overlap: bool, backend: Backend) -> None:
        self.random = random.Random(f"{seed} {strategy} {overlap}")
        choose = self.random.choice
        rules = Rules.of(strategy, choose((1, 2, 4, 4, 6)), overlap, in_place=choose((True, False)))
        page = choose([n for n in (1, 2, 3) if rules.every % n == 0])
        rows = self.random.randint(2, 6)
        capacity = self.random.randint((1 + rules.admission) * (rows + 1) // 2, rules.most_slots * rows + 3)
        self.rig = Rig(
            rules, overlap, backend, capacity=capacity, rows=rows, snapshots=choose((0, 1, 2, 3, 4, 6)),
            direct=choose((True, False)), reserve=choose((0, 0, 1)), page=page, pages=choose((0, 3 * LONGEST // page)),
        )  # fmt: skip
        self.batch: list[tuple[Tenant | None, int]] = []
        self.stale: list[ms.Row] = []
        self.log: deque[str] = deque(maxlen=25)
        self.operations: dict[Callable[[], object], int] = {
            self.admit: 9, self.step: 24, self.settle: 10, self.leave: 5, self.publish: 5, self.drop: 4,
            self.cancel: 1, self.submit: 2, self.misuse: 2,
        }  # fmt: skip

    def __str__(self) -> str:
        m = self.rig.model
        size = f"{m.capacity} slots, {self.rig.row_count} rows, {m.node_limit} holders"
        pages = f"{self.rig.page_count} pages of {m.page}"
        return f"{m.rules}, overlap={self.rig.overlap}, direct={m.direct}, reserve={m.reserve}, {size}, {pages}"

    def run(self, operations: int) -> None:
        for i in range(operations):
            (operation,) = self.random.choices(list(self.operations), list(self.operations.values()))
            if i % 150 == 149:
                operation = self.audit_and_reset
            self.log.append(operation.__name__)
            try:
                operation()
                self.rig.look()
            except Exception as error:
                error.add_note(f"{self}\noperation {i}, the last ones:\n  " + "\n  ".join(self.log))
                raise
        self.close()

    def note(self, *what: object) -> None:
        self.log[-1] += " " + " ".join(map(str, what))

    def some(self, most: int = 3) -> list[Tenant]:
        count = min(self.random.randint(1, most), len(self.rig.tenants))
        return self.random.sample(self.rig.tenants, count)

    @property
    def kept(self) -> list[ms.Snapshot]:
        return [snap for snap in self.rig.snaps if snap not in self.rig.pins]

    def admit(self) -> None:
        requests = []
        for i in range(self.random.choice((1, 1, 1, 2, 3))):
            resume = self.random.choice(self.kept) if self.kept and self.random.random() < 0.6 else None
            page, base = self.rig.model.page, resume.length if resume else 0
            snapshot_at = (base + self.random.randint(0, 9)) // page * page if self.random.random() < 0.4 else 0
            length = base + self.random.randint(0, 6) if self.rig.page_count else 0
            requests.append(ms.Request(f"request {i}", length=length, resume=resume, snapshot_at=snapshot_at))
        tenants = self.rig.admit(requests)
        self.note(requests, "->", [t.handle.index for t in tenants])

    def step(self) -> None:
        self.plan(run=True)

    def plan(self, run: bool) -> bool:
        if len(self.rig.flights) > self.rig.overlap:
            self.settle()
            self.log.append("then")
        batch = [(t, n) for t, n in self.batch if t is None or t in self.rig.tenants]
        if self.random.random() < 0.5:  # the same batch again sends nothing to the device
            batch = [(t, 1) for t in self.some(5)]
            padding = self.random.randint(0, self.rig.row_count + 2 - len(batch))
            batch = self.random.sample([*batch, *[(None, 1)] * padding], len(batch) + padding)
        if self.random.random() < 0.3:
            batch = [(t, self.random.choice(WIDTHS)) for t, _ in batch]
        self.batch = batch
        alive = [t for t, _ in batch if t and not t.row.finished]
        room = {t: self.rig.model.next_boundary(t.row) - self.rig.model.length(t.row) for t in alive}
        fed = [(t, self.tokens(min(n, room[t])) if t in room else (7,)) for t, n in batch]
        if self.rig.page_count and not self.rig.extend(
            alive, [self.rig.model.length(t.row) + len(tokens) for t, tokens in fed if t in room]
        ):
            return False
        limit = self.random.choice((NO_LIMIT, NO_LIMIT, NO_LIMIT, 0, 1, 2))
        flight = self.rig.plan(fed, limit, run=run)
        said = [(e.row and e.row.number, e.before, e.after, e.read, e.write, e.snapshot) for e in flight.entries]
        self.note("limit", limit, *said)
        return True

    def tokens(self, n: int) -> tuple[int, ...]:
        return tuple(self.random.randrange(10**6) for _ in range(n))

    def settle(self) -> None:
        if self.rig.flights:
            flight = self.rig.flights[0]
            over = [bool(e.row) and (e.after > LONGEST or self.random.random() < 0.08) for e in flight.entries]
            ended = [e.row.number for e, is_over in zip(flight.entries, over, strict=True) if e.row and is_over]
            self.note("finished", ended)
            self.rig.settle(over if any(over) or self.random.random() < 0.5 else None)

    def leave(self) -> None:
        finished = [t for t in self.rig.tenants if t.row.finished]
        leaving = finished if finished and self.random.random() < 0.8 else []
        leaving = leaving or (self.some(2) if self.random.random() < 0.3 else [])
        keys = [self.random.randint(0, len(t.fed) + 1) for t in leaving]
        publish = self.random.choice((True, True, False, keys))
        self.stale = [t.handle for t in leaving] or self.stale
        snaps = self.rig.end(leaving, publish)
        self.note([t.handle.index for t in leaving], "publish", publish, "->", snaps)

    def publish(self) -> None:
        tenants = [t for t in self.some() if not t.row.finished]
        self.note([t.handle.index for t in tenants], "->", self.rig.publish(tenants))

    def drop(self) -> None:
        snaps = self.random.sample(self.kept, min(len(self.kept), self.random.randint(0, 2)))
        awaited = [snap for snap in self.kept if self.rig.model.pins["node", snap.register]]
        if awaited and self.random.random() < 0.5:
            snaps = [self.random.choice(awaited)]
        self.note(snaps)
        self.rig.drop(snaps)

    def cancel(self) -> None:
        if self.plan(run=False):
            if len(self.rig.flights) > 1 and self.random.random() < 0.3:
                self.settle()
            self.note("cancelled ->", self.rig.cancel(publish=self.random.random() < 0.5))

    def submit(self) -> None:
        self.rig.mem.submit()
        self.rig.model.submit()

    def audit_and_reset(self) -> None:
        self.rig.model.submit()
        report = self.rig.mem.audit()
        report.raise_if_leaking()
        scan(self.rig.mem)
        assert report.free == self.rig.model.free_count
        self.rig.mem.check()
        self.rig.look()
        if self.random.random() < 0.5:
            self.note("reset")
            self.stale = [t.handle for t in self.rig.tenants] or self.stale
            self.rig.reset()

    def misuse(self) -> None:
        """Raises a named error and changes nothing; the comparison after it says so."""
        mem, rig = self.rig.mem, self.rig
        alive = [t for t in rig.tenants if not t.row.finished]
        wrong: list[tuple[type[ms.MemstateError], Callable[[], object]]] = []
        if self.stale:
            old = self.random.choice(self.stale)
            for call in (mem.release, mem.abort, mem.retract, mem.publish):
                wrong.append((ms.StaleHandle, lambda call=call: call([old])))
            early = ms.StaleHandle if len(rig.flights) <= rig.overlap else ms.InvalidArgument
            wrong.append((early, lambda: mem.plan([old])))
        if len(rig.flights) == 2:
            wrong.append((ms.InvalidArgument, lambda: mem.settle(rig.flights[1].step)))
            wrong.append((ms.InvalidArgument, lambda: mem.cancel(rig.flights[0].step)))
        if len(rig.flights) > rig.overlap:
            wrong.append((ms.InvalidArgument, lambda: mem.plan([t.handle for t in alive])))
        elif alive:
            handle, row = alive[0].handle, alive[0].row
            wrong.append((ms.InvalidArgument, lambda: mem.plan([handle, handle])))
            wrong.append((ms.InvalidArgument, lambda: mem.plan([handle], tokens=0)))
            if rig.rules.lanes:
                beyond = rig.model.next_boundary(row) - rig.model.length(row) + 1
                wrong.append((ms.InvalidArgument, lambda: mem.plan([handle], tokens=beyond)))
        if self.kept:
            snap = self.random.choice(self.kept)
            wrong.append((ms.InvalidArgument, lambda: mem.drop([snap, snap])))
        if rig.pins:
            gone = self.random.choice(rig.pins)
            wrong.append((ms.StaleHandle, lambda: mem.drop([gone])))
            wrong.append((ms.StaleHandle, lambda: mem.admit([ms.Request("late", resume=gone)])))
        for error, call in wrong:
            with pytest.raises(error):
                call()

    def close(self) -> None:
        """Everything ends, everything is free."""
        while self.rig.flights:
            self.rig.settle()
        for last in (lambda: self.rig.end(list(self.rig.tenants)), lambda: self.rig.drop(self.kept), self.submit):
            last()
            self.rig.look()
        assert self.rig.mem.free_slots == self.rig.model.capacity and self.rig.mem.free_pages == self.rig.page_count
        scan(self.rig.mem)


@pytest.mark.sample
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_random_schedules_follow_the_rules(strategy: str, overlap: bool, backend: Backend) -> None:
    runs, operations = (12 if PROOF else 6, 200) if backend.name == "reference" else (2, 110)
    for seed in range(SEED, SEED + runs):
        Schedule(seed, strategy, overlap, backend).run(operations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--strategy", choices=STRATEGIES)
    parser.add_argument("--overlap", type=int, choices=(0, 1))
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    backend = Backend(chosen.backend, chosen.device)
    done = 0
    seed = chosen.seed
    while done < chosen.operations:
        for strategy in [chosen.strategy] if chosen.strategy else STRATEGIES:
            for overlap in (0, 1) if chosen.overlap is None else (chosen.overlap,):
                schedule = Schedule(seed, strategy, bool(overlap), backend)
                print(f"{done} operations done; seed {seed}: {schedule}", flush=True)
                schedule.run(1000)
                done += 1000
        seed += 1
    print(f"{done} operations, no difference")


if __name__ == "__main__":
    main()
