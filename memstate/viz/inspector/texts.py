"""Makes texts and columns of any inspection safe and small inside a page."""

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Final

from markupsafe import Markup

LONGEST: Final = 120  # limit of the characters of a name; of a longer name, beginning and end are shown
END: Final = 20  # characters of a long name's end
EXACT: Final = 2**53  # up to this number, JavaScript's numbers are exact
# a number, not part of a word, that has the same digits when it is written again
NUMBER = re.compile(r"(?<!\w)(0|[1-9]\d{0,14})(?!\w)", re.ASCII)
BREAKS: Final = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})


def text(name: str) -> str:
    r"""Returns a name for display: short, and with escapes for all invisible characters.

    Args:
        name: A name from an inspection, which may come from an untrusted file.

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
    """Returns a number as a script can show it exactly: as it is or, if a script would round it, as a text."""
    return value if abs(value) <= EXACT else str(value)


def runs(values: Iterable[Any]) -> list[Any]:
    """Returns a column shortened: each value once, followed by how many times in a row it comes.

    Example:
        >>> runs([4, 4, 4, 0])
        [4, 3, 0, 1]
    """
    return [part for value, same in groupby(values) for part in (value, sum(1 for _ in same))]


def steps(values: Sequence[int]) -> list[int]:
    """Returns the difference of each number to the one before: it has fewer digits if numbers rise slowly.

    Example:
        >>> steps([3, 4, 5, 9])
        [3, 1, 1, 4]
    """
    return [value - before for value, before in zip(values, (0, *values), strict=False)]


def packed(names: Iterable[str], known: Iterable[Sequence[int]]) -> dict[str, list[Any]]:
    """Returns names in a shorter form: texts with gaps, and numbers for the gaps.

    In a large inspection, most names differ only in their numbers. Then a form, a text with gaps, serves many names.

    Args:
        names: A name for each owner.
        known: For each owner, numbers that the page has in another place, in the same order for all owners. If such a
            number is in the name, it is not stored again.

    Returns:
        `forms`: lists of texts; the number between two texts is the index of a known number, or -1 for the next stored
        number. `uses`: for each name the index of its form, shortened as by `runs`. `numbers`: the stored numbers.

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
    """Returns data as ASCII JSON, escaped so that it cannot end the script element around it."""
    return Markup(json.dumps(data, separators=(",", ":"), ensure_ascii=True).translate(BREAKS))
