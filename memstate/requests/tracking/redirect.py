"""Takes snapshots without a copy: at a boundary the step reads the old slot and writes a fresh one.

The old slot is the snapshot. One row, I = 4; slots a, b; a snapshot is in the lane from the plan of the step after its
boundary:

    length      3 -> 4      4 -> 5       ..     7 -> 8      8 -> 9
    reads       a           a                   b           b
    writes      a           b (claimed)         b           a (rotated; b is now the snapshot at 8)
    lane        -           a@4                 a@4         b@8
"""

from dataclasses import dataclass

from memstate.kernels.tables import REGISTERS_PER_ROW, Strategy
from memstate.requests.tracking.base import Tracking, TryClaim, last_boundary
from memstate.slots.registers import RegisterFile


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

    def needs_claim(self, file: RegisterFile, row: int, length: int, lanes: int, window: bool = False) -> bool:
        """Returns whether a snapshot is due and the row's lane has no slot to swap."""
        return (window or _new(file, row, length)) and not file.held[REGISTERS_PER_ROW * row + 1]

    def boundary(self, file: RegisterFile, row: int, length: int, after: int, lanes: int, claim: TryClaim) -> bool:
        """Makes the old slot the snapshot, if the row has a slot to continue in."""
        lane = REGISTERS_PER_ROW * row + 1
        if not _new(file, row, length) or (not file.held[lane] and not claim()):
            return False
        file.held[lane], file.labels[lane] = True, length
        file.tracked[row] = length
        return True

    def accept(self, file: RegisterFile, row: int, length: int, after: int, lanes: int, claim: TryClaim) -> bool:
        """Keeps the state at the last boundary inside the accepted tokens, else the one at their start.

        A boundary at their very end is left to the next step.
        """
        mark, lane = last_boundary(self, file, row, length, after - 1), REGISTERS_PER_ROW * row + 1
        if not mark:
            at = length % self.every == 0 or length == int(file.snapshot_at[row])
            return at and self.boundary(file, row, length, after, lanes, claim)
        if not file.held[lane] and not claim():
            return False
        file.held[lane], file.labels[lane] = True, mark
        file.tracked[row] = mark
        return True


def _new(file: RegisterFile, row: int, length: int) -> bool:
    """Returns whether the state at `length` is not a snapshot yet, and not the one that the row started from."""
    return bool(length > file.tracked[row] and not file.source[row])
