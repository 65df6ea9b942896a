"""Texts and columns that are safe and small inside a page, whatever the inspection holds."""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final

from markupsafe import Markup

LONGEST: Final = 120  # characters of a name that are shown; of a longer one the begin and the end
END: Final = 20  # of these, at the end
EXACT: Final = 2**53  # up to here, numbers of JavaScript are whole
NUMBER = re.compile(r"(?<!\w)(0|[1-9]\d{0,14})(?!\w)", re.ASCII)  # a number that stands alone and reads back the same
BREAKS: Final = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def text(name: str) -> str:
    r"""Returns a name as it can be shown: short, and with everything invisible as an escape.

    Args:
        name: A name from an inspection, which may come from a stranger.

    Example:
        >>> text("a\0b")
        'a\\x00b'
    """
    if len(name) > LONGEST:
        name = f"{name[: LONGEST - END]}\u2026{name[-END:]} ({len(name)} characters)"
    if name.isprintable():
        return name
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in name)


def number(value: int) -> int | str:
    """Returns a number that a script can show: itself, or its digits where a script would round it."""
    return value if abs(value) <= EXACT else str(value)


def runs(values: Iterable[Any]) -> list[Any]:
    """Returns a column as value, times, value, times.

    Example:
        >>> runs([4, 4, 4, 0])
        [4, 3, 0, 1]
    """
    return [part for value, same in groupby(values) for part in (value, sum(1 for _ in same))]


def steps(values: Sequence[int]) -> list[int]:
    """Returns each number less the one before it, which is short where numbers rise slowly.

    Example:
        >>> steps([3, 4, 5, 9])
        [3, 1, 1, 4]
    """
    return [value - before for value, before in zip(values, (0, *values), strict=False)]


def packed(names: Iterable[str], known: Iterable[Sequence[int]]) -> dict[str, list[Any]]:
    """Returns names as forms with numbers to fill in, because most names of a large inspection differ in numbers only.

    Args:
        names: A name for each owner.
        known: For each owner, numbers that the page has anyway, in the same order for all. A number of a name that is
            among them is not stored again.

    Returns:
        `forms`: texts, and between them the place of a known number, or -1 for the next stored one. `uses`: the form
        of each name, as runs. `numbers`: the stored numbers.

    Example:
        >>> packed(["slot 4 of 9", "slot 5 of 9"], [[4], [5]])
        {'forms': [['slot ', 0, ' of ', -1, '']], 'uses': [0, 2], 'numbers': [9, 9]}
    """
    forms: dict[tuple[int | str, ...], int] = {}
    uses, numbers = [], []
    for name, mine in zip(names, known, strict=True):
        parts: list[Any] = NUMBER.split(name)
        for at in range(1, len(parts), 2):
            value = int(parts[at])
            parts[at] = mine.index(value) if value in mine else -1
            if parts[at] < 0:
                numbers.append(value)
        uses.append(forms.setdefault(tuple(parts), len(forms)))
    return {"forms": [list(form) for form in forms], "uses": runs(uses), "numbers": numbers}


def embedded(data: Any) -> Markup:
    """Returns JSON that cannot end the script element that holds it, and that is ASCII alone."""
    return Markup(json.dumps(data, separators=(",", ":"), ensure_ascii=True).translate(BREAKS))
