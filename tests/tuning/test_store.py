"""Tests the file that a sweep writes: which entries it keeps, sweeps that end together, and files that stay."""

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="without Triton there are no kernels")

from memstate.errors import InvalidArgument
from memstate.kernels import tuned, tuned_files
from memstate.kernels.configs import CopyConfig
from memstate.kernels.tuned import config_of
from memstate_tools.tuning.store import document, require_folder, store, versions
from tests.support import swept
from tests.support.swept import copies, outcome_of

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
FILE = {"format", "device", "date", "versions", "timed", "yardstick", "entries"}
folder = swept.folder
ENTRY = {"kernel", "key", "config", "value", "unit", "checked"}


def test_the_document_has_the_file_and_every_trial(folder: Path) -> None:
    outcome = outcome_of(2.0, 3.0, None)
    made = document(outcome)
    assert made.keys() == FILE | {"trials", "complete"} and made["versions"]["torch"] == torch.__version__
    assert [entry["config"]["programs_per_sm"] for entry in made["entries"]] == [2]
    assert all(trial.keys() == ENTRY | {"why", "details", "us", "default", "chosen"} for trial in made["trials"])
    assert [(each["default"], each["chosen"], each["why"]) for each in made["trials"]] == [
        (True, False, ""), (False, True, ""), (False, False, "spills 8 bytes"),
    ]  # fmt: skip
    assert outcome.store() == folder / "cpu.json"
    assert json.loads((folder / "cpu.json").read_text()) == {name: made[name] for name in FILE}


def test_nothing_untimed_changes_a_launch_here() -> None:
    device = tuned.device_name(DEVICE)
    outcome_of(2.0, 1.0, timed=False, device=device).store()
    assert config_of(CopyConfig, DEVICE, 16, 8) == CopyConfig()
    outcome_of(1.0, 2.0, device=device).store()
    assert config_of(CopyConfig, DEVICE, 16, 8) == copies(timed=True)[1]


def test_a_sweep_of_other_planes_adds_to_the_file() -> None:
    path = outcome_of(1.0).store()
    outcome_of(2.0, key="unit=16,tiles=64").store()
    outcome_of(1.0, 3.0).store()
    values = {entry["key"]: entry["value"] for entry in tuned_files.read(path)["entries"]}
    assert values == {"unit=16,tiles=8": 3.0, "unit=16,tiles=64": 2.0}

    content = json.loads(path.read_text())
    content["versions"]["triton"] = "3.0.0"
    path.write_text(json.dumps(content))
    outcome_of(4.0).store()  # this process may not use the old one, another may
    entries = [(entry["key"], entry["value"], entry["made"]["triton"]) for entry in tuned_files.read(path)["entries"]]
    here = versions()["triton"]
    assert entries == [
        ("unit=16,tiles=8", 4.0, here), ("unit=16,tiles=8", 3.0, "3.0.0"), ("unit=16,tiles=64", 2.0, here),
    ]  # fmt: skip


def test_a_file_that_is_not_understood_stays() -> None:
    path = outcome_of(1.0).store()
    with pytest.raises(InvalidArgument, match="timed on cpu: nothing is stored there"):
        outcome_of(2.0, timed=False).store()
    for text, says in (("{", "Expecting"), (path.read_text().replace('"cpu"', '"gpu"'), "timed on gpu")):
        path.write_text(text)
        with pytest.raises(ValueError, match=says):
            outcome_of(1.0).store()
        assert path.read_text() == text


def stored(folder: Path, tiles: int, gate: Any) -> None:
    gate.wait()
    outcome_of(1.0, key=f"unit=16,tiles={tiles}").store(folder)


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
    path = outcome_of(1.0).store()
    before, lock = path.read_bytes(), folder / ".cpu.json.lock"

    def fails(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    for module, name in ((os, "replace"), (json, "dumps"), (os, "fsync")):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
            patch.setattr(module, name, fails)
            outcome_of(1.0, 9.0).store()
        assert path.read_bytes() == before and set(folder.iterdir()) == {path, lock}
    with pytest.raises(ValueError, match=r"copy, unit=16: expected each key once"):
        store(outcome_of(1.0, key="unit=16"))  # a launch would refuse this file
    assert path.read_bytes() == before and set(folder.iterdir()) == {path, lock}


def test_a_folder_is_tried_without_making_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_folder(tmp_path / "new" / "folder")
    monkeypatch.chdir(tmp_path)
    require_folder(Path("relative"))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    monkeypatch.setenv("MEMSTATE_TUNED", str(tmp_path / "file" / "tuned"))
    with pytest.raises(
        InvalidArgument, match=r"stored in .*/file/tuned: .*/file is no folder .*; MEMSTATE_TUNED names"
    ):
        require_folder()
