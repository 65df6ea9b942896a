"""Says where a new row starts."""

from collections.abc import Sequence
from typing import NamedTuple

from memstate.requests.handles import Snapshot


class Source(NamedTuple):
    """Where the state of a new row comes from: zeros, a state that it reads, or states that become its own.

    Attributes:
        length: tokens that the state stands for; 0 for zeros.
        states: states in holders, the longest first. None for zeros, and for a state that is still below the device.
        pages: ids of the KV pages of these tokens, which the row shares. For what is still below the device, zeros.
        of: who has the states: a session, a node of the prefix cache, or None: the caller, or nobody on the device.
        takes: whether the states move to the row. If not, the row reads or copies the first.

    Example:
        >>> ZEROS.length, Source(16).takes
        (0, False)
    """

    length: int = 0
    states: Sequence[Snapshot] = ()
    pages: Sequence[int] = ()
    of: object = None
    takes: bool = False


ZEROS = Source()  # from the first token on
