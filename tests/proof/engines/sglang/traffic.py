"""Requests that arrive by step number: talks of several turns, some with a beginning that they share."""

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """One request.

    Args:
        talk: number of its talk.
        at: the first step in which it may arrive; it also waits for the turn before.
        fresh: its new tokens; the prompt is all of the talk so far and these.
        answer: tokens to generate.
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
        seed: of the random numbers.
        count: number of talks.
        turns: turns of each.
        shared: tokens with which every second talk begins.
        fresh: the fewest and most new tokens of a turn.
        answer: the fewest and most generated tokens.
        apart: the most steps from one arrival of a talk to the next.
    """
    pick = random.Random(seed)
    start = tuple(pick.randrange(2, 256) for _ in range(shared))
    found = []
    for talk in range(count):
        at = pick.randrange(apart)
        for turn in range(turns):
            tokens = tuple(pick.randrange(2, 256) for _ in range(pick.randint(*fresh)))
            found.append(Turn(talk, at, start + tokens if turn == talk % 2 == 0 else tokens, pick.randint(*answer)))
            at += pick.randrange(apart)
    return found
