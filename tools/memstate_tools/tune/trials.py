"""Runs a sweep: checks every configuration, then times it on a GPU, or ranks it by its compiled code without one.

The first round changes one axis of the default at a time, the cheapest axis first. The second round combines the best
values of all axes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from statistics import geometric_mean
from typing import Any

import torch

from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels.configs import CONFIGS, Config
from memstate.kernels.dispatch import Backend
from memstate.kernels.tuned import architecture, device_name, trying
from memstate_tools.bench.clock import DeviceClock, TooSlow
from memstate_tools.compile import TARGETS
from memstate_tools.models import Model, model_of, toy_of
from memstate_tools.tune import cost
from memstate_tools.tune.check import ROWS, wrong
from memstate_tools.tune.grid import combinations, model_for, one_at_a_time
from memstate_tools.tune.tasks import findings
from memstate_tools.workload import Workload, fitting, make

KERNELS = tuple(CONFIGS)
MARGIN = 1.02  # a configuration is better than the default only if it is better by this factor
RATE = "bytes/s"
BATCHES = (1, 8, 64)  # slots that are moved, or rows of a step
# memory of each slot, in slots: two batches of planes, other tensors, the planes of a check, allocations of torch
COPIES = 8

Stopwatch = Callable[[Callable[[], object]], float]  # call -> seconds of the device
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TuneTrial:
    """The result of one configuration.

    Attributes:
        kernel: Name of the kernel.
        key: Key under which the configuration would be stored.
        config: The configuration that was tried.
        checked: Whether its results are those of the reference.
        value: Bytes per second if timed, otherwise the weight of `memstate_tools.tune.cost`; None if it is excluded.
        unit: Unit of the value.
        why: Reason why it is excluded; empty if it is not.
        details: Figures from which the value was computed.
        micros: Device time of a call, the geometric mean over operations and batches; None if it was not timed.
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

    @property
    def goodness(self) -> float:
        """Number that ranks trials: more is better, and 0 is excluded."""
        value = self.value or 0.0
        return value if self.unit == RATE or not value else 1 / value


@dataclass(frozen=True)
class SweepResult:
    """The trials of a sweep on `device`; or for the target `device`, if nothing was timed.

    Attributes:
        device: Name of the device or target.
        timed: Whether configurations were timed.
        trials: The trials, in the order in which they were made.
        yardstick: Number of slots -> rates of a plain copy of as many bytes, in bytes per second, before and after the
            trials; empty if nothing was timed.
        complete: Whether every configuration was tried.
        architecture: Architecture for which kernels were compiled; "" if unknown.
    """

    device: str
    timed: bool
    trials: tuple[TuneTrial, ...]
    yardstick: dict[str, list[float]] = field(default_factory=dict)
    complete: bool = True
    architecture: str = ""

    @property
    def best(self) -> list[TuneTrial]:
        """The best trial of each kernel and key, unless all are excluded.

        The default is chosen unless another one is better by a margin, because times differ from run to run.
        """
        chosen = []
        for _, trials in groupby(sorted(self.trials, key=_key), key=_key):
            left = sorted((trial for trial in trials if trial.value), key=lambda trial: -trial.goodness)
            default = next((trial for trial in left if is_default(trial)), None)
            if default and left[0].goodness <= MARGIN * default.goodness:
                left = [default]
            chosen += left[:1]
        return sorted(chosen, key=lambda trial: KERNELS.index(trial.kernel))

    @property
    def wrong(self) -> list[TuneTrial]:
        """Trials whose results are not those of the reference."""
        return [trial for trial in self.trials if not trial.checked]


def is_default(trial: TuneTrial) -> bool:
    """Returns whether a trial has the default configuration."""
    return trial.config == CONFIGS[trial.kernel]()


