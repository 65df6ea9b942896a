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
    return {str(name): layout for name, layout in given.items()}


def inspections(given: Inspections) -> list[Inspection]:
    """Returns one inspection or several as a list.

    Raises:
        InvalidArgument: These are no inspections.
    """
    found = [given] if isinstance(given, Inspection) else list(given) if isinstance(given, Iterable) else None
    if found is None or not all(isinstance(inspection, Inspection) for inspection in found):
        raise InvalidArgument(f"{given!r}: expected what `StateManager.inspect` returns")
    return found


def numbers(what: str, given: Any, known: range) -> list[int]:
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


def bars(given: Any, log: bool = False, *, least: float | None = None) -> dict[str, dict[str, float]]:
    """Returns group -> name -> value, with the same names in every group.

    Args:
        given: What a caller gave.
        log: Whether the axis is logarithmic: no value is below 0 then.
        least: The least value, None for any.

    Raises:
        InvalidArgument: A value is no number, or groups differ in their names.
    """
    if not isinstance(given, Mapping) or not all(isinstance(group, Mapping) for group in given.values()):
        raise InvalidArgument(f"bars: {given!r}, expected a dict of groups, each a dict of values by name")
    found = {str(group): {str(name): value for name, value in each.items()} for group, each in given.items()}
    names = list(next(iter(found.values()), {}))
    if not names or any(list(each) != names for each in found.values()):
        raise InvalidArgument(f"bars: expected the names {names} in every group of {list(found)}")
    for group, each in found.items():
        for name, value in each.items():
            _require_number(f"bars: {group}, {name}", value, 0 if log else least)
    return found


def series(given: Any, log: bool) -> dict[str, dict[int, float]]:
    """Returns name -> place -> value, the places in order.

    Raises:
        InvalidArgument: A value is no number, a place is not 1 or more, or a name has no value.
    """
    if not isinstance(given, Mapping) or not all(isinstance(each, Mapping) and each for each in given.values()):
        raise InvalidArgument(f"lines: {given!r}, expected a dict of lines, each a dict of values by setting")
    if not given:
        raise InvalidArgument("no line to draw")
    for name, each in given.items():
        for place, value in each.items():
            if not checks.is_whole(place) or place < 1:
                raise InvalidArgument(f"lines: {name} at {place!r}, expected a whole number from 1 on")
            _require_number(f"lines: {name} at {place}", value, None, above=log)
    return {str(name): {int(place): each[place] for place in sorted(each)} for name, each in given.items()}


def limits(given: Any, log: bool) -> dict[str, float]:
    """Returns name -> value.

    Raises:
        InvalidArgument: A value is no number.
    """
    if not isinstance(given, Mapping):
        raise InvalidArgument(f"limits: {given!r}, expected a dict of numbers by name")
    for name, value in given.items():
        _require_number(f"limits: {name}", value, None, above=log)
    return {str(name): value for name, value in given.items()}


def _require_number(what: str, value: Any, least: float | None, *, above: bool = False) -> None:
    """Refuses what is no finite number, is below `least`, or, with `above`, is not above 0."""
    number = isinstance(value, int | float | np.number) and isfinite(value)
    if not number or (least is not None and value < least) or (above and value <= 0):
        where = " above 0" if above else "" if least is None else f" from {least} on"
        raise InvalidArgument(f"{what} is {value!r}, expected a number{where}")
