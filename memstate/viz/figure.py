"""The figure that all pictures are drawn on, and their colours. The only place that imports matplotlib."""

from collections.abc import Iterable, Mapping
from colorsys import hls_to_rgb
from io import StringIO
from warnings import catch_warnings, filterwarnings

from memstate.sheet import visible
from memstate.viz import kinds

try:
    from matplotlib import rc_context, rcParams
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.textpath import TextPath
except ModuleNotFoundError as error:
    raise ImportError("pictures need matplotlib: pip install '.[viz]' in a checkout of memstate") from error

Colour = str | tuple[float, float, float]

PADDING = kinds.kind("padding").colour  # hatched, so that it is told from a plane in print as well
HATCH = "/////"
MISSING = r"Glyph \d+ .* missing from"  # how a warning of matplotlib begins
EDGE = "#444444"
COLUMNS = 8  # of a legend; more would be wider than the picture
GOLDEN = 0.618034  # of a turn of the colour wheel, again and again: no two hues are ever the same


class Drawing(Figure):
    """A figure that shows itself in a notebook as SVG, without pyplot, and with the same text every time."""

    def _repr_svg_(self) -> str:
        out = StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "memstate"}), catch_warnings():
            filterwarnings("ignore", MISSING)  # the text stays text: the reader's fonts draw it
            self.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        return out.getvalue()


def drawing(width: float, height: float) -> Drawing:
    """Returns an empty figure of so many inches."""
    return Drawing(figsize=(width, height), dpi=80, layout="constrained")


def plane_colours(names: Iterable[str]) -> dict[str, Colour]:
    """Returns a colour for each plane, the same one in every layout of a picture, and no two alike."""
    return {name: _colour(at) for at, name in enumerate(dict.fromkeys(names))}


def _colour(at: int) -> Colour:
    return kinds.PLANES[at] if at < len(kinds.PLANES) else hls_to_rgb(at * GOLDEN % 1, 0.35 + 0.1 * (at % 3), 0.5)


def inches(text: str) -> float:
    """Returns how wide a text of the usual size is, with a bar before it: a path of no glyph has no width."""
    with catch_warnings():
        filterwarnings("ignore", MISSING)
        return TextPath((0, 0), f"|{plain(text)}", size=rcParams["font.size"]).get_extents().width / 72


def plain(name: str) -> str:
    """Returns a name that draws as it is: matplotlib takes `$` for a formula, and control characters break an SVG."""
    return visible(name).replace("$", r"\$")


def lighter(colour: Colour, part: float) -> Colour:
    """Returns a colour moved towards white: 0 = as it is, 1 = white."""
    red, green, blue = (value + (1 - value) * part for value in to_rgb(colour))
    return red, green, blue


def key(colours: Mapping[str, Colour], padding: bool = False) -> list[Patch]:
    """Returns the entries of a legend.

    Args:
        colours: Name -> colour.
        padding: Whether to add one for padding, hatched as it is drawn.
    """
    shown = [
        Patch(facecolor=colour, edgecolor=EDGE, linewidth=0.5, label=plain(name)) for name, colour in colours.items()
    ]
    hatched = Patch(facecolor="white", edgecolor=PADDING, hatch=HATCH, linewidth=0.5, label="padding")
    return [*shown, hatched] if padding else shown


def kind_key(names: Iterable[str]) -> list[Patch]:
    """Returns the entries of a legend for kinds of owners, in the order of the table of kinds; faulty ones hatched."""
    found = [kinds.kind(name) for name in kinds.KINDS if name in set(names)]
    return [
        Patch(facecolor=kind.colour, edgecolor=EDGE, linewidth=0.5, label=kind.name, hatch=HATCH if kind.faulty else "")
        for kind in found
    ]
