"""Kinds of slot owners, with one colour each for all pictures. Strings only: knows no picture and no page.

The colours stay apart for readers with protanopia, deuteranopia and tritanopia, and on light and dark pages. Kinds that
an audit finds wrong are also hatched, so that a print without colours shows them.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple


class Kind(NamedTuple):
    """How a kind of owner is shown.

    Attributes:
        name: Name of the kind.
        colour: Its colour, `#rrggbb`.
        ink: Colour of text on it.
        meaning: What such a slot is, for legends.
        faulty: Whether an audit finds such a slot wrong.
        dark: Its colour on a dark page.
    """

    name: str
    colour: str
    ink: str
    meaning: str
    faulty: bool = False
    dark: str = ""

    @property
    def on_dark(self) -> str:
        """Its colour on a dark page: the same, unless it is said."""
        return self.dark or self.colour


LIGHT: Final = "#ffffff"
DARK: Final = "#161616"
INK: Final = "#0a0a0a"

# In the order of legends and of bars.
KINDS: Final[Mapping[str, Kind]] = {
    kind.name: kind
    for kind in (
        Kind("live", "#4f89f1", INK, "states that steps advance"),
        Kind("lane", "#e48c14", INK, "snapshots of running requests"),
        Kind("mark", "#fabe27", INK, "states inside prompts"),
        Kind("snapshot", "#2abcfa", INK, "published snapshots"),
        Kind("cached", "#2d8154", LIGHT, "states of the prefix cache"),
        Kind("session", "#560bde", LIGHT, "states of conversations"),
        Kind("by id", "#c451a8", INK, "claimed by id"),
        Kind("unknown", "#a7a7a7", INK, "held, and nobody knows by whom", faulty=True),
        Kind("leaked", "#eb0c0c", LIGHT, "neither free nor owned", faulty=True),
        Kind("contested", "#852e75", LIGHT, "several owners, or owned and free", faulty=True),
        Kind("free", "#e6e6e6", INK, "free", dark="#3a3a3a"),
    )
}
_OTHER_NAMES: Final = {"group": "by id"}  # an audit counts slots of open claim groups under this name


def kind(name: str) -> Kind:
    """Returns how a kind is shown. A name that is no kind is shown as `unknown`.

    Args:
        name: A kind of an inspection, of `viz.holdings`, or of an audit.

    Example:
        >>> kind("group").name
        'by id'
    """
    return KINDS.get(_OTHER_NAMES.get(name, name), KINDS["unknown"])


def short(name: str, letters: int) -> str:
    """Returns a name of at most so many letters. It keeps the end, because ends tell names apart.

    Args:
        name: The name.
        letters: 3 or more.

    Example:
        >>> short("conversation-17", 6), short("@4096", 6)
        ('..n-17', '@4096')
    """
    return name if len(name) <= letters else ".." + name[len(name) - letters + 2 :]
