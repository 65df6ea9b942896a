"""The figure of all pictures, with its colours and legends. The only module that imports matplotlib."""

from collections.abc import Iterable, Mapping, Sequence
from colorsys import hls_to_rgb
from io import StringIO
from typing import Any, TypeVar
from warnings import catch_warnings, filterwarnings

from memstate.sheet import visible
from memstate.viz import kinds

try:
    from matplotlib import rc_context, rcParams
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes as Axes
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure as Figure
    from matplotlib.patches import Patch
    from matplotlib.textpath import TextPath
except ModuleNotFoundError as error:
    raise ImportError("pictures need matplotlib: pip install '.[viz]' in a checkout of memstate") from error

Colour = str | tuple[float, float, float] | tuple[float, float, float, float]
Name = TypeVar("Name")

PADDING = kinds.kind("padding").colour  # also hatched, so that it shows in a print without colours
HATCH = "/////"
MISSING = r"Glyph \d+ .* missing from"  # beginning of matplotlib's warning about a missing glyph
EDGE = "#444444"
COLUMNS = 8  # limit of the columns of a legend
# Colour on a light page -> colour on a dark page, for paper, frames and rules; colours of owners and planes stay. In a
# notebook, the style of one picture applies to all, so each light colour must always have the same dark one.
DARK = {
    "#ffffff": "#16181d", "#000000": "#d5d8de", EDGE: "#9aa0aa", "#e6e6e6": "#3a3a3a", "#eeeeee": "#2b2e35",
    "#dddddd": "#33363d", "#bbbbbb": "#555961",
}  # fmt: skip
STYLE = f'g[id^=figure] text:not([style*="fill:"]){{fill:{DARK["#000000"]}}}' + "".join(
    f'g[id^=figure] path[style*="fill: {light}"],pattern rect[fill="{light}"]{{fill:{dark}!important}}'
    f'[style*="stroke: {light}"]{{stroke:{dark}!important}}'
    for light, dark in DARK.items()
)
GOLDEN = 0.618034  # part of the colour wheel between one hue and the next: no hue comes twice


class Drawing(Figure):
    """A figure that a notebook shows as SVG, on light and dark pages. Equal pictures give equal SVG texts."""

    def _repr_svg_(self) -> str:
        out = StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "memstate"}), catch_warnings():
            filterwarnings("ignore", MISSING)  # no fault: SVG keeps text as text, and the viewer's fonts draw it
            self.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
        return out.getvalue().replace(
            "<defs>", f"<defs>\n  <style>@media (prefers-color-scheme:dark){{{STYLE}}}</style>", 1
        )


def drawing(width: float, height: float) -> Drawing:
    """Returns an empty figure, `width` x `height` inches."""
    return Drawing(figsize=(width, height), dpi=80, layout="constrained")


def plane_colours(names: Iterable[Name]) -> dict[Name, Colour]:
    """Returns a different colour for each name of a plane, for all layouts of a picture."""
    return {name: _colour(at) for at, name in enumerate(dict.fromkeys(names))}


def _colour(at: int) -> Colour:
    return kinds.PLANES[at] if at < len(kinds.PLANES) else hls_to_rgb(at * GOLDEN % 1, 0.35 + 0.1 * (at % 3), 0.5)


def inches(text: str) -> float:
    """Returns the width of a text in inches, plus that of a `|`, because an empty text has no width to measure."""
    with catch_warnings():
        filterwarnings("ignore", MISSING)
        return TextPath((0, 0), f"|{plain(text)}", size=rcParams["font.size"]).get_extents().width / 72


def plain(name: object) -> str:
    """Returns a name as it can be drawn: to matplotlib `$` is a formula, and control characters break SVGs."""
    return visible(str(name)).replace("$", r"\$")


def lighter(colour: Colour, part: float) -> Colour:
    """Returns a more transparent colour. With part 0 it is unchanged, with part 1 it is invisible."""
    return *to_rgb(colour), 1 - part


def ink(colour: Colour) -> str:
    """Returns the colour in which a text is readable on a coloured background."""
    red, green, blue = to_rgb(colour)
    return kinds.INK if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else kinds.LIGHT


def cell(
    axes: Axes, at: float, line: float, kind: kinds.Kind, *, wide: float = 1, tall: float = 1, edge: float = 0.8
) -> None:
    """Draws a cell for a kind of owner: in its colour, and hatched if the kind is faulty. It begins at x = `at`."""
    axes.barh(
        line, wide, left=at, height=tall, facecolor=kind.colour, edgecolor="white", linewidth=edge, zorder=2,
        hatch=HATCH if kind.faulty else "",
    )  # fmt: skip


def name_lines(axes: Axes, names: Iterable[object], size: float | None = None) -> None:
    """Writes a name beside each line of a picture, the first name at the top."""
    labels = [plain(name) for name in names]
    axes.set_yticks(range(len(labels)), labels, fontsize=size)
    axes.invert_yaxis()


def half_frame(axes: Axes) -> None:
    """Hides the top and right side of the frame."""
    axes.spines[["top", "right"]].set_visible(False)


def no_frame(axes: Axes) -> None:
    """Hides the frame and its ticks, but not the labels."""
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def legend(drawn: Figure, handles: Sequence[Artist], columns: int = COLUMNS) -> None:
    """Adds a legend above the picture. It gets fewer columns if it would be wider than the picture."""
    drawn.legend(handles=handles, loc="outside upper left", ncols=min(len(handles), columns), frameon=False)


def key(colours: Mapping[Any, Colour], padding: bool = False) -> list[Patch]:
    """Returns the entries of a legend of colours.

    Args:
        colours: The colour of each name.
        padding: Whether to add an entry for padding, which is hatched as in the picture.
    """
    shown = [_patch(colour, plain(name)) for name, colour in colours.items()]
    return [*shown, _patch("white", "padding", PADDING, HATCH)] if padding else shown


def kind_key(names: Iterable[str]) -> list[Patch]:
    """Returns the entries of a legend for kinds of owners, in the order of `KINDS`. Faulty kinds are hatched."""
    shown = [kinds.kind(name) for name in kinds.KINDS if name in set(names)]
    return [_patch(kind.colour, kind.name, hatch=HATCH if kind.faulty else None) for kind in shown]


def _patch(colour: Colour, label: str, edge: Colour = EDGE, hatch: str | None = None) -> Patch:
    return Patch(facecolor=colour, edgecolor=edge, hatch=hatch, linewidth=0.5, label=label)
