"""Checks arguments: sequences, flags, salts, names and whole numbers. A wrong argument raises `InvalidArgument`.

`memstate.kernels.checks` has the checks of tensors.
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
PLAIN = frozenset((NoneType, str, bytes, int))  # types of salts; values of two of these types are never equal
BOOLS = frozenset((bool, np.bool_))
NESTED = 8  # levels of tuples in a salt, at most
PARTS = 1000  # parts of a salt at most, tuples included
LONGEST_KIND = 64  # characters of the kind of a request, at most
SHOWN = 200  # characters of a value in a message, at most
SHORT = Repr()  # shows at most four levels of six parts: a part that stands in many places is shown at each of them
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother = 4, SHOWN, SHOWN


class NotCopied:
    """Base of objects that refuse copy and pickle: two copies would change the same memory, with separate counts."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise InvalidArgument(
            f"a {type(self).__name__} cannot be copied or pickled: each copy would change the same slots with counts "
            "of its own; pass the object itself, or mem.inspect(), which is plain data"
        )


def require_switch(name: str, switch: object, why: str = "") -> None:
    """Raises an error unless a value is True or False.

    Raises:
        ConfigurationError: The value is something else.
    """
    if not isinstance(switch, bool):
        raise ConfigurationError(f"{name}={switch!r}: expected True or False{why}")


def is_whole(value: object) -> TypeGuard[int]:
    """Returns whether a value is a whole number of Python or numpy. True and False are no numbers here."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_count(n: object) -> TypeGuard[int]:
    """Returns whether n is a whole number from 0 on that fits int32. True and False are no numbers here."""
    return 0 <= n <= INT32_MAX if type(n) is int else is_whole(n) and 0 <= int(n) <= INT32_MAX


def whole(what: str, count: Any, least: int = 1) -> int:
    """Returns a whole number of `least` or more as an int. Raises: InvalidArgument, whose text begins with `what`."""
    if not is_whole(count) or count < least:
        raise InvalidArgument(f"{what} {count!r}: expected {least} or more")
    return int(count)


def counts(what: str, values: npt.ArrayLike, size: int) -> npt.NDArray[np.int64]:
    """Returns values as an array of whole numbers from 0 on that fit int32.

    Args:
        what: the name of the values in an error.
        values: `size` numbers, or one number for all.
        size: how many numbers are expected.

    Returns:
        int64 `size`.

    Raises:
        InvalidArgument: the values are no such numbers, or not `size` of them.
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
    if (  # numpy turns True and False in a list of numbers into numbers: look for them in the list
        (given.size and (given.dtype.kind not in "iu" or int(given.min()) < 0 or int(given.max()) > INT32_MAX))
        or (isinstance(number, list | tuple) and not BOOLS.isdisjoint(map(type, number)))
    ):  # fmt: skip
        each = list(number) if isinstance(number, list | tuple) else given.ravel().tolist()
        at = next((at for at, one in enumerate(each) if not is_count(one)), 0)
        named = f"{what}={values!r}" if given.ndim == 0 else f"{what}[{at}]={each[at]!r}"
        raise InvalidArgument(f"{named}: expected whole numbers from 0 to {INT32_MAX}")
    return (given if given.ndim else np.broadcast_to(given, (size,))).astype(np.int64)


def numbers_of(what: str, values: npt.ArrayLike, size: int) -> list[int]:
    """Returns values as a list of whole numbers from 0 on that fit int32; see `counts`."""
    given: Any = values
    plain = type(given) is list and len(given) == size and set(map(type, given)) == {int}
    if not (plain and min(given) >= 0 and max(given) <= INT32_MAX):
        given = counts(what, values, size).tolist()
    return [*given]


