"""A process that serves requests on an owner's word. It parks them in the store, and goes on from what is there."""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from owner import Seat, Tokens
from toy import MODEL, PAGE, WHOLE, folded, open_store

import memstate as ms
from memstate.tiers import Store

CHUNK = 8  # tokens of a prompt in one step
BEAT_S = 0.02  # after this time, a process says again what it has
SLOTS = 4
KV = ms.StateLayout((ms.Plane("kv", (PAGE,), torch.int32),), layers=1)  # of each token, the token


def sampled(state: torch.Tensor, tokens: torch.Tensor) -> int:
    """Returns the next token, in place of a model's: a number of the state `layer head 2` and of all KV."""
    weights = torch.arange(1, 1 + len(tokens), device=tokens.device)
    return int(state.double().sum() + (tokens * weights).sum()) % 997


@dataclass
class Here:
    """A request in this process.

    Attributes:
        seat: Says what this process may do for it.
        tokens: All tokens.
        most: Number of tokens at which it ends.
        due: Whether it waits for its row.
        row: Its row while it runs.
        asked: Whether it is to be parked.
        parked: Its handle while it is parked.
        trip: Its way to the store or from there, as `mem.tiers.write` and `mem.tiers.read` return it.
    """

    seat: Seat = field(default_factory=Seat)
    tokens: list[int] = field(default_factory=list)
    most: int = 0
    due: bool = False
    row: ms.Row | None = None
    asked: bool = False
    parked: ms.Parked | None = None
    trip: Any = None


class Worker:
    """Serves the requests of an owner at the other end of a pipe.

    Args:
        store: The store of all processes.
        line: The pipe.
    """

    def __init__(self, store: Store, line: Connection) -> None:
        self.kv = ms.Planes(KV, 256, ms.Backend("auto"))
        self.mem = ms.StateManager(
            WHOLE, slots=SLOTS, max_requests=SLOTS, tracking=ms.NoTracking(), prefix=ms.Prefix(),
            pages=ms.Pages(size=PAGE, count=256, per_row=64),
            tiers=ms.Tiers(MODEL, host_slots=16, kv=self.kv, store=store),
        )  # fmt: skip
        self.line, self.here, self.said, self.serving, self.computed = line, dict[str, Here](), 0.0, True, 0

    def serve(self) -> None:
        """Runs until the owner says stop and nothing is left here. Then says what is left."""
        while self.serving or any(map(self.holds, self.here.values())) or len(self.mem.tiers.parked):
            while self.line.poll(0 if any(one.row for one in self.here.values()) else 0.001):
                kind, *given = self.line.recv()
                getattr(self, f"hear_{kind}")(*given)
            for name, one in self.here.items():
                self.advance(name, one)
                if one.row is not None and one.seat.speaks():
                    self.step(name, one)
            self.mem.poll()
            if time.monotonic() > self.said + BEAT_S:
                self.say("holds", {name: one.seat.seen for name, one in self.here.items() if self.holds(one)})
        self.say("left", self.left(), self.computed)
        self.mem.close()

    def say(self, *message: object) -> None:
        """Sends a message to the owner."""
        self.line.send(message)
        self.said = time.monotonic()

    def holds(self, one: Here) -> bool:
        """Returns whether anything of a request is here."""
        return one.seat.speaks() or one.seat.parked is not None

    def hear_run(
        self, name: str, epoch: int, tokens: Tokens, most: int, saved: tuple[int, Tokens, bytes] | None
    ) -> None:
        """Hears the owner's word to run a request up to `most` tokens. saved: what was parked of it last."""
        one = self.here.setdefault(name, Here())
        if saved is not None:
            one.seat.take(*saved)
        if one.seat.run(epoch):
            source = one.seat.use(tokens)
            self.clear(one, source)
            one.tokens, one.most, one.due = list(tokens), most, True
            if isinstance(source, bytes):
                with suppress(ms.OutOfRecords):  # no room to read it: then its tokens are computed again
                    one.trip = self.mem.tiers.read(source)

    def hear_park(self, name: str, epoch: int) -> None:
        """Hears that a request is to be parked."""
        one = self.here[name]
        one.asked = one.seat.speaks() and epoch == one.seat.seen

    def hear_over(self, name: str, epoch: int) -> None:
        """Hears that an epoch is over."""
        if self.here[name].seat.over(epoch):
            self.clear(self.here[name])

    def hear_stop(self) -> None:
        """Hears that nothing more comes."""
        self.serving = False

    def clear(self, one: Here, but: object = None) -> None:
        """Ends what is here of a request, but not a handle from which it is going to go on."""
        if one.row is not None:
            self.mem.end([one.row])
        if one.trip is not None:
            one.trip.cancel()
        handles = {one.parked, one.trip and one.trip.parked} - {None, but}
        self.mem.drop(list(handles))
        one.row, one.trip, one.due, one.asked = None, None, False, False
        one.parked = but if isinstance(but, ms.Parked) else None

    def advance(self, name: str, one: Here) -> None:
        """Goes on with a request that is on its way, waits for its row, or is to be parked."""
        if one.trip is not None and one.trip.done:
            trip, one.trip = one.trip, None
            if one.due:
                one.parked = trip.parked  # None if it has failed: then all tokens are computed again
            else:
                self.say("parked", name, one.seat.seen, one.seat.parked[0], trip.manifest)
        if one.due and one.trip is None:
            request = ms.Request(name, one.most, tokens=one.tokens, resume=one.parked)
            with suppress(ms.OutOfSlots, ms.OutOfRows, ms.OutOfPages):  # it waits until another one ends or is parked
                (one.row,) = self.mem.admit([request])
                one.due, one.parked = False, None
        if one.asked and one.row is not None:
            with suppress(ms.OutOfRecords):  # host memory is full for now
                (one.parked,) = self.mem.park([one.row], [one.tokens])
                one.row, one.asked = None, False
                one.seat.park(tuple(one.tokens), one.parked)
                one.trip = self.mem.tiers.write(one.parked)

    def step(self, name: str, one: Here) -> None:
        """Computes a chunk or a token of a request, and says what was sampled."""
        at = self.mem.info(one.row).length
        fed = one.tokens[at : at + CHUNK]
        step = self.mem.plan([one.row], len(fed))
        states, kv, pages = self.mem.planes["ssm"], self.kv["kv"][0], self.mem.device.page_table[one.row.index].long()
        for place, token in enumerate(fed, at):
            kv[pages[place // PAGE], place % PAGE] = token
        states[:, step.write] = state = folded(states[:, step.read], fed, 0)
        self.mem.settle(step)
        self.computed += len(fed)
        if (length := at + len(fed)) == len(one.tokens):
            one.tokens.append(sampled(state, kv[pages].flatten()[:length]))
            self.say("count", name, one.seat.seen, length, one.tokens[-1])
            if len(one.tokens) == one.most:
                self.mem.end([one.row])
                one.row = None

    def left(self) -> dict[str, int]:
        """Returns what is still held here; all figures are 0 if nothing is."""
        self.mem.audit().raise_if_leaking()
        stats = self.mem.stats()
        left = {"slots": SLOTS - self.mem.free_slots, "rows": stats.rows_used, "parked": len(self.mem.tiers.parked)}
        return left | {"states in host memory": stats.tiers.host_states, "leaked records": stats.tiers.leaked_records}


def work(place: str, line: Connection) -> None:
    """Runs a process of `moves.py`."""
    torch.set_num_threads(1)
    Worker(open_store(place), line).serve()
