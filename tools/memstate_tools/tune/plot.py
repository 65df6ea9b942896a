"""Draws a sweep: a bar for each configuration, with the chosen one and the default marked."""

from pathlib import Path
from typing import TYPE_CHECKING

from memstate.errors import InvalidArgument
from memstate_tools.tune.record import in_order, marks, text_of
from memstate_tools.tune.trials import SweepResult, TuneTrial

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, INCHES_A_ROW = 9.0, 0.2
COLOURS = {"chosen": "#5b9a68", "default": "#3b6ea5", "": "#b9b9b9"}


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
    if path.suffix not in (".svg", ".png", ".pdf"):
        raise InvalidArgument(f"{path}: expected a name that ends with .svg, .png or .pdf")


def plot(outcome: SweepResult) -> "Figure":
    """Draws a sweep: a panel for each kernel, and a bar for each configuration that is not excluded.

    Raises:
        ImportError: matplotlib is not installed. The message says what to install.
    """
    from memstate.viz import figure

    kernels: dict[str, list[TuneTrial]] = {}
    for trial in in_order(outcome):
        kernels.setdefault(trial.kernel, []).append(trial)
    counts = [max(1, sum(trial.value is not None for trial in trials)) for trials in kernels.values()]
    drawn = figure.drawing(WIDTH, 0.8 + sum(0.7 + INCHES_A_ROW * count for count in counts))
    panels = drawn.subplots(len(kernels), 1, squeeze=False, height_ratios=[3 + count for count in counts])
    for axes, (kernel, trials) in zip(panels[:, 0], kernels.items(), strict=True):
        _panel(axes, kernel, trials, outcome)
    how = "timed" if outcome.timed else "NOT timed (no GPU): ranked by compiled code"
    drawn.suptitle(f"{figure.plain(outcome.device)}, {how}{'' if outcome.complete else ', incomplete'}")
    return drawn


def _panel(axes: "Axes", kernel: str, trials: list[TuneTrial], outcome: SweepResult) -> None:
    shown = [trial for trial in trials if trial.value is not None]
    shown.sort(key=_length)
    noted = [marks(trial, outcome) for trial in shown]
    colours = [COLOURS[next(iter(notes), "")] for notes in noted]
    axes.barh(range(len(shown)), [_length(trial) for trial in shown], color=colours, height=0.75)
    names = [f"{text_of(trial.config)}{_said(notes)}" for trial, notes in zip(shown, noted, strict=True)]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("device time of a call, us" if outcome.timed else shown[0].unit if shown else "", fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    left_out = len(trials) - len(shown)
    title = f"{kernel}, {trials[0].key}" + (f"; {left_out} excluded" if left_out else "")
    axes.set_title(title, fontsize=8, loc="left")
    axes.spines[["top", "right"]].set_visible(False)


def _said(notes: list[str]) -> str:
    return f" ({', '.join(notes)})" if notes else ""


def _length(trial: TuneTrial) -> float:
    """Returns the length of a bar: less is better."""
    return trial.micros if trial.micros is not None else trial.value or 0.0
