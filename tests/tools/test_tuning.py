"""Tests the sweep of launch configurations: its grid, its checks, its timing, its ranking and its files."""

import json
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from memstate.errors import ConfigurationError, InvalidArgument
from memstate.kernels import copy, tuned, tuned_files
from memstate.kernels.configs import (
    CONFIGS,
    Config,
    ConvConfig,
    CopyConfig,
    DeltaConfig,
    GatherConfig,
    Int8Config,
    PackConfig,
    ScatterConfig,
    SelectiveConfig,
)
from memstate.kernels.dispatch import Backend
from memstate.kernels.kept import KeptLaunch
from memstate.kernels.tuned import launch_of
from memstate.state.planes import Planes
from memstate_tools import models, workload
from memstate_tools import tune as tuning
from memstate_tools.tune import cost, grid, record, trials
from memstate_tools.tune.check import wrong
from memstate_tools.tune.tasks import findings
from memstate_tools.tune.trials import SweepResult, TuneTrial, sweep

CPU = torch.device("cpu")
DEFAULT = CopyConfig()
ODD = replace(DEFAULT, lanes=256)
KEYS = {"format", "device", "date", "versions", "timed", "yardstick", "entries", "trials", "complete"}
FREE_AXIS = "programs_per_sm"  # the compiled code does not depend on the number of programs
ENTRY = {"kernel", "key", "config", "value", "unit", "checked"}
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU does")


@pytest.fixture
def cli() -> Callable[..., Any]:
    """A function that runs `memstate tune`; tests are skipped if packages of the command are missing."""
    for package in ("typer", "rich"):
        pytest.importorskip(package)
    from tests.support.command import memstate

    return lambda *given: memstate("tune", *given)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder of configurations, empty; no shipped file exists, and the process has read no file."""
    monkeypatch.setattr(tuned_files, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("MEMSTATE_TUNED", str(tmp_path / "user"))
    tuned.forget()
    yield tmp_path / "user"
    tuned.forget()


# -- the grid --------------------------------------------------------------------------------------


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("kernel", tuning.KERNELS)
def test_one_axis_changes_at_a_time_and_the_cheapest_first(kernel: str, timed: bool) -> None:
    configs = grid.one_at_a_time(kernel, timed)
    default, *others = configs
    assert default == CONFIGS[kernel]() and len(set(configs)) == len(configs) > 3
    changed = [[name for name, value in asdict(config).items() if value != asdict(default)[name]] for config in others]
    assert all(len(names) == 1 for names in changed)
    order = list(dict.fromkeys(names[0] for names in changed))
    assert set(order) == set(asdict(default)) - (set() if timed else {FREE_AXIS})
    # the axis that needs no compilation comes first
    assert timed is False or FREE_AXIS not in order or order[0] == FREE_AXIS
    assert grid.one_at_a_time(kernel, timed, 3) == configs[:3]


def test_the_best_values_are_combined_by_what_they_promise() -> None:
    goodness = dict.fromkeys(grid.one_at_a_time("conv", True), 1.0)
    goodness |= {ConvConfig(warps=2): 3.0, ConvConfig(window_bytes=1024): 2.0, ConvConfig(window_bytes=4096): 0.5}
    combined = grid.combinations("conv", True, goodness)
    assert combined == [ConvConfig(window_bytes=1024, warps=2)]  # the others of the best values were tried before
    assert grid.combinations("conv", True, {**goodness, ConvConfig(warps=2): 0.0})[0].warps == 4
    assert grid.combinations("conv", True, goodness, limit=5) == []
    assert len(grid.combinations("copy", True, dict.fromkeys(grid.one_at_a_time("copy", True), 1.0))) <= 12


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        ({"kernels": ["copy", "ssm"]}, "kernels ssm: expected copy, gather"),
        ({"kernels": []}, "kernels missing: expected copy, gather"),
        ({"model": "gpt"}, "model 'gpt': expected one of qwen3_next, "),
        ({"target": "sm_1"}, "target 'sm_1': expected one of sm_80, "),
        ({"limit": 0}, "limit 0: at least 1"),
    ],
)
def test_bad_requests_are_refused(refused: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        sweep(**refused)


def test_a_kernel_without_a_state_in_the_model_takes_another_model() -> None:
    names = {
        (kernel, model): grid.model_for(kernel, model)[0] for kernel in tuning.KERNELS for model in ("lfm2", "mamba")
    }
    assert names["conv", "lfm2"] == names["copy", "lfm2"] == "lfm2"
    assert names["gated_delta", "mamba"] == "qwen3_next" and names["selective", "lfm2"] == "nemotron_h"
    assert names["selective", "mamba"] == "mamba"


# -- faults that the check notices -----------------------------------------------------------------


def planted(name: str, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces an operation by `fault`, which gets the true operation before its arguments."""
    true = getattr(copy, name)
    monkeypatch.setattr(copy, name, lambda *given: fault(true, *given))


