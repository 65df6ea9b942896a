"""A clock that a test turns: for `SessionLimits(clock=...)` and for whatever else asks for seconds."""

import heapq
from collections.abc import Callable

from memstate.errors import InvalidArgument


class Clock:
    """Knows the seconds that have passed, and what is due at which of them.

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
        """Notes what to do later. Actions that are due at the same time come in the order of these calls.

        Args:
            seconds: seconds from now.
            action: is called when they have passed.
        """
        self._serial += 1
        heapq.heappush(self._due, (self.now + seconds, self._serial, action))

    def advance(self, seconds: float) -> None:
        """Lets seconds pass, and does what becomes due.

        Args:
            seconds: seconds from now.

        Raises:
            InvalidArgument: less than 0.
        """
        if seconds < 0:
            raise InvalidArgument(f"advance({seconds!r}): a clock goes forward only")
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, _, action = heapq.heappop(self._due)
            action()
        self.now = until
