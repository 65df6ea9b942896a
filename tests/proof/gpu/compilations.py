"""Counts the kernels that a process compiles, and those that it loads from Triton's cache instead."""

from collections import Counter
from typing import Any


class Compilations:
    """By name: kernels that were compiled here, and kernels that were loaded. A launch that is known is neither."""

    def __init__(self) -> None:
        self.compiled: Counter[str] = Counter()
        self.loaded: Counter[str] = Counter()

    def install(self) -> bool:
        """Listens from now on; whether this Triton tells."""
        try:
            from triton import knobs
        except ImportError:
            return False
        if not hasattr(knobs.compilation, "listener"):
            return False
        knobs.compilation.listener = self
        return True

    def __call__(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        (self.loaded if cache_hit else self.compiled)[str(getattr(src, "name", src))] += 1

    @property
    def all(self) -> Counter[str]:
        """Both: each of them makes the launch wait."""
        return self.compiled + self.loaded
