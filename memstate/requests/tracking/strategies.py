"""Defines the four tracking strategies: their settings, and the slots that each takes.

`memstate.kernels.rules` has the rules by which they take snapshots.

One row under PingPong, every=4. `a` and `b` are slots, brackets mark unpublished snapshots:

    length      1    2    3    4       5    6    7    8          12
    lane 0      a    a    a   [a@4]   .................  [a@4]   [a@12]
    lane 1      b    b    b    b      .................  [b@8]   [b@8]     the smaller label goes next

One row under Redirect, every=4. The snapshot is in the lane once the step after its boundary is planned:

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
    """A tracking strategy: its number for the kernels, its settings, and the slots that it takes.

    Args:
        every: tokens between boundaries.

    Attributes:
        strategy: number of the strategy in the kernels.
        reads_old_slot: whether a snapshot is taken of the length before the step (Redirect), not after the step.
        releases_at_settle: whether a settle can release lanes.
    """

    every: int = 256

    strategy: ClassVar[Strategy]
    reads_old_slot: ClassVar[bool] = False
    releases_at_settle: ClassVar[bool] = False

    @abstractmethod
    def lanes(self, overlap: bool) -> int:
        """Returns the number of lanes of a row."""

    def lanes_at_admission(self, overlap: bool) -> int:
        """Returns the number of lanes that get a slot when a request is admitted, besides the live slot."""
        return 0

    def most_slots(self, overlap: bool) -> int:
        """Returns the largest number of slots of one request, the live slot included."""
        return 1 + self.lanes(overlap)

    def validate(self, unit: int, overlap: bool) -> None:
        """Raises an error unless the settings can work.

        Args:
            unit: the length of a kept state is a multiple of this number of tokens: whole KV pages, and the grid.
            overlap: whether the next step can be planned before the previous step is settled.

        Raises:
            ConfigurationError: the settings cannot work.
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
    """Takes no snapshots: a request has one slot, updated in place. Only its last state can be published, at its end.

    Args:
        every: tokens between the boundaries that `RowInfo.next_boundary` names; no snapshot is taken at them.

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
    """Holds two lanes from admission on, or one without overlap. A step at a boundary also writes its state to a lane.

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
        """Returns `lane_count`, or the default for this `overlap`."""
        return self.lane_count if self.lane_count is not None else 2 if overlap else 1

    def lanes_at_admission(self, overlap: bool) -> int:
        """Returns the number of all lanes."""
        return self.lanes(overlap)

    def validate(self, unit: int, overlap: bool) -> None:
        """Raises an error unless there are two lanes, or one lane without overlap.

        Raises:
            ConfigurationError: `lane_count` or `every` cannot work.
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
    """Holds one lane. A boundary claims the second one, and the next settle of the row releases the older snapshot.

    Args:
        every: tokens between boundaries.
        overwrite: whether a boundary overwrites the only lane if no slot is free. If not, it takes no snapshot.

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
    """Keeps the old slot as the snapshot, without a copy: one slot per request, two with an unpublished snapshot.

    At a boundary the step reads the old slot and writes to a newly claimed slot. The old slot is the snapshot.

    If no slot is free, the step takes no snapshot, and reads and writes the same slot.

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
