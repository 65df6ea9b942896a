"""Draws requests that arrive at given steps: talks of several turns, some with the same first tokens."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One request.

    Args:
        talk: number of its talk.
        at: first step in which the request may arrive. It also waits for the end of the turn before it.
        fresh: its new tokens. In the prompt, they follow the tokens of all earlier turns of the talk.
        answer: number of tokens to generate.
    """

    talk: int
    at: int
    fresh: tuple[int, ...]
    answer: int


def talks(
    seed: int, count: int = 4, turns: int = 3, *, shared: int = 80, fresh: tuple[int, int] = (8, 90),
    answer: tuple[int, int] = (4, 40), apart: int = 12,
) -> list[Turn]:  # fmt: skip
    """Returns talks of random tokens and lengths.

    Args:
        seed: seed of the random numbers.
        count: number of talks.
        turns: number of turns in each talk.
        shared: number of first tokens that every second talk shares.
        fresh: smallest and largest number of new tokens of a turn.
        answer: smallest and largest number of generated tokens.
        apart: largest number of steps between two arrivals of a talk.
    """
    pick = random.Random(seed)
    start = tuple(pick.randrange(2, 256) for _ in range(shared))
    drawn = []
    for talk in range(count):
        at = pick.randrange(apart)
        for turn in range(turns):
            tokens = tuple(pick.randrange(2, 256) for _ in range(pick.randint(*fresh)))
            drawn.append(Turn(talk, at, start + tokens if turn == talk % 2 == 0 else tokens, pick.randint(*answer)))
            at += pick.randrange(apart)
    return drawn
