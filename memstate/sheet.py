"""Defines sheets: what an object shows of itself, as plain data. A sheet has a title, bars, tables, faults and notes.

Each class that shows itself has a method `sheet()`. `memstate.viz` draws the sheet: as HTML in a notebook, as text with
`rich.print`. Making a sheet launches nothing and does not wait for the device.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from memstate import tables
from memstate.sizes import format_bytes

if TYPE_CHECKING:
    from rich.console import Group

R = TypeVar("R")
MOST_ROWS = 10  # rows of a table, at most
MOST_RECORDS = 100  # rows of a `Table`, at most
MOST_PARTS = 24  # parts of a bar, at most
MOST_FAULTS = 12
MOST_LETTERS = 60  # letters of a cell, at most
MOST_TEXT = 300  # letters of a title, a fault, or a cell of a `Table`, at most
MOST_NOTE = 2000  # letters of a note, at most; a note can be a long recommendation of `capacity`
_NO_TEXT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


# Kinds of owners of slots, and the kinds of faults that an audit finds, in the order of bars and legends.
SLOT_KINDS: Final = (
    "live", "lane", "mark", "snapshot", "cached", "session", "by id", "unknown", "leaked", "contested", "free",
)  # fmt: skip
MEMORY_KINDS: Final = ("planes", "KV pages", "staging of tiers", "tables", "null slot", "padding")


class BarPart(NamedTuple):
    """A part of a bar.

    Attributes:
        name: The name of the part in the legend.
        size: The length of the part, in any unit, the same for all parts of a bar.
        kind: The name of the part's colour, see `memstate.viz.kinds`.
        text: The size as a text for people.
    """

    name: str
    size: int
    kind: str
    text: str


class Bar(NamedTuple):
    """Parts side by side, to scale, with a legend.

    Attributes:
        title: The name of the whole.
        parts: The parts; parts of size 0 are left out.
    """

    title: str
    parts: tuple[BarPart, ...]


class SheetSection(NamedTuple):
    """A table. In a notebook it folds, unless it has no title.

    Attributes:
        title: What the table lists.
        heads: Names of the columns; empty for a table without a head.
        rows: The rows: one text per column.
        more: Number of further rows that are not shown.
        counted: Whether to show the number of rows. False if rows are not the things that the table lists.
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
        bars: Bars, one below the other.
        sections: Tables, below the bars.
        faults: What is wrong, one sentence each.
        notes: Further remarks, one sentence each.
    """

    title: str
    bars: tuple[Bar, ...] = ()
    sections: tuple[SheetSection, ...] = ()
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def bar(title: str, parts: Iterable[BarPart]) -> Bar:
    """Returns a bar of the parts that have a size. Beyond `MOST_PARTS`, the last parts are joined into one."""
    shown = [part._replace(name=cut(part.name, MOST_LETTERS)) for part in parts if part.size > 0]
    if len(shown) > MOST_PARTS:
        rest = shown[MOST_PARTS:]
        size = sum(part.size for part in rest)
        shown = [*shown[:MOST_PARTS], BarPart(f"{len(rest)} more", size, "unknown", f"{size:,}")]
    return Bar(cut(title, MOST_TEXT), tuple(shown))


def section(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[object]], total: int | None = None, most: int = MOST_ROWS,
    letters: int = MOST_LETTERS,
) -> SheetSection:  # fmt: skip
    """Returns a table of the first rows.

    Args:
        title: What the table lists.
        heads: Names of the columns.
        rows: The rows, or only the first ones.
        total: Number of all rows. None: `rows` has them all.
        most: Limit of the rows that are shown.
        letters: Limit of the letters of a cell.
    """
    kept = tuple(tuple(cut(str(cell), letters) for cell in row) for row in rows[:most])
    return SheetSection(title, tuple(heads), kept, (len(rows) if total is None else total) - len(kept))


def sheet(
    title: str, bars: Iterable[Bar] = (), sections: Iterable[SheetSection] = (), faults: Sequence[str] = (),
    notes: Iterable[str] = (),
) -> Sheet:  # fmt: skip
    """Returns a sheet: empty bars and tables are left out, and long texts are cut."""
    wrong = [cut(fault, MOST_TEXT) for fault in faults[:MOST_FAULTS]]
    if len(faults) > len(wrong):
        wrong.append(f"... and {len(faults) - len(wrong):,} more")
    return Sheet(
        cut(title, MOST_TEXT), tuple(bar for bar in bars if bar.parts), tuple(each for each in sections if each.rows),
        tuple(wrong), tuple(cut(note, MOST_NOTE) for note in notes),
    )  # fmt: skip


def cut(text: str, letters: int) -> str:
    """Returns a text cut to at most `letters` letters, in which `visible` has replaced what cannot be shown."""
    return visible(text if len(text) <= letters else text[: letters - 3] + "...")


def visible(text: str) -> str:
    """Returns a text in which control characters and marks that turn the direction of writing are replaced."""
    return _NO_TEXT.sub("\ufffd", text)


def of_bytes(name: str, count: int, kind: str) -> BarPart:
    """Returns a part of a bar of bytes."""
    return BarPart(name, count, kind, format_bytes(count))


def of_tokens(name: str, count: int, kind: str) -> BarPart:
    """Returns a part of a bar of tokens."""
    return BarPart(name, count, kind, f"{count:,} tokens")


def of_slots(counts: Mapping[str, int], each: int = 0) -> list[BarPart]:
    """Returns the parts of a bar of slots.

    Args:
        counts: number of slots of each kind of owner.
        each: bytes of a slot, to show bytes too; 0 to show slots only.
    """
    sizes = {kind: counts.get(kind, 0) for kind in SLOT_KINDS}
    return [
        BarPart(kind, n, kind, f"{n:,}, {format_bytes(n * each)}" if each else f"{n:,}") for kind, n in sizes.items()
    ]


def of_use(used: int, total: int) -> list[BarPart]:
    """Returns the two parts of a bar: used and free."""
    return [BarPart("used", used, "used", f"{used:,}"), BarPart("free", total - used, "free", f"{total - used:,}")]


def figures(title: str, stats: Any) -> SheetSection:
    """Returns a table of the figures that are not 0, with several figures per line.

    Args:
        title: The title of the table.
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
    """Base of objects that show what they hold: as HTML in a notebook, as text with `rich.print`."""

    def sheet(self) -> Sheet:
        """Returns the sheet of this object, from figures that the host knows.

        Syncs: no.
        """
        raise NotImplementedError

    def _repr_html_(self) -> str:
        from memstate.viz import html  # loaded only when something is shown

        return html.render(self.sheet())

    def __rich__(self) -> "Group":
        from memstate.viz import text

        return text.render(self.sheet())