def flags(what: str, values: Any, size: int) -> npt.NDArray[np.bool_]:
    """Returns truth values as an array, one per entry of a step.

    Numbers and texts are refused, because their truth value is rarely what the caller meant.

    Args:
        what: the name of the values in an error.
        values: `size` times True or False, or None for all False.
        size: how many values are expected.

    Returns:
        bool `size`.

    Raises:
        InvalidArgument: the values are not `size` times True or False.
    """
    if values is None:
        return np.zeros(size, bool)
    try:
        given = np.asarray(values)
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:  # ragged, or a tensor on a device
        raise InvalidArgument(f"{what}={shown(values)}: expected {size} times True or False") from error
    if given.shape != (size,) or (size and given.dtype != bool):
        raise InvalidArgument(f"{what}={shown(values)}: expected {size} times True or False, one per entry of the step")
    return given.astype(bool)


def sequence(what: str, values: Any, such_as: str) -> Sequence[Any]:
    """Returns the values as they are. Raises: InvalidArgument, unless they are a sequence other than a text."""
    if type(values) is not list and (not isinstance(values, Sequence) or isinstance(values, str | bytes)):
        raise InvalidArgument(f"{values!r}: expected a sequence of {what}, such as {such_as}")
    return values


def items(what: str, values: Any, kind: type) -> tuple[Any, ...]:
    """Returns values of class `kind` as a tuple. Raises: InvalidArgument for a text, one value, or other classes."""
    given = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes) else None
    if given is None or not all(isinstance(value, kind) for value in given):
        raise InvalidArgument(f"{what} {values!r}: expected a sequence of {kind.__name__}")
    return given


def hashable(what: str, name: Any) -> Any:
    """Returns the name as it is. Raises: InvalidArgument if it is not hashable."""
    try:
        hash(name)
    except TypeError as error:
        raise InvalidArgument(f"{what} {name!r}: {error}; expected something hashable, such as a text") from error
    return name


def require_name(what: str, name: object) -> None:
    """Raises InvalidArgument unless a name is a text and not empty."""
    if not isinstance(name, str) or not name:
        raise InvalidArgument(f"a {what} needs a name, a text; got {name!r}")


def require_kind(kind: Any) -> str | None:
    """Returns the kind of a request as it is. Raises: InvalidArgument, unless it is None or a short text."""
    if kind is not None and (type(kind) is not str or not 0 < len(kind) <= LONGEST_KIND):
        raise InvalidArgument(
            f"kind={shown(kind)}: expected None or a word of at most {LONGEST_KIND} characters, such as 'chat'"
        )
    return kind


def require_salt(salt: Any) -> Hashable:
    """Returns the salt as it is: None, str, bytes, int, or a tuple of these, of exactly these types.

    Two such values are equal in Python only if their types are equal, so a salt can be a key of a dict. With other
    types this fails: 1, True and 1.0 are one key. A salt of these types also means the same in every process.

    Args:
        salt: the value to check.

    Raises:
        InvalidArgument: the salt has another type, or its tuples are too deep or too large.
    """
    if type(salt) not in PLAIN and not _is_salt(salt):
        raise InvalidArgument(
            f"salt {shown(salt)} of {type(salt).__name__}: expected None, str, bytes, int, or a tuple of these nested"
            f" at most {NESTED} deep and of at most {PARTS} parts, of exactly these types, because 1, True and 1.0 are"
            " equal; give the tenant's name, as a text"
        )
    return salt  # type: ignore[no-any-return]


def _is_salt(salt: Any) -> bool:
    """Returns whether a tuple is a salt. It counts parts level by level, and stops at the limits."""
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
    """Returns a value as text, even if its `__str__` raises."""
    try:
        return str(value)
    except Exception:
        return shown(value)


def shown(value: Any) -> str:
    """Returns a value as a text for people: cut if it is long or deep, the name of its type if its `repr` raises."""
    try:
        text = SHORT.repr(value) if isinstance(value, tuple | list | dict | set | frozenset) else repr(value)
    except Exception:  # such as a number with more digits than Python prints
        text = f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}.."
