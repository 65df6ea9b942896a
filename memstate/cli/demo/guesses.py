"""Guesses tokens for steps with drafts: what the uncached run has, with some of it wrong. Knows no row."""

import random
from collections.abc import Mapping

from memstate.cli.demo.transcript import Transcript
from memstate.cli.demo.work import Work

RIGHT = 0.7  # share of the guesses that are right, as long as those before them are


class Guesser:
    """Guesses from what every conversation comes to.

    Args:
        seed: Of what is wrong.
        known: What the uncached run gave, by conversation.
    """

    def __init__(self, seed: int, known: Mapping[int, Transcript]) -> None:
        self._chance, self._known = random.Random(f"guess {seed}"), known

    def guess(self, work: Work, at: int, most: int) -> list[int]:
        """Returns up to so many tokens that may follow the first `at` of a request."""
        found = self._known[work.conversation.number].tokens[at : at + max(0, most)]
        return [token if self._chance.random() < RIGHT else self._chance.randrange(256) for token in found]
