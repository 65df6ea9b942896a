"""The four tracking strategies: the slots that each takes. Their rules are in `memstate.kernels.rules`.

One row under PingPong, I = 4, unpublished snapshots in brackets; `a`, `b` are slots:

    length      1    2    3    4       5    6    7    8          12
    lane 0      a    a    a   [a@4]   .................  [a@4]   [a@12]
    lane 1      b    b    b    b      .................  [b@8]   [b@8]     the smaller label is next

One row under Redirect, I = 4; a snapshot is in the lane from the plan of the step after its boundary:

    length      3 -> 4      4 -> 5       ..     7 -> 8      8 -> 9
    reads       a           a                   b           b
    writes      a           b (claimed)         b           a (rotated; b is now the snapshot at 8)
    lane        -           a@4                 a@4         b@8
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from memstate.checks import is_count
from memstate.errors import ConfigurationError
from memstate.kernels.tables import Strategy


@dataclass(frozen=True)
class Tracking(ABC):
    """A strategy: its number for the kernels, its settings, and the slots that it takes.

    Args:
        every: tokens between boundaries.

    Attributes:
        strategy: the kernels' number of the strategy.
        reads_old_slot: the boundary is found before the step (Redirect), not after it.
        releases_at_settle: a settle can release lanes.
    """

    every: int = 256

    strategy: ClassVar[Strategy]
    reads_old_slot: ClassVar[bool] = False
    releases_at_settle: ClassVar[bool] = False

    @abstractmethod
    def lanes(self, overlap: bool) -> int:
        """Returns the lane registers that a row may fill."""

    def lanes_at_admission(self, overlap: bool) -> int:
        """Returns the lanes that are filled when a request is admitted. With live these are its slots."""
        return 0

    def most_slots(self, overlap: bool) -> int:
        """Returns the slots that one request holds at most, live included."""
        return 1 + self.lanes(overlap)

    def validate(self, unit: int, overlap: bool) -> None:
        """Requires settings that can work.

        Args:
            unit: tokens of which the length of a kept state is a multiple: whole KV pages.
            overlap: the next step is planned before the last one is settled.

        Raises:
            ConfigurationError: they cannot work.
        """
        if not is_count(self.every) or self.every < 1:
            raise ConfigurationError(f"every={self.every!r}: a boundary needs a whole number of tokens, at least 1")
        if self.every % unit:
            raise ConfigurationError(
                f"every={self.every} is no multiple of {unit}: a snapshot fills whole KV pages, and the grid of all "
                "planes"
            )


@dataclass(frozen=True)
class NoTracking(Tracking):
    """One slot a request, read and written in place. Only its last state can be published, when it ends.

    Args:
        every: where chunks may end, for `next_boundary` only.

    Example:
        >>> NoTracking().most_slots(overlap=True)
        1
    """

    strategy = Strategy.NONE

    def lanes(self, overlap: bool) -> int:
        """Returns 0."""
        return 0


@dataclass(frozen=True)
class PingPong(Tracking):
    """Two lanes held from admission on (one without overlap). Snapshots alternate, in the same pass as the state.

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

    def validate(self, unit: int, overlap: bool) -> None:
        """Requires one or two lanes, and two with overlap.

        Raises:
            ConfigurationError: it cannot work with these lanes, or with this `every`.
        """
        super().validate(unit, overlap)
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

    def lanes(self, overlap: bool) -> int:
        """Returns 2."""
        return 2

    def lanes_at_admission(self, overlap: bool) -> int:
        """Returns 1."""
        return 1


@dataclass(frozen=True)
class Redirect(Tracking):
    """One slot a request, two while a snapshot is kept unpublished. Snapshots take no copy.

    At a boundary the step reads the old slot, which is the snapshot, and writes a fresh one.

    If no slot is free, the step stays in place: it takes no snapshot, and loses nothing.

    Args:
        every: tokens between boundaries.

    Example:
        >>> Redirect(every=64).lanes_at_admission(overlap=True), Redirect(every=64).most_slots(overlap=True)
        (0, 2)
    """

    strategy = Strategy.REDIRECT
    reads_old_slot = True

    def lanes(self, overlap: bool) -> int:
        """Returns 1."""
        return 1
