"""How long rows have run and stood still. Costs the steps nothing: rows are looked at where figures are asked for."""

import numpy as np
from numpy.typing import NDArray

from memstate.requests.table import RequestTable
from memstate.requests.tracking.mirror import Mirror

Seconds = NDArray[np.float64]


class Ages:
    """Knows the age of each row, and how long its length has been seen to stay the same.

    A row that is looked at for the first time has just moved, as far as is known. So the idle time is at least what it
    says, and as exact as looks are frequent: each scrape of the metrics is one.

    Args:
        table: The request table, which notes when a row was taken.
        mirror: Knows the lengths.
    """

    def __init__(self, table: RequestTable, mirror: Mirror) -> None:
        self._table, self._mirror = table, mirror
        self._rows = np.arange(table.rows + 1)
        self._seen = np.full((2, table.rows + 1), -1), np.zeros(table.rows + 1)

    def look(self, now: float) -> tuple[Seconds, Seconds]:
        """Returns the age and the idle time of each row; what it says of a row without a request means nothing.

        Threads may call it at once. One of their looks is forgotten then.

        Args:
            now: The time, in seconds of the table's clock.

        Returns:
            Seconds since each row was taken, and since its length was last seen to change. float64 `row`.
        """
        (before, since), found = self._seen, np.stack([self._table.generation, self._mirror.lengths(self._rows)])
        since = np.where((before == found).all(0), since, now)
        self._seen = found, since
        return now - self._table.admitted, now - since
