"""Tests sweeps of memstate's kernels: the keys of their trials, what is refused, and timing with a pretended clock."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from memstate.errors import InvalidArgument
from memstate.kernels import copy, tuned
from memstate.kernels.configs import ConvConfig, CopyConfig, GatherConfig
from memstate.kernels.dispatch import Backend
from memstate.kernels.tuned import config_of
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from memstate_tools import tuning
from memstate_tools.bench.clock import TooSlow
from memstate_tools.launches import compiling, kernels
from memstate_tools.maker import Maker
from memstate_tools.models import model_of, toy_of
from memstate_tools.tuning.cost import Compiler
from memstate_tools.tuning.store import document
from memstate_tools.tuning.subject import Subject
from tests.support import swept
from tests.support.running_mean import running_mean
from tests.support.swept import copies
from tests.support.written import registered

CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU does")
FALCON = replace(model_of("falcon_mamba").layout, layers=2)
folder = swept.folder
sweep = partial(tuning.sweep, limit=1, batches=[1, 2])


# -- keys --------------------------------------------------------------------------------------------------------------


@on_cpu
def test_a_key_is_that_of_the_states_of_one_rank_and_of_their_dtype() -> None:
    def keys(kernel: str, states: object = FALCON, **given: Any) -> list[str]:
        return [trial.key for trial in sweep(kernel, states, **given).trials]

    assert keys("gather") == ["unit=16,tiles=32"] and keys("gather", ranks=4) == ["unit=16,tiles=8"]
    halves = [None, torch.float32, torch.bfloat16]
    assert keys("gather", dtypes=halves) == ["unit=16,tiles=32", "unit=16,tiles=16"]
    int8 = ["reduced=128,inner=1,bytes=4", "reduced=128,inner=1,bytes=2"]
    assert keys("pack_int8", "qwen3_next", dtypes=halves) == int8
    layout = StateLayout([Plane("own", (5000,), torch.float32), Plane("ssm", (9,), torch.float32)], layers=3)
    assert keys(["gather", "gather"], layout, dtypes=halves) == ["unit=16,tiles=2"]  # of the larger plane


@on_cpu
def test_what_is_compiled_is_what_the_model_launches() -> None:
    """Figures are those of the code for the model's states: Mamba's are not those of LFM2, and a target has its own."""

    def cost(config: Any, states: object, target: str = "sm_90") -> Any:
        subject = Subject(config.kernel, model_of(states))
        return Compiler(subject.workload(2, kernels(), 0), target).cost(config)

    gather, narrow = (cost(config, FALCON) for config in (GatherConfig(), replace(GatherConfig(), lanes=256)))
    assert gather.registers > 0 and (gather.spill_bytes, gather.why) == (0, "")
    assert gather.narrowest_bulk_access_bits == 128 and gather.weight > 0 and gather.programs == 2 * 32 * 2
    assert narrow.why == "moves 64 bits a lane for sm_90, expected 128"  # 256 words: two for each of 128 threads
    assert cost(GatherConfig(), FALCON, "gfx942").registers != gather.registers
    convs = [cost(ConvConfig(), states) for states in (FALCON, "lfm2")]
    assert convs[0].registers != convs[1].registers and [each.why for each in convs] == ["", ""]
    assert cost(CopyConfig(), "lfm2").programs is None  # they depend on the device


@on_cpu
def test_a_ranked_sweep_changes_no_launch() -> None:
    outcome = sweep("copy", "lfm2", limit=2)
    assert (
        not outcome.timed and outcome.yardstick == {} and [trial.config for trial in outcome.trials] == copies(False, 2)
    )
    outcome.store()
    assert config_of(CopyConfig, CPU, 16, 16) == CopyConfig()


# -- what is refused ---------------------------------------------------------------------------------------------------


@on_cpu
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kernels": "gather", "space": {"waves": [1]}}, "axis waves: gather has warps, lanes"),
        ({"kernels": running_mean, "space": {"warps": [1], "lanes": [1]}}, "axis lanes: running_mean has BLOCK, warps"),
        ({"kernels": running_mean, "space": {"BLOCK": [-1]}}, "running_mean: BLOCK -1: expected a whole number from 0"),
        ({"kernels": "gather", "space": {"lanes": [3000]}}, "gather: lanes 3000: expected a power of two from 128"),
    ],
)
def test_a_space_that_a_kernel_does_not_have_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        sweep(states="lfm2", **given)


# -- a timed sweep with a pretended clock ------------------------------------------------------------------------------


class Clock:
    """A clock that runs nothing. The time of a copy is the time that was given for its configuration."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = dict(zip(copies(True), seconds, strict=False))
        self.asked: list[CopyConfig] = []

    def __call__(self, act: Callable[[], object]) -> float:
        config = config_of(CopyConfig, CPU, 16, 1)
        self.asked.append(config)
        return self.seconds[config]


def timed(clock: Any, kernels: Any = "copy", limit: int = 3, **given: Any) -> tuning.Sweep:
    return sweep(kernels, "lfm2", device=CPU, stopwatch=clock, limit=limit, **given)


def steady(act: Callable[[], object]) -> float:
    return 1e-6


