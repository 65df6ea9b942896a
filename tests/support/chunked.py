"""Where the rows of a packed batch begin, in tokens and in the pieces of chunked kernels."""

from collections.abc import Sequence
from itertools import accumulate


def starts_of(lengths: Sequence[int]) -> list[int]:
    """The first packed token of each row, and the number of tokens."""
    return [0, *accumulate(lengths)]


def first_of(lengths: Sequence[int], chunk: int) -> list[int]:
    """The first piece of each row, and the number of pieces, where pieces begin with their row."""
    return [0, *accumulate(-(-length // chunk) for length in lengths)]
