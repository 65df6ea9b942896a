"""Splits the words of one upload into the sections of a packet."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memstate import checks
from memstate.errors import InvalidArgument
from memstate.kernels.tables import HEADER_INTS, Section

COLUMNS = {
    Section.BATCH: ("row", "tokens"), Section.MARKS: ("entry", "offset", "register"),
    Section.MOVES: ("to", "from"), Section.RELEASES: ("register",), Section.CLAIMS: ("register",),
    Section.WRITES: ("cell", "value"), Section.DATA: ("to", "from"),
}  # fmt: skip


@dataclass(frozen=True)
class PacketSection:
    """One section of a packet.

    Args:
        name: Name of the section.
        start: First word of the section.
        columns: The entries of each column by its name. In the packet, each column is padded to a multiple of 4 words.
    """

    name: str
    start: int
    columns: dict[str, list[int]]

    @property
    def count(self) -> int:
        """Number of entries of each column."""
        return len(next(iter(self.columns.values())))

    @property
    def stride(self) -> int:
        """Number of words from one column to the next."""
        return -(-self.count // 4) * 4

    @property
    def end(self) -> int:
        """The first word after the section."""
        return self.start + len(self.columns) * self.stride


def sections(packet: Sequence[int]) -> list[PacketSection]:
    """Returns the sections of a packet that have entries, in the order of memory.

    A move to `-register` runs behind the releases.

    Args:
        packet: The words of an upload, such as `CommandBuffer.step.tolist()`. Words after the last section are ignored.

    Raises:
        InvalidArgument: `packet` is not the words of a packet.

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
    parts = []
    for section, columns in COLUMNS.items():
        count, start = int(given[section]), int(given[HEADER_INTS // 2 + section])
        stride = -(-count // 4) * 4
        if count < 0 or (count and not HEADER_INTS <= start <= len(given) - len(columns) * stride):
            raise InvalidArgument(
                f"packet: {count} {section.name.lower()} from word {start} on do not fit {len(given)} words"
            )
        if count:
            entries = {
                name: [int(word) for word in given[start + at * stride :][:count]] for at, name in enumerate(columns)
            }
            parts.append(PacketSection(section.name.lower(), start, entries))
    return sorted(parts, key=lambda part: part.start)
