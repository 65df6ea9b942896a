"""Takes no snapshots while a request runs. Its last state can still be published when it ends."""

from dataclasses import dataclass

from memstate.kernels.tables import Strategy
from memstate.requests.tracking.base import Tracking


@dataclass(frozen=True)
class NoTracking(Tracking):
    """One slot a request, read and written in place.

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

    def lanes_at_admission(self, overlap: bool) -> int:
        """Returns 0."""
        return 0