def backend_here() -> Backend:
    return Backend("auto", "cuda" if torch.cuda.is_available() else "cpu")


def check(config: CopyConfig = DEFAULT) -> str:
    return wrong(config, toy("lfm2"), backend_here(), torch.seed() % 2**31)


def toy(model: str, kernel: str = "copy") -> models.Model:
    return models.toy_of(grid.model_for(kernel, model)[1], kernel)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "config",
    [
        CopyConfig(3, 2, 16, 256), CopyConfig(1, 8, 512, 8192), GatherConfig(2, 1024), ScatterConfig(3, 2, 16, 512),
        PackConfig(3, 2, 16, 256), Int8Config(3, 2, 512), DeltaConfig(512, 32), SelectiveConfig(256, 2),
        ConvConfig(2, 512),
    ],
    ids=str,
)  # fmt: skip
def test_every_kernel_is_right_under_another_configuration(config: Config) -> None:
    kernel = config.kernel
    assert wrong(config, toy("qwen3_next", kernel), backend_here(), 7) == ""


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kernel", "axis"),
    [(kernel, axis) for kernel, kind in CONFIGS.items() for axis in fields(kind) if not axis.metadata["bits"]],
    ids=lambda given: getattr(given, "name", given),
)
def test_an_axis_that_changes_no_bits_changes_none(kernel: str, axis: Any) -> None:
    def written(config: Config) -> list[torch.Tensor]:
        made = workload.make(kernel, toy("qwen3_next", kernel), 3, backend_here(), 7)
        with tuned.trying(config):
            for act in made.acts.values():
                act()
        return [tensor.contiguous().view(torch.uint8) for tensor in made.written.values()]

    default = CONFIGS[kernel]()
    pairs = zip(written(default), written(replace(default, **{axis.name: axis.metadata["values"][-1]})), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("config", "op", "says"),
    [
        (DeltaConfig(), "gated_delta_step", "gated delta: out, ssm differs from the reference, seed 7"),
        (Int8Config(), "pack_int8", "pack int8: records differs"),
    ],
    ids=str,
)
def test_what_another_kernel_does_wrong_is_noticed(config: Any, op: str, says: str) -> None:
    kernel, backend = config.kernel, backend_here()
    true = getattr(backend, op)

    def fault(*given: Any) -> Any:
        out = true(*given)
        for tensor in given:
            if isinstance(tensor, torch.Tensor) and (tensor.is_floating_point() or tensor.dtype == torch.uint8):
                tensor.add_(1)
        return out

    setattr(backend, op, fault)
    assert wrong(config, toy("qwen3_next", kernel), backend, 7).startswith(says)


def _skip_last(copy_slots: Any, planes: Any, dst: Any, src: Any) -> None:
    copy_slots(planes, dst[:-1].contiguous(), src[:-1].contiguous())


def _canary(copy_slots: Any, planes: Any, dst: Any, src: Any) -> None:
    copy_slots(planes, dst, src)
    block = planes.blocks[0]
    torch.empty(0, dtype=torch.uint8, device=block.device).set_(block.untyped_storage())[0] += 1


def _null(zero_slots: Any, planes: Any, ids: Any) -> None:
    zero_slots(planes, ids)
    planes.blocks[0][:, 0] = 0


def _first_tile_only(run_data: Any, planes: Any, slots: Any, packet: Any) -> None:
    run_data(planes._replace(tiles=planes.tiles[:1]), slots, packet)


