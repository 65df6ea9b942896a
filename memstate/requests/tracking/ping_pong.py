"""Writes snapshots in the same pass into one of two lanes.

PingPong is eager: both lanes are held. LazyPingPong claims the second lane when a snapshot is due.

One row under PingPong, I = 4, unpublished snapshots in brackets; `a`, `b` are slots:

    length      1    2    3    4       5    6    7    8          12
    lane 0      a    a    a   [a@4]   .................  [a@4]   [a@12]
    lane 1      b    b    b    b      .................  [b@8]   [b@8]     the smaller label is next
"""

from dataclasses import dataclass

from memstate.checks import is_count
from memstate.errors import ConfigurationError
from memstate.kernels.tables import Strategy
from memstate.requests.tracking.base import Tracking


@dataclass(frozen=True)
class PingPong(Tracking):
    """Two lanes held from admission on (one without overlap); snapshots alternate.

    Args:
        every: tokens between boundaries.
        lane_count: 1 or 2. None: 2 with overlap and 1 without.

    Example:
        >>> PingPong(every=64).most_slots(overlap=True), PingPong(every=64).most_slots(overlap=False)
        (3, 2)
    """

    lane_count: int | None = None

    strategy = Strategy.PING_PONG

    def lanes(self, overlap: bool) -> int:
        """Returns `lane_count`, or its default."""
        return self.lane_count if self.lane_count is not None else 2 if overlap else 1

    def lanes_at_admission(self, overlap: bool) -> int:
        """Returns the same as `lanes`."""
        return self.lanes(overlap)

    def validate(self, page_size: int, overlap: bool) -> None:
        """Requires one or two lanes, and two with overlap.

        Raises:
            ConfigurationError: it cannot work with these lanes, or with this `every`.
        """
        super().validate(page_size, overlap)
        if self.lane_count is not None and not (is_count(self.lane_count) and 1 <= self.lane_count <= 2):
            raise ConfigurationError(f"lane_count={self.lane_count!r}: a row has 1 or 2 lanes")
        if overlap and self.lanes(overlap) < 2:
            raise ConfigurationError(
                "one lane with overlap: a dead step could overwrite the only snapshot; use 2 lanes or overlap=False"
            )


@dataclass(frozen=True)
class LazyPingPong(Tracking):
    """One lane held; the second is claimed at a boundary, and the older one released at the next settle of the row.

    Args:
        every: tokens between boundaries.
        overwrite: if no slot is free, overwrite the only lane in place. Without it, the boundary passes without a
            snapshot.

    Example:
        >>> LazyPingPong().lanes_at_admission(overlap=True), LazyPingPong().most_slots(overlap=True)
        (1, 3)
    """

    overwrite: bool = True

    strategy = Strategy.LAZY
    releases_at_settle = True

    @property
    def in_place(self) -> bool:
        """Whether the only lane is overwritten when no slot is left for another."""
        return self.overwrite

    def lanes(self, overlap: bool) -> int:
        """Returns 2."""
        return 2

    def lanes_at_admission(self, overlap: bool) -> int:
        """Returns 1."""
        return 1
