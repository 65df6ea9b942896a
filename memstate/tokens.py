"""Tokens as bytes: eight of them a token, so that a prefix is compared by one call and hashed without a loop."""

from collections.abc import Hashable, Sequence
from struct import Struct
from struct import error as StructError
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memstate.errors import InvalidArgument

BYTES = 8  # of one token: ids may be hashes of images
Tokens = Sequence[int] | npt.NDArray[np.integer]


class Prompt(NamedTuple):
    """Tokens and their salt, which go together wherever prefixes are compared.

    Attributes:
        key: The tokens, encoded.
        salt: As `require_salt` takes it. Equal tokens under different salts share nothing.
        kind: Of the request that they come from; compared nowhere.

    Example:
        >>> Prompt(encode([3, 1, 4]), "tenant").head(2).tokens
        2
    """

    key: bytes
    salt: Hashable
    kind: str | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.key) // BYTES

    def head(self, tokens: int) -> "Prompt":
        """Returns the first tokens under the same salt.

        Args:
            tokens: How many; all where there are fewer.
        """
        return Prompt(self.key[: tokens * BYTES], self.salt, self.kind)


EMPTY = Prompt(b"", None)


def encode(tokens: Tokens) -> bytes:
    """Tokens as a key: `BYTES` bytes each.

    Args:
        tokens: whole numbers that fit 64 bits: a list, a tuple, an array of numpy or of the standard library, bytes, or
            a tensor in host memory. Arrays of int64 cost no loop.

    Raises:
        InvalidArgument: they are not whole numbers in one dimension, or do not fit.
    """
    try:
        if isinstance(tokens, list | tuple):
            return Struct(f"{len(tokens)}q").pack(*tokens)  # half the time of an array
        given = np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes | bytearray) else np.asarray(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError, StructError) as error:
        raise InvalidArgument(f"tokens: {error}; expected whole numbers that fit 64 bits") from error
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidArgument(f"tokens: {given.dtype} of shape {given.shape}, expected whole numbers in one dimension")
    if given.dtype == np.uint64 and given.size and int(given.max()) >= 2**63:
        raise InvalidArgument(f"tokens: {given.max()} does not fit 64 bits with a sign")
    return given.astype(np.int64, copy=False).tobytes()


def common(one: bytes, other: bytes, unit: int, start: int = 0, offset: int = 0) -> int:
    """Bytes that two keys share, in whole units. Compares by halving, without a loop over tokens.

    Args:
        one: a key, compared from `start` on.
        other: a key, compared from `offset` on.
        unit: bytes of a unit, such as those of a page.
        start: a byte of `one`.
        offset: a byte of `other`.
    """
    most = min(len(one) - start, len(other) - offset) // unit
    low, high = 0, most  # units known to agree; units that may
    while low < high:
        middle = (low + high + 1) // 2
        if one[start + low * unit : start + middle * unit] == other[offset + low * unit : offset + middle * unit]:
            low = middle
        else:
            high = middle - 1
    return low * unit
