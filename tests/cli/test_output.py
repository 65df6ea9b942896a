"""Tests the output of commands: tables, numbers with units, progress, and lines of at most 80 columns."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from memstate import metrics
from memstate.cli import output, units
from memstate.cli.app import app
from memstate.cli.traces import form
from memstate.tables import table
from memstate_tools import compile as compiling
from memstate_tools import names
from memstate_tools.traces.make import make
from tests.support.command import memstate
from tests.support.metered import manager, turn

ROOT = Path(__file__).parents[2]
COMMANDS = [command.name or command.callback.__name__ for command in app.registered_commands]


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"), (3e-8, "0.03 us"), (24.56e-6, "24.6 us"), (999.4e-6, "999 us"), (999.6e-6, "1 ms"),
        (1.75, "1.75 s"), (59.98, "1 min"), (210, "3.5 min"), (5400, "1.5 h"), (86400 * 2000, "2,000 d"),
    ],
)  # fmt: skip
def test_a_duration_has_the_largest_unit_that_is_not_longer(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1200.0, "host us", "1.2 ms of host"), (15.328, "us", "15.3 us"), (2841845790512.5, "bytes/s", "2.58 TiB/s"),
        (8192.0, "bytes", "8.00 KiB"), (3.0, "launches", "3 launches"), (12345.6, "tokens/s", "12,346 tokens/s"),
    ],
)  # fmt: skip
def test_a_measured_value_has_its_unit(value: float, unit: str, text: str) -> None:
    assert units.measured(value, unit) == text


# -- tables ----------------------------------------------------------------------------------------


def test_heads_are_cut_at_spaces_and_numbers_stand_to_the_right() -> None:
    rows = [{"policy": "lru", "a longer head": 1234, "none": None}, {"policy": "x", "a longer head": 0.5}]
    assert table(rows, 21) == ["policy  a longer head", "lru             1,234", "x                 0.5"]
    assert table(rows, 20) == ["             a", "        longer", "policy    head", "lru      1,234", "x          0.5"]


def test_columns_that_do_not_fit_go_on_below_with_the_first_one() -> None:
    rows = [{"name": "a", "one": "x" * 20, "two": "y" * 20}, {"name": "b", "one": "z"}]
    assert table(rows, 40) == [
        "name  one", f"a     {'x' * 20}", "b     z", "", "name  two", f"a     {'y' * 20}"
    ]  # fmt: skip


def test_a_text_that_is_too_long_goes_on_in_the_next_line() -> None:
    assert table([{"figure": "ended", "value": "finished 18, aborted 2"}], 22) == [
        "figure  value", "ended   finished 18,", "        aborted 2"
    ]  # fmt: skip
    long = {"case": "one two three four five six seven", "value": "7 us"}
    assert table([long], 32) == ["case                       value", "one two three four five     7 us", "six seven"]


def test_a_group_has_its_name_above_and_does_not_repeat_the_next_one() -> None:
    rows = [{"op": op, "case": case, "value": n} for op, case, n in (("a", "x", 1), ("b", "x", 3), ("a", "x", 2))]
    assert table(rows, 80, grouped=True) == [
        "  case  value",
        "a",
        "  x         1",
        "            2",
        "b",
        "  x         3",
    ]


def test_a_group_with_a_long_name_goes_on_in_the_next_line() -> None:
    rows = [{"op": "one two three four five six seven", "case": "x", "value": 1}, {"case": "y", "value": 2}]
    assert table(rows, 30, grouped=True) == [
        "  case  value",
        "one two three four five six",
        "seven",
        "  x         1",
        "",
        "  y         2",
    ]


def test_a_row_with_the_first_column_only_is_shown() -> None:
    assert table([{"name": "a", "one": 1}, {"name": "b"}], 40) == ["name  one", "a       1", "b"]
    assert table([{"name": "a"}, {"name": "b", "one": None}], 40) == ["name", "a", "b"]
    assert table([{"name": "a"}], 40, grouped=True) == ["name", "a"]
    assert table([{"op": "a", "case": None}], 40, grouped=True) == ["a"]
    assert table([], 40) == table([], 40, grouped=True) == table([{}], 40, grouped=True) == []


# -- progress --------------------------------------------------------------------------------------


def lines(times: list[float], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns the lines of progress without a terminal. At each of `times`, in seconds, one more percent is done."""
    clock = iter([0.0, *times])
    monkeypatch.setattr(output, "monotonic", lambda: next(clock))
    with output.progress("replay", "requests") as report:
        for done, _ in enumerate(times, 1):
            report(done * 1000, 100_000)
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()


