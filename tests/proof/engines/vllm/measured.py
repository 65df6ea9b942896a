"""Measures the CPU time of calls, by label."""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any


class Measured:
    """Sums the CPU time of this thread in calls. A call inside another call of the same label does not count again.

    Attributes:
        seconds: Label -> CPU time.
    """

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside: set[str] = set()

    def watch(self, label: str, thing: Any, names: Iterable[str]) -> None:
        """Measures methods of an object from now on.

        Args:
            label: The label to which their time is added.
            thing: The object.
            names: Names of its methods. Names that it does not have are skipped.
        """
        for name in names:
            if (method := getattr(thing, name, None)) is not None:
                setattr(thing, name, self._measured(label, method))

    def _measured(self, label: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if label in self._inside:
                return method(*args, **kwargs)
            self._inside.add(label)
            began = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[label] += time.thread_time() - began
                self._inside.discard(label)

        return call
