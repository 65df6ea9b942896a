"""Guesses tokens for steps with drafts: the tokens of the uncached run, with some of them wrong."""

import random
from collections.abc import Mapping

from memstate_tools.demo.transcript import Transcript
from memstate_tools.demo.trees import DraftTree
from memstate_tools.demo.work import Work

RIGHT = 0.7  # probability that a guess is right if all guesses before it are right; second guesses have the same


class Guesser:
    """Guesses the next tokens of conversations whose tokens are known.

    Args:
        seed: Start of the random numbers that choose wrong guesses.
        known: Conversation -> its transcript in the uncached run.
    """

    def __init__(self, seed: int, known: Mapping[int, Transcript]) -> None:
        self._chance, self._known = random.Random(f"guess {seed}"), known

    def guess(self, work: Work, at: int, most: int, tree: DraftTree) -> list[list[int]]:
        """Returns up to `most` guesses of the tokens from place `at` on; if the tree forks, also second guesses."""
        right = self._known[work.conversation.number].tokens[at : at + max(0, most)]
        sides = [[self._instead(token, None) for token in right]]
        if tree.branches:
            sides.append([self._instead(token, other) for token, other in zip(right, sides[0], strict=True)])
        return sides

    def _instead(self, token: int, not_: int | None) -> int:
        """Returns a token, or sometimes another one, but never `not_`."""
        while (guess := token if self._chance.random() < RIGHT else self._chance.randrange(256)) == not_:
            pass
        return guess
