"""Measures the age of each row, and how long its length has not changed, but only when figures are asked for."""

import numpy as np
from numpy.typing import NDArray

from memstate.requests.table import RequestTable
from memstate.requests.tracking.mirror import Mirror

Seconds = NDArray[np.float64]


class Ages:
    """Knows the age and the idle time of each row.

    The idle time of a row counts from the first look that saw its present length. So the measured idle time is shorter
    than the real one, by at most the time between two looks. Each scrape of the metrics is a look.

    Args:
        table: the request table, which has the times of admission.
        mirror: has the lengths of rows.
    """

    def __init__(self, table: RequestTable, mirror: Mirror) -> None:
        self._table, self._mirror = table, mirror
        self._rows = np.arange(table.rows + 1)
        self._seen = np.full((2, table.rows + 1), -1), np.zeros(table.rows + 1)

    def look(self, now: float) -> tuple[Seconds, Seconds]:
        """Returns the age and the idle time of each row. Entries of rows without a request mean nothing.

        Several threads can call it at the same time. Then only one of their looks is kept.

        Args:
            now: the time, in seconds of the table's clock.

        Returns:
            Seconds since the admission to each row, and seconds since its length was seen to change: float64 `row`.
        """
        (before, since), seen = self._seen, np.stack([self._table.generation, self._mirror.lengths(self._rows)])
        since = np.where((before == seen).all(0), since, now)
        self._seen = seen, since
        return now - self._table.admitted, now - since
