"""Drives a small manager beside the model of `tests/proof/stateful`: lists the allowed calls, and makes them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product
from typing import Any

import memstate as ms
from memstate.kernels.dispatch import Backend
from tests.proof.stateful.cache import Start
from tests.proof.stateful.ledger import Row
from tests.proof.stateful.machine import Flight
from tests.proof.stateful.operations import NO_LIMIT, Operations
from tests.proof.stateful.settings import Digits, Settings

ROWS, SLOTS, EVERY = 3, 5, 2
LONGEST = 7  # limit of the tokens of a row: three boundaries, and one token more
NOTHING = Digits(0)

Move = tuple[Any, ...]  # (name of a method of `World`, *arguments)
Batch = Sequence[tuple[int, int]]  # (row, number of tokens) each


def case(strategy: str, overlap: bool = True, **more: Any) -> Settings:
    return Settings(strategy, EVERY, overlap, slots=SLOTS, rows=ROWS, **more)


def tailed(strategy: str, every: int = EVERY, overlap: bool = False, rings: bool = True, **more: Any) -> Settings:
    return replace(case(strategy, overlap, tails=rings, tail=2, **more), every=every)


CASES = {
    "Redirect": case("redirect"),
    "Redirect, pages of 2": case("redirect", page_size=2),
    "Redirect, copied hits": case("redirect", direct_hits=False),
    "Redirect, in place": case("redirect", in_place=True),
    "Redirect, rows and a grid": case("redirect", tails=True, alone=2),
    "Redirect, tails": tailed("redirect"),
    "Redirect, tails, every=4": tailed("redirect", 4),
    "Redirect, tails, overlap": tailed("redirect", overlap=True),
    "PingPong": case("ping-pong"),
    "PingPong, direct hits": case("ping-pong", direct_hits=True, page_size=2),
    "PingPong, tails": tailed("ping-pong"),
    "LazyPingPong": case("lazy"),
    "LazyPingPong, skipping": case("lazy", overwrite=False, page_size=2),
    "LazyPingPong, tails, overlap": tailed("lazy", 4, overlap=True),
    "NoTracking": case("none"),
    "NoTracking, tails, in place": tailed("none", rings=False, in_place=True),
}


class Caller(Operations):
    """Feeds each row one token again and again, so that all states of the row with the same length are equal."""

    def feed(self, row: Row, length: int, n: int) -> list[int]:
        return [row.taste] * n

    def number(self, handles: Sequence[ms.Row]) -> list[ms.Row]:
        """Gives each new row a token: the lowest number that no other row or kept state uses. Returns the rows."""
        for handle in handles:
            tenants = [entry.row for flight in self.flights for entry in flight.planned.entries if entry.row]
            tenants += [row for row in self.handles.values() if row is not self.handles[handle]]
            used = {row.taste for row in tenants}
            used.update(*[one.text for one in (*tenants, self.handles[handle], *self.model.kept.values())])
            self.handles[handle].taste = min(set(range(1, len(used) + 2)) - used)
        return list(handles)


class World:
    """A manager and its model, with all moves that are possible.

    A move is a call of one of the methods that `moves` names. A refused move returns False, and changes nothing.
    to_run: the step whose forward has not run.
    """

    def __init__(self, settings: Settings) -> None:
        self.at = Caller(settings, Backend("reference"))
        self.mem, self.model = self.at.mem, self.at.model
        self.to_run: Flight | None = None

    # The moves

    def moves(self) -> Iterator[Move]:
        """Yields all allowed moves. Of moves that differ only in arguments without an effect, yields one."""
        model, at = self.model, self.at
        if self.to_run:
            yield ("forward",)
        if self.to_run and not model.late:
            yield from (("cancel", publish) for publish in (False, True))
        if at.flights:
            yield from self._settling(at.flights[0])
            yield from self._sampling(at.flights[-1])
        if len(at.flights) <= at.settings.overlap:
            yield from self._planning()
        if len(model.rows) < ROWS:
            yield ("admit", 0)
            yield from (("admit", snap.register) for snap in at.snaps)
            yield from (("fork", number) for number, row in model.rows.items() if not (row.unsettled or row.finished))
        for number in (number for number, row in model.rows.items() if row not in model.undecided):
            yield from ((name, number) for name in ("abort", "release", "publish"))
        yield from (("drop", snap.register) for snap in at.snaps)
        if model.open:
            yield ("launched",)
        if model.queue:
            yield ("submit",)

    def _settling(self, oldest: Flight) -> Iterator[Move]:
        entries = oldest.planned.entries
        alive = [bool((row := self.model.tenant(entry)) and not row.finished) for entry in entries]
        for over in product(*((False, True) if lives else (False,) for lives in alive)):
            if not oldest.planned.drafted:
                yield ("settle", over)
            elif oldest.written:
                yield "accept", tuple(oldest.accepted), over
            else:
                pairs = [(entry.certain, len(entry.tokens)) for entry in entries]
                counts = [range(m if lives else n, n + 1) for (m, n), lives in zip(pairs, alive, strict=True)]
                yield from (("accept", accepted, over) for accepted in product(*counts))

    def _sampling(self, newest: Flight) -> Iterator[Move]:
        """Yields all numbers of accepted tokens that a sampler could write before the next plan."""
        if self.at.settings.overlap and newest.planned.drafted and not newest.written:
            entries = newest.planned.entries
            counts = [range(entry.certain, len(entry.tokens) + 1) for entry in entries]
            yield from (("sample", accepted) for accepted in product(*counts))

    def _planning(self) -> Iterator[Move]:
        """Yields plans of every set of rows, with all numbers of tokens that make a difference."""
        if (flights := self.at.flights) and flights[-1].planned.drafted and not flights[-1].written:
            return
        running = [number for number, row in self.model.rows.items() if not row.finished]
        for size in range(1, len(running) + 1):
            for rows in combinations(running, size):
                for tokens in product(*map(self._tokens, rows)):
                    yield from self._batches(tuple(zip(rows, tokens, strict=True)))
                    if self.at.settings.tail:
                        yield from self._drafted(tuple(zip(rows, tokens, strict=True)))
                if len(rows) == len(running) and all(map(self._tokens, rows)):
                    yield "replay", tuple((row, self._tokens(row)[-1]) for row in rows), NO_LIMIT

    def _drafted(self, batch: Batch) -> Iterator[Move]:
        """Yields plans of a batch whose drafts are all tokens, all except one per row, or those of the first row."""
        most = self.at.settings.tail
        if all(0 < n <= most for _, n in batch):
            every = [n for _, n in batch]
            chosen = {tuple(every), tuple(n - 1 for n in every), (every[0], *[0] * (len(every) - 1))}
            for drafts in sorted(chosen):
                if any(drafts):
                    yield "draft", batch, drafts

    def _tokens(self, row: int) -> list[int]:
        """Returns the numbers of tokens to plan: 1, those up to the next boundary, and 0 if tokens may be pending."""
        one, every = self.model.rows[row], self.at.settings.every
        length = len(self.model.text_of(one))
        none = {0} if one.pending or self.model.unsure(one) else set[int]()
        return [n for n in sorted({1, every - length % every} | none) if length + n <= LONGEST]

    def _batches(self, batch: Batch) -> Iterator[Move]:
        """Yields plans of a batch, with and without claims. If slots are short, claiming rows come in all orders."""
        late = any(self.model.unsure(self.model.rows[row]) for row, _ in batch)
        first = [(row, n) for row, n in batch if self.model.needs(self.model.rows[row], n, most=late)]
        rest = [one for one in batch if one not in first]
        orders = permutations(first) if len(first) > self.model.free_count else [first]
        yield from (("plan", (*order, *rest), NO_LIMIT) for order in orders)
        if first:
            yield "plan", (*first, *rest), 0

    # The calls

    def apply(self, move: Move) -> bool:
        """Makes a move, and compares manager and model. Returns whether the move was refused."""
        name, *arguments = move
        refused = getattr(self, name)(*arguments) is False
        if name not in ("plan", "replay", "draft"):  # these three compare, too
            self.at.look()
        return refused

    def _handle(self, number: int) -> ms.Row:
        return next(handle for handle in self.at.handles if handle.index == number)

    def admit(self, register: int) -> bool:
        snap, start = next((snap for snap in self.at.snaps if snap.register == register), None), Start("r")
        if snap:
            start = replace(start, origin=self.at.snaps[snap], length=snap.length, shared=snap.pages)
        rows = self.at.admit_all(NOTHING, [(ms.Request("r", resume=snap), start, set())])
        return bool(self.at.number(rows))

    def fork(self, row: int) -> bool:
        return bool(self.at.number(self.at.fork_row(self._handle(row), ["f"], set())))

    def plan(self, batch: Batch, limit: int, replays: bool = False, drafts: Sequence[int] = ()) -> None:
        self._close()
        handles, counts = [self._handle(row) for row, _ in batch], [n for _, n in batch]
        flight = self.at.plan_batch(
            NOTHING, handles, counts, limit, run=False, replays=replays, drafts=drafts, accepted=counts
        )
        self.to_run = None if replays else flight

    def draft(self, batch: Batch, drafts: Sequence[int]) -> None:
        self.plan(batch, NO_LIMIT, drafts=drafts)

    def sample(self, accepted: Sequence[int]) -> None:
        """Writes the numbers of accepted tokens to the device, as a sampler does after the forward."""
        self._close()
        self.at.flights[-1].accepted = list(accepted)
        self.at.write(self.at.flights[-1])

    def replay(self, batch: Batch, limit: int) -> None:
        """Plans a batch whose forward runs inside the plan, as in a captured graph."""
        self.plan(batch, limit, replays=True)

    def forward(self) -> None:
        self.at.forward(self.to_run)
        self.to_run = None

    def _close(self, flight: Flight | None = None) -> None:
        """Runs the forward of the open step, if it has not run. flight: only if it is this step."""
        if self.to_run and flight in (None, self.to_run):
            self.forward()

    def launched(self) -> None:
        self._close()
        self.at.tell_launched()

    def submit(self) -> None:
        self.at.submit(NOTHING)

    def settle(self, over: Sequence[bool]) -> None:
        self._close(self.at.flights[0])
        self.at.settle_step(self.at.flights[0], list(over), list(over) if any(over) else None)

    def accept(self, accepted: Sequence[int], over: Sequence[bool]) -> None:
        flight = self.at.flights[0]
        self._close(flight)
        self.at.accept_step(flight, list(accepted), list(accepted), list(over), flight.written)

    def cancel(self, publish: bool) -> bool:
        done = self.at.cancel_step(self.to_run, "handle" if publish else None)
        self.to_run = None if done else self.to_run
        return done

    def abort(self, row: int) -> None:
        self.at.end_rows(NOTHING, [self._handle(row)], "abort")

    def release(self, row: int) -> None:
        self.at.end_rows(NOTHING, [self._handle(row)], "publish")

    def publish(self, row: int) -> None:
        self.at.publish_rows([self._handle(row)], set())

    def drop(self, register: int) -> None:
        self.at.drop_snaps([snap for snap in self.at.snaps if snap.register == register], set())

    def end(self) -> None:
        """Ends everything, and asserts that all slots are free."""
        self._close()
        self.at.end_all()
        self.submit()
        self.at.look()
        assert self.mem.free_slots == SLOTS and not self.model.kept

    def warm_up(self) -> list[list[Move]]:
        """Makes the manager busier in three stages. Returns for each stage the moves from the start to its end.

        Stage 1 has one or two rows at their second boundary. In stage 2, if there are two rows, one publishes its
        snapshot, and a third row starts from it. Stage 3 adds a step of all rows, whose forward has not run. If drafts
        can be accepted after the next plan, it adds two steps with drafts instead; the first has one real token per
        row, and its drafts are not accepted yet.
        """
        moves: list[Move] = []
        stages: list[list[Move]] = []

        def make(*move: Any) -> None:
            if not self.apply(move):
                moves.append(move)

        make("admit", 0)
        make("admit", 0)
        for _ in range(2):
            make("plan", tuple((row, EVERY) for row in self.model.rows), NO_LIMIT)
            make("settle", (False,) * len(self.model.rows))
        stages.append(list(moves))
        if len(self.model.rows) > 1:
            make("publish", 1)
        for snap in list(self.at.snaps):
            make("admit", snap.register)
        stages.append(list(moves))
        if self.at.settings.tail and self.at.settings.overlap:
            batch, ones = tuple((row, 2) for row in self.model.rows), (1,) * len(self.model.rows)
            make("draft", batch, ones)
            make("sample", ones)
            make("draft", batch, ones)
        else:
            make("plan", tuple((row, 1) for row in self.model.rows), NO_LIMIT)
        stages.append(list(moves))
        return stages
