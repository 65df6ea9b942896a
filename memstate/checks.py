"""Argument checks of the library: sequences, flags, salts, names and whole numbers, or InvalidArgument.

The checks of tensors that ops make are in `memstate.kernels.checks`.
"""

from collections.abc import Hashable, Iterable, Sequence
from itertools import chain
from reprlib import Repr
from types import NoneType
from typing import Any, NoReturn, SupportsIndex, TypeGuard

import numpy as np
import numpy.typing as npt

from memstate.errors import ConfigurationError, InvalidArgument

INT32_MAX = 2**31 - 1
PLAIN = frozenset((NoneType, str, bytes, int))  # types of salts whose values are equal only where their types are
BOOLS = frozenset((bool, np.bool_))
NESTED = 8  # tuples in tuples of a salt
PARTS = 1000  # of a salt, tuples included
LONGEST_KIND = 64  # characters of the kind of a request
SHOWN = 200  # characters of a value in a message
SHORT = Repr()  # of collections: four levels of six parts, so that parts which are shared are not shown again and again
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother = 4, SHOWN, SHOWN


class NotCopied:
    """Refuses copies and pickles of an object: each copy would change the same memory with counts of its own."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InvalidArgument(
            f"a {type(self).__name__} cannot be copied or pickled: each copy would change the same slots with counts "
            "of its own; pass the object itself, or mem.inspect(), which is plain data"
        )


def require_switch(name: str, switch: object, why: str = "") -> None:
    """Requires True or False.

    Raises:
        ConfigurationError: The value is something else.
    """
    if not isinstance(switch, bool):
        raise ConfigurationError(f"{name}={switch!r}: expected True or False{why}")


def is_whole(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, of Python or numpy; True and False are no numbers."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_count(n: object) -> TypeGuard[int]:
    """Whether n is a whole number from 0 on that fits int32; True and False are no numbers."""
    return 0 <= n <= INT32_MAX if type(n) is int else is_whole(n) and 0 <= int(n) <= INT32_MAX


def whole(what: str, count: Any, least: int = 1) -> int:
    """A whole number of `least` or more as an int. Raises: InvalidArgument naming `what` it is."""
    if not is_whole(count) or count < least:
        raise InvalidArgument(f"{what} {count!r}: expected {least} or more")
    return int(count)


def counts(what: str, values: npt.ArrayLike, size: int) -> npt.NDArray[np.int64]:
    """Whole numbers from 0 on that fit int32.

    Args:
        what: names them in an error.
        values: `size` numbers, or one that stands for all.
        size: how many are expected.

    Returns:
        int64 `size`.

    Raises:
        InvalidArgument: for anything else.
    """
    number: object = values
    if type(number) is int and 0 <= number <= INT32_MAX:
        (same := np.empty(size, np.int64)).fill(number)
        return same
    try:
        given = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # a ragged list, or a tensor that requires grad
        raise InvalidArgument(f"{what}={values!r}: expected {size} whole numbers") from error
    if given.shape not in ((), (size,)):
        raise InvalidArgument(f"{what} has {given.size} entries, expected {size}, or one number for all")
    if (  # numpy makes numbers of True and False among numbers
        (given.size and (given.dtype.kind not in "iu" or int(given.min()) < 0 or int(given.max()) > INT32_MAX))
        or (isinstance(number, list | tuple) and not BOOLS.isdisjoint(map(type, number)))
    ):  # fmt: skip
        each = list(number) if isinstance(number, list | tuple) else given.ravel().tolist()
        at = next((at for at, one in enumerate(each) if not is_count(one)), 0)
        named = f"{what}={values!r}" if given.ndim == 0 else f"{what}[{at}]={each[at]!r}"
        raise InvalidArgument(f"{named}: expected whole numbers from 0 to {INT32_MAX}")
    return np.broadcast_to(given, (size,)).astype(np.int64)


def numbers_of(what: str, values: npt.ArrayLike, size: int) -> list[int]:
    """Whole numbers from 0 on that fit int32, as plain ones; see `counts`."""
    given: Any = values
    plain = type(given) is list and len(given) == size and set(map(type, given)) == {int}
    if not (plain and min(given) >= 0 and max(given) <= INT32_MAX):
        given = counts(what, values, size).tolist()
    return list[int](given)


def flags(what: str, values: Any, size: int) -> npt.NDArray[np.bool_]:
    """Truth values, one per entry of a step. Numbers and words are refused: their truth is rarely what was meant.

    Args:
        what: names them in an error.
        values: `size` times True or False, or None for all False.
        size: how many are expected.

    Returns:
        bool `size`.

    Raises:
        InvalidArgument: for anything else.
    """
    if values is None:
        return np.zeros(size, bool)
    try:
        given = np.asarray(values)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:  # ragged, or a tensor elsewhere
        raise InvalidArgument(f"{what}={shown(values)}: expected {size} times True or False") from error
    if given.shape != (size,) or (size and given.dtype != bool):
        raise InvalidArgument(f"{what}={shown(values)}: expected {size} times True or False, one per entry of the step")
    return given.astype(bool)


def sequence(what: str, values: Any, such_as: str) -> Sequence[Any]:
    """The values themselves. Raises: InvalidArgument for what is no list, tuple or the like."""
    if type(values) is not list and (not isinstance(values, Sequence) or isinstance(values, str | bytes)):
        raise InvalidArgument(f"{values!r}: expected a sequence of {what}, such as {such_as}")
    return values


def items(what: str, values: Any, kind: type) -> tuple[Any, ...]:
    """Several values of one kind as a tuple; one alone, or a text, is no sequence. Raises: InvalidArgument."""
    found = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes) else None
    if found is None or not all(isinstance(value, kind) for value in found):
        raise InvalidArgument(f"{what} {values!r}: expected a sequence of {kind.__name__}")
    return found


def hashable(what: str, name: Any) -> Any:
    """The name itself. Raises: InvalidArgument for what cannot be looked up."""
    try:
        hash(name)
    except TypeError as error:
        raise InvalidArgument(f"{what} {name!r}: {error}; expected something hashable, such as a text") from error
    return name


def require_name(what: str, name: object) -> None:
    """Refuses a name that is no text or an empty one. Raises: InvalidArgument."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"a {what} needs a name, a text; got {name!r}")


