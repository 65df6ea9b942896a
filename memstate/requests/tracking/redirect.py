"""Snapshots for free: at a boundary the step reads the old slot and writes a fresh one, and the old slot is the
snapshot.

One row, I = 4; slots a, b; a snapshot is in the lane from the plan of the step after its boundary:

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
    """One slot a request, two while a snapshot is kept unpublished. With nothing free the step stays in place: no
    snapshot, nothing lost.
    """

    strategy = Strategy.REDIRECT
    reads_old_slot = True

    def lanes(self, overlap: bool) -> int:
        return 1

    def lanes_at_admission(self, overlap: bool) -> int:
        return 0

    def needs_claim(self, file: RegisterFile, row: int, length: int, lanes: int, window: bool = False) -> bool:
        return (window or _new(file, row, length)) and not file.held[REGISTERS_PER_ROW * row + 1]

    def boundary(self, file: RegisterFile, row: int, length: int, after: int, lanes: int, claim: TryClaim) -> bool:
        lane = REGISTERS_PER_ROW * row + 1
        if not _new(file, row, length) or (not file.held[lane] and not claim()):
            return False
        file.held[lane], file.labels[lane] = True, length
        file.tracked[row] = length
        return True

    def accept(self, file: RegisterFile, row: int, length: int, after: int, lanes: int, claim: TryClaim) -> bool:
        mark, lane = last_boundary(self, file, row, length, after - 1), REGISTERS_PER_ROW * row + 1
        if not mark:
            return (length % self.every == 0 or length == file.snapshot_at[row]) and self.boundary(
                file, row, length, after, lanes, claim
            )
        if not file.held[lane] and not claim():
            return False
        file.held[lane], file.labels[lane] = True, mark
        file.tracked[row] = mark
        return True


def _new(file: RegisterFile, row: int, length: int) -> bool:
    """Whether the row's state at `length` is neither snapshotted already nor the snapshot it was restored from."""
    return bool(length > file.tracked[row] and not file.source[row])
