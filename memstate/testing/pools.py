"""Protocols of a pool of slots that `memstate check` checks: an id is a whole number, and no call needs tensors.

Only `SlotPool` is required. If a pool lacks one of the others, behaviours that need it are reported as not offered.

A call refuses by raising an exception of any kind; `claim`, `admit` and `publish` can also return None.
"""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class SlotPool(Protocol):
    """Hands out slots 1..capacity by id.

    Attributes:
        capacity: number of slots.
    """

    capacity: int

    def claim(self, n: int) -> Any:
        """Claims n slots.

        Args:
            n: number of slots.

        Returns:
            Their ids, as the pool returns them: a list, an array or a tensor. None: too few slots are free.
        """

    def release(self, ids: list[int]) -> None:
        """Frees slots that the caller holds by id, from `claim` or `publish`.

        Args:
            ids: ids of the slots.
        """

    def free(self) -> int:
        """Returns the number of slots that a claim could get now."""
        ...


@runtime_checkable
class Clears(Protocol):
    """A pool that can be emptied."""

    def clear(self) -> None:
        """Frees all slots, ends all requests and closes all groups."""


@runtime_checkable
class Sized(Protocol):
    """A pool that can make pools of other sizes."""

    def of_size(self, slots: int) -> SlotPool:
        """Returns a new, empty pool of another size.

        Args:
            slots: number of slots of the new pool.
        """
        ...


@runtime_checkable
class Groups(Protocol):
    """A pool that sets slots aside in groups. While a group is open, claims take its slots."""

    def open_group(self, n: int) -> None:
        """Opens a group: sets slots aside for later claims.

        Args:
            n: number of slots.
        """

    def close_group(self) -> None:
        """Closes the newest group, and frees its slots that no claim has taken."""


@runtime_checkable
class RowPool(Protocol):
    """A pool that gives slots to running requests. A row stands for a request while it runs."""

    def admit(self, key: str) -> int | None:
        """Starts a request.

        Args:
            key: name of the request.

        Returns:
            The row of the request. None: too few rows or slots are free.
        """

    def slots_of(self, row: int) -> list[int]:
        """Returns all slots that a running request holds.

        Args:
            row: row of the request.
        """
        ...

    def end(self, row: int) -> None:
        """Ends a request and frees its slots.

        Args:
            row: row of the request.
        """


@runtime_checkable
class Table(RowPool, Protocol):
    """A pool whose rows are numbered 1..rows.

    Attributes:
        rows: number of rows.
    """

    rows: int


@runtime_checkable
class Generations(RowPool, Protocol):
    """A pool that counts the uses of its rows."""

    def generation(self, row: int) -> int:
        """Returns a number that rises each time the row is given away.

        Args:
            row: number of the row.
        """
        ...


@runtime_checkable
class Tracks(RowPool, Protocol):
    """A pool whose requests keep states while they run, and publish them."""

    def track(self, row: int) -> None:
        """Lets a request run until it has kept one more state, if enough slots are free.

        Args:
            row: row of the request.
        """

    def tracked(self, row: int) -> int | None:
        """Returns the slot with the newest state that the request has kept and not published. None: no such state.

        Args:
            row: row of the request.
        """

    def publish(self, row: int) -> int | None:
        """Gives the newest kept state to the caller, who then holds its slot by id.

        Args:
            row: row of the request.

        Returns:
            The slot. None: the request has no kept state.
        """