@on_cpu
def test_a_timed_sweep_decides_what_is_launched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    clock = Clock(4e-6, 5e-6, 2e-6)
    outcome = timed(clock, progress=lambda *at: calls.append(at))
    layout = toy_of(model_of("lfm2"), "copy").layout
    moved = layout.payload_bytes_per_slot  # bytes moved to zero one slot; a copy moves twice as many
    assert (outcome.device, outcome.timed, outcome.complete) == ("cpu", True, True)
    assert calls == [(1, 3), (2, 3), (3, 3)] and [trial.config for trial in outcome.trials] == copies(True, 3)
    assert [trial.value for trial in outcome.trials] == pytest.approx([2 * moved / each for each in (4e-6, 5e-6, 2e-6)])
    assert [trial.micros for trial in outcome.trials] == pytest.approx([4, 5, 2])
    rates = {"copy, 1": 2, "zero, 1": 1, "copy, 2": 4, "zero, 2": 2}
    assert outcome.trials[2].details == pytest.approx({name: n * moved / 2e-6 for name, n in rates.items()})
    # the yardstick, the device's own copy, is timed before and after the trials
    assert len(clock.asked) == 2 * 2 + 3 * 4
    assert outcome.yardstick == {f"{n} slots": pytest.approx([2 * n * 2**12 / 4e-6] * 2) for n in (1, 2)}

    assert outcome.store() == folder / "cpu.json"
    fast = outcome.best[0].config
    assert fast == copies(True)[2]
    with compiling("sm_90") as seen:
        Planes(layout, 1, kernels()).zero(torch.ones(1, dtype=torch.int32))
    assert (seen[0].grid, seen[0].arguments["LANES"]) == ((fast.programs_per_sm,), fast.lanes)
    assert fast.programs_per_sm != tuned.PROGRAMS_ON_CPU


@on_cpu
def test_a_kernel_of_ones_own_takes_what_was_timed_once_it_is_registered() -> None:
    def stopwatch(act: Callable[[], object]) -> float:
        return {128: 2e-6, 256: 1e-6}[config_of(running_mean.kind, CPU, ("size", 208)).BLOCK]  # type: ignore[attr-defined]

    def launched() -> int:
        with compiling("sm_90") as seen:
            running_mean(**running_mean.case(1, Maker(CPU, 1)))
        return int(seen[0].arguments["BLOCK"])

    outcome = timed(stopwatch, running_mean, limit=2)
    sizes = [sum(each.nbytes for each in running_mean.case(rows, Maker(CPU, 1)).values()) for rows in (1, 2)]
    assert list(outcome.trials[1].details.values()) == pytest.approx([size / 1e-6 for size in sizes])
    outcome.store()
    before = launched()
    with registered():
        assert (before, launched()) == (128, 256)


@on_cpu
def test_a_wrong_configuration_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = copy.zero_slots
    monkeypatch.setattr(copy, "zero_slots", lambda planes, ids: usual(planes, ids * 0))
    clock = Clock(4e-6, 1e-6)
    outcome = timed(clock, limit=2)
    assert (len(outcome.wrong), outcome.best) == (2, []) and "zero_slots: arena 0" in outcome.wrong[0].why
    assert set(clock.asked) == {CopyConfig()}  # only the yardstick was timed, with the default configuration
    with pytest.raises(InvalidArgument, match="nothing to store for cpu: every configuration is excluded"):
        outcome.store()


@on_cpu
def test_what_is_too_slow_to_time_is_excluded() -> None:
    calls: list[int] = []

    def stopwatch(act: Callable[[], object]) -> float:
        calls.append(1)
        if len(calls) == 3:  # calls 1 and 2 time the device's own copy, call 3 the default configuration
            raise TooSlow
        return 1e-3

    outcome = timed(stopwatch, limit=2)
    slow, other = outcome.trials
    assert slow.checked and slow.value is None and "waits for the device" in slow.why and other.value
    assert outcome.complete and outcome.wrong == []


@on_cpu
def test_the_second_round_combines_the_best_of_the_first() -> None:
    """Without a limit, two values of each of two axes are the best: their combination is tried, and counted."""
    calls: list[tuple[int, int]] = []
    space = {"programs_per_sm": [4, 2], "warps": [4, 8], "entries": [256], "lanes": [4096]}
    sweeps = [timed(steady, limit=limit, space=space, progress=lambda *at: calls.append(at)) for limit in (9, 3)]
    assert [len(outcome.trials) for outcome in sweeps] == [4, 3] and calls[:4] == [(1, 3), (2, 3), (3, 3), (4, 4)]
    assert sweeps[0].trials[3].config == CopyConfig(programs_per_sm=2, warps=8)


@on_cpu
def test_a_sweep_that_is_stopped_says_so_and_begins_no_other_kernel() -> None:
    asked: list[int] = []
    outcome = timed(steady, ["copy", running_mean], stop=lambda: bool(asked.append(1)) or len(asked) > 2)
    assert len(outcome.trials) == 2 and not outcome.complete and not document(outcome)["complete"]
    assert "; INCOMPLETE" in outcome.title and len(asked) == 3
    whole = timed(steady, ["copy", running_mean], limit=1)
    assert [trial.kernel for trial in whole.trials] == ["copy", "running_mean"] and [*whole.sources] == [
        "copy",
        "running_mean",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="times copies on a CUDA device")
def test_a_device_times_a_copy_and_a_sweep_stores_it() -> None:
    outcome = sweep("copy", "lfm2", limit=2)
    assert outcome.timed and not outcome.wrong
    assert 0 < outcome.best[0].value < 1e14  # bytes per second
    outcome.store()
    storage = Planes(model_of("lfm2").layout, 1, Backend("cuda", "cuda"))
    planes = storage.plane_map
    assert config_of(CopyConfig, storage.device, *copy.key_sizes(planes)) == outcome.best[0].config
