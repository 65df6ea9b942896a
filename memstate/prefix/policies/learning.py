"""How likely a state is to be asked for again, learned while running: by what kind it is, and how long ago it was.

A *class* is one of a few kinds of states, an *age* a bucket of requests gone by, one for each octave. Every class
counts how many states entered an age (`seen`) and were asked for in it (`hit`): hits / seen is the hazard. The index of
an age is the best, over all horizons, of P(asked for until then) / E[requests that the slot is held until then]: what a
slot earns if it is released at the right moment (J. Gittins, Journal of the Royal Statistical Society B 41, 1979).
"""

from itertools import pairwise

Table = list[list[float]]

SHRINKAGE = 8.0  # asked-for states that a class must show before its own figures outweigh those of all classes
PRIOR = 0.2  # chance per age before anything is known: the same in every octave makes a rate of 1/age, as for LRU
OLDEST = 2**14  # requests: an age beyond it is as good as never
EDGES = [0, *(2**octave for octave in range(OLDEST.bit_length() - 1))]  # ages, in requests, at which buckets begin
AGES = len(EDGES)
WIDTHS = [after - before for before, after in pairwise(EDGES)] + [EDGES[-1] - EDGES[-2]]


class ReturnRates:
    """Learns the chances per request that a state is asked for: `rate(class, age, growth)`.

    Args:
        classes: Number of classes.
        pooled: How many of the first classes lend their figures to those that know little.
        growths: Number of growths. A growth says how far the last request went beyond the state; it scales the rate.
    """

    def __init__(self, classes: int, pooled: int, growths: int) -> None:
        self._classes, self._pooled, self._growths = classes, pooled, growths
        self._hit: Table = [[0.0] * AGES for _ in range(classes)]
        self._seen: Table = [[0.0] * AGES for _ in range(classes)]
        self._observed: Table = [[0.0] * growths for _ in range(classes)]
        self._expected: Table = [[0.0] * growths for _ in range(classes)]
        self.update()

    def enter(self, kind: int, age: int, growth: int) -> None:
        """Counts a state that reached an age without being asked for."""
        self._seen[kind][age] += 1
        self._expected[kind][growth] += self._hazard[kind][age]

    def leave(self, kind: int, age: int, growth: int) -> None:
        """Takes back an `enter`: the state belongs to another class from now on."""
        self._seen[kind][age] = max(0.0, self._seen[kind][age] - 1)
        self._expected[kind][growth] = max(0.0, self._expected[kind][growth] - self._hazard[kind][age])

    def asked(self, kind: int, age: int, growth: int) -> None:
        """Counts a state that was asked for, whether it was kept or evicted."""
        self._hit[kind][age] += 1
        self._observed[kind][growth] += 1

    def rate(self, kind: int, age: int, growth: int) -> float:
        """Returns the chances per request of keeping a state."""
        return self._index[kind][age] * self._factor[kind][growth]

    def fade(self, by: float) -> None:
        """Scales all counts, so that what was learned so far counts less."""
        for table in (self._hit, self._seen, self._observed, self._expected):
            for row in table:
                row[:] = [value * by for value in row]

    def update(self) -> None:
        """Computes the rates from the counts: less than a millisecond for 14 classes and 15 ages."""
        pooled, oldest = self._pool()
        self._hazard: Table = []
        self._index: Table = []
        self._factor: Table = []
        for kind in range(self._classes):
            hit, seen = self._hit[kind], self._seen[kind]
            expected = sum(n * g for n, g in zip(seen, pooled, strict=True))
            level = (sum(hit) + SHRINKAGE) / (expected + SHRINKAGE)
            self._hazard.append(
                [
                    min(0.999, g * level * (h + SHRINKAGE) / (n * g * level + SHRINKAGE))
                    for h, n, g in zip(hit, seen, pooled, strict=True)
                ]
            )
            self._index.append([_best(self._hazard[kind], age, oldest) for age in range(AGES)])
            pairs = zip(self._observed[kind], self._expected[kind], strict=True)
            self._factor.append([(o + SHRINKAGE) / (e + SHRINKAGE) for o, e in pairs])

    def _pool(self) -> tuple[list[float], int]:
        """Returns the hazard by age of the pooled classes together, and how many ages were reached."""
        pooled, oldest = [], 1
        for age in range(AGES):
            hit = sum(self._hit[kind][age] for kind in range(self._pooled))
            seen = sum(self._seen[kind][age] for kind in range(self._pooled))
            oldest = age + 1 if seen else oldest
            pooled.append((hit + SHRINKAGE * PRIOR) / (seen + SHRINKAGE))
        return pooled, oldest


def _best(hazard: list[float], age: int, oldest: int) -> float:
    """Returns the best of all horizons: chance of being asked for / requests that the slot is kept."""
    alive, held, best = 1.0, 0.0, 0.0
    for at in range(age, max(age + 1, oldest)):
        held += alive * WIDTHS[at] * (1 - hazard[at] / 2)
        alive *= 1 - hazard[at]
        best = max(best, (1 - alive) / held)
    return best
