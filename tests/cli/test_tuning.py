"""The sweep: what it tries, what it notices, how it measures and ranks, and what it leaves behind."""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memstate.cli import tune as tuning
from memstate.cli.compile import KernelReport
from memstate.cli.tune import cost, grid, record, timing, trials
from memstate.cli.tune.check import wrong
from memstate.cli.tune.tasks import findings
from memstate.cli.tune.trials import SweepResult, Trial, own_target, sweep
from memstate.errors import CompileFailed, ConfigurationError, InvalidArgument
from memstate.kernels import copy, tuned
from memstate.kernels.dispatch import Backend
from memstate.kernels.tuned import CopyConfig, copy_launch
from memstate.state.layout import Plane, StateLayout
from memstate.state.planes import Planes
from tests.kernels.test_copy import LAYOUTS, ORDERS

CPU = torch.device("cpu")
DEFAULT = CopyConfig()
KEYS = {"format", "device", "date", "versions", "timed", "yardstick", "entries", "trials"}
ENTRY = {"kernel", "key", "config", "value", "unit", "checked"}
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU does")


@pytest.fixture
def cli() -> Any:
    """The command line, where its packages are."""
    for package in ("typer", "rich"):
        pytest.importorskip(package)
    from memstate.cli.commands import kernels as cli

    return cli


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of the user's, nothing shipped, and a process that has read nothing."""
    monkeypatch.setattr(tuned, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setenv("MEMSTATE_TUNED", str(tmp_path / "user"))
    tuned.forget()
    yield tmp_path / "user"
    tuned.forget()


# -- what is tried ---------------------------------------------------------------------------------


@pytest.mark.parametrize("timed", [False, True])
def test_the_default_is_tried_first_and_nothing_twice(timed: bool) -> None:
    configs = grid.configurations(timed)
    assert configs[0] == DEFAULT and len(set(configs)) == len(configs) > 20
    assert grid.configurations(timed, 3) == configs[:3] and len(grid.configurations(timed, 10**6)) == len(configs)
    compiled = {replace(config, programs_per_sm=1) for config in configs}
    assert (len(compiled) == len(configs)) is not timed  # without timing, programs are not told apart


def test_bad_requests_are_refused() -> None:
    for refused, says in (
        ({"kernels": ["copy", "ssm"]}, "kernels ssm: expected copy"),
        ({"kernels": []}, "kernels missing: expected copy"),
        ({"model": "gpt"}, "model 'gpt': expected one of qwen3_next, "),
        ({"target": "sm_1"}, "target 'sm_1': expected one of sm_80, "),
        ({"limit": 0}, "limit 0: at least 1"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            sweep(**refused)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("planes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_key_of_a_layout_is_that_of_its_planes(planes: list[Plane], order: Any) -> None:
    layout = StateLayout(planes, 3, order)
    storage = Planes(layout, 2, Backend("reference"))
    assert grid.key_of(layout) == tuned.copy_key(storage.plane_map.unit, storage.plane_map.tiles.shape[0])


def test_toys_keep_the_planes_of_a_model() -> None:
    layout = grid.layout_of("qwen3_next")
    small = grid.toy(layout)
    assert [(p.name, p.dtype) for p in small.planes] == [(p.name, p.dtype) for p in layout.planes]
    storage = Planes(small, 1, Backend("reference"))
    assert storage.plane_map.tiles[:, 2].tolist() == 4 * [32768, 1200]


# -- what the check notices ------------------------------------------------------------------------


def planted(name: str, fault: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes an operation do something else: fault(the true operation, planes, its tensors)."""
    true = getattr(copy, name)
    monkeypatch.setattr(copy, name, lambda *given: fault(true, *given))


def backend_here() -> Backend:
    return Backend("auto", "cuda" if torch.cuda.is_available() else "cpu")


def check(config: CopyConfig = DEFAULT) -> str:
    return wrong(config, grid.toy(grid.layout_of("lfm2")), backend_here(), torch.seed() % 2**31)


@pytest.mark.parametrize("config", [DEFAULT, CopyConfig(16, 256, 2, 3), CopyConfig(512, 8192, 8, 1)], ids=str)
@pytest.mark.parametrize("model", ["qwen3_next", "kimi_linear"])
def test_right_configurations_are_found_right(model: str, config: CopyConfig) -> None:
    assert wrong(config, grid.toy(grid.layout_of(model)), backend_here(), 7) == ""


def _skip_last(copy_slots: Any, planes: Any, dst: Any, src: Any) -> None:
    copy_slots(planes, dst[:-1].contiguous(), src[:-1].contiguous())


def _one_byte(copy_slots: Any, planes: Any, dst: Any, src: Any) -> None:
    copy_slots(planes, dst, src)
    planes.blocks[-1][0, 1, -1] += 1  # of a slot that is written, in the last byte


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
        ("copy_slots", _skip_last, "copy_slots: [0-9]+ of [0-9]+ bytes differ from the reference, seed [0-9]+"),
        ("copy_slots", _one_byte, "copy_slots: 1 of [0-9]+ bytes differ"),
        ("copy_slots", _canary, "copy_slots: 1 of [0-9]+ bytes differ"),
        ("zero_slots", _null, "zero_slots: [0-9]+ of"),
        ("run_data", _first_tile_only, "run_data: [0-9]+ of"),
        ("run_data", _raises, "run_data raises RuntimeError: out of resources"),
    ],
)
def test_a_wrong_kernel_is_noticed(name: str, fault: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(name, fault, monkeypatch)
    assert re.match(says, check())


@on_cpu
def test_a_wrong_configuration_is_excluded_and_nothing_is_stored(
    cli: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    second = grid.configurations(timed=False)[1]

    def fault(copy_slots: Any, planes: Any, dst: Any, src: Any) -> None:
        if copy_launch(CPU, planes.unit, planes.tiles.shape[0]).config == second:
            dst = dst * 0
        copy_slots(planes, dst, src)

    planted("copy_slots", fault, monkeypatch)
    fine = asdict(cost.Cost(64, 0, 32, 128))
    monkeypatch.setattr(trials, "findings", _with_costs([fine] * 3))
    report = tmp_path / "report.json"
    with pytest.raises(pytest.importorskip("typer").Exit) as left:
        cli.tune(model="lfm2", limit=3, json_path=str(report))
    assert left.value.exit_code == 1 and not folder.exists()
    assert "differs from the reference: copy_slots" in capsys.readouterr().err
    found = json.loads(report.read_text())
    assert [trial["checked"] for trial in found["trials"]] == [True, False, True]
    assert [one["config"] for one in found["trials"] if one["why"]] == [asdict(second)] and found["stored"] is None
    assert found["entries"][0]["config"] != asdict(second)


def _with_costs(costs: list[dict[str, Any]]) -> Any:
    """The checks as they are, and these costs instead of compiling."""
    return lambda task, argument, configs: costs if task == "compiled" else findings(task, argument, configs)


# -- what compiled code is worth -------------------------------------------------------------------


def report(**changes: Any) -> KernelReport:
    return replace(KernelReport("copy_slots", "sm_90", 72, 0, 32, 128, 1, True), **changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, ""),
        ({"spill_bytes": 8}, "spills 8 bytes a thread for sm_90"),
        ({"narrowest_bulk_access_bits": 64}, "moves 64 bits a lane for sm_90, expected 128"),
        ({"narrowest_bulk_access_bits": None}, "moves 0 bits a lane for sm_90, expected 128"),
    ],
)
def test_the_worst_operation_decides(changes: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = iter([report(), report(registers=90, **changes), report(shared_bytes=64)])
    monkeypatch.setattr(cost, "compile_cases", lambda config: range(3))
    monkeypatch.setattr(cost, "build", lambda case, target: next(reports))
    found = cost._cost.__wrapped__(DEFAULT, "sm_90")
    assert (found.registers, found.shared_bytes, found.why) == (90, 64, why)


def test_code_that_does_not_compile_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(case: Any, target: str) -> None:
        raise CompileFailed("copy_slots", target, "too large")

    monkeypatch.setattr(cost, "compile_cases", lambda config: range(3))
    monkeypatch.setattr(cost, "build", fails)
    assert cost._cost.__wrapped__(DEFAULT, "sm_90").why == "does not compile: copy_slots for sm_90: too large"


def test_the_weight_is_register_bytes_per_byte_in_flight() -> None:
    found = cost.Cost(registers=64)
    assert cost.weight(DEFAULT, found, "sm_90") == 64 * 4 * 128 / (4096 * 4)
    assert cost.weight(CopyConfig(lanes=8192, warps=8), found, "gfx942") == 64 * 4 * 512 / (8192 * 4)


def test_compiled_code_is_inspected_in_another_process() -> None:
    narrow = CopyConfig(lanes=256)  # two words for each of 128 threads
    default, excluded = findings("compiled", "sm_90", [DEFAULT, narrow])
    assert default["registers"] > 0 and (default["spill_bytes"], default["why"]) == (0, "")
    assert default["narrowest_bulk_access_bits"] == 128
    assert excluded["why"] == "moves 64 bits a lane for sm_90, expected 128"


def test_a_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigurationError, match="'compiled' of 1 configurations: exit status 1"):
        list(findings("compiled", "sm_90", [DEFAULT]))


@on_cpu
def test_the_command_ranks_checks_and_stores_where_there_is_no_gpu(
    cli: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "report.json"
    cli.tune(model="qwen3_next", limit=2, json_path=str(target))
    printed = " ".join(capsys.readouterr().out.split())
    assert "NOT timed (no GPU): ranked by compiled code, launches keep their defaults" in printed

    found = json.loads(target.read_text())
    assert set(found) == KEYS | {"stored"} and set(found["entries"][0]) == ENTRY
    assert (found["device"], found["timed"]) == ("sm_90", False)
    assert found["versions"]["torch"] == torch.__version__
    tried, (entry,) = found["trials"], found["entries"]
    assert [trial["config"] for trial in tried] == [asdict(c) for c in grid.configurations(False, 2)]
    assert all(trial["checked"] and trial["details"]["registers"] > 0 for trial in tried)
    assert entry["value"] == min(trial["value"] for trial in tried) and entry["key"] == "unit=16,tiles=4096"

    assert found["stored"] == str(folder / "sm-90.json")
    stored = tuned.read(folder / "sm-90.json")
    assert stored == {name: found[name] for name in stored} and set(stored) == KEYS - {"trials"}

    cli.tune(model="qwen3_next", limit=1, dry_run=True, json_path=str(target))
    assert json.loads(target.read_text())["stored"] is None
    assert tuned.read(folder / "sm-90.json") == stored


# -- how copies are timed --------------------------------------------------------------------------


def test_triton_times_a_call_by_its_median(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    testing = SimpleNamespace(do_bench=lambda act, return_mode: asked.append((act, return_mode)) or 2.5)
    monkeypatch.setitem(sys.modules, "triton.testing", testing)
    assert timing.device_seconds(print) == 2.5e-3 and asked == [(print, "median")]


def test_a_course_copies_the_slots_it_counts() -> None:
    layout, backend = StateLayout([Plane("ssm", (5,), torch.float32)], layers=2), backend_here()
    run: list[Any] = []

    def stopwatch(act: Any) -> float:
        if len(run) < 3:  # copies of slots, then those of the device
            plane, (dst, src) = course.planes["ssm"], (column[column != 0].long() for column in act.args)
            expected = plane.clone()
            expected[:, dst] = plane[:, src]
            act()
            assert torch.equal(plane.view(torch.int32), expected.view(torch.int32))
        run.append(act)
        return 1e-6

    course = timing.Course(layout, backend, stopwatch, 10**6)
    assert course.planes.slots == 128 and layout.bytes_per_slot == 64
    expected = {f"{due} slots": pytest.approx(128 * due * 10**6) for due in (1, 8, 64)}
    assert course.copies() == expected and course.yardstick() == expected
    assert backend.counts.launches == {"copy_slots": 3}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="times copies on a CUDA device")
def test_a_device_times_a_copy_and_a_sweep_stores_it(folder: Path) -> None:
    outcome = sweep("lfm2", limit=2)
    assert outcome.timed and not outcome.wrong
    assert 0 < outcome.best[0].value < 1e14  # bytes a second
    tuning.store(outcome)
    storage = Planes(grid.layout_of("lfm2"), 1, Backend("cuda", "cuda"))
    planes = storage.plane_map
    assert copy_launch(storage.device, planes.unit, planes.tiles.shape[0]).config == outcome.best[0].config


def test_a_cpu_is_no_target() -> None:
    assert own_target(CPU) is None


# -- a timed sweep, under a clock of the test ------------------------------------------------------


class Clock:
    """Says how long a copy takes by its configuration; runs nothing."""

    def __init__(self, seconds: dict[CopyConfig, float]) -> None:
        self.seconds = seconds
        self.asked: list[CopyConfig] = []

    def __call__(self, act: Callable[[], object]) -> float:
        config = copy_launch(CPU, 16, 1).config
        self.asked.append(config)
        return self.seconds[config]


@on_cpu
def test_a_timed_sweep_decides_what_is_launched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default, slow, fast = configs = grid.configurations(timed=True, limit=3)
    clock = Clock({default: 4e-6, slow: 5e-6, fast: 2e-6})
    calls: list[tuple[int, int]] = []
    outcome = sweep("lfm2", limit=3, device=CPU, stopwatch=clock, progress=lambda *at: calls.append(at))
    layout = grid.toy(grid.layout_of("lfm2"))
    moved = 2 * layout.bytes_per_slot  # with one slot due, and 8 times as much with 8
    assert (outcome.device, outcome.timed, calls) == ("cpu", True, [(1, 3), (2, 3), (3, 3)])
    assert [trial.config for trial in outcome.trials] == configs
    assert [trial.value for trial in outcome.trials] == pytest.approx(
        [8**0.5 * moved / seconds for seconds in (4e-6, 5e-6, 2e-6)]
    )
    assert outcome.trials[2].details["1 slots"] == pytest.approx(moved / 2e-6)
    assert outcome.yardstick["1 slots"] == pytest.approx([moved / 4e-6] * 2)  # by the device, before and after

    path = tuning.store(outcome)
    assert path == folder / "cpu.json"
    storage = Planes(layout, 2, Backend("auto"))
    seen: list[tuple[int, int]] = []
    kernel = copy._move

    class Seen:
        def __getitem__(self, grid_: tuple[int]) -> Any:
            return lambda *args, **given: seen.append((grid_[0], given["LANES"])) or kernel[grid_](*args, **given)

    monkeypatch.setattr(copy, "_move", Seen())
    storage.zero(torch.ones(1, dtype=torch.int32))
    assert seen == [(fast.programs_per_sm, fast.lanes)] and fast.lanes != default.lanes


@on_cpu
def test_a_wrong_configuration_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    default, second = grid.configurations(timed=True, limit=2)
    planted("zero_slots", lambda zero, planes, ids: zero(planes, ids * 0), monkeypatch)
    clock = Clock({default: 4e-6, second: 1e-6})
    outcome = sweep("lfm2", limit=2, device=CPU, stopwatch=clock)
    assert (len(outcome.wrong), outcome.best) == (2, [])
    assert set(clock.asked) == {default}  # the yardstick alone, outside of trials
    with pytest.raises(InvalidArgument, match="nothing to store for cpu: every configuration is excluded"):
        tuning.store(outcome)


def outcome_of(
    *values: float | None, timed: bool = True, device: str = "cpu", key: str = "unit=16,tiles=8"
) -> SweepResult:
    """A sweep whose configurations, the default first, came to these values; None: excluded."""
    made = [
        Trial("copy", key, config, True, value, "bytes/s", "" if value else "spills 8 bytes")
        for config, value in zip(grid.configurations(timed), values, strict=False)
    ]
    return SweepResult(device, timed, tuple(made))


@pytest.mark.parametrize(
    ("timed", "values", "best"),
    [
        (True, (100.0, 101.9, 90.0), 0),  # not clearly better
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


# -- what is stored --------------------------------------------------------------------------------


def test_nothing_untimed_changes_a_launch_here() -> None:
    device = tuned.device_name(backend_here().device)
    tuning.store(outcome_of(2.0, 1.0, timed=False, device=device))
    here = torch.zeros(0, device=backend_here().device).device
    assert copy_launch(here, 16, 8).config == DEFAULT
    tuning.store(outcome_of(1.0, 2.0, device=device))
    assert copy_launch(here, 16, 8).config == grid.configurations(True)[1]


def test_a_sweep_of_other_planes_adds_to_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuning.store(outcome_of(1.0))
    tuning.store(outcome_of(2.0, key="unit=16,tiles=64"))
    tuning.store(outcome_of(1.0, 3.0, key="unit=16,tiles=8"))
    found = {entry["key"]: entry["value"] for entry in tuned.read(path)["entries"]}
    assert found == {"unit=16,tiles=8": 3.0, "unit=16,tiles=64": 2.0}

    monkeypatch.setattr(record, "versions", lambda: {"triton": "9"})
    tuning.store(outcome_of(4.0, key="unit=16,tiles=2"))  # what another compiler made is no measure
    assert [entry["key"] for entry in tuned.read(path)["entries"]] == ["unit=16,tiles=2"]


def test_a_file_that_no_launch_would_read_is_replaced(folder: Path) -> None:
    folder.mkdir()
    (folder / "cpu.json").write_text("{")
    assert tuned.read(tuning.store(outcome_of(1.0)))["entries"][0]["value"] == 1.0


def test_a_file_is_written_whole_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuning.store(outcome_of(1.0))
    before = path.read_bytes()

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    for module, name in ((os, "replace"), (record.json, "dumps"), (os, "fsync")):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
            patch.setattr(module, name, fails)
            tuning.store(outcome_of(1.0, 9.0))
        assert path.read_bytes() == before and list(folder.iterdir()) == [path]
    with pytest.raises(ValueError, match=r"copy, unit=16: expected each key once"):
        tuning.store(outcome_of(1.0, key="unit=16"))  # a file that a launch would refuse
    assert path.read_bytes() == before and list(folder.iterdir()) == [path]


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
    (title, columns), rows = tuning.table(outcome_of(None, 1.0, 3.0, 2.0), "a/b.json")
    assert title == "cpu, timed; stored in a/b.json" and len(columns) == len(rows[0])
    assert [row[5] for row in rows] == ["3", "2", "1", ""]
    assert [row[7] for row in rows] == ["best", "", "", "spills 8 bytes"]
