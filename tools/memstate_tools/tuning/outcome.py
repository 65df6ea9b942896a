"""What a sweep returns: its result, which can be drawn and stored."""

from pathlib import Path
from typing import TYPE_CHECKING

from memstate_tools.tuning.plot import plot
from memstate_tools.tuning.result import Result
from memstate_tools.tuning.store import store

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Sweep(Result):
    """The result of `sweep`; see `Result` for its attributes."""

    def plot(self, kind: str = "bars") -> "Figure":
        """Draws the sweep.

        Args:
            kind: "bars": a bar for each configuration that is not excluded. "heat": a map of the two axes that change
                most, for each kernel and key.

        Raises:
            ImportError: matplotlib is not installed. The message says what to install.
            InvalidArgument: There is no such kind.
        """
        return plot(self, kind)

    def store(self, folder: Path | None = None) -> Path:
        """Writes the best configurations into the file that launches read; see `memstate_tools.tuning.store.store`."""
        return store(self, folder)
