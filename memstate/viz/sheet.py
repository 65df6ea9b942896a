"""What an object shows of itself, as plain data: a title, bars of parts, tables, and what is wrong.

Imports colours only. `sheets` describes objects, `html` and `text` render the description.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MOST_ROWS = 10  # of a table
MOST_PARTS = 24  # of a bar
MOST_FAULTS = 12
MOST_LETTERS = 60  # of a cell
MOST_TEXT = 300  # letters of a title or a fault
MOST_NOTE = 2000  # letters of a note: the recommendation of a plan is one
_NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


class Part(NamedTuple):
    """A part of a bar.

    Attributes:
        name: What it is.
        size: Its share of the bar, in any unit.
        kind: Names its colour, see `kinds.kind`.
        text: The size for people.
    """

    name: str
    size: int
    kind: str
    text: str


class Bar(NamedTuple):
    """Parts side by side, to scale, with a legend.

    Attributes:
        title: What the whole is.
        parts: The parts; those of size 0 are left out.
    """

    title: str
    parts: tuple[Part, ...]


class Section(NamedTuple):
    """A table that folds.

    Attributes:
        title: What it lists.
        heads: Names of the columns; none for a table without a head.
        rows: Texts, a column each.
        more: Further rows that are not shown.
        counted: Whether a row is a thing, so that the number of rows says something.
    """

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0
    counted: bool = True


class Sheet(NamedTuple):
    """What an object shows of itself.

    Attributes:
        title: One line.
        bars: Bars.
        sections: Tables.
        faults: What is wrong, a sentence each.
        notes: What else there is to say, a sentence each.
    """

    title: str
    bars: tuple[Bar, ...] = ()
    sections: tuple[Section, ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def bar(title: str, parts: Iterable[Part]) -> Bar:
    """Returns a bar of parts that have a size; the smallest of too many are joined."""
    found = [part._replace(name=cut(part.name, MOST_LETTERS)) for part in parts if part.size > 0]
    if len(found) > MOST_PARTS:
        rest = found[MOST_PARTS:]
        size = sum(part.size for part in rest)
        found = [*found[:MOST_PARTS], Part(f"{len(rest)} more", size, "unknown", f"{size:,}")]
    return Bar(cut(title, MOST_TEXT), tuple(found))


def section(title: str, heads: Sequence[str], rows: Sequence[Sequence[object]], total: int | None = None) -> Section:
    """Returns a table of the first rows.

    Args:
        title: What it lists.
        heads: Names of the columns.
        rows: The rows, or the first of them.
        total: Number of rows, where `rows` are only the first.
    """
    kept = tuple(tuple(cut(str(cell), MOST_LETTERS) for cell in row) for row in rows[:MOST_ROWS])
    return Section(title, tuple(heads), kept, (len(rows) if total is None else total) - len(kept))


def sheet(
    title: str, bars: Iterable[Bar] = (), sections: Iterable[Section] = (), faults: Sequence[str] = (),
    notes: Iterable[str] = (),
) -> Sheet:  # fmt: skip
    """Returns a sheet without empty bars and tables, of limited size."""
    wrong = [cut(fault, MOST_TEXT) for fault in faults[:MOST_FAULTS]]
    if len(faults) > len(wrong):
        wrong.append(f"... and {len(faults) - len(wrong):,} more")
    return Sheet(
        cut(title, MOST_TEXT), tuple(bar for bar in bars if bar.parts), tuple(each for each in sections if each.rows),
        tuple(wrong), tuple(cut(note, MOST_NOTE) for note in notes),
    )  # fmt: skip


def cut(text: str, letters: int) -> str:
    """Returns the text that can be shown, of at most so many letters."""
    return visible(text if len(text) <= letters else text[: letters - 3] + "...")


def visible(text: str) -> str:
    """Returns a text without what pages and terminals cannot show: control characters, and marks that turn lines."""
    return _NO_TEXT.sub("\ufffd", text)
