"""Encodes tokens as keys, 8 bytes per token, so that prefixes are compared and hashed without a loop over tokens."""

from collections.abc import Hashable, Sequence
from operator import index
from struct import Struct
from struct import error as StructError
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from memstate.checks import shown
from memstate.errors import InvalidArgument

BYTES = 8  # bytes of one token in a key; ids may be 64-bit hashes of images
Tokens = Sequence[int] | npt.NDArray[np.integer]
Keys = Sequence[int] | Sequence[bytes] | npt.NDArray[np.integer]


class SaltedTokens(NamedTuple):
    """Tokens and their salt. Prefixes are equal only if their tokens and their salts are equal.

    Attributes:
        key: The tokens, encoded.
        salt: A salt that `require_salt` accepts. Equal tokens under different salts share nothing.
        kind: `Request.kind` of the request with these tokens. Comparisons of prefixes ignore it.
        extent: (number of all tokens of the prompt, number of its first tokens whose KV the caller has). None: `key`
            has all tokens, and the KV is in the pages of the cache.

    Example:
        >>> SaltedTokens(encode([3, 1, 4]), "tenant").head(2).tokens
        2
    """

    key: bytes
    salt: Hashable
    kind: str | None = None
    extent: tuple[int, int] | None = None

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.key) // BYTES

    def head(self, tokens: int) -> "SaltedTokens":
        """Returns the first tokens under the same salt.

        Args:
            tokens: How many. If the prompt has fewer, all are returned.
        """
        return SaltedTokens(self.key[: tokens * BYTES], self.salt, self.kind)


EMPTY = SaltedTokens(b"", None)


def encode(tokens: Tokens) -> bytes:
    """Returns tokens as a key: `BYTES` bytes for each token.

    Args:
        tokens: whole numbers that fit 64 bits: a list, a tuple, an array of numpy or of the standard library, bytes, or
            a tensor in host memory. Arrays of int64 need no loop.

    Raises:
        InvalidArgument: the tokens are not whole numbers in one dimension, or do not fit 64 bits.
    """
    try:
        if isinstance(tokens, list | tuple):
            return Struct(f"{len(tokens)}q").pack(*tokens)  # takes half the time of numpy
        given = np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes | bytearray) else np.asarray(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError, StructError) as error:
        raise InvalidArgument(f"tokens: {error}; expected whole numbers that fit 64 bits") from error
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidArgument(f"tokens: {given.dtype} of shape {given.shape}, expected whole numbers in one dimension")
    if given.dtype == np.uint64 and given.size and int(given.max()) >= 2**63:
        raise InvalidArgument(f"tokens: {given.max()} does not fit 64 bits with a sign")
    return given.astype(np.int64, copy=False).tobytes()


def encode_keys(keys: Keys, page: int) -> bytes:
    """Returns keys of blocks as bytes: each key takes the place of a page of tokens. So a list of keys is a prompt.

    Args:
        keys: whole numbers from 0 on that fit 64 bits; or byte strings of one length, which is at most `page * BYTES`.
        page: tokens of a page.

    Raises:
        InvalidArgument: the keys are something else.

    Example:
        >>> encode_keys([1, 2], page=2) == encode([1, 0, 2, 0])
        True
    """
    unit, given = page * BYTES, cast("Any", keys)
    try:
        if not isinstance(given, list):  # other types take longer to check
            if isinstance(given, str | bytes | bytearray | memoryview):
                given = None  # the key of one block
            elif not isinstance(given, Sequence):
                numbers = np.asarray(given)
                given = numbers[:].tolist() if numbers.dtype.kind in "iu" or not numbers.size else None
        if not (given and isinstance(given[0], bytes)):
            given = [index(key).to_bytes(BYTES, "little") for key in given]
        (width,) = set(map(len, given)) or {BYTES}
        encoded = (b"\0" * (unit - width)).join([*given, b""])
    except (TypeError, ValueError, IndexError, OverflowError, RuntimeError):
        width = 0
    if not 0 < width <= unit:
        raise InvalidArgument(f"keys={shown(keys)}: expected numbers from 0 below 2**64, or bytes, at most {unit}")
    return encoded


def common(one: bytes, other: bytes, unit: int, start: int = 0, offset: int = 0) -> int:
    """Returns the length of the common prefix of two keys, in bytes, rounded down to whole units.

    It halves the range of the answer in each step, so it needs no loop over tokens.

    Args:
        one: a key, compared from byte `start` on.
        other: a key, compared from byte `offset` on.
        unit: bytes of a unit, such as those of a page.
        start: first byte of `one` that is compared.
        offset: first byte of `other` that is compared.
    """
    most = min(len(one) - start, len(other) - offset) // unit
    low, high = 0, most  # low: units that certainly agree; high: units that perhaps agree
    while low < high:
        middle = (low + high + 1) // 2
        if one[start + low * unit : start + middle * unit] == other[offset + low * unit : offset + middle * unit]:
            low = middle
        else:
            high = middle - 1
    return low * unit