class Table(list[R], Shown):
    """Records in a list that shows itself as a table, also as plain text.

    Args:
        records: Named tuples, or mappings from heading to value.
        title: One line.
        texts: Heading -> the function that writes the values below it. Others are written as in every table.
        grouped: Number of columns that stand above the others in plain text, once for all rows that are alike there.
    """

    def __init__(
        self, records: Iterable[R], title: str, texts: Mapping[str, Callable[[Any], str]] | None = None,
        grouped: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(records)
        self.title, self.texts, self.grouped = title, texts or {}, grouped

    def sheet(self) -> Sheet:
        """See `Shown.sheet`."""
        rows = [record if isinstance(record, Mapping) else record._asdict() for record in list[Any](self)]
        names = list(dict.fromkeys(name for row in rows for name, value in row.items() if value is not None))
        cells = [[self._text(name, row.get(name)) for name in names] for row in rows]
        heads = [name.replace("_", " ") for name in names]
        return sheet(self.title, sections=[section("", heads, cells, most=MOST_RECORDS, letters=MOST_TEXT)])

    def _text(self, name: str, value: Any) -> str:
        return "" if value is None else self.texts.get(name, tables.text)(value)

    def __rich__(self) -> "Group":
        from memstate.viz import text

        return text.plain(repr(self))

    def __repr__(self) -> str:
        lines, above = [self.title], self.grouped
        for shown in self.sheet().sections:
            heads = ("", *shown.heads[above:]) if above else shown.heads
            rows = [(", ".join(filter(None, row[:above])), *row[above:]) if above else row for row in shown.rows]
            cells = [dict(zip(heads, row, strict=True)) for row in rows]
            lines += tables.table(cells, tables.width(), grouped=bool(above))
            lines += [f"... and {shown.more:,} more"] * bool(shown.more)
        return "\n".join(lines)
