"""The figure that all pictures are drawn on, and their colours. The only place that imports matplotlib."""

from collections.abc import Iterable
from io import StringIO

try:
    from matplotlib import rc_context
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
except ModuleNotFoundError as error:
    raise ImportError("pictures need matplotlib: pip install 'memstate[viz]'") from error

Colour = str | tuple[float, float, float]

PLANES: tuple[Colour, ...] = ("#3b6ea5", "#e08e2d", "#5b9a68", "#8a63a8", "#b0574f", "#6f6f6f")
PADDING = "#d23b3b"  # hatched, so that it is told from a plane in print as well
HATCH = "/////"
EDGE = "#444444"


class Drawing(Figure):
    """A figure that shows itself in a notebook as SVG, without pyplot, and with the same text every time."""

    def _repr_svg_(self) -> str:
        out = StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "memstate"}):
            self.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        return out.getvalue()


def drawing(width: float, height: float) -> Drawing:
    """An empty figure of so many inches."""
    return Drawing(figsize=(width, height), dpi=80, layout="constrained")


def plane_colours(names: Iterable[str]) -> dict[str, Colour]:
    """A colour for each plane, the same one in every layout of a picture."""
    return {name: PLANES[at % len(PLANES)] for at, name in enumerate(dict.fromkeys(names))}


def lighter(colour: Colour, part: float) -> Colour:
    """A colour moved towards white: 0 = as it is, 1 = white."""
    red, green, blue = (value + (1 - value) * part for value in to_rgb(colour))
    return red, green, blue


def key(colours: dict[str, Colour]) -> list[Patch]:
    """The entries of a legend."""
    hatched = {"padding"}
    return [
        Patch(facecolor="white" if name in hatched else colour, edgecolor=colour if name in hatched else EDGE,
              hatch=HATCH if name in hatched else None, linewidth=0.5, label=name)
        for name, colour in colours.items()
    ]  # fmt: skip
