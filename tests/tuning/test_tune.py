"""Tests `memstate tune`, in a process that interprets no kernel: it ranks, checks, stores and draws."""

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

from memstate.errors import InvalidArgument
from memstate.kernels import copy, tuned_files
from memstate.kernels.configs import CopyConfig
from memstate.kernels.tuned import config_of
from memstate_tools import tuning
from tests.support import swept
from tests.support.command import Done, memstate
from tests.support.swept import copies, outcome_of
from tests.tuning.test_store import FILE

CPU = torch.device("cpu")
OWN = "tests.support.running_mean:running_mean"
LAYOUT = {"layers": 3, "planes": [{"name": "ssm", "shape": [5000], "dtype": "float32"}]}
folder = swept.folder
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what a machine without a GPU does")


def tune(*given: object) -> Done:
    """Runs the command. Each run of white space in what it prints becomes a space."""
    done = memstate("tune", *given)
    return done._replace(out=" ".join(done.out.split()), err=" ".join(done.err.split()))


def small(*given: object) -> Done:
    return tune("--kernels", "copy", "--model", "lfm2", "--batches", "1,2", "--limit", 3, *given)


def test_kernels_are_ranked_checked_and_stored_where_there_is_no_gpu(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    started: list[str] = []

    class Seen(subprocess.Popen[Any]):
        def __init__(self, args: Any, *given: Any, **more: Any) -> None:
            started.append(os.path.basename(args if isinstance(args, str) else args[0]))
            super().__init__(args, *given, **more)

    monkeypatch.setattr(subprocess, "Popen", Seen)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a second process"))
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    report, picture = tmp_path / "report.json", tmp_path / "sweep.svg"
    done = small("--json", report, "--plot", picture)
    assert done.status == 0, done.err
    assert "NOT timed (no GPU): ranked by compiled code, launches keep their defaults; stored in" in done.out
    assert "ptxas" in started and not [name for name in started if "python" in name]

    outcome = json.loads(report.read_text())
    assert outcome.keys() == FILE | {"trials", "complete", "stored"}
    assert (outcome["device"], outcome["timed"], outcome["complete"]) == ("sm_90", False, True)
    tried, (entry,) = outcome["trials"], outcome["entries"]
    assert [trial["config"] for trial in tried] == list(map(asdict, copies(False, 3)))
    assert all(trial["checked"] and trial["details"]["registers"] > 0 for trial in tried)
    assert [trial["config"] for trial in tried if trial["chosen"]] == [entry["config"]]
    assert entry["key"] == "unit=16,tiles=16"
    assert outcome["stored"] == str(folder / "sm-90.json")
    stored = json.loads((folder / "sm-90.json").read_text())
    assert entry["made"] == {"architecture": "sm_90", "source": tuned_files.source_of(CopyConfig)}
    assert stored == {name: outcome[name] for name in FILE} and picture.stat().st_size > 1000


def test_a_wrong_configuration_is_excluded_and_nothing_is_stored(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, second = copy.copy_slots, copies(False, 2)[1]

    def fault(planes: Any, dst: Any, src: Any) -> None:
        config = config_of(CopyConfig, CPU, *copy.key_sizes(planes))
        usual(planes, dst * 0 if config == second else dst, src)

    monkeypatch.setattr(copy, "copy_slots", fault)
    report = tmp_path / "report.json"
    done = small("--json", report)
    assert done.status == 1 and not folder.exists() and "nothing stored" in done.out
    assert "differs from the reference: copy_slots: arena 0" in done.err
    outcome = json.loads(report.read_text())
    assert [trial["checked"] for trial in outcome["trials"]] == [True, False, True]
    assert [one["config"] for one in outcome["trials"] if one["why"]] == [asdict(second)] and outcome["stored"] is None
    assert outcome["entries"][0]["config"] != asdict(second)


def test_a_kernel_and_a_layout_of_ones_own(tmp_path: Path, folder: Path) -> None:
    layout, file = tmp_path / "layout.json", tmp_path / "trials.jsonl"
    layout.write_text(json.dumps(LAYOUT))
    given = ("--kernels", f"{OWN},gather", "--layout", layout, "--limit", 1, "--file", file, "--dry-run")
    first, again = tune(*given), tune(*given, "--batches", "64,8,1")
    assert "running_mean, size=208" in first.out and "gather, unit=16,tiles=2" in first.out
    assert "nothing stored" in first.out and not folder.exists()
    assert "from the file" not in first.out and "; 2 of 2 from the file" in again.out
    for other in (("--target", "sm_80"), ("--batches", "1")):
        assert "from the file" not in tune(*given, *other).out
    assert len(file.read_text().splitlines()) == 6
    half = tune("--kernels", "gather", "--layout", layout, "--limit", 1, "--dry-run", "--dtype", "bfloat16")
    assert "gather, unit=16,tiles=1 " in half.out


def test_advice_follows_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = outcome_of(1.0)
    monkeypatch.setattr(tuning, "sweep", lambda *given, **more: outcome)
    for error, advised in ((OSError("disk full"), True), (InvalidArgument("every configuration is excluded"), False)):
        monkeypatch.setattr(tuning.Sweep, "store", Mock(side_effect=error))
        done = small()
        assert done.status == 2 and f"nothing stored: {error}" in done.err and "cpu, timed" in done.out
        assert ("set MEMSTATE_TUNED" in done.err) == advised


def test_a_result_is_shown_if_it_cannot_be_stored(folder: Path) -> None:
    (folder / "sm-90.json").mkdir(parents=True)
    done = small("--json", "-")
    assert done.status == 2 and "nothing stored" in done.err and "Is a directory" in done.err
    report = json.loads(done.out)
    assert report["stored"] is None and len(report["entries"]) == 1


def test_a_place_that_cannot_be_written_is_known_before_the_sweep(folder: Path) -> None:
    folder.touch()
    done = small()
    assert done.status == 2 and "is no folder that can be written to" in done.err and not done.out
