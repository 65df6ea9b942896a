"""Snapshots written in the same pass into one of two lanes: eager (both lanes held) and lazy (the second claimed when
due).

One row under PingPong, I = 4, unpublished snapshots in brackets; `a`, `b` are slots:

    length      1    2    3    4       5    6    7    8          12
    lane 0      a    a    a   [a@4]   .................  [a@4]   [a@12]
    lane 1      b    b    b    b      .................  [b@8]   [b@8]     the smaller label is next
"""

from dataclasses import dataclass

from memstate.checks import is_count
from memstate.errors import ConfigurationError
from memstate.kernels.tables import Strategy
from memstate.requests.tracking.base import Tracking, TryClaim, lane_registers, last_boundary
from memstate.slots.registers import RegisterFile


class _Alternating(Tracking):
    """The choice of a lane that both strategies share."""

    def needs_claim(self, file: RegisterFile, row: int, length: int, lanes: int, window: bool = False) -> bool:
        registers = lane_registers(row, lanes)
        return not file.held[registers].all() and not (file.held[registers] & (file.labels[registers] == 0)).any()

    def boundary(self, file: RegisterFile, row: int, length: int, after: int, lanes: int, claim: TryClaim) -> bool:
        registers = lane_registers(row, lanes)
        held = [lane for lane in registers if file.held[lane]]
        if not self.needs_claim(file, row, length, lanes):
            lane = min(held, key=lambda lane: int(file.labels[lane]))  # nothing valid in it: label 0, the smallest
        elif claim():
            lane = next(lane for lane in registers if not file.held[lane])
        elif self.in_place and held:
            lane = held[0]
        else:
            return False
        file.held[lane], file.labels[lane] = True, after
        return True

    def accept(self, file: RegisterFile, row: int, length: int, after: int, lanes: int, claim: TryClaim) -> bool:
        mark = last_boundary(self, file, row, length, after)
        return bool(mark) and self.boundary(file, row, length, mark, lanes, claim)


@dataclass(frozen=True)
class PingPong(_Alternating):
    """Two lanes held from admission on (one without overlap); snapshots alternate.

    lane_count: None chooses 2 with overlap and 1 without.
    """

    lane_count: int | None = None

    strategy = Strategy.PING_PONG

    def lanes(self, overlap: bool) -> int:
        return self.lane_count if self.lane_count is not None else 2 if overlap else 1

    def lanes_at_admission(self, overlap: bool) -> int:
        return self.lanes(overlap)

    def validate(self, page_size: int, overlap: bool) -> None:
        super().validate(page_size, overlap)
        if self.lane_count is not None and not (is_count(self.lane_count) and 1 <= self.lane_count <= 2):
            raise ConfigurationError(f"lane_count={self.lane_count!r}: a row has 1 or 2 lanes")
        if overlap and self.lanes(overlap) < 2:
            raise ConfigurationError(
                "one lane with overlap: a dead step could overwrite the only snapshot; use 2 lanes or overlap=False"
            )


@dataclass(frozen=True)
class LazyPingPong(_Alternating):
    """One lane held; the second is claimed at a boundary and the older one released at the next settle of the row.

    overwrite: with nothing free the only lane is overwritten in place; otherwise the boundary passes without a
    snapshot.
    """

    overwrite: bool = True

    strategy = Strategy.LAZY
    releases_at_settle = True

    @property
    def in_place(self) -> bool:
        return self.overwrite

    def lanes(self, overlap: bool) -> int:
        return 2

    def lanes_at_admission(self, overlap: bool) -> int:
        return 1

    def settle(self, file: RegisterFile, row: int, known: int) -> int:
        lanes = lane_registers(row, 2)
        top = max((int(file.labels[lane]) for lane in lanes if file.labels[lane] <= known), default=0)
        old = [lane for lane in lanes if file.held[lane] and file.labels[lane] < top]
        file.held[old] = False
        file.labels[old] = 0
        return len(old)
