"""What an object shows of itself, as plain data: a title, bars of parts, tables, and what is wrong.

Each class that shows itself has a method `sheet()`. `memstate.viz` draws a sheet: as HTML in a notebook, as text with
`rich.print`. Making a sheet launches nothing and does not wait for the device.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from memstate.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import Group

MOST_ROWS = 10  # of a table
MOST_PARTS = 24  # of a bar
MOST_FAULTS = 12
MOST_LETTERS = 60  # of a cell
MOST_TEXT = 300  # letters of a title or a fault
MOST_NOTE = 2000  # letters of a note: the recommendation of a plan is one
_NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


# Kinds of owners of slots, and what an audit finds besides, in the order of bars and legends.
SLOT_KINDS: Final = (
    "live", "lane", "mark", "snapshot", "cached", "session", "by id", "unknown", "leaked", "contested", "free",
)  # fmt: skip
MEMORY_KINDS: Final = ("planes", "KV pages", "staging of tiers", "tables", "null slot", "padding")


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


def of_bytes(name: str, count: int, kind: str) -> Part:
    """Returns a part of a bar of bytes."""
    return Part(name, count, kind, format_bytes(count))


def of_tokens(name: str, count: int, kind: str) -> Part:
    """Returns a part of a bar of tokens."""
    return Part(name, count, kind, f"{count:,} tokens")


def of_slots(counts: Mapping[str, int], each: int = 0) -> list[Part]:
    """Returns the parts of a bar of slots.

    Args:
        counts: slots of each kind.
        each: bytes of a slot, to say those too.
    """
    sizes = {kind: counts.get(kind, 0) for kind in SLOT_KINDS}
    return [Part(kind, n, kind, f"{n:,}, {format_bytes(n * each)}" if each else f"{n:,}") for kind, n in sizes.items()]


def of_use(used: int, total: int) -> list[Part]:
    """Returns what is used and what is free."""
    return [Part("used", used, "used", f"{used:,}"), Part("free", total - used, "free", f"{total - used:,}")]


def figures(title: str, stats: Any) -> Section:
    """Returns a table of the figures that are not 0, several to a line.

    Args:
        title: What they are.
        stats: A mapping or a dataclass of numbers.
    """
    named: Mapping[str, Any] = stats if isinstance(stats, Mapping) else asdict(stats)
    cells = [
        (name.replace("_", " "), f"{value:,}") for name, value in named.items() if isinstance(value, int) and value
    ]
    cells += [
        (f"{name}: {what}", f"{count:,}")
        for name, value in named.items() if name == "flaws" and isinstance(value, Mapping)
        for what, count in islice(value.items(), MOST_ROWS)
    ]  # fmt: skip
    wide = min(3, len(cells))
    cells += [("", "")] * (-len(cells) % max(1, wide))
    lines = [tuple(cell for pair in cells[at : at + wide] for cell in pair) for at in range(0, len(cells), wide or 1)]
    return section(title, (), lines)._replace(counted=False)


class Shown:
    """An object that shows what it holds, by its method `sheet`: as HTML in a notebook, as text with `rich.print`."""

    def sheet(self) -> Sheet:
        """Returns what the object shows of itself, from what the host knows.

        Syncs: no.
        """
        raise NotImplementedError

    def _repr_html_(self) -> str:
        from memstate.viz import html  # what draws is loaded when something is shown

        return html.render(self.sheet())

    def __rich__(self) -> "Group":
        from memstate.viz import text

        return text.render(self.sheet())
