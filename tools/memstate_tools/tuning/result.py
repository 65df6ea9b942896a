"""Holds the trials of a sweep, and chooses the best ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from statistics import geometric_mean
from typing import Any

from memstate.cli.units import measured
from memstate.kernels.configs import Config
from memstate.sheet import Shown, Table

MARGIN = 1.02  # a configuration is better than the default only if it is better by this factor
MARGIN_OF_ROWS = 1.05  # the same for a second configuration of a key, which is one more to compile
RATE = "bytes/s"


@dataclass(frozen=True)
class Trial:
    """The result of one configuration.

    Attributes:
        kernel: Name of the kernel.
        key: Key under which the configuration would be stored.
        config: The configuration that was tried.
        checked: Whether its results are those of the reference.
        value: Bytes per second if timed, otherwise the weight of `memstate_tools.tuning.cost`; None if it is excluded.
        unit: Unit of the value.
        why: Reason why it is excluded; empty if it is not.
        details: Figures from which the value was computed.
        micros: Device time of a call, the geometric mean over operations and batches; None if it was not timed.
        rows: Rows from which on launches take it, if they take another one for fewer; the value is that of so many.
    """

    kernel: str
    key: str
    config: Config
    checked: bool
    value: float | None
    unit: str
    why: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    micros: float | None = None
    rows: int = 1

    @property
    def goodness(self) -> float:
        """Number that ranks trials: more is better, and 0 is excluded."""
        value = self.value or 0.0
        return value if self.unit == RATE or not value else 1 / value

    @property
    def rates(self) -> dict[int, float]:
        """Batch -> bytes per second, the geometric mean over operations, of a trial that was timed."""
        found: dict[int, list[float]] = {}
        for name, rate in self.details.items():
            found.setdefault(int(name.rpartition(", ")[2]), []).append(rate)
        return {batch: geometric_mean(found[batch]) for batch in sorted(found)}

    @property
    def is_default(self) -> bool:
        """Whether this is the default configuration."""
        return self.config == type(self.config)()

    @property
    def text(self) -> str:
        """The configuration in one line."""
        return " ".join(f"{axis.name}={getattr(self.config, axis.name)}" for axis in fields(self.config))


@dataclass(frozen=True, repr=False)
class Result(Shown):
    """The trials of a sweep on `device`; or for the target `device`, if nothing was timed.

    In a notebook it shows itself as a table.

    Attributes:
        device: Name of the device or target.
        timed: Whether configurations were timed.
        trials: The trials, in the order in which they were made.
        yardstick: Number of slots -> rates of a plain copy of as many bytes, in bytes per second, before and after the
            trials; empty if nothing was timed.
        complete: Whether every configuration was tried.
        architecture: Architecture for which kernels were compiled; "" if unknown.
        resumed: Number of trials that a file had already.
        sources: Kernel -> hash of its source.
    """

    device: str
    timed: bool
    trials: Sequence[Trial]
    yardstick: Mapping[str, list[float]] = field(default_factory=dict)
    complete: bool = True
    architecture: str = ""
    resumed: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> list[Trial]:
        """The best trial of each kernel and key, unless all are excluded.

        The default is chosen unless another one is better by a margin, because times differ from run to run. If another
        one is better for many rows, it comes next, with its `rows`.
        """
        chosen = []
        order = list(dict.fromkeys(map(_key, self.trials)))
        for _, trials in groupby(sorted(self.trials, key=lambda trial: order.index(_key(trial))), key=_key):
            left = sorted((trial for trial in trials if trial.value), key=lambda trial: -trial.goodness)
            default = next((trial for trial in left if trial.is_default), None)
            if default and left[0].goodness <= MARGIN * default.goodness:
                left.insert(0, default)
            chosen += left[:1] + _for_many_rows(left)
        return chosen

    @property
    def wrong(self) -> list[Trial]:
        """Trials whose results are not those of the reference."""
        return [trial for trial in self.trials if not trial.checked]

    @property
    def title(self) -> str:
        """One line: the device, and what was done."""
        how = "timed" if self.timed else "NOT timed (no GPU): ranked by compiled code, launches keep their defaults"
        how += f"; {len(self.wrong)} WRONG" * bool(self.wrong) + "; INCOMPLETE" * (not self.complete)
        return f"{self.device}, {how}" + (f"; {self.resumed} of {len(self.trials)} from the file" * bool(self.resumed))

    @property
    def ordered(self) -> list[Trial]:
        """The trials kernel by kernel, the chosen one first and the excluded ones last."""
        best, keys = self.best, list(dict.fromkeys(map(_key, self.trials)))
        return sorted(
            self.trials,
            key=lambda trial: (keys.index(_key(trial)), trial not in best, -trial.goodness),
        )

    def marks(self, trial: Trial) -> list[str]:
        """Returns the marks of a trial: "chosen", perhaps with its rows, "default", both or none."""
        rows = [each.rows for each in self.best if each.details is trial.details]
        return [f"chosen from {each} rows" if each > 1 else "chosen" for each in rows] + ["default"] * trial.is_default

    def table(self) -> Table[dict[str, Any]]:
        """Returns one row for each trial, in the order of `ordered`."""
        rows = []
        for trial in self.ordered:
            row: dict[str, Any] = {"kernel": trial.kernel, "key": trial.key, "configuration": trial.text}
            note = trial.why or ", ".join(self.marks(trial))
            if self.timed:
                row |= {"time": measured(trial.micros, "us"), "rate": measured(trial.value, trial.unit), "note": note}
            else:
                weight = None if trial.value is None else round(trial.value, 2)
                figures = {name: trial.details.get(name) for name in ("registers", "programs")}
                row |= {"weight": weight, "note": note, **figures}
            rows.append(row)
        return Table(rows, self.title, grouped=2)

    def sheet(self) -> Any:
        """See `Shown.sheet`."""
        return self.table().sheet()

    def __repr__(self) -> str:
        return repr(self.table())


def _key(trial: Trial) -> tuple[str, str]:
    return trial.kernel, trial.key


def _for_many_rows(left: Sequence[Trial]) -> list[Trial]:
    """Returns the best trial of the largest batch, with the rows from which on it is better than the first by a margin.

    The two differ only in axes that change no bits. Returns nothing if there are no such rows.

    Args:
        left: Trials of a key; the first one is chosen for few rows.
    """
    if not (left and left[0].config.by_rows and left[0].unit == RATE):
        return []
    alike, before = (trial for trial in left if trial.config.order == left[0].config.order), left[0].rates
    best = max(alike, key=lambda trial: trial.rates[max(before)])
    slow = [batch for batch, rate in best.rates.items() if rate <= MARGIN_OF_ROWS * before[batch]]
    rows = min((batch for batch in before if batch > max(slow, default=1)), default=0)
    return [replace(best, rows=rows, value=best.rates[rows])] if rows else []
