"""The sweep: every configuration is checked, then timed on a GPU or, without one, ranked by what it compiles to."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from statistics import geometric_mean
from typing import Any

import torch

from memstate.cli.compile import TARGETS
from memstate.cli.tune import cost
from memstate.cli.tune.check import SLOTS, wrong
from memstate.cli.tune.grid import configurations, key_of, layout_of, toy
from memstate.cli.tune.tasks import findings
from memstate.cli.tune.timing import Course, Rates, Stopwatch, device_seconds
from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels.dispatch import Backend
from memstate.kernels.tuned import CopyConfig, device_name, trying
from memstate.state.layout import StateLayout

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
    details: Mapping[str, Any] = field(default_factory=dict)


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
        """The best trial that is left, if any is: the default, unless another is better by a margin.

        What is measured differs from run to run.
        """
        left = sorted((trial for trial in self.trials if trial.value), key=self._goodness, reverse=True)
        default = next((trial for trial in left if trial.config == CopyConfig()), None)
        if default and self._goodness(left[0]) <= MARGIN * self._goodness(default):
            return [default]
        return left[:1]

    def _goodness(self, trial: Trial) -> float:
        value = trial.value or 0.0
        return value if self.timed else 1 / value

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
    show = partial(_with_progress, total=len(configs), progress=progress)
    if stopwatch is None:
        return SweepResult(target, False, tuple(show(_ranked(layout, model, target, configs))))
    on_gpu, backend = device.type == "cuda", Backend("auto", device)
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else 2**20
    layout = layout if on_gpu else toy(layout)
    checked = layout if 20 * SLOTS * layout.bytes_per_slot < free else toy(layout)  # beside what is timed
    course = Course(layout, backend, stopwatch, free)
    before = course.yardstick()
    done = tuple(show(_timed(course, key_of(layout), checked, backend, configs)))
    after = course.yardstick()
    return SweepResult(device_name(device), True, done, {due: [before[due], after[due]] for due in before})


def _ranked(layout: StateLayout, model: str, target: str, configs: Sequence[CopyConfig]) -> Iterator[Trial]:
    key = key_of(layout)
    checks, costs = findings("check", model, configs), findings("compiled", target, configs)
    for config, check, fields in zip(configs, checks, costs, strict=True):
        found = cost.Cost(**fields)
        why = check["why"] or found.why
        value = None if why else cost.weight(config, found, target)
        yield Trial("copy", key, config, not check["why"], value, cost.UNIT, why, fields)


def _timed(
    course: Course, key: str, checked: StateLayout, backend: Backend, configs: Sequence[CopyConfig]
) -> Iterator[Trial]:
    target = own_target(backend.device)
    for config in configs:
        bad = wrong(config, checked, backend, torch.seed() % 2**31)
        why = bad or (cost.cost(config, target).why if target else "")
        rates: Rates = {}
        if not why:
            with trying(config):
                rates = course.copies()
        value = geometric_mean(rates.values()) if rates else None  # few and many slots weigh the same
        yield Trial("copy", key, config, not bad, value, "bytes/s", why, rates)


def own_target(device: torch.device) -> str | None:
    """Returns the compile target of a device; None if nothing is compiled ahead for it, or if it is no GPU."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    architecture = getattr(properties, "gcnArchName", "").split(":")[0]
    name = architecture if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    return name if name in TARGETS else None


def _with_progress(trials: Iterator[Trial], total: int, progress: Progress | None) -> Iterator[Trial]:
    for done, trial in enumerate(trials):
        yield trial
        if progress is not None:
            progress(done + 1, total)
