"""Learns while running how likely a state is asked for again, by its class and its age.

A *class* is one of a few kinds of states. The *age* of a state says how many requests came since the state was last
asked for: one age for each power of two. For each class and age, this module counts how many states reached the age
(`seen`), and how many were asked for in it (`hit`). The *hazard* is hit / seen. The outcome of a state is unknown if
the state is still in this age, has changed its class or has left the tree. Such a state counts half in `seen`, in the
oldest age three quarters.

The *index* of an age says how much a slot is worth that is released at the best moment, the *horizon*. It is the
maximum, over all horizons, of P(asked for before the horizon) / E[requests during which the slot is held] (J. Gittins,
Journal of the Royal Statistical Society B 41, 1979).
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Table = list[list[float]]
Hazards = NDArray[np.float64]

SHRINKAGE = 8.0  # weight of the pooled figures, in hits: with more hits, a class's own figures count more
PRIOR = 0.2  # hazard of each age before any count; a hazard equal in all ages is a rate of 1/age, as in LRU
OLDEST = 2**14  # a state that none of this many requests asked for counts as never asked for
EDGES = [0, *(2**octave for octave in range(OLDEST.bit_length() - 1))]  # number of requests at which each age begins
AGES = len(EDGES)
AT = np.arange(AGES)
WIDTHS = [after - before for before, after in pairwise(EDGES)] + [EDGES[-1] - EDGES[-2]]


class ReturnRates:
    """Learns the chances per request that a state is asked for: `rate(class, age, growth)`.

    Args:
        classes: Number of classes.
        pooled: How many of the first classes are pooled. The pooled figures are used for classes with few counts.
        growths: Number of growths. The growth of a state says by how many pages the last request was longer than the
            state, in powers of two. Each growth has a factor for the rate.
    """

    def __init__(self, classes: int, pooled: int, growths: int) -> None:
        self._growths, self._pooled = growths, list[int]()
        self._hit, self._seen, self._observed, self._expected = Table(), Table(), Table(), Table()
        self.add(classes, pooled)

    def add(self, classes: int, pooled: int) -> int:
        """Adds classes without counts, and returns the index of the first new one.

        Args:
            classes: Number of classes to add.
            pooled: How many of the first new classes are pooled.
        """
        first = len(self._hit)
        for table in (self._hit, self._seen):
            table += [[0.0] * AGES for _ in range(classes)]
        for table in (self._observed, self._expected):
            table += [[0.0] * self._growths for _ in range(classes)]
        self._pooled += range(first, first + pooled)
        self.update()
        return first

    def enter(self, kind: int, age: int, growth: int) -> None:
        """Counts a state that reached an age without being asked for."""
        self._seen[kind][age] += 1
        self._expected[kind][growth] += self._hazard[kind][age]

    def asked(self, kind: int, age: int, growth: int) -> None:
        """Counts a state that a request asked for, whether it is cached or evicted."""
        self._hit[kind][age] += 1
        self._observed[kind][growth] += 1

    def rate(self, kind: int, age: int, growth: int) -> float:
        """Returns the chance of a hit, per request during which a state is kept."""
        return self._index[kind][age] * self._factor[kind][growth]

    def fade(self, by: float) -> None:
        """Multiplies all counts by a factor below 1, so that later counts weigh more."""
        for table in (self._hit, self._seen, self._observed, self._expected):
            for row in table:
                row[:] = [value * by for value in row]

    def update(self) -> None:
        """Computes the rates from the counts. It takes 0.16 ms for 14 classes, 0.5 ms for all kinds of requests."""
        hit, seen, observed, expected = map(np.array, (self._hit, self._seen, self._observed, self._expected))
        reached = np.concatenate([seen[:, 1:], np.zeros_like(seen[:, :1])], 1)  # states that entered the next age
        seen = np.where(reached > 0, (seen + np.minimum(seen, hit + reached)) / 2, (3 * seen + hit) / 4)
        all_seen = seen[self._pooled].sum(0)
        pooled = (hit[self._pooled].sum(0) + SHRINKAGE * PRIOR) / (all_seen + SHRINKAGE)
        level = (hit.sum(1, keepdims=True) + SHRINKAGE) / ((seen * pooled).sum(1, keepdims=True) + SHRINKAGE)
        prior = pooled * level
        hazard = np.minimum(0.999, prior * (hit + SHRINKAGE) / (seen * prior + SHRINKAGE))
        oldest = int(np.flatnonzero(all_seen)[-1]) + 1 if all_seen.any() else 1
        self._hazard: Table = hazard.tolist()
        self._index: Table = best_index(hazard, oldest).tolist()
        self._factor: Table = ((observed + SHRINKAGE) / (expected + SHRINKAGE)).tolist()


def best_index(hazard: Hazards, oldest: int) -> Hazards:
    """Returns the index of each age: the maximum over horizons of chance of a hit / requests for which a slot is held.

    Args:
        hazard: Chance that a state is asked for in an age, float `class age`.
        oldest: Number of ages that at least one state has reached. A horizon does not go beyond these ages. For each
            later age, the only horizon is the end of that age.
    """
    later = AT[:, None] <= AT  # `age horizon`: the horizon is not before the age
    stays = np.where(later, 1 - hazard[:, None], 1.0).cumprod(2)  # `class age horizon`: no hit before its end
    before = np.concatenate([np.ones_like(stays[:, :, :1]), stays[:, :, :-1]], 2)
    held = (later * before * (np.array(WIDTHS) * (1 - hazard / 2))[:, None]).cumsum(2)
    allowed = later & ((oldest > AT) | (AT[:, None] == AT))
    return np.where(allowed, (1 - stays) / np.where(allowed, held, 1.0), 0.0).max(2)  # type: ignore[no-any-return]
