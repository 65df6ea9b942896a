"""Shows copies of the states in the layers of a cache between two forwards. The first access makes the copies."""

from collections import UserDict
from collections.abc import Callable

from torch import Tensor

Found = dict[int, Tensor | None]


class Between(UserDict[int, Tensor | None]):
    """The states of one kind of a layer, by number. The first access after a forward gathers the states of all layers.

    The states are copies: what a caller changes is lost at the next forward. If no layer reads the oldest input of a
    window, this input is 0 here. The states do not contain pending tokens of tails.

    Args:
        look: function that returns the states.
    """

    def __init__(self, look: Callable[[], Found]) -> None:
        self._look = look

    @property
    def data(self) -> Found:  # type: ignore[override]
        """The states."""
        return self._look()

    def copy(self) -> Found:  # type: ignore[override]
        """Returns the states as they are now."""
        return dict(self.data)

    def __copy__(self) -> Found:  # type: ignore[override]
        return self.copy()