def test_long_work_says_now_and_then_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lines([3.0, 9.9], capsys, monkeypatch) == []
    assert lines([3.0, 10.0, 12.0, 19.9, 20.0], capsys, monkeypatch) == [
        "replay: 2,000 of 100,000 requests, 2%, 11.4 min left",  # 7 seconds per percent
        "replay: 5,000 of 100,000 requests, 5%, 6.73 min left",
    ]
    assert len(lines([10.0 * at for at in range(1, 100)], capsys, monkeypatch)) < 35  # long work reports less often


def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    with output.progress("trace", "requests") as report:
        report(64, 128)
    assert "━" in screen.getvalue() and "64 of 128 requests, 50%" in screen.getvalue()


# -- the width -------------------------------------------------------------------------------------


def too_long(text: str, columns: int, *paths: object) -> list[str]:
    for path in paths:
        text = text.replace(str(path), "")
    return [line for line in text.splitlines() if len(line) > columns]


def test_every_help_fits_and_the_list_of_commands_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        shown = memstate("--help").out.partition("Commands:\n")[2]
        assert "..." not in shown and [line.split()[0] for line in shown.splitlines()] == COMMANDS
    monkeypatch.setenv("COLUMNS", "80")
    for command in COMMANDS:
        assert not too_long(memstate(command, "--help").out, 80, "|".join(get_args(names.Benchmark))), command


@pytest.mark.parametrize(
    "arguments",
    [
        "demo --backend reference --requests 4 --host-slots 4 --all", "bench launches --backend reference",
        "check --pool memstate --only B1,B5 --examples 1",
        "trace chat --out {tmp}/a.jsonl", "replay {trace} --states 8,16,32,64,128 --policy lru,return-rate",
        "inspect {owners}", "top {url} --once --every 0", "compile",
    ],
)  # fmt: skip
def test_every_line_of_every_command_fits(arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(output, "PAUSE", 0.0)  # so each report prints a line
    name = "gated_delta_step_bf16_rwkv7_value_key_marks"
    reports = [compiling.KernelReport(name, target, 168, 0, 98304, 128, 10, True, 2, 5) for target in compiling.TARGETS]
    monkeypatch.setattr(compiling, "compile_all", lambda targets, report, _: report(1, 1) or reports)
    form.write(tmp_path / "trace.jsonl", make("chat", 128, 0))
    mem = manager(below=True)
    with metrics.serve(mem, 0, tenant=str, steps=True) as server:
        turn(mem, 1, "acme")
        mem.inspect().save(tmp_path / "owners.json")
        files = {"tmp": tmp_path, "trace": tmp_path / "trace.jsonl", "owners": tmp_path / "owners.json"}
        done = memstate(*arguments.format(url=server.url, **files).split())
    assert done.status == 0 and done.out + done.err, done.err
    assert not too_long(done.out + done.err, 80, tmp_path, server.url)
    if arguments.split()[0] not in ("inspect", "top"):
        assert " of " in done.err or "measurements in" in done.err, done.err


@pytest.mark.parametrize("tracing", ["", "--host-memory 64GiB --speculate 4"])
@pytest.mark.parametrize("model", ["qwen3_next", "nemotron_h", "codestral_mamba"])
def test_every_line_of_a_plan_fits(model: str, tracing: str) -> None:
    done = memstate("capacity", model, "--memory", "1000GiB", "--context", "128k", *tracing.split())
    assert done.status == 0 and not too_long(done.out, 80), done


def test_a_pipe_has_80_columns() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    command = [sys.executable, "-m", "memstate", "demo", "--requests", "2", "--backend", "reference", "--all"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert not too_long(done.stdout, 80) and too_long(done.stdout, 60) and done.stderr == ""
    assert get_args(names.Backend)[1] in done.stdout
