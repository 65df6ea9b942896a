"""Tests that killed serving processes lose only hits, with a sample of `python -m tests.proof.kills`."""

import os
import random
import re
from pathlib import Path

import numpy as np
import pytest

import memstate as ms
from memstate.tiers import FileStore
from tests.proof import kills
from tests.proof.kills import COUNTED, Folder, Process, Setting, Wrong, goal, life, prompt, server
from tests.support.object_server import missing
from tests.support.processes import python
from tests.support.sampling import PROOF


@pytest.mark.parametrize("place", ["files", "objects"])
def test_processes_that_are_killed_lose_hits_and_nothing_else(place: str) -> None:
    """Runs in a new process, because only a process without threads can fork. MEMSTATE_SEED repeats a run."""
    if place == "objects" and (why := missing()):
        pytest.skip(f"S3 server: {why}")
    seed = int(os.environ.get("MEMSTATE_SEED", random.SystemRandom().randrange(2**31)))
    most = {"files": 2000, "objects": 500}[place] if PROOF else 12
    more = ["--objects"] if place == "objects" else []
    said = python("-m", "tests.proof.kills", "--kills", most, "--seed", seed, *more, without=(), OMP_NUM_THREADS="1")
    said = said.strip()
    figures = re.search(r"(\d+) kills, (\d+) turns, (\d+) tokens from storage, .*, nothing wrong$", said)
    assert figures and int(figures[1]) == most and int(figures[2]) > most // 4 and int(figures[3]) > 0, said


def filled(path: Path, setting: Setting) -> Folder:
    """Returns a folder that one server has filled before it closed."""
    folder = Folder(path, setting)
    folder.know(1)
    at = server(setting, FileStore(path))
    at.turn(prompt(1, 1), goal(1))
    at.mem.close()
    folder.look()
    assert len(folder.records) > 3 and folder.unfinished == 0
    return folder


@pytest.mark.parametrize(
    ("fault", "said"),
    [("cut", "truncated"), ("flipped", "checksum"), ("sealed", "not the bytes of its"), ("renamed", "foreign")],
)
def test_a_wrong_record_is_found(fault: str, said: str, tmp_path: Path) -> None:
    folder = filled(tmp_path, Setting(ms.Redirect(8)))
    name, other = sorted(folder.records)[-2:]  # two states
    (path,) = tmp_path.rglob(name)
    record = np.fromfile(path, np.uint8)
    record[-20] ^= 1
    if fault == "sealed":
        form = folder._below.host.states.form
        key = bytes.fromhex(name.removeprefix("state-"))
        form.seal(record, key, len(folder.known[key]))
    elif fault == "renamed":
        record = np.fromfile(next(tmp_path.rglob(other)), np.uint8)
    record[: -1 if fault == "cut" else None].tofile(path)
    folder.records.clear()
    with pytest.raises(Wrong, match=rf"{name}: {said}"):
        folder.look()


def test_a_record_that_is_gone_or_that_nobody_asked_for_is_found(tmp_path: Path) -> None:
    folder = filled(tmp_path, Setting(ms.Redirect(8)))
    name = max(folder.records)
    (path,) = tmp_path.rglob(name)
    unasked = path.with_name(f"state-{'0' * 64}")
    path.rename(unasked)
    with pytest.raises(Wrong, match=f"1 records have gone: .*{name}"):
        folder.look()
    folder.setting = Setting(ms.Redirect(8), capacity=6_000)  # a store with a limit evicts
    with pytest.raises(Wrong, match="never asked"):
        folder.look()
    unasked.unlink()
    folder.look()
    path.with_name(f"{name}.tmp").touch()
    folder.look()
    assert folder.unfinished == 1
    path.with_name("notes").touch()
    with pytest.raises(Wrong, match=r"a store wrote \['notes'\]"):
        folder.look()


@pytest.mark.parametrize("killed", [False, True])
def test_a_process_that_ends_by_itself_is_found(
    killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def turn(self: Process) -> None:
        raise AssertionError("the state of row 3 is wrong")

    monkeypatch.setattr(Process, "turn", turn)
    folder, chance = Folder(tmp_path, Setting(ms.Redirect(8))), random.Random(1)
    monkeypatch.setattr(kills, "TURNS_LEFT", (1,))
    with pytest.raises(Wrong, match="a process ended with 1"):
        life(folder, chance, 3, np.zeros(len(COUNTED), np.int64), killed)
    assert "AssertionError: the state of row 3 is wrong" in capfd.readouterr().err
