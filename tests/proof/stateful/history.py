"""What the bytes of a slot say about the tokens folded into its state. Knows no slot and no tensor.

A history is a tuple of integers modulo 2**64, all linear in the tokens, so that a forward pass can work on bytes alone:

    0         tokens folded in
    1         a polynomial of all tokens
    2 3 4     a ring with a cursor: token i is folded into cell i % 3
    5 6       the last two tokens, as the inputs of a convolution
"""

from collections.abc import Iterable

History = tuple[int, ...]

FACTOR = 0x5851F42D4C957F2D
RING, TAPS = 3, 2
WHOLE, FIRST_CELL, FIRST_TAP = 1, 2, 2 + RING
SIZE = FIRST_TAP + TAPS
EMPTY: History = (0,) * SIZE
FILLED: History = (-2,)  # what the forward of a step in debug mode has to store over
MASK = 2**64 - 1


def value(token: int) -> int:
    """A number for a token, never 0 in any width, different in its low bits for neighbours."""
    return (token * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & MASK | 1


def fold(history: History, tokens: Iterable[int]) -> History:
    """The history after some more tokens."""
    count, whole, *rest = history
    ring, taps = rest[:RING], rest[RING:]
    for token in tokens:
        number = value(token)
        whole = (whole * FACTOR + number) & MASK
        ring[count % RING] = (ring[count % RING] * FACTOR + number) & MASK
        taps = [*taps[1:], number]
        count += 1
    return (count, whole, *ring, *taps)


def step(start: int, tokens: Iterable[int]) -> tuple[History, History]:
    """What a forward pass multiplies a state of `start` tokens by, and what it adds; taps move instead."""
    tokens = list(tokens)
    factors = [1] * SIZE
    for at in range(start, start + len(tokens)):
        for cell in (WHOLE, FIRST_CELL + at % RING):
            factors[cell] = factors[cell] * FACTOR & MASK
    return tuple(factors), fold((start, *EMPTY[1:]), tokens)
