"""Checks of what a picture is drawn of: layouts, inspections and numbers, or a named error."""

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
    """Returns name -> layout; one layout alone goes by its order.

    Raises:
        InvalidArgument: These are no layouts.
    """
    if isinstance(given, StateLayout):
        return {given.order: given}
    if not isinstance(given, Mapping) or not all(isinstance(layout, StateLayout) for layout in given.values()):
        raise InvalidArgument(f"{given!r}: expected a StateLayout, or a dict of them by name")
    if not given:
        raise InvalidArgument("no layout to draw")
    return dict(given)


def inspections(given: Inspections) -> list[Inspection]:
    """Returns one inspection or several as a list.

    Raises:
        InvalidArgument: These are no inspections.
    """
    found = [given] if isinstance(given, Inspection) else list(given) if isinstance(given, Iterable) else None
    if found is None or not all(isinstance(inspection, Inspection) for inspection in found):
        raise InvalidArgument(f"{given!r}: expected what `StateManager.inspect` returns")
    return found


def ids(what: str, given: Any, known: range) -> list[int]:
    """Returns some of the whole numbers `known`.

    Raises:
        InvalidArgument: One is not among them.
    """
    if not isinstance(given, Iterable):
        raise InvalidArgument(f"{what} {given!r}: expected a list of {known.start}..{known.stop - 1}")
    found = list(given)
    unknown = [number for number in found if not checks.is_whole(number) or int(number) not in known]
    if unknown:
        raise InvalidArgument(f"{what} {unknown}: expected {known.start}..{known.stop - 1}")
    return [int(number) for number in found]


def groups(what: str, given: Any, alike: bool = True) -> list[Any]:
    """Returns the names in the first of some groups.

    Args:
        what: The picture.
        given: Group -> name -> value.
        alike: Whether every group must have the same names.

    Raises:
        InvalidArgument: There is no group, one has no name, or the names are not alike.
    """
    if (
        not isinstance(given, Mapping)
        or not given
        or not all(isinstance(each, Mapping) and each for each in given.values())
    ):
        raise InvalidArgument(f"{what}: {given!r}, expected a dict of groups, each a dict of values by name")
    names = list(next(iter(given.values())))
    if alike and any(list(each) != names for each in given.values()):
        raise InvalidArgument(f"{what}: expected the names {names} in every group of {list(given)}")
    return names


def number(what: str, value: Any, *, least: float | None = None, above: float | None = None) -> None:
    """Refuses what is no finite number, is below `least`, or is not above `above`.

    Raises:
        InvalidArgument: It is.
    """
    is_number = isinstance(value, int | float | np.number) and isfinite(value)
    if not is_number or (least is not None and value < least) or (above is not None and value <= above):
        where = f" above {above}" if above is not None else "" if least is None else f" from {least} on"
        raise InvalidArgument(f"{what} is {value!r}, expected a number{where}")


def few(count: int, most: int, what: str, draw: str) -> None:
    """Refuses what has more parts than a reader can tell apart.

    Args:
        count: Its parts.
        most: As many as can be told apart.
        what: What it is, with the picture and the number.
        draw: What to draw instead.

    Raises:
        InvalidArgument: It has.
    """
    if count > most:
        raise InvalidArgument(f"{what} cannot be told apart, at most {most}: draw {draw}")
