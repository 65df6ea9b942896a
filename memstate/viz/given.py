"""What a picture is drawn of, at the door: one layout or several, one `Inspection` or several, or a named error."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

import numpy as np

from memstate.errors import InvalidArgument
from memstate.slots.inspect import Inspection
from memstate.state.layout import StateLayout

Layouts = StateLayout | Mapping[str, StateLayout]
Inspections = Inspection | Sequence[Inspection]


def layouts(given: Layouts) -> dict[str, StateLayout]:
    """Name -> layout; one layout alone goes by its order. Raises: InvalidArgument."""
    if isinstance(given, StateLayout):
        return {given.order: given}
    if not isinstance(given, Mapping) or not all(isinstance(layout, StateLayout) for layout in given.values()):
        raise InvalidArgument(f"{given!r}: expected a StateLayout, or a dict of them by name")
    if not given:
        raise InvalidArgument("no layout to draw")
    return {str(name): layout for name, layout in given.items()}


def inspections(given: Inspections) -> list[Inspection]:
    """One picture or several as a list. Raises: InvalidArgument."""
    found = [given] if isinstance(given, Inspection) else list(given) if isinstance(given, Iterable) else None
    if found is None or not all(isinstance(inspection, Inspection) for inspection in found):
        raise InvalidArgument(f"{given!r}: expected pictures, as `StateManager.snapshot` returns them")
    return found


def numbers(what: str, given: Any, known: range) -> list[int]:
    """Some of the whole numbers `known`. Raises: InvalidArgument with those that are not."""
    if not isinstance(given, Iterable):
        raise InvalidArgument(f"{what} {given!r}: expected a list of {known.start}..{known.stop - 1}")
    found = list(given)
    unknown = [number for number in found if not is_whole(number) or int(number) not in known]
    if unknown:
        raise InvalidArgument(f"{what} {unknown}: expected {known.start}..{known.stop - 1}")
    return [int(number) for number in found]


def count(what: str, number: Any) -> int:
    """A whole number of 1 or more. Raises: InvalidArgument."""
    if not is_whole(number) or number < 1:
        raise InvalidArgument(f"{what} {number!r}: expected 1 or more")
    return int(number)


def bars(given: Any, log: bool) -> dict[str, dict[str, float]]:
    """Group -> name -> value, the same names in every group. Raises: InvalidArgument."""
    if not isinstance(given, Mapping) or not all(isinstance(group, Mapping) for group in given.values()):
        raise InvalidArgument(f"bars: {given!r}, expected a dict of groups, each a dict of values by name")
    found = {str(group): {str(name): value for name, value in each.items()} for group, each in given.items()}
    names = list(next(iter(found.values()), {}))
    if not names or any(list(each) != names for each in found.values()):
        raise InvalidArgument(f"bars: expected the names {names} in every group of {list(found)}")
    for group, each in found.items():
        for name, value in each.items():
            if not isinstance(value, int | float | np.number) or not isfinite(value) or (log and value < 0):
                raise InvalidArgument(f"bars: {group}, {name} is {value!r}, expected a number{' from 0 on' * log}")
    return found


def is_whole(number: object) -> bool:
    """Whether it is a whole number, of Python or numpy; True and False are no numbers."""
    return isinstance(number, int | np.integer) and not isinstance(number, bool)