def require_kind(kind: Any) -> str | None:
    """The kind of a request itself. Raises: InvalidArgument for all but None and short texts."""
    if kind is not None and (type(kind) is not str or not 0 < len(kind) <= LONGEST_KIND):
        raise InvalidArgument(
            f"kind={shown(kind)}: expected None or a word of at most {LONGEST_KIND} characters, such as 'chat'"
        )
    return kind


def require_salt(salt: Any) -> Hashable:
    """The salt itself: None, str, bytes, int, or a tuple of these, of exactly these types.

    Two such values are equal in Python only where they are the same value of the same type, so they may be looked up as
    they are; 1, True and 1.0 would be one key. Each also means the same in every other process.

    Args:
        salt: the value.

    Raises:
        InvalidArgument: for any other type, and for tuples that are too deep or too large.
    """
    if type(salt) not in PLAIN and not _is_salt(salt):
        raise InvalidArgument(
            f"salt {shown(salt)} of {type(salt).__name__}: expected None, str, bytes, int, or a tuple of these nested"
            f" at most {NESTED} deep and of at most {PARTS} parts, of exactly these types, because 1, True and 1.0 are"
            " equal; give the tenant's name, as a text"
        )
    return salt  # type: ignore[no-any-return]


def _is_salt(salt: Any) -> bool:
    """Level by level, so that tuples that share parts cost no more than their parts."""
    left, level = PARTS, iter((salt,))
    for _ in range(NESTED + 1):
        tuples = []
        for part in level:
            left -= 1
            if left < 0 or (type(part) is not tuple and type(part) not in PLAIN):
                return False
            if type(part) is tuple:
                tuples.append(part)
        if not tuples:
            return True
        level = chain.from_iterable(tuples)
    return False


def text(value: Any) -> str:
    """A value as text, whatever its own method raises."""
    try:
        return str(value)
    except Exception:
        return shown(value)


def shown(value: Any) -> str:
    """A value for people: its beginning where it is long or deep, its type where it cannot be shown."""
    try:
        text = SHORT.repr(value) if isinstance(value, tuple | list | dict | set | frozenset) else repr(value)
    except Exception:  # as of a number of more digits than Python prints
        text = f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.."
