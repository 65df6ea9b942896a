"""The protocols of a pool of slots that `memstate check` checks. Ids are whole numbers; nothing has to be a tensor.

Only `Slots` is required. Behaviours that need a part which a pool lacks are reported as not offered.

A call refuses by raising an exception of any kind; `claim`, `admit` and `publish` can also return None.
"""

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Slots(Protocol):
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
        """Frees slots that the caller holds by id: from `claim` or `publish`.

        Args:
            ids: the slots.
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
    """A pool that can be had in other sizes."""

    def of_size(self, slots: int) -> Slots:
        """Returns another, empty pool.

        Args:
            slots: its number of slots.
        """
        ...


@runtime_checkable
class Groups(Protocol):
    """A pool that claims a batch in advance. While a group is open, claims take its slots."""

    def open_group(self, n: int) -> None:
        """Opens a group.

        Args:
            n: number of slots.
        """

    def close_group(self) -> None:
        """Closes the newest group, and frees what it has not handed out."""


@runtime_checkable
class Rows(Protocol):
    """A pool that gives slots to running requests. A row stands for a request while it runs."""

    def admit(self, key: str) -> int | None:
        """Starts a request.

        Args:
            key: its name.

        Returns:
            Its row. None: too few rows or slots are free.
        """

    def slots_of(self, row: int) -> list[int]:
        """Returns all slots that a running request holds.

        Args:
            row: its row.
        """
        ...

    def end(self, row: int) -> None:
        """Ends a request and frees its slots.

        Args:
            row: its row.
        """


@runtime_checkable
class Table(Rows, Protocol):
    """A pool whose rows are the rows 1..rows of a table.

    Attributes:
        rows: number of rows.
    """

    rows: int


@runtime_checkable
class Generations(Rows, Protocol):
    """A pool that counts the uses of its rows."""

    def generation(self, row: int) -> int:
        """Returns how often a row was given away, or another number that only rises.

        Args:
            row: the row.
        """
        ...


@runtime_checkable
class Tracks(Rows, Protocol):
    """A pool whose requests keep states, and give them away while they run."""

    def track(self, row: int) -> None:
        """Lets a request run until it has kept one more state, as far as slots allow it.

        Args:
            row: its row.
        """

    def tracked(self, row: int) -> int | None:
        """Returns the slot with the newest state that the request has kept and not published; None if there is none.

        Args:
            row: its row.
        """

    def publish(self, row: int) -> int | None:
        """Gives the newest kept state to the caller, who holds its slot by id from then on.

        Args:
            row: its row.

        Returns:
            The slot. None: there is no kept state.
        """
