"""Settings of prefetches, checked when they are made."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from memstate.checks import is_count
from memstate.errors import ConfigurationError

StopPolicy = Literal["best_effort", "wait_complete", "timeout"]


@dataclass(frozen=True)
class Prefetch:
    """Configures prefetches from storage: which are worth it, and when they stop.

    Args:
        threshold: Tokens that a prefetch must gain.
        limit: Tokens that all prefetches together may fetch, None for any number. A prompt that lacks more is not
            fetched.
        stop: What happens to a prefetch whose request could be admitted. `best_effort` stops it. `wait_complete` lets
            it
            end. `timeout` stops it after `timeout` seconds plus `timeout_per_page` for each page.
        timeout: Seconds.
        timeout_per_page: Seconds.
        chunk: Records that storage is asked for at a time.

    Raises:
        ConfigurationError: A setting is out of range.

    Example:
        >>> Prefetch(threshold=64, stop="timeout").patience(pages=100)
        2.0
    """

    threshold: int = 256
    limit: int | None = None
    stop: StopPolicy = "best_effort"
    timeout: float = 1.0
    timeout_per_page: float = 0.01
    chunk: int = 32

    def __post_init__(self) -> None:
        if not is_count(self.threshold) or not (self.limit is None or is_count(self.limit)):
            raise ConfigurationError(f"threshold={self.threshold!r}, limit={self.limit!r}: expected numbers of tokens")
        if self.limit is not None and self.limit < self.threshold:
            raise ConfigurationError(
                f"limit={self.limit} below threshold={self.threshold}: nothing would ever be fetched"
            )
        if self.stop not in get_args(StopPolicy):
            raise ConfigurationError(f"stop={self.stop!r}: expected one of {', '.join(get_args(StopPolicy))}")
        for name, seconds in (("timeout", self.timeout), ("timeout_per_page", self.timeout_per_page)):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
                raise ConfigurationError(f"{name}={seconds!r}: expected seconds from 0 on")
        if not is_count(self.chunk) or self.chunk < 1:
            raise ConfigurationError(f"chunk={self.chunk!r}: expected at least 1 record")

    def patience(self, pages: int) -> float:
        """Returns the seconds that a prefetch of so many pages may take under `timeout`."""
        return self.timeout + pages * self.timeout_per_page