def sweep(
    model: str = "qwen3_next",
    kernels: Sequence[str] = KERNELS,
    target: str = "sm_90",
    limit: int | None = None,
    progress: Progress | None = None,
    device: torch.device | None = None,
    stopwatch: Stopwatch | None = None,
    report: Callable[[TuneTrial], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> SweepResult:
    """Tries launch configurations for the states of a model.

    With a GPU, each configuration is checked there on states of the model, and timed. Without a GPU, each is checked by
    an interpreter on small states, and ranked by its compiled code for `target`. A sweep without times changes no
    launch.

    Args:
        model: Name of a preset. A kernel that the preset has no state for uses another model; its key says so.
        kernels: Names in `KERNELS`.
        target: Name in `TARGETS`.
        limit: Largest number of configurations of each kernel, with the default. None: all.
        progress: Called with (done, total); the total grows when the combinations are known.
        device: Device of the trials. Default: the GPU if there is one.
        stopwatch: Measures a call. Default: a clock of the device. If given, launches are timed on any device.
        report: Called with each trial.
        stop: Called before each trial. The sweep ends if it returns True.

    Returns:
        The sweep.

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
    model_of(model)
    kernels = tuple(dict.fromkeys(kernels))
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda" and stopwatch is None:
        clock = DeviceClock(device)
        stopwatch = lambda act: clock.alone(act).device  # noqa: E731  (device time with a cold cache)
    bench = _Ranking(model, target) if stopwatch is None else _Timing(model, device, stopwatch)
    first = [config for kernel in kernels for config in one_at_a_time(kernel, bench.timed, limit)]
    most, before, trials = len(first), bench.yardstick(), list[TuneTrial]()

    def run(configs: Sequence[Config]) -> bool:
        """Tries configurations one after the other. Returns False if `stop` ended it."""
        made = bench.trials(configs)
        for _ in configs:
            if stop and stop():
                return False
            trials.append(next(made))
            if report:
                report(trials[-1])
            if progress:
                progress(len(trials), most)
        return True

    complete, second = run(first), list[Config]()
    for kernel in kernels if complete else ():
        goodness = {trial.config: trial.goodness for trial in trials if trial.kernel == kernel and trial.value}
        second += combinations(kernel, bench.timed, goodness, limit)
    most = len(trials) + len(second)
    complete = complete and run(second)
    after = bench.yardstick()
    rates = {name: [before[name], after[name]] for name in before}
    return SweepResult(bench.device, bench.timed, tuple(trials), rates, complete, bench.architecture)


class _Ranking:
    """Checks configurations in an interpreter, and ranks them by their compiled code for a target."""

    timed, unit = False, cost.UNIT

    def __init__(self, model: str, target: str) -> None:
        self.model, self.device, self.architecture = model, target, target

    def yardstick(self) -> dict[str, float]:
        return {}

    def trials(self, configs: Sequence[Config]) -> Iterator[TuneTrial]:
        checks, costs = findings("check", configs, self.model), findings("compiled", configs, self.model, self.device)
        for config, check, fields in zip(configs, checks, costs, strict=True):
            compiled = cost.Cost(**fields)
            details = {name: figure for name, figure in fields.items() if name != "key"}
            why = check["why"] or compiled.why
            value = None if why else compiled.weight
            yield TuneTrial(config.kernel, compiled.key, config, not check["why"], value, self.unit, why, details)


class _Timing:
    """Checks and times configurations on a device. On a CPU (only in tests, with their own clock) sizes are toy."""

    timed, unit = True, RATE

    def __init__(self, model: str, device: torch.device, stopwatch: Stopwatch) -> None:
        self._model, self._device, self._stopwatch = model, device, stopwatch
        self.device, self._on_gpu = device_name(device), device.type == "cuda"
        self._backend = Backend("auto", device)
        self.architecture = architecture(device)

    @property
    def _free(self) -> int:
        if self._on_gpu:
            torch.cuda.empty_cache()  # `mem_get_info` asks the driver, which counts cached memory as used
        return torch.cuda.mem_get_info(self._device)[0] if self._on_gpu else 2**20

    def _states(self, kernel: str) -> Model:
        model = model_for(kernel, self._model)[1]
        return model if self._on_gpu else toy_of(model, kernel)

    def yardstick(self) -> dict[str, float]:
        """Returns the rate of a plain copy for each number of slots in `BATCHES`: bytes read and written per second."""
        slot, rates = self._states("copy").layout.bytes_per_slot, {}
        for size in fitting(BATCHES, COPIES * slot, self._free):
            to, of = torch.zeros(2, size * slot, dtype=torch.uint8, device=self._device).random_(0, 256)
            rates[f"{size} slots"] = 2 * size * slot / self._stopwatch(partial(to.copy_, of))
        return rates

    def trials(self, configs: Sequence[Config]) -> Iterator[TuneTrial]:
        for kernel, group in groupby(configs, key=lambda config: config.kernel):
            states = self._states(kernel)
            free = self._free
            checked = states if 2 * COPIES * ROWS * states.layout.bytes_per_slot < free else toy_of(states, kernel)
            sizes, seed = fitting(BATCHES, COPIES * states.layout.bytes_per_slot, free), torch.seed() % 2**31
            batches = {size: make(kernel, states, size, self._backend, seed) for size in sizes}
            key, default = cost.key_of(kernel, states), 0.0
            for config in group:
                trial = self._trial(key, config, checked, batches)
                default = trial.value or 0.0 if is_default(trial) else default
                # a configuration that may be chosen must neither spill nor move few bytes at a time
                if trial.value and trial.value >= default and self.architecture in TARGETS:  # compiles, which is slow
                    why = cost.cost(config, self._model, self.architecture).why
                    trial = replace(trial, value=None, micros=None, why=why) if why else trial
                yield trial

    def _trial(self, key: str, config: Config, checked: Model, batches: Mapping[int, Workload]) -> TuneTrial:
        bad, kernel = wrong(config, checked, self._backend, torch.seed() % 2**31), config.kernel
        if bad:
            return TuneTrial(kernel, key, config, False, None, self.unit, bad)
        try:
            with trying(config):
                spent = {
                    f"{op}, {size}": (self._stopwatch(act), workload.nbytes[op])
                    for size, workload in batches.items()
                    for op, act in workload.acts.items()
                }
        except TooSlow as error:
            return TuneTrial(kernel, key, config, True, None, self.unit, str(error))
        rates = {name: nbytes / seconds for name, (seconds, nbytes) in spent.items()}
        micros = geometric_mean(seconds for seconds, _ in spent.values()) * 1e6
        value = geometric_mean(rates.values())  # the geometric mean gives few and many slots the same weight
        return TuneTrial(kernel, key, config, True, value, self.unit, "", rates, micros)


def _key(trial: TuneTrial) -> tuple[str, str]:
    return trial.kernel, trial.key
