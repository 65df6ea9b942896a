"""Checks the inputs of pictures: layouts, inspections and numbers. Wrong ones raise InvalidArgument."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from memstate import checks
from memstate.errors import InvalidArgument
from memstate.slots.inspect import Inspection
from memstate.state.layout import StateLayout

Layouts = StateLayout | Mapping[str, StateLayout]
Inspections = Inspection | Sequence[Inspection]


def layouts(given: Layouts) -> dict[str, StateLayout]:
    """Returns layouts by name, from a dict of them or from a single layout, whose name is then its order.

    Raises:
        InvalidArgument: `given` is neither a layout nor a dict of layouts.
    """
    if isinstance(given, StateLayout):
        return {given.order: given}
    if not isinstance(given, Mapping) or not all(isinstance(layout, StateLayout) for layout in given.values()):
        raise InvalidArgument(f"{given!r}: expected a StateLayout, or a dict of them by name")
    if not given:
        raise InvalidArgument("no layout to draw")
    return dict(given)


def inspections(given: Inspections) -> list[Inspection]:
    """Returns a list of inspections, from one inspection or a list of them.

    Raises:
        InvalidArgument: `given` is neither an inspection nor a list of inspections.
    """
    taken = [given] if isinstance(given, Inspection) else list(given) if isinstance(given, Iterable) else None
    if taken is None or not all(isinstance(inspection, Inspection) for inspection in taken):
        raise InvalidArgument(f"{given!r}: expected what `StateManager.inspect` returns")
    return taken


def ids(what: str, given: Any, known: range) -> list[int]:
    """Checks that all ids are in `known`, and returns them as a list.

    Raises:
        InvalidArgument: An id is not in `known`.
    """
    if not isinstance(given, Iterable):
        raise InvalidArgument(f"{what} {given!r}: expected a list of {known.start}..{known.stop - 1}")
    numbers = list(given)
    if unknown := [number for number in numbers if not checks.is_whole(number) or int(number) not in known]:
        raise InvalidArgument(f"{what} {unknown}: expected {known.start}..{known.stop - 1}")
    return [int(number) for number in numbers]


def groups(what: str, given: Any, alike: bool = True) -> list[Any]:
    """Checks groups of numbers, and returns the names in the first group.

    Args:
        what: Name of the picture, for messages.
        given: For each group, its values by name.
        alike: Whether every group must have the same names.

    Raises:
        InvalidArgument: There is no group, a group has no name, or the names differ.
    """
    if not (isinstance(given, Mapping) and given and all(isinstance(one, Mapping) and one for one in given.values())):
        raise InvalidArgument(f"{what}: {given!r}, expected a dict of groups, each a dict of values by name")
    names = list(next(iter(given.values())))
    if alike and any(list(each) != names for each in given.values()):
        raise InvalidArgument(f"{what}: expected the names {names} in every group of {list(given)}")
    return names


def number(what: str, value: Any, *, least: float | None = None, above: float | None = None) -> None:
    """Raises an error unless a value is a finite number that is not below `least`, and is above `above`.

    Raises:
        InvalidArgument: The value is not such a number.
    """
    is_number = isinstance(value, int | float | np.number) and isfinite(value)
    if not is_number or (least is not None and value < least) or (above is not None and value <= above):
        where = f" above {above}" if above is not None else "" if least is None else f" from {least} on"
        raise InvalidArgument(f"{what} is {value!r}, expected a number{where}")


def few(count: int, most: int, what: str, draw: str) -> None:
    """Raises an error if a picture has so many parts that a reader cannot tell them apart.

    Args:
        count: Number of the picture's parts.
        most: Limit of the number of parts.
        what: Text that names the picture and its number of parts, for the error.
        draw: What to draw instead, for the error.

    Raises:
        InvalidArgument: There are more than `most` parts.
    """
    if count > most:
        raise InvalidArgument(f"{what} cannot be told apart, at most {most}: draw {draw}")
