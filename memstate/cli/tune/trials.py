"""The sweep: every configuration is checked, then timed on a GPU or, without one, ranked by what it compiles to."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from memstate.cli.compile import TARGETS
from memstate.cli.tune import cost
from memstate.cli.tune.check import SLOTS, wrong
from memstate.cli.tune.grid import configurations, key_of, layout_of, toy
from memstate.cli.tune.tasks import findings
from memstate.cli.tune.timing import Course, Stopwatch, device_seconds, score
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.kernels.tuned import CopyConfig, device_name, trying
from memstate.state.layout import StateLayout
from memstate.state.planes import Planes

KERNELS = ("copy",)
MARGIN = 1.02  # what another configuration must be better by than the default: less is chance
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Trial:
    """What became of one configuration.

    Attributes:
        kernel: Name of the kernel.
        key: What it was tried for.
        config: The configuration.
        checked: Whether its copies are those of the reference, byte for byte.
        value: Bytes a second where timed, or the weight of `memstate.cli.tune.cost`; None if it is excluded.
        unit: Of the value.
        why: What excludes it, empty if nothing does.
        details: What the value was made of.
    """

    kernel: str
    key: str
    config: CopyConfig
    checked: bool
    value: float | None
    unit: str
    why: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SweepResult:
    """A sweep on `device`, or for it where nothing was timed.

    Attributes:
        device: Name of the device or target.
        timed: Whether configurations were timed.
        trials: In the order in which they were made.
        yardstick: Of a timed sweep, the device's own copy of as many slots, bytes a second before and after the trials.
    """

    device: str
    timed: bool
    trials: tuple[Trial, ...]
    yardstick: dict[str, list[float]] = field(default_factory=dict)

    @property
    def best(self) -> list[Trial]:
        """The best trial of each kernel and key that is left; the default, unless another is clearly better."""
        keys = dict.fromkeys((trial.kernel, trial.key) for trial in self.trials)
        chosen = (_best([t for t in self.trials if (t.kernel, t.key) == key], self.timed) for key in keys)
        return [trial for trial in chosen if trial is not None]

    @property
    def excluded(self) -> list[Trial]:
        """Trials that are wrong, spill, move less than they could at a time, or do not compile."""
        return [trial for trial in self.trials if trial.why]

    @property
    def wrong(self) -> list[Trial]:
        """Trials whose bytes are not those of the reference."""
        return [trial for trial in self.trials if not trial.checked]


def sweep(
    model: str = "qwen3_next",
    kernels: Sequence[str] = KERNELS,
    target: str = "sm_90",
    limit: int | None = None,
    progress: Progress | None = None,
    device: torch.device | None = None,
    stopwatch: Stopwatch | None = None,
) -> SweepResult:
    """Tries launch configurations for the layout of a model; the first `limit` of them, the default among these.

    With a GPU, each is checked there in planes of the model and timed. Without, each is checked by an interpreter in
    small planes, and ranked by what it compiles to for `target`; nothing that was not timed changes a launch.

    Args:
        model: Name of a preset.
        kernels: Names in `KERNELS`.
        target: Name in `TARGETS`.
        limit: How many configurations. None: all.
        progress: Called with (done, total).
        device: Where to try them. Default: the GPU if there is one.
        stopwatch: Measures a call. Default: Triton's timer. With one, launches are timed wherever they run.

    Raises:
        InvalidArgument: A name is unknown.
        ConfigurationError: Triton is not installed.

    Syncs: yes.
    """
    unknown = [kernel for kernel in kernels if kernel not in KERNELS]
    if unknown or not kernels:
        raise InvalidArgument(f"kernels {', '.join(unknown) or 'missing'}: expected {', '.join(KERNELS)}")
    if target not in TARGETS:
        raise InvalidArgument(f"target {target!r}: expected one of {', '.join(TARGETS)}")
    if find_spec("triton") is None:
        raise ConfigurationError("tuning kernels needs Triton, which is not installed; it exists for Linux only")
    layout = layout_of(model)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        stopwatch = stopwatch or device_seconds
    configs = configurations(stopwatch is not None, limit)
    if stopwatch is None:
        trials = _with_progress(_ranked(layout, model, target, configs), len(configs), progress)
        return SweepResult(target, False, tuple(trials))
    return _timed(layout, configs, device, stopwatch, progress)


def _ranked(layout: StateLayout, model: str, target: str, configs: Sequence[CopyConfig]) -> Iterator[Trial]:
    key = key_of(layout)
    checks, costs = findings("check", model, configs), findings("compiled", target, configs)
    for config, check, fields in zip(configs, checks, costs, strict=True):
        found = cost.Cost(**fields)
        why = check["why"] or found.why
        value = None if why else cost.weight(config, found, target)
        yield Trial("copy", key, config, not check["why"], value, cost.UNIT, why, fields)


def _timed(
    layout: StateLayout, configs: Sequence[CopyConfig], device: torch.device, stopwatch: Stopwatch,
    progress: Progress | None,
) -> SweepResult:  # fmt: skip
    backend = Backend("auto", device)
    free = _free_bytes(device)
    fits = device.type == "cuda" and 20 * SLOTS * layout.bytes_per_slot < free  # beside what is timed
    layout = layout if device.type == "cuda" else toy(layout)
    checked, key = (layout if fits else toy(layout)), key_of(layout)
    course = Course(layout, lambda slots: Planes(layout, slots, backend), free)

    def trials() -> Iterator[Trial]:
        for config in configs:
            why = wrong(config, checked, backend, torch.seed() % 2**31)
            found = cost.Cost() if why or target is None else cost.cost(config, target)
            rates: dict[int, float] = {}
            if not (why or found.why):
                with trying(config):
                    rates = course.copies(stopwatch)
            value = score(list(rates.values())) if rates else None
            details = {f"{due} slots": rate for due, rate in rates.items()}
            yield Trial("copy", key, config, not why, value, "bytes/s", why or found.why, details)

    target = own_target(device)
    before = course.yardstick(stopwatch)
    done = tuple(_with_progress(trials(), len(configs), progress))
    after = course.yardstick(stopwatch)
    yardstick = {f"{due} slots": [before[due], after[due]] for due in before}
    return SweepResult(device_name(device), True, done, yardstick)


def own_target(device: torch.device) -> str | None:
    """Returns the compile target that a device is; None if it is none of those compiled ahead, or no GPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    architecture = getattr(properties, "gcnArchName", "").split(":")[0]
    name = architecture if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return name if name in TARGETS else None


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 2**20


def _best(trials: Sequence[Trial], timed: bool) -> Trial | None:
    """The default stays where nothing beats it by a margin: what is measured differs from run to run."""
    left = [trial for trial in trials if trial.value is not None]
    if not left:
        return None

    def goodness(trial: Trial) -> float:
        assert trial.value is not None
        return trial.value if timed else 1 / trial.value

    best = max(left, key=goodness)
    default = next((trial for trial in left if trial.config == CopyConfig()), best)
    return best if goodness(best) > MARGIN * goodness(default) else default


def _with_progress(trials: Iterator[Trial], total: int, progress: Progress | None) -> Iterator[Trial]:
    for done, trial in enumerate(trials):
        yield trial
        if progress is not None:
            progress(done + 1, total)
