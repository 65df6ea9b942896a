"""Lays out tables as plain text for a terminal. Nothing is cut: long texts wrap, more columns go into a new block."""

import shutil
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from textwrap import wrap
from typing import Any

GAP = "  "
LEAST = 24  # characters that texts of the first column get at least


def width() -> int:
    """Returns the number of columns of the terminal, or $COLUMNS; 80 without a terminal."""
    return max(40, shutil.get_terminal_size().columns)


def table(rows: Sequence[Mapping[str, Any]], columns: int, *, grouped: bool = False) -> list[str]:
    """Returns the lines of a table.

    Args:
        rows: Rows as heading -> value. A row can lack headings.
        columns: Largest number of characters of a line.
        grouped: Whether rows with the same first value form a group. The value then stands above its group, and a
            second value that equals that of the row above is left out.
    """
    heads = list(dict.fromkeys(head for row in rows for head in row))
    if grouped := grouped and len(heads) > 1:
        names = list(dict.fromkeys(row.get(heads[0]) for row in rows))
        rows = sorted(rows, key=lambda row: names.index(row.get(heads[0])))
    cells = {head: [text(row.get(head)) for row in rows] for head in heads}
    above = cells[heads.pop(0)] if grouped else [""] * len(rows)
    heads = [head for head in heads if any(cells[head])]
    if not heads:
        return [line for name in dict.fromkeys(above) for line in wrap(name, columns)]
    margin = GAP * grouped
    columns -= len(margin)
    key, *others = heads
    sizes = {head: max(map(len, (head, *cells[head]))) for head in heads}
    if sum(sizes.values()) + len(GAP) * len(others) > columns:
        sizes = {head: max(map(len, (*head.split(), *cells[head]))) for head in heads}
    rest = sum(len(GAP) + sizes[head] for head in others)
    sizes[key] = min(sizes[key], max(LEAST, columns - rest))
    lines: list[str] = []
    for block in _blocks(key, others, sizes, columns):
        numbers = {head for head in block if all(cell[:1] in "-0123456789" for cell in cells[head])} - {key}
        titles = [wrap(head, sizes[head]) for head in block]
        tall = max(map(len, titles))
        lines += [""] * bool(lines) + _lines(
            [[""] * (tall - len(title)) + title for title in titles], block, sizes, numbers, margin
        )
        group = name = ""
        for at in range(len(rows)):
            if not any(cells[head][at] for head in block[1:]) and any(cells[head][at] for head in others):
                continue  # this row has no value in this block
            if above[at] != group:
                lines += wrap(group := above[at], columns + len(margin)) or [""]
                name = ""
            wrapped = [wrap(cells[head][at], sizes[head], break_on_hyphens=False) for head in block]
            if grouped and cells[key][at] == name:
                wrapped[0] = []
            name = cells[key][at]
            lines += _lines(wrapped, block, sizes, numbers, margin)
    return lines


def _blocks(key: str, others: Sequence[str], sizes: dict[str, int], columns: int) -> list[list[str]]:
    """Distributes the columns over as few blocks as fit; each has the first column. Narrows those that fit no block."""
    blocks, left = [[key]], columns - sizes[key]
    for head in others:
        sizes[head] = min(sizes[head], columns - sizes[key] - len(GAP))
        if len(GAP) + sizes[head] > left:
            blocks.append([key])
            left = columns - sizes[key]
        blocks[-1].append(head)
        left -= len(GAP) + sizes[head]
    return blocks


def _lines(
    cells: Sequence[Sequence[str]], heads: Sequence[str], sizes: Mapping[str, int], numbers: set[str], margin: str
) -> list[str]:
    """Returns the lines of a row whose cells have several lines. Numbers stand at the right."""
    return [
        margin + GAP.join(
            part.rjust(sizes[head]) if head in numbers else part.ljust(sizes[head])
            for head, part in zip(heads, parts, strict=True)
        ).rstrip()
        for parts in zip_longest(*cells, fillvalue="")
    ]  # fmt: skip


def number(value: float) -> str:
    """Returns a number with at least three digits, and commas between thousands.

    Example:
        >>> number(2265.4), number(0.123456), number(7)
        ('2,265', '0.123', '7')
    """
    return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def text(value: Any) -> str:
    """Returns a value as the text of a cell."""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "" if value is None else number(value) if isinstance(value, int | float) else str(value)
