"""Draws a sweep: bars of all configurations, or a map of the two axes that matter."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstate.errors import InvalidArgument
from memstate_tools.tuning.result import Result, Trial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, INCHES_A_ROW, INCHES_A_CELL = 9.0, 0.2, 0.5
COLOURS = {"chosen": "#5b9a68", "default": "#3b6ea5", "": "#b9b9b9"}
SUFFIXES = (".svg", ".png", ".pdf")


def require_plot(path: Path) -> None:
    """Requires that a picture can be drawn, before a sweep begins.

    Args:
        path: File of the picture; .svg, .png or .pdf.

    Raises:
        InvalidArgument: matplotlib is not installed (the message says what to install), or the suffix is another one.
    """
    try:
        import memstate.viz.figure  # noqa: F401
    except ImportError as error:
        raise InvalidArgument(str(error)) from error
    if path.suffix not in SUFFIXES:
        raise InvalidArgument(f"{path}: expected a name that ends with {', '.join(SUFFIXES)}")


def plot(outcome: Result, kind: str = "bars") -> "Figure":
    """Draws a sweep, with a panel for each kernel and key.

    Args:
        outcome: The sweep.
        kind: "bars": a bar for each configuration that is not excluded. "heat": a map of the two axes with the most
            values; a cell has the best configuration of its two values.

    Raises:
        ImportError: matplotlib is not installed. The message says what to install.
        InvalidArgument: There is no such kind, or nothing was tried.
    """
    if kind not in PANELS or not outcome.trials:
        raise InvalidArgument(
            f"plot {kind!r} of {len(outcome.trials)} trials: expected trials, and {', '.join(PANELS)}"
        )
    from memstate.viz import figure

    panel, height = PANELS[kind]
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in outcome.ordered:
        groups.setdefault((trial.kernel, trial.key), []).append(trial)
    heights = [height(trials) for trials in groups.values()]
    drawn = figure.drawing(WIDTH, 0.8 + sum(heights))
    panels = drawn.subplots(len(groups), 1, squeeze=False, height_ratios=heights)
    for axes, ((kernel, key), trials) in zip(panels[:, 0], groups.items(), strict=True):
        left_out = sum(trial.value is None for trial in trials)
        axes.set_title(f"{kernel}, {key}" + (f"; {left_out} excluded" if left_out else ""), fontsize=8, loc="left")
        panel(axes, trials, outcome)
    drawn.suptitle(figure.plain(outcome.title))
    return drawn


def _bars(axes: "Axes", trials: list[Trial], outcome: Result) -> None:
    shown = sorted((trial for trial in trials if trial.value is not None), key=_length)
    noted = [outcome.marks(trial) for trial in shown]
    colours = [COLOURS[next(iter(notes), "").partition(" ")[0]] for notes in noted]
    axes.barh(range(len(shown)), [_length(trial) for trial in shown], color=colours, height=0.75)
    said = [f" ({', '.join(notes)})" if notes else "" for notes in noted]
    names = [f"{trial.text}{notes}" for trial, notes in zip(shown, said, strict=True)]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel(_unit(trials) + ": less is better" * (not outcome.timed), fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _heat(axes: "Axes", trials: list[Trial], outcome: Result) -> None:
    from memstate.viz.figure import ink

    across, down = _widest(trials)
    values = {name: sorted({vars(trial.config)[name] for trial in trials}) for name in (across, down)}
    cells: dict[tuple[int, int], list[Trial]] = {}
    for trial in trials:
        x, y = (values[name].index(vars(trial.config)[name]) for name in (across, down))
        cells.setdefault((x, y), []).append(trial)
    grid = [[float("nan")] * len(values[across]) for _ in values[down]]
    best = {place: max(cell, key=lambda trial: trial.goodness) for place, cell in cells.items()}
    for (x, y), trial in best.items():
        grid[y][x] = _length(trial) or float("nan")
    drawn: Any = axes.imshow(grid, aspect="auto", cmap="YlGn_r")
    for (x, y), trial in best.items():
        marks = {mark for each in cells[x, y] for mark in outcome.marks(each)}
        said = [f"{_length(trial):.3g}" if trial.value else "excluded", *sorted(marks)]
        colour = ink(drawn.to_rgba(_length(trial))) if trial.value else None  # None: light on a dark page
        axes.text(x, y, "\n".join(said), ha="center", va="center", fontsize=8, color=colour)
    axes.set_xticks(range(len(values[across])), [f"{each:,}" for each in values[across]], fontsize=8)
    axes.set_yticks(range(len(values[down])), [f"{each:,}" for each in values[down]], fontsize=8)
    axes.set_xlabel(f"{across}    ({_unit(trials)}: less is better; an empty cell was not tried)", fontsize=8)
    axes.set_ylabel(down, fontsize=8)


def _widest(trials: list[Trial]) -> list[str]:
    """Returns the two axes with the most values; the same one twice if there is only one."""
    values = {name: {vars(trial.config)[name] for trial in trials} for name in vars(trials[0].config)}
    return (sorted(values, key=lambda name: -len(values[name])) * 2)[:2]


def _bars_height(trials: list[Trial]) -> float:
    return 0.7 + INCHES_A_ROW * max(1, sum(trial.value is not None for trial in trials))


def _heat_height(trials: list[Trial]) -> float:
    _, down = _widest(trials)
    return 0.8 + INCHES_A_CELL * len({vars(trial.config)[down] for trial in trials})


def _length(trial: Trial) -> float:
    """Returns the length of a bar: less is better."""
    return trial.micros if trial.micros is not None else trial.value or 0.0


def _unit(trials: list[Trial]) -> str:
    """Returns the unit of `_length`."""
    if any(trial.micros is not None for trial in trials):
        return "device time of a call, us"
    return trials[0].unit


PANELS: dict[str, tuple[Callable[["Axes", list[Trial], Result], None], Callable[[list[Trial]], float]]] = {
    "bars": (_bars, _bars_height), "heat": (_heat, _heat_height),
}  # fmt: skip
