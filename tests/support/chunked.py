"""Computes where the rows of a packed batch begin, in tokens and in pieces (the chunks of chunked kernels)."""

from collections.abc import Sequence
from itertools import accumulate


def starts_of(lengths: Sequence[int]) -> list[int]:
    """Returns the number of the first packed token of each row, then the number of all tokens."""
    return [0, *accumulate(lengths)]


def first_of(lengths: Sequence[int], chunk: int) -> list[int]:
    """Returns the number of the first piece of each row, then the number of all pieces. Rows share no piece."""
    return [0, *accumulate(-(-length // chunk) for length in lengths)]
