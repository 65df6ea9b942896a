"""Renders the sheet of an object as text for a terminal. The only module that imports rich."""

from memstate.sheet import Bar, Sheet, SheetSection
from memstate.viz import kinds

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Group, RenderableType
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as error:
    raise ImportError("text in colours needs rich: pip install '.[cli]' in a checkout of memstate") from error

WIDTH = 60  # cells of a bar


def render(sheet: Sheet) -> Group:
    """Returns a sheet as an object that rich prints.

    Args:
        sheet: The sheet to show.
    """
    parts: list[RenderableType] = [Text(sheet.title, style="bold")]
    parts += [Text(f"  {fault}", style="bold red") for fault in sheet.faults]
    for bar in sheet.bars:
        parts += _bar(bar)
    parts += [Text(note, style="dim") for note in sheet.notes]
    for section in sheet.sections:
        parts += _section(section)
    return Group(*parts)


def plain(lines: str) -> Group:
    """Returns plain text as an object that rich prints as it is."""
    return Group(Text(lines))


def _bar(bar: Bar) -> list[RenderableType]:
    drawn, key = Text(), Text()
    for part, cells in zip(bar.parts, widths([part.size for part in bar.parts], WIDTH), strict=True):
        kind = kinds.kind(part.kind)
        style = "bright_black" if kind.name == "free" or kind.dark else kind.colour
        fill = "░" if kind.name == "free" or kind.dark else "▒" if kind.faulty or kind.hatched else "█"
        drawn.append(fill * cells, style)
        key.append(f"{fill} ", style)
        key.append(part.name)
        key.append(f" {part.text}   ", "dim")
    key.rstrip()
    return [Text(bar.title, style="dim"), drawn, key]


def widths(sizes: list[int], cells: int) -> list[int]:
    """Returns how many of `cells` cells each size gets: in proportion to the sizes, but at least one.

    Example:
        >>> widths([1, 1000, 1000], 10)
        [1, 5, 4]
    """
    shares = [1 + (cells - len(sizes)) * size // max(1, sum(sizes)) for size in sizes]
    by_rest = sorted(range(len(sizes)), key=lambda at: -((cells - len(sizes)) * sizes[at] % max(1, sum(sizes))))
    for at in by_rest[: max(0, cells - sum(shares))]:
        shares[at] += 1
    return shares


def _section(section: SheetSection) -> list[RenderableType]:
    table = Table(
        box=SIMPLE_HEAD if section.heads else None, show_header=bool(section.heads),
        title=Text(f"\n{section.title}" * bool(section.title)), title_justify="left", title_style="bold",
        padding=(0, 2, 0, 0), pad_edge=False,
    )  # fmt: skip
    for head in section.heads:
        table.add_column(Text(head), overflow="fold")
    for row in section.rows:
        table.add_row(*(Text(cell) for cell in row))
    return [table, Text(f"... and {section.more:,} more", style="dim")] if section.more else [table]
