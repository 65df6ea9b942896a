"""Which levels a length has in a Fenwick tree over chunks of tokens, and which merge. Knows no tensor and no Triton.

    whole chunks   1    2    3     4     5     6     7       8
    levels held    0    1    1 0   2     2 0   2 1   2 1 0   3     the set bits of the number of chunks

Level j is the state of 2^j chunks that end where the next lower level held begins.
"""

CHUNK = 64  # tokens
INNER = 7  # levels inside a chunk: that of the token itself, and six of buckets of 1 to 32 tokens
MOST_LEVELS = 31


def levels_of(length: int) -> tuple[int, ...]:
    """Returns the levels that a row of `length` tokens holds, the lowest and youngest first."""
    return _bits(length // CHUNK)


def merge_of(length: int) -> tuple[tuple[int, ...], int]:
    """Returns the levels that merge with the chunk that ends at `length`, and the level that they become.

    Args:
        length: a positive multiple of `CHUNK`.
    """
    chunks = length // CHUNK - 1
    merging = _bits((chunks ^ (chunks + 1)) >> 1)  # the ones at the end of the number
    return merging, len(merging)


def _bits(number: int) -> tuple[int, ...]:
    return tuple(bit for bit in range(number.bit_length()) if number >> bit & 1)
