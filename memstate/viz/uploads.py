"""What one upload holds: the sections of a packet, and its words one by one."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memstate import checks
from memstate.errors import InvalidArgument
from memstate.kernels.tables import HEADER_INTS, LIMIT_CELL, Section

if TYPE_CHECKING:
    from matplotlib.figure import Figure

A_LINE = 16  # words of a line: 64 bytes
MOST_WORDS = 1024
COLUMNS = {
    Section.BATCH: ("row", "tokens"), Section.MARKS: ("entry", "offset", "register"),
    Section.MOVES: ("to", "from"), Section.RELEASES: ("register",), Section.CLAIMS: ("register",),
    Section.WRITES: ("cell", "value"), Section.DATA: ("to", "from"),
}  # fmt: skip
HEADER, PADDING = "#6f6f6f", "#eeeeee"


@dataclass(frozen=True)
class PacketSection:
    """One section of a packet.

    Args:
        name: Its name.
        start: Its first word.
        columns: Name of the column -> its entries. A column is padded to 4 words.
    """

    name: str
    start: int
    columns: dict[str, list[int]]

    @property
    def count(self) -> int:
        """Entries of each column."""
        return len(next(iter(self.columns.values())))

    @property
    def stride(self) -> int:
        """Words from one column to the next."""
        return -(-self.count // 4) * 4

    @property
    def end(self) -> int:
        """The word behind it."""
        return self.start + len(self.columns) * self.stride


def sections(packet: Sequence[int]) -> list[PacketSection]:
    """Returns the sections of a packet that have entries, in the order in which they lie.

    Args:
        packet: The words of an upload, such as `CommandBuffer.step.tolist()`. Words behind the last section do not
            matter.

    Raises:
        InvalidArgument: These are no words of a packet.

    Example:
        >>> header = [0] * 16
        >>> header[2], header[10] = 2, 16  # two claims, from word 16 on
        >>> sections([*header, 3, 6, 0, 0])
        [PacketSection(name='claims', start=16, columns={'register': [3, 6]})]

    Syncs: no.
    """
    if not isinstance(packet, Iterable):
        raise InvalidArgument(f"packet: {packet!r}, expected a list of words")
    given = list(packet)
    if len(given) < HEADER_INTS or not all(checks.is_whole(word) for word in given):
        raise InvalidArgument(f"packet: {len(given)} words, expected {HEADER_INTS} or more whole numbers")
    found = []
    for section, columns in COLUMNS.items():
        count, start = int(given[section]), int(given[HEADER_INTS // 2 + section])
        stride = -(-count // 4) * 4
        if count < 0 or (count and not HEADER_INTS <= start <= len(given) - len(columns) * stride):
            raise InvalidArgument(
                f"packet: {count} {section.name.lower()} from word {start} on do not fit {len(given)} words"
            )
        if count:
            values = [given[at : at + count] for at in range(start, start + len(columns) * stride, stride)]
            name = section.name.lower()
            found.append(
                PacketSection(name, start, {of: [*map(int, v)] for of, v in zip(columns, values, strict=True)})
            )
    return sorted(found, key=lambda part: part.start)


def packet(packet: Sequence[int]) -> "Figure":
    """Draws the words of a packet, 16 a line, coloured by section; what only pads a column is pale.

    The header has the number of entries of each section, the limit of optional claims, and where each section starts.
    Beyond 1024 words nothing is drawn.

    Args:
        packet: The words of an upload, as for `sections`.

    Raises:
        InvalidArgument: These are no words of a packet, or too many.
        ImportError: matplotlib is not installed.

    Syncs: no.
    """
    from memstate.viz import figure

    parts = sections(packet)
    size = max([HEADER_INTS, *(part.end for part in parts)])
    if size > MOST_WORDS:
        raise InvalidArgument(f"packet: {size} words cannot be told apart, draw {MOST_WORDS} or fewer")
    colours: dict[str, figure.Colour] = {"header": HEADER, **figure.plane_colours(part.name for part in parts)}
    lines = -(-size // A_LINE)
    drawn = figure.drawing(9, 1.0 + 0.36 * lines)
    axes = drawn.subplots()
    for word, name, real in _words(parts):
        axes.barh(
            word // A_LINE, 1, left=word % A_LINE, height=0.9, color=colours[name] if real else PADDING,
            edgecolor="white", linewidth=1.0,
        )  # fmt: skip
        if real:
            axes.text(
                word % A_LINE + 0.5, word // A_LINE, str(int(packet[word])), ha="center", va="center", fontsize=7,
                color="white",
            )  # fmt: skip
    axes.set_yticks(range(lines), [f"byte {4 * A_LINE * line}" for line in range(lines)], fontsize=7)
    axes.set_ylim(lines - 0.5, -0.5)
    axes.set_xlim(0, A_LINE)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    shown: dict[str, figure.Colour] = {**colours, "padding": PADDING}
    drawn.legend(handles=figure.key(shown), loc="outside upper right", ncols=figure.COLUMNS, frameon=False)
    return drawn


def _words(parts: Sequence[PacketSection]) -> Iterator[tuple[int, str, bool]]:
    """Yields each word of a packet: where it lies, its section, and whether it is more than padding."""
    for word in range(HEADER_INTS):
        yield word, "header", word <= LIMIT_CELL or word < HEADER_INTS // 2 + len(Section)
    for part in parts:
        for word in range(part.start, part.end):
            yield word, part.name, (word - part.start) % part.stride < part.count
