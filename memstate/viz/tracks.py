"""Draws who held what over time, from the journal: a line for each register, and packets from left to right."""

from collections.abc import Sequence

from memstate.errors import InvalidArgument
from memstate.viz import figure, kinds
from memstate.viz.figure import Axes, Figure
from memstate.viz.owners import Changes, OwnerSpan, holdings_over

MOST_LINES = 200
TALL = 60  # limit of the lines that are drawn at full height
WIDE = 40  # limit of the letters of a group's name
FEW = 0.004  # least width of a span, as a share of the picture's width


def timeline(changes: Changes) -> Figure:
    """Draws who held what, by packets: a line for each register, grouped by request, session and cache.

    A span begins at the packet that filled the register, and ends at the packet that emptied it. It has no left edge
    if the register was filled before the first change, and no right edge if it still holds its slot. The number in a
    span is the length of the state in tokens; it is left out if it does not fit. A vertical line joins the spans of a
    state that moved.

    Args:
        changes: `mem.journal.changes`, the `changes` of an inspection, or an inspection.

    Raises:
        InvalidArgument: `changes` is not a list of changes, it is empty, or there are more than 200 lines.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    spans = holdings_over(changes)
    if not (lines := sorted_lines(spans)):
        raise InvalidArgument(
            "timeline: no changes to draw: no slot had an owner yet, or the manager has no journal, such as journal=100"
        )
    if len(lines) > MOST_LINES:
        raise InvalidArgument(
            f"timeline: {len(lines)} registers of {len(spans)} spans, expected 1..{MOST_LINES}: draw a part of "
            "mem.journal.changes, such as mem.journal.changes[-100:]"
        )
    first, last = bounds(spans)
    inch = 0.26 if len(lines) <= TALL else 0.26 * TALL / len(lines)
    drawn = figure.drawing(10, 1.3 + inch * len(lines))
    axes = drawn.subplots()
    place = {line: at for at, line in enumerate(lines)}
    for span in spans:
        begin = first if span.begin is None else span.begin
        end = last if span.end is None else span.end
        _draw(axes, span, place[span.group, span.register], begin, max(end - begin, FEW * (last - first)), last - first)
    for one, other in moves(spans):
        at = one.end or first
        axes.plot(
            [at, at], [place[one.group, one.register], place[other.group, other.register]], color=figure.EDGE,
            linewidth=0.8, marker=".", markersize=3, zorder=4,
        )  # fmt: skip
    _name(axes, lines)
    axes.set_xlim(first, last)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    axes.set_xlabel("packet")
    axes.set_ylabel("owner and register")
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)  # packets are whole numbers, even if there are few
    axes.grid(axis="x", color="#dddddd", linewidth=0.5, zorder=0)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(drawn, figure.kind_key({kinds.kind(span.kind).name for span in spans}))
    return drawn


def sorted_lines(spans: Sequence[OwnerSpan]) -> list[tuple[str, int]]:
    """Returns (group, register) for each line: groups in the order in which they appear, caches last."""
    order = {group: at for at, group in reversed(list(enumerate(span.group for span in spans)))}
    late = ("snapshots", "prefix cache", "unknown")
    lines = {(span.group, span.register) for span in spans}
    return sorted(lines, key=lambda line: (line[0] in late and late.index(line[0]) + 1, order[line[0]], line[1]))


def bounds(spans: Sequence[OwnerSpan]) -> tuple[float, float]:
    """Returns the first and last packet that a picture shows, with room for spans that begin earlier or end later."""
    known = [packet for span in spans for packet in (span.begin, span.end) if packet is not None] or [0]
    early, late = any(span.begin is None for span in spans), any(span.end is None for span in spans)
    room = max(0.5, 0.04 * (max(known) - min(known)))
    return min(known) - room * early, max(known) + room * (late or max(known) == min(known))


def moves(spans: Sequence[OwnerSpan]) -> list[tuple[OwnerSpan, OwnerSpan]]:
    """Returns (span before, span after) of each move."""
    begun = {(span.register, span.serials[0]): span for span in spans if span.source}
    pairs = ((span, begun.get((span.target, span.serials[1]))) for span in spans if span.target)
    return [(span, other) for span, other in pairs if other is not None]


def _draw(axes: Axes, span: OwnerSpan, line: int, begin: float, width: float, whole: float) -> None:
    """Draws a span, with edges where it begins and ends, and with its length if there is room."""
    kind = kinds.kind(span.kind)
    figure.cell(axes, begin, line, kind, wide=width, tall=0.72, edge=0)
    for at, closed in ((begin, span.begin is not None), (begin + width, span.end is not None)):
        if closed:
            axes.plot([at, at], [line - 0.36, line + 0.36], color=figure.EDGE, linewidth=0.8, zorder=3)
    text = f"{span.label:,}" if span.label else ""
    if text and width > (0.011 * len(text) + 0.004) * whole:
        # the box hides lines of moves behind the number
        box = {"facecolor": kind.colour, "edgecolor": "none", "pad": 0.5}
        axes.text(
            begin + width / 2, line, text, ha="center", va="center", fontsize=7, color=kind.ink, zorder=5, bbox=box
        )


def _name(axes: Axes, lines: Sequence[tuple[str, int]]) -> None:
    """Writes the register beside each line and the group beside its first line, and draws a rule between groups."""
    labels = []
    for at, (group, register) in enumerate(lines):
        new = at == 0 or lines[at - 1][0] != group
        if new and at:
            axes.axhline(at - 0.5, color="#bbbbbb", linewidth=0.6)
        labels.append(f"{figure.plain(kinds.short(group, WIDE))}   {register}" if new else str(register))
    axes.set_yticks(range(len(lines)), labels, fontsize=8 if len(lines) <= TALL else 5)
