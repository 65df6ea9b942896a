"""Calls a pool, and notes each call as a line of Python."""

from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any

from memstate.testing.pools import SlotPool

MOST = 8  # longest list of ids that is shown whole
MOST_SAID = 100  # characters of an error that are shown
Draw = Callable[[int, int], int]  # (low, high) -> a whole number from low to high


class Violation(Exception):
    """Says that a behaviour does not hold.

    Args:
        calls: the calls that show it.
        what: what is wrong after these calls.

    Attributes:
        sequence: `calls` and `what`, as lines of Python.
    """

    def __init__(self, calls: Sequence[str], what: str) -> None:
        super().__init__(what)
        self.sequence = [*calls, f"# {what}"]


def shown(value: object) -> str:
    """Returns a value as Python code. Long lists of ids are cut short."""
    if isinstance(value, list) and len(value) > MOST:
        return f"[{value[0]}, {value[1]}, ..., {value[-1]}]"
    return repr(value)


class Trial:
    """One program of calls on a new pool. It notes calls, but not reads.

    Args:
        pool: the pool under test.

    Attributes:
        calls: the calls so far, as lines of Python.
        refused: whether the last call was refused.
        returned: the object that the last call returned, unchanged.
    """

    def __init__(self, pool: SlotPool) -> None:
        self.pool: Any = pool
        self.capacity = pool.capacity
        self.calls: list[str] = []
        self.refused = False
        self.returned: Any = None

    def __call__(self, name: str, *given: Any) -> Any:
        """Makes a call.

        Args:
            name: name of the pool's method.
            given: arguments of the method.

        Returns:
            The result of the call, ids as a list. None: the call was refused, or returned None.
        """
        line, result, self.returned = f"pool.{name}({', '.join(map(shown, given))})", None, None
        try:
            self.returned = result = getattr(self.pool, name)(*given)
        except Exception as error:
            said = " ".join(str(error).split())[:MOST_SAID]
            self.calls.append(f"{line}  # {type(error).__name__}{f': {said}' if said else ''}")
            self.refused = True
            return None
        if name == "claim" and result is not None:
            result = self._whole(name, result)
        told = result is not None or name in ("claim", "admit", "publish")
        self.calls.append(f"{line} -> {shown(result)}" if told else line)
        self.refused = told and result is None
        return result

    def read(self, name: str, *given: Any) -> Any:
        """Reads something from the pool. A read must not fail.

        Args:
            name: name of the pool's method.
            given: arguments of the method.

        Returns:
            The result, slots as a list.
        """
        try:
            result = getattr(self.pool, name)(*given)
        except Exception as error:
            raise Violation(self.calls, f"{name}({', '.join(map(repr, given))}): {error!r}") from error
        return self._whole(name, result) if name == "slots_of" else result

    def _whole(self, name: str, ids: Any) -> list[int]:
        """Returns ids as a list of whole numbers."""
        try:
            return [index(each) for each in (ids.tolist() if hasattr(ids, "tolist") else ids)]
        except Exception as error:
            raise Violation(self.calls, f"{name} returned {ids!r}: expected whole numbers") from error

    def need(self, true: bool, what: str) -> None:
        """Raises a `Violation` if a condition is false.

        Args:
            true: the condition that must hold.
            what: says what is wrong if the condition is false.
        """
        if not true:
            raise Violation(self.calls, what)

    def need_free(self, n: int) -> None:
        """Requires that a number of slots is free.

        Args:
            n: number of slots.
        """
        self.need((free := self.read("free")) == n, f"free() is {free}, expected {n}")

    def need_ids(self, ids: Sequence[int], owned: Iterable[int] = ()) -> None:
        """Requires that slots exist, and that each has no other owner.

        Args:
            ids: slots that were handed out.
            owned: slots that had an owner before.
        """
        seen = set(owned)
        for slot in ids:
            self.need(1 <= slot <= self.capacity, f"slot {slot} of a pool with slots 1..{self.capacity}")
            self.need(slot not in seen, f"slot {slot} has two owners")
            seen.add(slot)

    def need_rest(self, owned: Sequence[int] = ()) -> None:
        """Claims slots until the pool refuses, and requires that it hands out each free slot once.

        Args:
            owned: slots that have an owner.
        """
        ids: list[int] = []
        calls, free = [*self.calls], self.read("free")
        while len(ids) <= self.capacity and (got := self("claim", 1)):
            ids += got
        self.calls = [*calls, f"[pool.claim(1) for _ in range({len(ids) + 1})] -> {shown(ids)}"]
        self.need_ids(ids, owned)
        lost = sorted({*range(1, self.capacity + 1)} - {*ids, *owned})
        self.need(not lost, f"slots {shown(lost)} have no owner and are not free")
        self.calls = calls
        self.need(free == len(ids), f"free() is {free}, expected {len(ids)}")

    def some(self, draw: Draw) -> list[int]:
        """Claims slots and releases some of them in random order, so that the free slots are scattered.

        Args:
            draw: draws numbers.

        Returns:
            The slots that stay claimed.
        """
        if not (n := draw(0, self.capacity)):
            return []
        held: list[int] = self("claim", n) or []
        self.need(len(held) == n, f"{self.capacity} slots were free")
        if back := [held.pop(draw(0, len(held) - 1)) for _ in range(draw(0, n))]:
            self("release", back)
        return held
