"""Makes transfers on a CPU that arrive as late as those of a GPU may."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

import memstate as ms
from memstate.tiers.host.packing import Packing
from memstate.tiers.host.pool import RecordPool
from memstate.tiers.host.transfers import Ticket, Transfers


class Patient(Transfers):
    """Transfers on a GPU that never give up a save because staging is full, but wait."""

    room = 2**31  # type: ignore[assignment]


def wait_for_staging(mem: ms.StateManager) -> None:
    """Lets a manager on a GPU save as many records at once as a manager on a CPU."""
    for each in mem.tiers.host.sets:  # type: ignore[union-attr]
        each.transfers.__class__ = Patient


class LateTicket(Ticket):
    """The ticket of a transfer. Its bytes move when a stream waits for it; for the host they arrive at `land`.

    left: whether the bytes have yet to move. there: whether they have arrived. waits: how often a stream has waited.
    """

    def __init__(self, move: Callable[[], None]) -> None:
        super().__init__()
        self._move, self.left, self.there, self.waits = move, True, False, 0

    @property
    def done(self) -> bool:
        return self.there

    def wait(self) -> None:
        self.waits += 1
        self._reach()

    def synchronize(self) -> None:
        self.land()

    def land(self) -> None:
        self._reach()
        self.there = True

    def _reach(self) -> None:
        if self.left:
            self._move()
        self.left = False


class Late(Transfers):
    """Transfers that arrive late.

    A save packs its bytes at once, but they arrive later. A load writes to slots only when a stream waits for it.
    """

    made: ClassVar[list["Late"]] = []

    def __init__(self, packing: Packing, pool: RecordPool, staging: int, slots: Tensor | None) -> None:
        super().__init__(packing, pool, staging, slots)
        self.tickets: list[tuple[str, list[int], LateTicket]] = []
        Late.made.append(self)

    def out(self, index: Sequence[int], records: Sequence[int]) -> Ticket:
        self.moved_out += len(records)
        packed = torch.zeros((len(index), self.packing.nbytes), dtype=torch.uint8, device="cpu")
        self.packing.pack(self._slots, *self._columns(index, range(len(index))), packed)

        def move() -> None:
            self._bodies[list(records)] = packed

        return self._later("out", records, move)

    def into(self, index: Sequence[int], records: Sequence[int]) -> Ticket:
        for kind, of, ticket in self.tickets:
            if kind == "out" and set(of) & set(records):
                ticket.wait()  # the stream of the load waits for a save of the same record
        self.moved_in += len(records)
        columns = self._columns(index, records)

        def move() -> None:
            self.packing.unpack(self._slots, *columns, self._bodies)

        return self._later("into", records, move)

    @staticmethod
    def _columns(*columns: Sequence[int]) -> tuple[Tensor, Tensor]:
        one, two = (torch.tensor(column, dtype=torch.int32, device="cpu") for column in columns)
        return one, two

    def _later(self, kind: str, records: Sequence[int], move: Callable[[], None]) -> Ticket:
        ticket = LateTicket(move)
        self.tickets.append((kind, list(records), ticket))
        return ticket

    def flying(self, kind: str) -> list[LateTicket]:
        """Returns the tickets of a kind, "out" or "into", that are not done."""
        return [ticket for of, _, ticket in self.tickets if of == kind and not ticket.there]

    def unread(self, kind: str) -> list[LateTicket]:
        """Returns the tickets of a kind, "out" or "into", whose bytes have not moved."""
        return [ticket for of, _, ticket in self.tickets if of == kind and ticket.left]
