"""Numbers at the door: whole numbers that fit the device's int32 columns, or a named error."""

from typing import TypeGuard

import numpy as np
import numpy.typing as npt

from memstate.errors import InvalidArgument

INT32_MAX = 2**31 - 1


def is_count(n: object) -> TypeGuard[int]:
    """Whether n is a whole number from 0 on that fits int32; True and False are no numbers."""
    return isinstance(n, int | np.integer) and not isinstance(n, bool) and 0 <= int(n) <= INT32_MAX


def counts(what: str, values: npt.ArrayLike, size: int) -> npt.NDArray[np.int64]:
    """`size` whole numbers from 0 on, one number standing for all: int64 `size`. Raises: InvalidArgument."""
    try:
        given = np.asarray(values)
    except (ValueError, TypeError) as error:  # a ragged list
        raise InvalidArgument(f"{what}={values!r}: expected {size} whole numbers") from error
    if given.shape not in ((), (size,)):
        raise InvalidArgument(f"{what} has {given.size} entries, expected {size}, or one number for all")
    if given.size and (given.dtype.kind not in "iu" or int(given.min()) < 0 or int(given.max()) > INT32_MAX):
        raise InvalidArgument(f"{what}={values!r}: expected whole numbers from 0 to {INT32_MAX}")
    return np.broadcast_to(given, (size,)).astype(np.int64)
