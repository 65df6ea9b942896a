"""What the layers of a cache show between two forwards: copies of the states, made at the first look."""

from collections import UserDict
from collections.abc import Callable

from torch import Tensor

Found = dict[int, Tensor | None]


class Between(UserDict[int, Tensor | None]):
    """The states of one kind of a layer, by number. All layers are gathered at the first look behind a forward.

    They are copies: what a caller writes to them, or puts in their place, is gone with the next forward. Of a window
    whose oldest input no layer reads, that input is 0. Tokens that are pending in tails are not in them.

    Args:
        look: returns them.
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
