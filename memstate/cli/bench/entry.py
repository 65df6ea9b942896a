"""One line of a benchmark's result."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A measured value; the last three where something else was measured in the same run.

    Attributes:
        op: Operation.
        case: Case of the operation.
        value: What was measured.
        unit: Its unit.
        peer: What it is compared with.
        peer_value: The peer's value.
        ratio: value / peer_value.
    """

    op: str
    case: str
    value: float
    unit: str
    peer: str | None = None
    peer_value: float | None = None
    ratio: float | None = None
