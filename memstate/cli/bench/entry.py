"""One line of a benchmark's result."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A measured value; `peer_value` and `ratio` (value / peer_value) where something else was measured in the same
    run.
    """

    op: str
    case: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
