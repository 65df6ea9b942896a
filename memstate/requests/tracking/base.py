"""Defines what every tracking strategy answers, and the rules that strategies share. It knows no device."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from memstate.checks import is_count
from memstate.errors import ConfigurationError
from memstate.kernels.tables import REGISTERS_PER_ROW, Strategy
from memstate.slots.registers import Longs, RegisterFile

TryClaim = Callable[[], bool]  # takes one optional slot if the budget allows


@dataclass(frozen=True)
class Tracking(ABC):
    """A strategy: settings for the kernels, and the same rules on the host's mirror, which keep its counts exact.

    Args:
        every: tokens between boundaries.

    Attributes:
        strategy: the kernels' number of the strategy.
        reads_old_slot: the boundary is found before the step (Redirect), not after it.
        releases_at_settle: a settle can release lanes.
    """

    every: int = 256

    strategy: ClassVar[Strategy]
    reads_old_slot: ClassVar[bool] = False  # the boundary is found before the step (Redirect), not after it
    releases_at_settle: ClassVar[bool] = False

    @property
    def in_place(self) -> bool:
        """Whether the only lane is overwritten when no slot is left for another."""
        return False

    @abstractmethod
    def lanes(self, overlap: bool) -> int:
        """Returns the lane registers that a row may fill."""

    @abstractmethod
    def lanes_at_admission(self, overlap: bool) -> int:
        """Returns the lanes that are filled when a request is admitted. With live these are its slots."""

    def most_slots(self, overlap: bool) -> int:
        """Returns the slots that one request holds at most, live included."""
        return 1 + self.lanes(overlap)

    def needs_claim(self, file: RegisterFile, row: int, length: int, lanes: int, window: bool = False) -> bool:
        """Returns whether a snapshot of a row at a boundary takes another slot.

        Args:
            file: the register file.
            row: the row.
            length: tokens before the step.
            lanes: lane registers of a row.
            window: whether the boundary lies inside the step.
        """
        return False

    def boundary(self, file: RegisterFile, row: int, length: int, after: int, lanes: int, claim: TryClaim) -> bool:
        """Applies the rule for a row at a boundary to the mirror; returns whether a snapshot is taken.

        Args:
            file: the register file.
            row: the row.
            length: tokens before the step.
            after: tokens after the step.
            lanes: lane registers of a row.
            claim: takes one optional slot if the budget allows.
        """
        return False

    def accept(self, file: RegisterFile, row: int, length: int, after: int, lanes: int, claim: TryClaim) -> bool:
        """Applies the rule for a window to the mirror; returns whether a snapshot is taken.

        Args:
            file: the register file.
            row: the row.
            length: tokens before the step.
            after: tokens after the accepted ones; all up to here are real.
            lanes: lane registers of a row.
            claim: takes one optional slot if the budget allows.
        """
        return False

    def settle(self, file: RegisterFile, row: int, known: int) -> int:
        """Applies settle to the mirror; returns the number of slots released.

        Args:
            file: the register file.
            row: the row.
            known: length up to which the row is real.
        """
        return 0

    def validate(self, page_size: int, overlap: bool) -> None:
        """Requires settings that can work.

        Args:
            page_size: tokens of a KV page.
            overlap: the next step is planned before the last one is settled.

        Raises:
            ConfigurationError: they cannot work.
        """
        if not is_count(self.every) or self.every < 1:
            raise ConfigurationError(f"every={self.every!r}: a boundary needs a whole number of tokens, at least 1")
        if self.every % page_size:
            raise ConfigurationError(
                f"every={self.every} is no multiple of page_size={page_size}: a snapshot could not share whole KV pages"
            )


def last_boundary(tracking: Tracking, file: RegisterFile, row: int, length: int, reach: int) -> int:
    """Returns the largest boundary in length + 1 .. reach, 0 for none."""
    marks = (reach // tracking.every * tracking.every, int(file.snapshot_at[row]))
    return max((mark for mark in marks if length < mark <= reach), default=0)


def lane_registers(row: int, lanes: int) -> list[int]:
    """Returns the lane registers of a row."""
    return [REGISTERS_PER_ROW * row + 1 + lane for lane in range(lanes)]


def due(tracking: Tracking, file: RegisterFile, rows: Longs, lengths: Longs) -> NDArray[np.bool_]:
    """Returns which rows are at a boundary at their length: a multiple of `every`, or the row's `snapshot_at`."""
    at: NDArray[np.bool_] = lengths % tracking.every == 0
    extra = file.snapshot_at[rows]
    if extra.any():
        at |= lengths == extra
    return at
