"""A clock that a test moves: for `SessionLimits(clock=...)` and other callers that read seconds."""

import heapq
from collections.abc import Callable

from memstate.errors import InvalidArgument


class Clock:
    """Counts seconds, and runs actions when they are due.

    Attributes:
        now: seconds since the start.

    Example:
        >>> clock = Clock()
        >>> clock.after(2.0, lambda: print("due at", clock()))
        >>> clock.advance(5.0)
        due at 2.0
        >>> clock()
        5.0
    """

    def __init__(self) -> None:
        self.now, self._serial = 0.0, 0
        self._due: list[tuple[float, int, Callable[[], None]]] = []

    def __call__(self) -> float:
        """Returns the seconds since the start."""
        return self.now

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Runs an action later. Actions that are due at the same time run in the order of these calls.

        Args:
            seconds: seconds from now.
            action: called when the seconds have passed.
        """
        self._serial += 1
        heapq.heappush(self._due, (self.now + seconds, self._serial, action))

    def advance(self, seconds: float) -> None:
        """Moves the clock forward, and runs the actions that become due.

        Args:
            seconds: seconds from now.

        Raises:
            InvalidArgument: `seconds` is below 0.
        """
        if seconds < 0:
            raise InvalidArgument(f"advance({seconds!r}): a clock goes forward only")
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = until
