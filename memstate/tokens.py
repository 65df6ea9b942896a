"""Encodes tokens as keys, so that prefixes are compared and hashed without a loop over tokens.

    ids from 0 below 2**32      bytes: 4 for each token
    any other id among them     Wide: the lower halves of all ids as such bytes, and the upper halves

Equal tokens have equal keys, because a slice of a wide key is narrow if its ids allow it. So both meet in one tree.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from operator import index
from struct import Struct
from struct import error as StructError
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from memstate.checks import shown
from memstate.errors import InvalidArgument

BYTES = 4  # bytes of one token in a key, and in the lower halves of a wide key
NUMBER = 8  # bytes of an id, and of a block's key that is a number
Tokens = Sequence[int] | npt.NDArray[np.integer]
Keys = Sequence[int] | Sequence[bytes] | npt.NDArray[np.integer]
HALF, LONG, WORD = np.dtype(np.uint32), np.dtype(np.int64), np.dtype(np.uint64)


@dataclass(slots=True, unsafe_hash=True)
class Wide:
    """A key with ids beyond 32 bits, such as hashes of images. Lengths and slices are in bytes of `low`.

    Attributes:
        low: The lower 32 bits of each id.
        high: The upper 32 bits of each id. Not all of them are 0.
    """

    low: bytes
    high: bytes

    def __len__(self) -> int:
        return len(self.low)

    def __getitem__(self, part: slice) -> "bytes | Wide":
        low, high = self.low[part], self.high[part]
        return low if high == bytes(len(high)) else Wide(low, high)

    def __add__(self, other: "bytes | Wide") -> "bytes | Wide":
        return joined([self, other])

    def __radd__(self, other: bytes) -> "bytes | Wide":
        return joined([other, self])


Key = bytes | Wide


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

    key: Key
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


def encode(tokens: Tokens) -> Key:
    """Returns tokens as a key.

    Args:
        tokens: whole numbers that fit 64 bits: a list, a tuple, an array of numpy or of the standard library, bytes, or
            a tensor in host memory. Arrays need no loop.

    Raises:
        InvalidArgument: the tokens are not whole numbers in one dimension, or do not fit 64 bits.
    """
    try:
        if isinstance(tokens, (list, tuple, range)):
            try:
                return Struct(f"={len(tokens)}I").pack(*tokens)  # takes half the time of numpy
            except StructError:  # an id is beyond 32 bits, or something is no id
                tokens = np.frombuffer(Struct(f"{len(tokens)}q").pack(*tokens), np.int64)
        given = np.frombuffer(tokens, np.uint8) if isinstance(tokens, (bytes, bytearray)) else np.asarray(tokens)
    except (TypeError, ValueError, OverflowError, RuntimeError, StructError) as error:
        raise InvalidArgument(f"tokens: {error}; expected whole numbers that fit 64 bits") from error
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise InvalidArgument(f"tokens: {given.dtype} of shape {given.shape}, expected whole numbers in one dimension")
    words = given.astype(LONG, copy=False).view(WORD)
    most = words.item(words.argmax()) if given.size else 0
    if not most >> 32:
        return words.astype(HALF).tobytes()
    if most >> 63 and given.dtype.kind == "u":
        raise InvalidArgument(f"tokens: {most} does not fit 64 bits with a sign")
    return Wide(words.astype(HALF).tobytes(), (words >> 32).astype(HALF).tobytes())


def joined(keys: Iterable[Key]) -> Key:
    """Returns one key with the tokens of several."""
    halves = [(key.low, key.high) if isinstance(key, Wide) else (key, bytes(len(key))) for key in keys]
    low, high = map(b"".join, zip(*halves, strict=True)) if halves else (b"", b"")
    return Wide(low, high)[:]


def ids(key: Key) -> npt.NDArray[np.int64]:
    """Returns the tokens of a key."""
    if isinstance(key, Wide):
        return ids(key.low) | ids(key.high) << 32
    return np.frombuffer(key, HALF).astype(np.int64)


def encode_keys(keys: Keys, page: int) -> Key:
    """Returns keys of blocks as one key: each takes the place of a page of tokens. So a list of keys is a prompt.

    Args:
        keys: whole numbers from 0 on that fit 64 bits; or byte strings of one length, which is at most `page * 8`.
        page: tokens of a page.

    Raises:
        InvalidArgument: the keys are something else.

    Example:
        >>> encode_keys([1, 2], page=2) == encode([1, 0, 2, 0])
        True
    """
    unit, given = page * NUMBER, cast("Any", keys)
    try:
        if not isinstance(given, list):  # other types take longer to check
            if isinstance(given, str | bytes | bytearray | memoryview):
                given = None  # the key of one block
            elif not isinstance(given, Sequence):
                numbers = np.asarray(given)
                given = numbers[:].tolist() if numbers.dtype.kind in "iu" or not numbers.size else None
        if not (given and isinstance(given[0], bytes)):
            given = [index(key).to_bytes(NUMBER, "little") for key in given]
        (width,) = set(map(len, given)) or {NUMBER}
        place = page * BYTES if width <= page * BYTES else unit
        encoded = (b"\0" * (place - width)).join([*given, b""])
    except (TypeError, ValueError, IndexError, OverflowError, RuntimeError):
        width = 0
    if not 0 < width <= unit:
        raise InvalidArgument(f"keys={shown(keys)}: expected numbers from 0 below 2**64, or bytes, at most {unit}")
    return encoded if place < unit else encode(np.frombuffer(encoded, np.int64))


def common(one: Key, other: Key, unit: int, start: int = 0, offset: int = 0) -> int:
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
