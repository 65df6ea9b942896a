"""Runs a sweep: checks every configuration, then times it on a GPU, or ranks it by its compiled code without one.

The first round changes one axis of the default at a time, the cheapest axis first. The second round combines the best
values of all axes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from math import inf
from pathlib import Path
from secrets import randbelow
from statistics import geometric_mean
from typing import Any

import torch

from memstate.errors import InvalidArgument
from memstate.kernels.configs import Config
from memstate.kernels.dispatch import Backend
from memstate.kernels.own import Kernel
from memstate.kernels.tuned import architecture, device_name, last_key, trying
from memstate_tools.bench.clock import DeviceClock, TooSlow
from memstate_tools.launches import TARGETS, compiling, interpreting, require_compiler
from memstate_tools.launches import kernels as seen_kernels
from memstate_tools.models import model_of
from memstate_tools.tuning.check import wrong
from memstate_tools.tuning.cost import UNIT, Compiler, Cost
from memstate_tools.tuning.grid import Axes, axes_of, combinations, one_at_a_time
from memstate_tools.tuning.outcome import Sweep
from memstate_tools.tuning.result import RATE, Trial
from memstate_tools.tuning.store import versions
from memstate_tools.tuning.subject import Subject, subjects
from memstate_tools.tuning.trials import TrialFile
from memstate_tools.workload import Workload, fitting

BATCHES = (1, 8, 64)  # slots that are moved, or rows of a step
INTERPRETED_ROWS, OWN_ROWS = 3, 8  # the largest batch that an interpreter checks of memstate's kernels, of others
CHECKED_ROWS = 8  # the largest batch of memstate's kernels that a device checks: their references go row by row
CPU_BYTES = 2**30  # memory of a workload that is only compiled
COPIES = 3  # workloads that are in memory together, at most: tried, expected, and what torch keeps

Stopwatch = Callable[[Callable[[], object]], float]  # call -> seconds of the device
Progress = Callable[[int, int], None]


def sweep(
    kernels: str | Kernel | Sequence[str | Kernel] = "all",
    states: object = "qwen3_next",
    *,
    ranks: int = 1,
    dtypes: Sequence[torch.dtype | None] = (None,),
    batches: Sequence[int] = BATCHES,
    space: Axes | None = None,
    target: str = "sm_90",
    limit: int | None = None,
    file: str | Path | None = None,
    progress: Progress | None = None,
    report: Callable[[Trial], None] | None = None,
    stop: Callable[[], bool] | None = None,
    device: torch.device | str | None = None,
    stopwatch: Stopwatch | None = None,
) -> Sweep:
    """Tries launch configurations of kernels.

    With a GPU, each configuration is checked there and timed. Without a GPU, each is checked by an interpreter on small
    states, and ranked by its compiled code for `target`. A sweep without times changes no launch.

    Args:
        kernels: "all" (every kernel that has states in the model), a name, a `Kernel` of your own, or several of them.
        states: Name of a preset, the path of a config.json, a configuration, or a `StateLayout`. Own kernels need none.
        ranks: Number of tensor-parallel ranks; states are those of one rank.
        dtypes: Dtypes of ssm states, one after the other; None: that of the model.
        batches: Slots that are moved, or rows of a step.
        space: Axis -> values to try instead of the usual ones.
        target: Name in `memstate_tools.launches.TARGETS`, if there is no GPU.
        limit: Largest number of configurations of each kernel, with the default. None: all.
        file: Each trial is written there at once. Trials that it has from an earlier sweep are not made again, unless
            kernel, reference, case, device or versions have changed.
        progress: Called with (done, total); the total grows when the combinations are known.
        report: Called with each trial.
        stop: Called before each trial. The sweep ends if it returns True.
        device: Device of the trials. Default: the GPU if there is one.
        stopwatch: Measures a call. Default: a clock of the device. If given, launches are timed on any device.

    Returns:
        The sweep.

    Raises:
        InvalidArgument: A kernel, axis, model or target is unknown; a number is not allowed; the file has something
            else; or a case differs from call to call.
        ConfigurationError: Triton is not installed, interprets kernels in this process, or cannot write its cache; or a
            kernel that an installed package names cannot be loaded.

    Example:
        >>> from memstate_tools import tuning
        >>> tuning.sweep("gather", "falcon_mamba", ranks=4, limit=3)

    Syncs: yes.
    """
    if target not in TARGETS:
        raise InvalidArgument(f"target {target!r}: expected one of {', '.join(TARGETS)}")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise InvalidArgument(f"limit {limit}: at least 1 configuration must be tried")
    if (
        not isinstance(batches, Sequence)
        or not batches
        or any(type(batch) is not int or batch < 1 for batch in batches)
    ):
        raise InvalidArgument(f"batches {batches!r}: expected whole numbers of rows from 1")
    if (
        not isinstance(dtypes, Sequence)
        or not dtypes
        or not all(dtype is None or isinstance(dtype, torch.dtype) for dtype in dtypes)
    ):
        raise InvalidArgument(f"dtypes {dtypes!r}: expected dtypes of torch, or None for that of the model")
    if space is not None and not isinstance(space, Mapping):
        raise InvalidArgument(f"space {space!r}: expected axis -> values")
    every = subjects(kernels, [model_of(states, ranks, dtype) for dtype in dtypes])
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and stopwatch is None:
        clock = DeviceClock(device)
        stopwatch = lambda act: clock.alone(act).device  # noqa: E731  (device time with a cold cache)
    bench = _Ranking(target, sorted(batches)) if stopwatch is None else _Timing(device, stopwatch, sorted(batches))
    made = {"device": bench.device, "timed": bench.timed, "batches": sorted(batches), **versions()}
    kept = TrialFile(None if file is None else Path(file), made)
    trials, resumed, complete, keys = list[Trial](), 0, True, set[tuple[str, str]]()
    before, total = bench.yardstick(every), 0
    for subject in every:
        subject.require_steady()
        axes, goodness = axes_of(subject.kind, bench.timed, space), dict[Config, float]()
        key = bench.begin(subject)
        if (name := (subject.kind.kernel, key)) in keys:
            continue  # another dtype with the same launches
        keys.add(name)
        for configs in _rounds(subject.kind, axes, goodness, limit):
            total += len(configs)
            for config in configs:
                if not (complete := not (stop and stop())):
                    break
                trial = kept.of(config, key, subject.source)
                resumed += trial is not None
                if trial is None:
                    trial = bench.trial(subject, key, config)
                    kept.add(trial, subject.source)
                goodness[config] = trial.goodness
                trials.append(trial)
                if report:
                    report(trial)
                if progress:
                    progress(len(trials), total)
        if not complete:
            break
    after = bench.yardstick(every)
    rates = {name: [before[name], after[name]] for name in before}
    sources = {subject.kind.kernel: subject.source_of_launch for subject in every}
    return Sweep(bench.device, bench.timed, trials, rates, complete, bench.architecture, resumed, sources)


def _rounds(
    kind: type[Config], axes: Axes, goodness: Mapping[Config, float], limit: int | None
) -> Iterator[list[Config]]:
    """Yields the configurations of the first round, then those of the second, which depends on their goodness."""
    first = one_at_a_time(kind, axes)[:limit]
    yield first
    yield combinations(kind, axes, goodness)[: None if limit is None else limit - len(first)]


def _key(kind: type[Config], workload: Workload) -> str:
    """Launches the calls of a workload. Returns the key that they ask for."""
    with trying(kind()):
        for act in workload.acts.values():
            try:
                act()
            except ValueError:
                raise
            except Exception as error:  # own kernels can raise any error
                raise InvalidArgument(
                    f"kernel {kind.kernel!r} cannot be launched: {type(error).__name__}: {error}; choices of"
                    " @triton.autotune belong into `space`"
                ) from error
        return last_key(kind.kernel)


class _Ranking:
    """Checks configurations in an interpreter, and ranks them by their compiled code for a target."""

    timed = False

    def __init__(self, target: str, batches: Sequence[int]) -> None:
        require_compiler()
        self.device = self.architecture = target
        self._batches = batches

    def yardstick(self, every: Sequence[Subject]) -> dict[str, float]:
        return {}

    def begin(self, subject: Subject) -> str:
        """Makes the workload that is compiled. Returns the key of its launches."""
        one = subject.workload(1, seen_kernels(), 0).memory
        batch = fitting(self._batches, one, CPU_BYTES)[-1]
        workload = subject.workload(batch, seen_kernels(), 0)
        self._compiler = Compiler(workload, self.device)
        with compiling(self.device):
            return _key(subject.kind, workload)

    def trial(self, subject: Subject, key: str, config: Config) -> Trial:
        rows = sorted({1, min(self._batches[-1], INTERPRETED_ROWS if subject.model else OWN_ROWS)})
        with interpreting():
            bad = wrong(config, subject, rows, Backend("interpreter"), True, randbelow(2**31))
        cost = Cost() if bad else self._compiler.cost(config)
        why = bad or cost.why
        value, details = None if why else cost.weight, asdict(cost)
        unit = UNIT if cost.narrowest_bulk_access_bits else "register bytes of a thread"  # states are not known
        return Trial(subject.kind.kernel, key, config, not bad, value, unit, why, details)


class _Timing:
    """Checks and times configurations on a device. On a CPU, which needs a clock of the caller, sizes are toy."""

    timed = True

    def __init__(self, device: torch.device, stopwatch: Stopwatch, batches: Sequence[int]) -> None:
        self._device, self._stopwatch, self._batches = device, stopwatch, batches
        self.device, self._on_gpu = device_name(device), device.type == "cuda"
        self.architecture = architecture(device)
        self._here = nullcontext if self._on_gpu else interpreting

    @property
    def _free(self) -> int:
        if self._on_gpu:
            torch.cuda.empty_cache()  # `mem_get_info` asks the driver, which counts cached memory as used
        return torch.cuda.mem_get_info(self._device)[0] if self._on_gpu else 2**26

    def yardstick(self, every: Sequence[Subject]) -> dict[str, float]:
        """Returns the rate of a plain copy for each batch of slots: bytes read and written per second."""
        model = next((subject.model for subject in every if subject.model), None)
        slot, rates = model.layout.bytes_per_slot if model and self._on_gpu else 2**12, {}
        for size in fitting(self._batches, COPIES * slot, self._free):
            to, of = torch.zeros(2, size * slot, dtype=torch.uint8, device=self._device).random_(0, 256)
            rates[f"{size} slots"] = 2 * size * slot / self._stopwatch(partial(to.copy_, of))
        return rates

    def begin(self, subject: Subject) -> str:
        """Makes the workloads that are timed. Returns the key of their launches."""
        self._workloads: dict[int, Workload] = {}  # the memory of the last ones is free
        free, toy, seed = self._free, not self._on_gpu, randbelow(2**31)
        with self._here():
            backend = Backend("auto", self._device)
            one = subject.workload(1, backend, seed, toy).memory
            sizes = fitting(self._batches, COPIES * one, free)
            self._workloads = {size: subject.workload(size, backend, seed, toy) for size in sizes}
            key = _key(subject.kind, self._workloads[sizes[0]])
        self._rows = sorted({1, min(sizes[-1], CHECKED_ROWS) if subject.model else sizes[-1]})
        self._default = 0.0
        self._compiler = Compiler(subject.workload(1, seen_kernels(), 0), self.architecture) if self._on_gpu else None
        return key

    def trial(self, subject: Subject, key: str, config: Config) -> Trial:
        kernel, seed = subject.kind.kernel, randbelow(2**31)
        with self._here():
            bad = wrong(config, subject, self._rows, Backend("auto", self._device), not self._on_gpu, seed)
            if bad:
                return Trial(kernel, key, config, False, None, RATE, bad)
            try:
                spent = self._times(config)
            except TooSlow as error:
                return Trial(kernel, key, config, True, None, RATE, str(error))
        rates = {name: nbytes / seconds for name, (seconds, nbytes) in spent.items()}
        micros = geometric_mean(seconds for seconds, _ in spent.values()) * 1e6
        value = geometric_mean(rates.values())  # the geometric mean gives few and many slots the same weight
        trial = Trial(kernel, key, config, True, value, RATE, "", rates, micros)
        self._default = value if trial.is_default else self._default
        # what may be chosen must neither spill nor move few bytes at a time; others are not compiled, which is slow
        if (value >= self._default or config.by_rows) and self._compiler and self.architecture in TARGETS:
            why = self._compiler.cost(config).why
            trial = replace(trial, value=None, micros=None, why=why) if why else trial
        return trial

    def _times(self, config: Config) -> dict[str, Any]:
        """Returns "operation, batch" -> (seconds, bytes)."""
        with trying(config):
            spent = {
                f"{op}, {size}": (self._stopwatch(act), workload.nbytes[op])
                for size, workload in self._workloads.items()
                for op, act in workload.acts.items()
            }
        for name, (seconds, nbytes) in spent.items():
            if not (0 < seconds < inf and 0 < nbytes < inf):
                raise InvalidArgument(f"{name}: {nbytes} bytes in {seconds} seconds: expected positive numbers")
        return spent
