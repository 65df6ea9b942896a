"""Defines what every tracking strategy answers. Its rules are in `memstate.kernels.rules`."""

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
