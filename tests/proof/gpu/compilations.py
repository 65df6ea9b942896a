"""Counts the kernels that a process compiles, and those that it loads from Triton's cache."""

from collections import Counter
from typing import Any


class Compilations:
    """Numbers of compiled and of loaded kernels, by name. Later launches of a kernel do not count."""

    def __init__(self) -> None:
        self.compiled: Counter[str] = Counter()
        self.loaded: Counter[str] = Counter()

    def install(self) -> bool:
        """Begins to count. Returns whether the installed Triton allows it."""
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
        """Numbers of compiled and loaded kernels together. In both cases the launch had to wait."""
        return self.compiled + self.loaded
