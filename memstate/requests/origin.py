"""Says where a new row starts."""

from collections.abc import Sequence
from typing import NamedTuple


class Origin(NamedTuple):
    """Where the state of a new row comes from: zeros, a register that it reads, or registers that become its own.

    Attributes:
        length: tokens that the state stands for; 0 for zeros.
        registers: registers with states, the longest first; empty for zeros.
        pages: ids of the KV pages of these tokens, which the row shares.
        moves: whether the registers move to the row. If not, the row reads or copies the first.

    Example:
        >>> START.length, Origin(16, [9]).moves
        (0, False)
    """

    length: int = 0
    registers: Sequence[int] = ()
    pages: Sequence[int] = ()
    moves: bool = False


START = Origin()  # zeros, from the first token on
