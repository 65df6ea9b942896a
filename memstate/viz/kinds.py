"""Kinds of slot owners, with a colour for each, for all pictures. Contains only texts, and imports no picture.

Readers with protanopia, deuteranopia and tritanopia can tell the colours apart, on light and dark pages. Kinds that an
audit reports as wrong are also hatched, so that a print without colours shows them.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple


class Kind(NamedTuple):
    """The look of a kind of owner.

    Attributes:
        name: Name of the kind.
        colour: Colour of a cell, `#rrggbb`.
        ink: Colour of text on a cell.
        meaning: Meaning of the kind, for legends.
        faulty: Whether an audit reports such a slot as wrong.
        dark: Colour on a dark page, if it differs.
        hatched: Whether cells are hatched although the kind is not faulty. For memory that holds nothing.
    """

    name: str
    colour: str
    ink: str
    meaning: str
    faulty: bool = False
    dark: str = ""
    hatched: bool = False

    @property
    def on_dark(self) -> str:
        """Colour on a dark page: `dark` if it is given, otherwise `colour`."""
        return self.dark or self.colour


def _by_name(*kinds: Kind) -> Mapping[str, Kind]:
    return {kind.name: kind for kind in kinds}


LIGHT: Final = "#ffffff"
INK: Final = "#0a0a0a"

# The order is that of legends and bars.
KINDS: Final = _by_name(
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
# Parts of bars (of memory, of tokens) that are not owners.
OTHERS: Final = _by_name(
    Kind("used", "#4f89f1", INK, "in use"),
    Kind("planes", "#4f89f1", INK, "states"),
    Kind("KV pages", "#e48c14", INK, "keys and values"),
    Kind("staging of tiers", "#2abcfa", INK, "on the way to host memory and back"),
    Kind("tables", "#686868", LIGHT, "memstate's own tables"),
    Kind("null slot", "#b3a38c", INK, "slot 0, which nobody owns"),
    Kind("padding", "#d23b3b", LIGHT, "padding", hatched=True),
    Kind("hit", "#2d8154", LIGHT, "need not be computed"),
    Kind("in host memory", "#2abcfa", INK, "found in host memory"),
    Kind("no sharing", "#e6e6e6", INK, "never in the cache", dark="#3a3a3a"),
    Kind("evicted", "#e48c14", INK, "lost: the state was evicted"),
    Kind("no snapshot", "#fabe27", INK, "lost: KV without a state"),
)
PLANES: Final = ("#3b6ea5", "#e08e2d", "#5b9a68", "#8a63a8", "#b0574f", "#6f6f6f")  # colours of planes, in their order
_OTHER_NAMES: Final = {"group": "by id"}  # an audit counts slots of open claim groups as `group`


def kind(name: str) -> Kind:
    """Returns the look of a kind of owner, or of another part of a bar. For other names, it is that of `unknown`.

    Args:
        name: A kind in an inspection, in `viz.holdings` or in an audit; a part in `OTHERS`; or `plane 0`, `plane 1`, ..

    Example:
        >>> kind("group").name
        'by id'
    """
    name = _OTHER_NAMES.get(name, name)
    if name.startswith("plane ") and name[6:].isdecimal():
        return Kind(name, PLANES[int(name[6:]) % len(PLANES)], LIGHT, name)
    return KINDS.get(name) or OTHERS.get(name) or KINDS["unknown"]


def short(name: str, letters: int) -> str:
    """Returns a name shortened to `letters` letters. Keeps the end, because names differ in their ends.

    Args:
        name: The name.
        letters: Limit of the letters of the result, 3 or more.

    Example:
        >>> short("conversation-17", 6), short("@4096", 6)
        ('..n-17', '@4096')
    """
    return name if len(name) <= letters else ".." + name[len(name) - letters + 2 :]
