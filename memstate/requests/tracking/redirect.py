"""Takes snapshots without a copy: at a boundary the step reads the old slot and writes a fresh one.

The old slot is the snapshot. One row, I = 4; slots a, b; a snapshot is in the lane from the plan of the step after its
boundary:

    length      3 -> 4      4 -> 5       ..     7 -> 8      8 -> 9
    reads       a           a                   b           b
    writes      a           b (claimed)         b           a (rotated; b is now the snapshot at 8)
    lane        -           a@4                 a@4         b@8
"""

from dataclasses import dataclass

from memstate.kernels.tables import Strategy
from memstate.requests.tracking.base import Tracking


@dataclass(frozen=True)
class Redirect(Tracking):
    """One slot a request, two while a snapshot is kept unpublished.

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

    def lanes_at_admission(self, overlap: bool) -> int:
        """Returns 0."""
        return 0
