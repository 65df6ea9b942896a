"""No snapshots while a request runs; its last state can still be published when it ends."""

from dataclasses import dataclass

from memstate.kernels.tables import Strategy
from memstate.requests.tracking.base import Tracking


@dataclass(frozen=True)
class NoTracking(Tracking):
    """One slot a request, read and written in place. `every` only tells `next_boundary` where chunks may end."""

    strategy = Strategy.NONE

    def lanes(self, overlap: bool) -> int:
        return 0

    def lanes_at_admission(self, overlap: bool) -> int:
        return 0
