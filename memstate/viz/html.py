"""HTML for objects in a notebook: strings from plain data.

Imports nothing of memstate, so the reprs of every layer may load it.
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH = 480  # pixels of the longest bar
NARROWEST = 2  # pixels of a bar that is there at all: padding of a few bytes stays visible
_COLOURS = ("#3b6ea5", "#e08e2d", "#5b9a68", "#8a63a8", "#b0574f", "#6f6f6f")
_PADDING = "repeating-linear-gradient(45deg,#d23b3b 0 2px,#ffffff 2px 5px)"


class Block(NamedTuple):
    """One plane of one layer of one slot.

    Attributes:
        name: Name of the plane.
        kind: Its shape and dtype.
        payload: Bytes.
        padding: Bytes.
    """

    name: str
    kind: str
    payload: int
    padding: int


def slot(caption: str, blocks: Sequence[Block]) -> str:
    """Returns a table of the blocks of a slot with bars to scale; padding is hatched.

    Example:
        >>> slot("a slot", [Block("ssm", "4x8 float32", 128, 16)])[:37]
        '<table><caption>a slot</caption><tr><'
    """
    most = max((block.payload + block.padding for block in blocks), default=0) or 1
    rows = "".join(_row(block, _COLOURS[at % len(_COLOURS)], WIDTH / most) for at, block in enumerate(blocks))
    heads = "".join(f"<th>{head}</th>" for head in ("plane", "shape", "bytes", "padding", "one layer of one slot"))
    return f"<table><caption>{escape(caption)}</caption><tr>{heads}</tr>{rows}</table>"


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of texts.

    Example:
        >>> table("sizes", ["part"], [["bitmap"]])
        '<table><caption>sizes</caption><tr><th>part</th></tr><tr><td>bitmap</td></tr></table>'
    """
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{escape(caption)}</caption><tr>{top}</tr>{body}</table>"


def paragraph(text: str) -> str:
    """Returns a paragraph."""
    return f"<p>{escape(text)}</p>"


def _row(block: Block, colour: str, scale: float) -> str:
    cells = (escape(block.name), escape(block.kind), f"{block.payload:,}", f"{block.padding:,}")
    bars = _bar(block.payload, colour, scale) + _bar(block.padding, _PADDING, scale)
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + f'<td style="text-align:left">{bars}</td></tr>'


def _bar(count: int, background: str, scale: float) -> str:
    if not count:
        return ""
    width = max(NARROWEST, round(count * scale))
    return f'<span style="display:inline-block;width:{width}px;height:14px;background:{background}"></span>'