def _raises(run_data: Any, planes: Any, slots: Any, packet: Any) -> None:
    raise RuntimeError("out of\nresources")


@pytest.mark.parametrize(
    ("name", "fault", "says"),
    [
        ("copy_slots", _skip_last, "copy_slots: arena 0.* differs from the reference, seed [0-9]+"),
        ("copy_slots", _canary, "copy_slots: arena 0 differs"),
        ("zero_slots", _null, "zero_slots: arena 0"),
        ("run_data", _first_tile_only, "run_data: arena "),
        ("run_data", _raises, "run_data raises RuntimeError: out of resources"),
    ],
)
def test_a_wrong_kernel_is_noticed(name: str, fault: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(name, fault, monkeypatch)
    assert re.match(says, check())


def test_a_cache_that_cannot_be_written_is_not_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(run_data: Any, planes: Any, slots: Any, packet: Any) -> None:
        raise PermissionError(13, "Permission denied", "/cache")

    planted("run_data", fails, monkeypatch)
    with pytest.raises(ConfigurationError, match=r"'/cache'; TRITON_CACHE_DIR names another folder"):
        check()


def test_advice_follows_the_cause(cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "sweep", lambda *given, **more: outcome_of(1.0))
    for error, advised in ((OSError("disk full"), True), (InvalidArgument("every configuration is excluded"), False)):
        monkeypatch.setattr(tuning, "store", Mock(side_effect=error))
        said = cli("--kernels", "copy").err
        assert f"nothing stored: {error}" in " ".join(said.split()) and ("MEMSTATE_TUNED" in said) == advised


@on_cpu
def test_a_wrong_configuration_is_excluded_and_nothing_is_stored(
    cli: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = grid.one_at_a_time("copy", timed=False)[1]

    def fault(copy_slots: Any, planes: Any, dst: Any, src: Any) -> None:
        if launch_of(CopyConfig, CPU, planes.unit, planes.tiles.shape[0])[1] == second:
            dst = dst * 0
        copy_slots(planes, dst, src)

    planted("copy_slots", fault, monkeypatch)
    fine = asdict(cost.Cost("unit=16,tiles=8", 64, 0, 32, 128, weight=2.0))
    monkeypatch.setattr(trials, "findings", _with_costs(fine))
    report = tmp_path / "report.json"
    done = cli("--kernels", "copy", "--model", "lfm2", "--limit", 3, "--json", report)
    assert done.status == 1 and not (folder / "sm-90.json").exists()
    assert "differs from the reference: copy_slots" in done.err
    outcome = json.loads(report.read_text())
    assert [trial["checked"] for trial in outcome["trials"]] == [True, False, True]
    assert [one["config"] for one in outcome["trials"] if one["why"]] == [asdict(second)] and outcome["stored"] is None
    assert outcome["entries"][0]["config"] != asdict(second)


def _with_costs(cost: dict[str, Any]) -> Any:
    """Returns a stand-in for `findings` that compiles nothing: every configuration has the given cost."""
    return lambda task, configs, *given: (
        [cost] * len(configs) if task == "compiled" else findings(task, configs, *given)
    )


# -- the cost of compiled code ---------------------------------------------------------------------


FINE = (64, 0, 32, 128, 1.5)  # registers, spills, shared memory, bits, weight


@pytest.mark.parametrize(("spilled", "why"), [(0, ""), (8, "spills 8 bytes a thread for sm_90")])
def test_the_worst_launch_decides(spilled: int, why: str) -> None:
    worst = cost.worst("unit=16,tiles=32", "sm_90", [FINE, (90, spilled, 64, 64, 1.0)])
    assert worst == cost.Cost("unit=16,tiles=32", 90, spilled, 64, 64, why, 1.5)


@pytest.mark.parametrize(("default", "bits", "why"), [
    (128, 128, ""), (128, 64, "moves 64 bits a lane for sm_90, expected 128"), (64, 64, ""),
    (64, 32, "moves 32 bits a lane for sm_90, expected 64"), (None, 64, "moves 64 bits a lane for sm_90, expected 128"),
])  # fmt: skip
def test_narrow_moves_are_excluded_unless_the_state_has_no_wider_ones(
    default: int | None, bits: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths = {DEFAULT: default, ODD: bits}
    figures = lambda config, model, target: cost.Cost(narrowest_bulk_access_bits=widths[config])  # noqa: E731
    monkeypatch.setattr(cost, "_cost", figures)
    assert cost.cost(replace(ODD, programs_per_sm=8), "lfm2", "sm_90").why == why


class Seen(list[Any]):
    """Launches that are seen in a process that interprets, in place of none."""

    def clear(self) -> None:
        pass


@pytest.mark.parametrize("said", ["too large", PermissionError(13, "Permission denied", "/cache")])
def test_code_that_does_not_compile_is_excluded(said: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise said if isinstance(said, Exception) else RuntimeError(f"line 1\n  {said}\n")

    monkeypatch.setattr(cost, "launches", lambda target: nullcontext(Seen([(copy._move, fails)])))
    if isinstance(said, Exception):  # the kernel is not to blame
        with pytest.raises(ConfigurationError, match=r"Permission denied: '/cache'; TRITON_CACHE_DIR names another"):
            cost._cost.__wrapped__(DEFAULT, "lfm2", "sm_90")
        return
    failed = cost._cost.__wrapped__(DEFAULT, "lfm2", "sm_90")
    assert failed.key == "unit=16,tiles=16" and failed.why.startswith("does not compile: _move")
    assert failed.why.endswith("too large")


def test_what_is_compiled_is_what_the_model_launches() -> None:
    """Figures stand under the key of the compiled code: those of Mamba are not those of Mamba-2."""
    narrow = replace(GatherConfig(), lanes=256)  # 256 words: two for each of 128 threads
    gather, of_mamba, excluded = findings(
        "compiled", [GatherConfig(), SelectiveConfig(), narrow], "falcon_mamba", "sm_90"
    )
    assert gather["registers"] > 0 and (gather["spill_bytes"], gather["why"]) == (0, "")
    assert gather["narrowest_bulk_access_bits"] == 128 and gather["weight"] > 0
    assert excluded["why"] == "moves 64 bits a lane for sm_90, expected 128"
    assert (gather["key"], of_mamba["key"]) == ("unit=16,tiles=32", "dim=8192,state=16,tied=0,bytes=4")
    (of_mamba_2,) = findings("compiled", [SelectiveConfig()], "nemotron_h", "gfx942")
    assert (of_mamba_2["key"], of_mamba_2["why"]) == ("dim=64,state=128,tied=1,bytes=4", "")
    assert of_mamba_2["narrowest_bulk_access_bits"] == 128
    assert of_mamba_2["registers"] != of_mamba["registers"]


def test_a_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigurationError, match="'compiled' of 1 configurations: exit status 1"):
        list(findings("compiled", [DEFAULT], "lfm2", "sm_90"))


@on_cpu
def test_the_command_ranks_checks_and_stores_where_there_is_no_gpu(cli: Any, folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    printed = " ".join(cli("--kernels", "copy", "--model", "qwen3_next", "--limit", 2, "--json", target).out.split())
    assert "NOT timed (no GPU): ranked by compiled code, launches keep their defaults" in printed

    outcome = json.loads(target.read_text())
    assert set(outcome) == KEYS | {"stored"} and set(outcome["entries"][0]) == ENTRY | {"made"}
    assert (outcome["device"], outcome["timed"]) == ("sm_90", False)
    assert outcome["versions"]["torch"] == torch.__version__
    tried, (entry,) = outcome["trials"], outcome["entries"]
    assert [trial["config"] for trial in tried] == [asdict(c) for c in grid.one_at_a_time("copy", False, 2)]
    assert [trial["default"] for trial in tried] == [True, False] and sum(trial["chosen"] for trial in tried) == 1
    assert all(trial["checked"] and trial["details"]["registers"] > 0 for trial in tried)
    assert entry["value"] == min(trial["value"] for trial in tried) and entry["key"] == "unit=16,tiles=4096"

    assert outcome["stored"] == str(folder / "sm-90.json")
    stored = json.loads((folder / "sm-90.json").read_text())
    assert entry["made"] == {"architecture": "sm_90", "source": tuned_files.source_of("copy")}
    assert stored == {name: outcome[name] for name in stored} and set(stored) == KEYS - {"trials", "complete"}


# -- timing on a device ----------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="times copies on a CUDA device")
def test_a_device_times_a_copy_and_a_sweep_stores_it(folder: Path) -> None:
    outcome = sweep("lfm2", ["copy"], limit=2)
    assert outcome.timed and not outcome.wrong
    assert 0 < outcome.best[0].value < 1e14  # bytes per second
    tuning.store(outcome)
    storage = Planes(models.model_of("lfm2").layout, 1, Backend("cuda", "cuda"))
    planes = storage.plane_map
    assert launch_of(CopyConfig, storage.device, planes.unit, planes.tiles.shape[0])[1] == outcome.best[0].config


# -- a timed sweep under a false clock -------------------------------------------------------------


class Clock:
    """A clock that runs nothing. The time of a copy is the time that was given for its configuration."""

    def __init__(self, seconds: dict[CopyConfig, float]) -> None:
        self.seconds = seconds
        self.asked: list[CopyConfig] = []

    def __call__(self, act: Callable[[], object]) -> float:
        config = launch_of(CopyConfig, CPU, 16, 1)[1]
        self.asked.append(config)
        return self.seconds[config]


def timed_sweep(clock: Any, **given: Any) -> SweepResult:
    return sweep("lfm2", ["copy"], device=CPU, stopwatch=clock, **given)


@on_cpu
def test_a_timed_sweep_decides_what_is_launched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default, slow, fast = configs = grid.one_at_a_time("copy", timed=True, limit=3)
    clock = Clock({default: 4e-6, slow: 5e-6, fast: 2e-6})
    calls: list[tuple[int, int]] = []
    outcome = timed_sweep(clock, limit=3, progress=lambda *at: calls.append(at))
    layout = toy("lfm2").layout
    moved = layout.payload_bytes_per_slot  # bytes moved to zero one slot; a copy moves twice as many
    assert (outcome.device, outcome.timed, outcome.complete) == ("cpu", True, True)
    assert calls == [(1, 3), (2, 3), (3, 3)] and [trial.config for trial in outcome.trials] == configs
    assert [trial.value for trial in outcome.trials] == pytest.approx(
        [2**0.5 * moved / seconds for seconds in (4e-6, 5e-6, 2e-6)]
    )
    assert [trial.micros for trial in outcome.trials] == pytest.approx([4, 5, 2])
    assert outcome.trials[2].details["copy, 1"] == pytest.approx(2 * moved / 2e-6)
    # the yardstick, the device's own copy, is timed before and after the trials
    assert outcome.yardstick["1 slots"] == pytest.approx([2 * layout.bytes_per_slot / 4e-6] * 2)

    path = tuning.store(outcome)
    assert path == folder / "cpu.json"
    storage = Planes(layout, 2, Backend("auto"))
    seen: list[tuple[int, int]] = []
    kernel = copy._move

    class Seen:
        def __getitem__(self, grid_: tuple[int]) -> Any:
            return lambda *args, **given: seen.append((grid_[0], given["LANES"])) or kernel[grid_](*args, **given)

    monkeypatch.setattr(copy, "KEPT", KeptLaunch(Seen(), {}))
    storage.zero(torch.ones(1, dtype=torch.int32))
    assert seen == [(fast.programs_per_sm, fast.lanes)] and fast.programs_per_sm != tuned.PROGRAMS_ON_CPU


@on_cpu
def test_a_wrong_configuration_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    default, second = grid.one_at_a_time("copy", timed=True, limit=2)
    planted("zero_slots", lambda zero, planes, ids: zero(planes, ids * 0), monkeypatch)
    clock = Clock({default: 4e-6, second: 1e-6})
    outcome = timed_sweep(clock, limit=2)
    assert (len(outcome.wrong), outcome.best) == (2, [])
    assert set(clock.asked) == {default}  # only the yardstick was timed, with the default configuration
    with pytest.raises(InvalidArgument, match="nothing to store for cpu: every configuration is excluded"):
        tuning.store(outcome)


def steady(act: Callable[[], object]) -> float:
    return 1e-6


@on_cpu
def test_a_sweep_that_is_stopped_says_so(folder: Path) -> None:
    asked: list[int] = []
    outcome = timed_sweep(steady, stop=lambda: asked.append(1) or len(asked) > 2)
    assert len(outcome.trials) == 2 and not outcome.complete and not tuning.document(outcome)["complete"]
    assert "INCOMPLETE" in tuning.table(outcome, None)[0]


def outcome_of(
    *values: float | None, timed: bool = True, device: str = "cpu", key: str = "unit=16,tiles=8"
) -> SweepResult:
    """Returns the result of a sweep.

    Args:
        values: The measured value of each configuration, the default first; None for an excluded configuration.
    """
    unit = "bytes/s" if timed else cost.UNIT
    made = [
        TuneTrial("copy", key, config, True, value, unit, "" if value else "spills 8 bytes", {}, micros)
        for config, value in zip(grid.one_at_a_time("copy", timed), values, strict=False)
        for micros in [value if timed else None]
    ]
    return SweepResult(device, timed, tuple(made))


@pytest.mark.parametrize(
    ("timed", "values", "best"),
    [
        (True, (100.0, 101.9, 90.0), 0),  # better, but not clearly
        (True, (100.0, 102.1, 102.5), 2),
        (True, (None, 50.0, 51.0), 2),
        (True, (100.0, None), 0),
        (False, (2.0, 1.97, 3.0), 0),
        (False, (2.0, 1.5, 1.4), 2),
    ],
)
def test_the_default_stays_unless_another_is_clearly_better(timed: bool, values: Any, best: int) -> None:
    outcome = outcome_of(*values, timed=timed)
    assert outcome.best == [outcome.trials[best]]


# -- stored files ----------------------------------------------------------------------------------


def test_nothing_untimed_changes_a_launch_here() -> None:
    device = tuned.device_name(backend_here().device)
    tuning.store(outcome_of(2.0, 1.0, timed=False, device=device))
    here = torch.zeros(0, device=backend_here().device).device
    assert launch_of(CopyConfig, here, 16, 8)[1] == DEFAULT
    tuning.store(outcome_of(1.0, 2.0, device=device))
    assert launch_of(CopyConfig, here, 16, 8)[1] == grid.one_at_a_time("copy", True)[1]


def test_a_sweep_of_other_planes_adds_to_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuning.store(outcome_of(1.0))
    tuning.store(outcome_of(2.0, key="unit=16,tiles=64"))
    tuning.store(outcome_of(1.0, 3.0, key="unit=16,tiles=8"))
    values = {entry["key"]: entry["value"] for entry in tuned_files.read(path)["entries"]}
    assert values == {"unit=16,tiles=8": 3.0, "unit=16,tiles=64": 2.0}

    content = json.loads(path.read_text())
    content["versions"]["triton"] = "3.0.0"
    path.write_text(json.dumps(content))
    tuning.store(outcome_of(4.0, key="unit=16,tiles=8"))  # this process may not use the old one, another may
    values = [(entry["key"], entry["value"], entry["made"]["triton"]) for entry in tuned_files.read(path)["entries"]]
    here = record.versions()["triton"]
    assert values == [
        ("unit=16,tiles=8", 4.0, here), ("unit=16,tiles=8", 3.0, "3.0.0"), ("unit=16,tiles=64", 2.0, here),
    ]  # fmt: skip


def test_a_file_that_is_not_understood_stays(folder: Path) -> None:
    path = tuning.store(outcome_of(1.0))
    with pytest.raises(InvalidArgument, match="timed on cpu: nothing is stored there"):
        tuning.store(outcome_of(2.0, timed=False))
    for text, says in (("{", "Expecting"), (path.read_text().replace('"cpu"', '"gpu"'), "timed on gpu")):
        path.write_text(text)
        with pytest.raises(ValueError, match=says):
            tuning.store(outcome_of(1.0))
        assert path.read_text() == text


def stored(folder: Path, tiles: int, gate: Any) -> None:
    gate.wait()
    tuning.store(outcome_of(1.0, key=f"unit=16,tiles={tiles}"), folder)


def test_sweeps_that_end_together_keep_each_others_entries(folder: Path) -> None:
    fork, tiles = multiprocessing.get_context("fork"), (1, 2, 4, 8, 16, 32)
    gate = fork.Barrier(len(tiles))
    sweeps = [fork.Process(target=stored, args=(folder, each, gate)) for each in tiles]
    for each in sweeps:
        each.start()
    for each in sweeps:
        each.join()
    keys = {entry["key"] for entry in tuned_files.read(folder / "cpu.json")["entries"]}
    assert keys == {f"unit=16,tiles={each}" for each in tiles}


def test_a_file_is_written_whole_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuning.store(outcome_of(1.0))
    before, lock = path.read_bytes(), folder / ".cpu.json.lock"

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    for module, name in ((os, "replace"), (record.json, "dumps"), (os, "fsync")):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
            patch.setattr(module, name, fails)
            tuning.store(outcome_of(1.0, 9.0))
        assert path.read_bytes() == before and set(folder.iterdir()) == {path, lock}
    with pytest.raises(ValueError, match=r"copy, unit=16: expected each key once"):
        tuning.store(outcome_of(1.0, key="unit=16"))  # a launch would refuse this file
    assert path.read_bytes() == before and set(folder.iterdir()) == {path, lock}


def test_a_folder_is_tried_without_making_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.require_folder(tmp_path / "new" / "folder")
    monkeypatch.chdir(tmp_path)
    tuning.require_folder(Path("relative"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMSTATE_TUNED", str(tmp_path / "file" / "tuned"))
    with pytest.raises(
        InvalidArgument, match=r"stored in .*/file/tuned: .*/file is no folder .*; MEMSTATE_TUNED names"
    ):
        tuning.require_folder()


def test_the_table_has_the_best_first_and_the_excluded_last() -> None:
    title, rows = tuning.table(outcome_of(None, 1.0, 3.0, 2.0), "a/b.json")
    assert title == "cpu, timed; stored in a/b.json"
    assert [row["time"] for row in rows] == ["3 us", "2 us", "1 us", ""]
    assert [row["value"] for row in rows] == ["3 B/s", "2 B/s", "1 B/s", ""]
    assert [row["note"] for row in rows] == ["chosen", "", "", "spills 8 bytes"]
    assert tuning.table(outcome_of(3.0, 1.0), None)[1][0]["note"] == "chosen, default"


# -- pictures --------------------------------------------------------------------------------------


def test_the_picture_marks_the_chosen_and_the_default(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from memstate_tools.tune import plot

    outcome = outcome_of(2.0, 1.0, None, 3.0, timed=False)
    (axes,) = plot.plot(outcome).axes
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert ["(chosen)" in name for name in names] == [True, False, False]
    assert ["(default)" in name for name in names] == [False, True, False]
    assert "1 excluded" in axes.get_title(loc="left") and axes.get_xlabel() == cost.UNIT
    assert [bar.get_width() for bar in axes.patches] == [1.0, 2.0, 3.0]
    (axes,) = plot.plot(outcome_of(2.0, 3.0)).axes
    assert axes.get_xlabel() == "device time of a call, us"
    plot.plot(outcome).savefig(tmp_path / "sweep.svg")
    assert (tmp_path / "sweep.svg").stat().st_size > 1000


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_sweep(
    cli: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "sweep", lambda *given, **more: pytest.fail("the work began"))

    def refusal(path: Path) -> str:
        done = cli("--plot", path, "--dry-run")
        assert done.status == 2
        return " ".join(done.err.split())

    assert "ends with .svg" in refusal(tmp_path / "a.txt")
    assert "is no directory" in refusal(tmp_path / "no" / "a.svg")
    for name in ("matplotlib", "memstate.viz.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    assert refusal(tmp_path / "a.svg")


@pytest.mark.parametrize("field", ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"])
def test_a_model_has_the_dtype_that_its_config_names(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.CONFIGS, "half", models.CONFIGS["qwen3_next"] | {field: "bfloat16"})
    assert models.model_of("half").plane("ssm").dtype == torch.bfloat16
    assert models.model_of("half", ssm_dtype=torch.float32) == models.model_of("qwen3_next")
    assert models.model_of("qwen3_next").plane("ssm").dtype == torch.float32
