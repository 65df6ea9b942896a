"""Snapshots written in the same pass into one of two lanes: eager (both lanes held) and lazy (the second claimed when
due).

One row under PingPong, I = 4, unpublished snapshots in brackets; `a`, `b` are slots:

    length      1    2    3    4       5    6    7    8          12
    lane 0      a    a    a   [a@4]   .................  [a@4]   [a@12]
    lane 1      b    b    b    b      .................  [b@8]   [b@8]     the smaller label is next
"""

from dataclasses import dataclass

from memstate.errors import ConfigurationError
from memstate.kernels.tables import Strategy
from memstate.registers import RegisterFile
from memstate.tracking.base import Claim, Tracking, lane_registers


class _Alternating(Tracking):
    """The choice of a lane that both strategies share."""

    def boundary(self, file: RegisterFile, row: int, length: int, after: int, lanes: int, claim: Claim) -> bool:
        lane = _choose(file, lane_registers(row, lanes), claim, self.in_place)
        if lane is None:
            return False
        file.held[lane], file.labels[lane] = True, after
        return True


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
        if self.lane_count not in (None, 1, 2):
            raise ConfigurationError(f"lane_count={self.lane_count}: a row has 1 or 2 lanes")
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


def _choose(file: RegisterFile, lanes: list[int], claim: Claim, in_place: bool) -> int | None:
    held = [lane for lane in lanes if file.held[lane]]
    idle = [lane for lane in held if file.labels[lane] == 0]
    if idle:
        return idle[0]
    if len(held) == len(lanes):
        return min(held, key=lambda lane: int(file.labels[lane]))
    if claim():
        return next(lane for lane in lanes if not file.held[lane])
    return held[0] if in_place and held else None
